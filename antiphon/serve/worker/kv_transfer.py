"""Keys and values on their way from the pages of one worker to those of another, over the M2N library.

A process that gives has a `KVSender`, one that takes a `KVReceiver`; each has a thread and an endpoint of its own, so
neither waits for steps, nor steps for it. What may be sent, and what is still missing, the books of
`policy/handover_sides` say.

1. After each layer of a step the runner says how far it has come (`layer_done`). The sender's thread fills slots of
   the target's inbox with plain rows (`KVCache.read_tokens`; of a cache in 8 bits codes and scales as they are stored)
   while the next layer is computed. `flush` at the end of a step: then nothing reads the source's pages any more, and
   they may be given back at any time.
2. The write is one-sided: into the target's memory over shared memory, into its registered slots over libfabric, and a
   word beside it says that it is there. It carries offer, layer and tokens, so order means nothing.
3. The receiver's thread moves the run from the slot into its pages, in its own layout and block size, and counts it.
   Both happen under the lock under which an offer is withdrawn: after it is drained nothing writes those pages.

A run that is here before its `ExpectKV` (they come over different sockets) keeps its slot until that comes.

Rejected: remote writes into the pages themselves. Layouts, block sizes and heads of both sides would have to agree,
and only a dead process or a revoked registration would end a write that is not wanted any more. The copy from the slot
costs one pass over bytes that a prompt's layer took a thousand times longer to compute.
Rejected: one thread for all of a worker's waits. The step's own wait for experts must not stand behind a slow wire.
"""

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon import _m2n
from antiphon.base.errors import Interrupted, NoCredit, PeerLost, PeerTimeout, Refused
from antiphon.base.logging import get_logger
from antiphon.comm.m2n.native import view_of
from antiphon.kernels.api import KVCache
from antiphon.models.shares import share_of
from antiphon.serve.policy.handover import CachePart, ExpectKV, KVNews, KVOffer, WithdrawKV
from antiphon.serve.policy.handover_sides import SLOT_BYTES, SLOTS, LandingBook, SendingBook, heads_between
from antiphon.serve.worker.messages import KVTransferConfig
from antiphon.specs.model import KVStorage, ModelSpec

_log = get_logger("worker")

_CONNECT_S = 2.0
_CREDIT_S = 5.0  # a target that takes nothing for so long is given up
_LOOK_S = 0.05  # a wait for a slot looks this often whether the offer was withdrawn
_IDLE_S = 60.0
_PARKED_LOOK_S = 0.2
_PARKED_S = 2.0  # a run waits so long for its `ExpectKV`
_STEP_BITS = 48  # of a message's number, which counts the messages of one source

Say = Callable[[msgspec.Struct], None]


def cache_part(spec: ModelSpec, rank: int, tp: int, layers: range) -> CachePart:
    """What rank `rank` of `tp` caches of these layers. A latent row is one head, which all ranks have."""
    heads = (0,) if spec.attention.latent is not None else share_of(spec, rank, tp).kv_heads
    return CachePart(layers.start, layers.stop, heads)


def layout_digest(spec: ModelSpec, dtype: torch.dtype, storage: KVStorage) -> str:
    """A digest of all that decides what a cached token is: the model's shape and what a person would compare."""
    attention = spec.attention
    latent = attention.latent
    width = f"{attention.num_kv_heads} heads of {attention.head_dim}" if latent is None else f"latent {latent.key_dim}"
    same = replace(spec, eos_token_ids=())  # the server adds what the tokenizer says
    shape = blake2b(repr(same).encode(), digest_size=6).hexdigest()
    stored = str(dtype).removeprefix("torch.") if storage == "auto" else f"{storage} with scales"
    return f"{spec.num_layers} layers, {width}, {stored}, shape {shape}"


def _endpoint(config: KVTransferConfig, name: str) -> _m2n.Endpoint:
    return _m2n.Endpoint(name, config.transport, host=config.host, secret=config.secret, waiting="block")


@dataclass(frozen=True)
class _Run:
    """Tokens [first, until) of one layer of an offer, and the blocks they are in. `is_last`: with it all is written."""

    offer: KVOffer
    layer: int
    first: int
    until: int
    blocks: Tensor
    is_last: bool


class KVSender:
    """Writes what this process computes, or has cached, into the inboxes of others.

    `open`, `layer_done` and `flush` are for the thread that runs steps, `withdraw` for any. Failures are said
    (`KVNews`), never raised: a step does not fail because its keys and values cannot go elsewhere."""

    def __init__(
        self, config: KVTransferConfig, name: str, cache: KVCache, part: CachePart, layout: str, say: Say
    ) -> None:
        self._source = config.source
        self._endpoint = _endpoint(config, name)
        self._cache = cache
        self._part = part
        self._layout = layout
        self._say = say
        self._book = SendingBook(config.source)
        self._outboxes: dict[bytes, _m2n.Outbox] = {}
        self._runs: deque[_Run] = deque()
        self._held: list[_Run] | None = [] if config.hand_over == "end" else None  # until the end of the step
        self._changed = threading.Condition()
        self._busy = False
        self._closed = False
        self._num_sent = 0
        self.bytes_sent = 0
        self._thread = threading.Thread(target=self._work, name="kv-sender", daemon=True)
        self._thread.start()

    def open(self, offers: Sequence[KVOffer]) -> None:
        """Offers of requests that start in this step, or in one that is repeated."""
        for offer in offers:
            if offer.layout != self._layout:
                self._fail(offer.number, f"keys and values differ: {self._layout} here, {offer.layout} there")
            else:
                with self._changed:
                    self._book.open(offer)

    def layer_done(self, request_id: str, layer: int, until: int, blocks: Callable[[], Tensor]) -> None:
        """Tokens [0, until) of the request are in this layer's pages; `blocks` gives its table, int32 in host memory,
        which nothing changes."""
        with self._changed:
            if (news := self._book.advance(request_id, layer, until)) is not None:
                offer, first, last = news
                run = _Run(offer, layer, first, last, blocks(), self._book.has_all(offer.number))
                (self._runs if self._held is None else self._held).append(run)
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all that was said to be done has left the pages. Bounded: a target that takes nothing is given up
        after some seconds, and with it all that goes there."""
        with self._changed:
            if self._held:
                self._runs.extend(self._held)
                self._held.clear()
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or not (self._runs or self._busy))

    def withdraw(self, number: int) -> None:
        """Any thread: nothing more of this offer is written, and nothing kept of it; a wait for its sake ends."""
        with self._changed:
            self._book.close(number)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._endpoint.interrupt()
        self._thread.join(_CONNECT_S + 1.0)
        self._endpoint.close()

    def _fail(self, number: int, reason: str) -> None:
        self.withdraw(number)
        self._say(KVNews(number, "failed", reason))

    @torch.inference_mode()
    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._runs)
                if self._closed:
                    return
                run, self._busy = self._runs.popleft(), True
                wanted = self._book.is_wanted(run.offer.number)
            if wanted:
                self._write_or_fail(run)

    def _write_or_fail(self, run: _Run) -> None:
        number = run.offer.number
        try:
            self._write(run)
            if run.is_last:
                self.withdraw(number)
        except _Withdrawn:
            pass
        except (PeerLost, PeerTimeout, Refused, OSError) as error:
            self._give_up(run.offer, str(error))
        except Exception as error:  # the request is computed elsewhere; the traceback goes to the log
            _log.error("hand-over %d failed:\n%s", number, traceback.format_exc())
            self._fail(number, f"{type(error).__name__}: {error}")

    def _give_up(self, offer: KVOffer, reason: str) -> None:
        """This offer, and all others to the same targets: each would be waited for in turn, and the step with them."""
        tickets = {target.ticket for target in offer.targets}
        for ticket in tickets:
            self._outboxes.pop(ticket, None)  # one that failed must be connected anew
        with self._changed:
            queued = [run.offer for run in self._runs]
        beside = {each.number for each in queued if any(target.ticket in tickets for target in each.targets)}
        for number in beside | {offer.number}:
            self._fail(number, reason)

    def _write(self, run: _Run) -> None:
        parts = [each.part for each in run.offer.sources]
        targets = [each.part for each in run.offer.targets]
        own = next(index for index, each in enumerate(run.offer.sources) if each.number == self._source)
        for index, target in enumerate(run.offer.targets):
            if not targets[index].first_layer <= run.layer < targets[index].last_layer:
                continue
            if heads := heads_between(parts, own, targets, index):
                places = torch.tensor([self._part.heads.index(head) for head in heads], dtype=torch.int32)
                self._write_to(self._outbox(target.ticket), run, places)

    def _write_to(self, outbox: _m2n.Outbox, run: _Run, places: Tensor) -> None:
        """In as few messages as slots allow; each carries whole tokens."""
        row_bytes = len(places) * self._cache.spec.row_bytes(self._cache.dtype.itemsize)
        most = outbox.slot_bytes // row_bytes
        number = run.offer.number
        for first in range(run.first, run.until, most):
            count = min(most, run.until - first)
            rows = torch.from_numpy(self._slot(outbox, number))[: count * row_bytes]
            self._cache.read_tokens(run.layer - self._part.first_layer, run.blocks, first, count, places, rows)
            self._num_sent += 1
            user = (number & 0xFFFFFFFF, number >> 32, run.layer, first, count)
            step = self._source << _STEP_BITS | self._num_sent
            outbox.commit(step, len(rows), user=user, participants=1)
            self.bytes_sent += len(rows)

    def _slot(self, outbox: _m2n.Outbox, number: int) -> NDArray[np.uint8]:
        deadline = time.monotonic() + _CREDIT_S
        while True:
            with self._changed:
                if self._closed or not self._book.is_wanted(number):
                    raise _Withdrawn
            try:
                return outbox.slot(_LOOK_S)
            except Interrupted:
                continue
            except NoCredit:
                if time.monotonic() > deadline:
                    raise

    def _outbox(self, ticket: bytes) -> _m2n.Outbox:
        outbox = self._outboxes.get(ticket)
        if outbox is None or outbox.lost:
            outbox = self._endpoint.connect(ticket, self._source, _CONNECT_S)
            self._outboxes = {other: each for other, each in self._outboxes.items() if not each.lost}
            self._outboxes[ticket] = outbox
        return outbox


class _Withdrawn(Exception):
    """The offer has ended while it was written."""


@dataclass(frozen=True)
class _Arrival:
    """A message that is here."""

    message: _m2n.Message
    number: int
    layer: int
    first: int
    count: int
    came_s: float


class KVReceiver:
    """Takes what others write for this process, and puts it into its pages. `heard` is for any thread."""

    def __init__(self, config: KVTransferConfig, name: str, cache: KVCache, part: CachePart, layout: str, say: Say):
        self._cache = cache
        self._part = part
        self._layout = layout
        self._say = say
        self._book = LandingBook()
        self._lock = threading.Lock()
        self._parked: list[_Arrival] = []
        self._closed = False
        self.num_dropped = 0
        self._endpoint = _endpoint(config, name)
        spec = cache.spec
        slot_bytes = max(SLOT_BYTES, spec.num_kv_heads * spec.row_bytes(cache.dtype.itemsize))
        self._inbox = self._endpoint.inbox(config.num_sources, SLOTS, slot_bytes)
        self._losses = [0] * config.num_sources
        self.ticket = self._endpoint.ticket(self._inbox)
        self._thread = threading.Thread(target=self._work, name="kv-receiver", daemon=True)
        self._thread.start()

    def heard(self, message: ExpectKV | WithdrawKV) -> None:
        """An order of the engine's; a withdrawal is answered when no write to its pages is under way."""
        if isinstance(message, WithdrawKV):
            with self._lock:
                self._book.withdraw(message.number)
            self._say(KVNews(message.number, "drained"))
        elif message.layout != self._layout:
            with self._lock:
                self._book.withdraw(message.number)
            reason = f"keys and values differ: {self._layout} here, {message.layout} there"
            self._say(KVNews(message.number, "failed", reason))
        else:
            with self._lock:
                self._book.expect(message)
        if self._parked:
            self._endpoint.interrupt()

    def close(self) -> None:
        self._closed = True
        self._endpoint.interrupt()
        self._thread.join(1.0)
        self._endpoint.close()

    @torch.inference_mode()
    def _work(self) -> None:
        while not self._closed:
            try:
                step = self._inbox.wait_complete(_PARKED_LOOK_S if self._parked else _IDLE_S)
            except Interrupted:
                step = None
            except PeerLost as error:
                self._lose(error)
                continue
            if step is not None:
                self._parked += [_arrival(message) for message in self._inbox.messages(step)]
            self._take_parked()

    def _take_parked(self) -> None:
        """Everything that is known by now; the rest waits, but not without end."""
        waiting = []
        for arrival in self._parked:
            with self._lock:
                known = self._book.knows(arrival.number)
            if known:
                self._take(arrival)
            elif time.monotonic() < arrival.came_s + _PARKED_S:
                waiting.append(arrival)
                continue
            else:
                self.num_dropped += 1
            self._inbox.release(arrival.message.step)
        self._parked = waiting

    def _take(self, arrival: _Arrival) -> None:
        number, source = arrival.number, arrival.message.source
        is_whole = False
        try:
            with self._lock:
                place = self._book.place(number, source, arrival.layer, arrival.first, arrival.count)
                if place is None:
                    self.num_dropped += 1
                    return
                self._store(arrival, *place)
                is_whole = self._book.landed(number, source, arrival.layer, arrival.first, arrival.count)
        except Exception as error:  # nonsense from a peer, or a fault of ours: only this offer ends
            with self._lock:
                self._book.withdraw(number)
            self._say(KVNews(number, "failed", str(error)))
        if is_whole:
            self._say(KVNews(number, "landed"))

    def _store(self, arrival: _Arrival, blocks: Sequence[int], heads: Sequence[int]) -> None:
        """Into every place that has one of these heads."""
        slot = arrival.message.payload
        payload = view_of(slot.ctypes.data, slot.shape, torch.uint8)  # of read-only memory, which PyTorch does not know
        layer, table = arrival.layer - self._part.first_layer, torch.tensor(blocks, dtype=torch.int32)
        first, count = arrival.first, arrival.count
        if len(set(self._part.heads)) == len(self._part.heads):
            places = torch.tensor([self._part.heads.index(head) for head in heads], dtype=torch.int32)
            self._cache.write_tokens(layer, table, first, count, places, payload)
            return
        for head, rows in zip(heads, payload.view(len(heads), -1), strict=True):
            for place in (place for place, own in enumerate(self._part.heads) if own == head):
                self._cache.write_tokens(layer, table, first, count, torch.tensor([place], dtype=torch.int32), rows)

    def _lose(self, error: PeerLost) -> None:
        """Who has gone since the last time: offers that miss something of it cannot be completed."""
        losses = [int(counters["lost"]) for counters in self._inbox.counters()]
        gone = [source for source, (now, before) in enumerate(zip(losses, self._losses, strict=True)) if now > before]
        self._losses = losses
        with self._lock:
            lost = [number for source in gone for number in self._book.lose(source)]
        for number in lost:
            self._say(KVNews(number, "failed", str(error)))


class KVLinks:
    """Both ends of one process: what it gives, and, where it `receives`, what it takes."""

    def __init__(
        self, config: KVTransferConfig, name: str, cache: KVCache, part: CachePart, layout: str, say: Say
    ) -> None:
        self.sender = KVSender(config, f"{name} gives", cache, part, layout, say)
        self._receiver = KVReceiver(config, f"{name} takes", cache, part, layout, say) if config.receives else None

    @property
    def ticket(self) -> bytes:
        """How others reach what it takes."""
        return b"" if self._receiver is None else self._receiver.ticket

    def heard(self, message: ExpectKV | WithdrawKV) -> None:
        """An order of the engine's; does not wait for a step. Any thread."""
        if isinstance(message, WithdrawKV):
            self.sender.withdraw(message.number)
        if self._receiver is not None:
            self._receiver.heard(message)

    def close(self) -> None:
        """Stop both."""
        self.sender.close()
        if self._receiver is not None:
            self._receiver.close()


def _arrival(message: _m2n.Message) -> _Arrival:
    low, high, layer, first, count, *_ = message.user
    return _Arrival(message, high << 32 | low, layer, first, count, time.monotonic())
