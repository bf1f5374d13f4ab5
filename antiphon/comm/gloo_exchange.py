"""The exchange over `torch.distributed` on gloo: a general library in the M2N library's place, to compare with.

1. All workers are ranks of one process group: attention workers first, then expert workers. Expert worker 0 keeps the
   store where they meet; its address is its ticket.
2. A dispatch is a header of fixed size and, if there are rows, a message with ids, weights and rows: a receiver of a
   general library must know a message's size before it comes.
3. An expert worker has a thread for each attention worker, because a wait of gloo cannot look at several peers, and one
   that times out breaks the connection.
4. The receive of a reply is posted before its dispatch is sent, which gloo likes best.

A group does not survive the death of a rank, and its waits cannot be interrupted: for `antiphon bench apart`, not for
serving. Rejected: one all-to-all for each dispatch. Attention workers without rows in a micro-batch would have to join.
"""

import queue
import threading
import time
from collections import defaultdict
from datetime import timedelta
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from antiphon.base.errors import PeerLost, PeerTimeout, UserError
from antiphon.comm.ledger import Traffic
from antiphon.comm.m2n.api import ExchangeShape, ExpertBatch, StepAborted
from antiphon.specs.placement import ExpertPlacement

_HEADER, _ROWS, _REPLY = 0, 1, 2  # tags; replies of micro-batch i have _REPLY + i
_HEADER_WORDS = 6  # step, layer, micro-batch, rows, participants as bits, version of the placement
_LEAVE_S = 5.0
_TRAILER_WORDS = 2  # behind a reply's rows: when they were computed


class _GlooEnd:
    """What both ends share: a rank of the group, which is made in the first epoch."""

    def __init__(self, shape: ExchangeShape, rank: int, host: str, timeout_s: float) -> None:
        self._shape = shape
        self._rank = rank
        self._host = host
        self._timeout_s = timeout_s
        self._store: Any = None
        self._group: Any = None
        self._epoch: int | None = None
        self._aborted_epoch = 0
        self.wait_s = 0.0
        self.bytes_sent = 0

    def abort(self, epoch: int) -> None:
        """Any thread. A wait that is under way ends when its peer does."""
        self._aborted_epoch = max(self._aborted_epoch, epoch)

    def reset(self, epoch: int, tickets: list[bytes]) -> None:
        """Make the group. Blocks until all are there; `UserError` for any epoch but the first: a rank has died."""
        if self._epoch is not None and epoch != self._epoch:
            raise UserError("a worker died, and a group of gloo does not survive that: start again, or use m2n")
        if self._epoch is None:
            self._join(tickets[0])
            self._epoch = epoch

    def _join(self, ticket: bytes) -> None:
        host, _, port = ticket.decode().rpartition(":")
        store = self._store or _store(host, int(port), self._timeout_s, keeps=False)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(interface=_interface_of(self._host))]
        options._timeout = timedelta(days=1)  # of a thread that listens; other waits say their own
        size = self._shape.num_attention + self._shape.num_experts
        self._group = dist.ProcessGroupGloo(store, self._rank, size, options)

    def _name(self, rank: int) -> str:
        experts = rank - self._shape.num_attention
        return f"attention[{rank}]" if experts < 0 else f"experts[{experts}]"

    def _send(self, tensor: Tensor, rank: int, tag: int) -> Any:
        self.bytes_sent += tensor.numel() * tensor.element_size()
        return self._group.send([tensor], rank, tag)

    def _receive(self, tensor: Tensor, rank: int, tag: int) -> Any:
        return self._group.recv([tensor], rank, tag)

    def _wait(self, work: Any, rank: int, what: str, timeout_s: float) -> None:
        """`PeerTimeout` or `PeerLost` names the peer; either is the end of the group."""
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if self._aborted_epoch > (self._epoch or 0):
                raise StepAborted from error
            if "timed out" in str(error).lower():
                raise PeerTimeout(what, [self._name(rank)], timeout_s) from error
            raise PeerLost(self._name(rank), str(error)) from error

    def traffic(self) -> Traffic:
        """Gloo counts nothing."""
        return Traffic(pairs=[], waits=[], round_trips=[])

    def close(self) -> None:
        """The process ends, and its connections with it."""


def _store(host: str, port: int, timeout_s: float, *, keeps: bool) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, None, keeps, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


def _interface_of(host: str) -> str:
    """The network interface with this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == host for each in addresses):
            return name
    raise UserError(f"no network interface has the address {host}")


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8).flatten()


class _Sent(NamedTuple):
    """A dispatch to one expert worker: which rows went there, what is still under way, where the answer comes."""

    rank: int
    rows: Tensor
    works: list[tuple[Any, Tensor]]
    answer: Tensor
    reply: Any


class GlooAttentionExchange(_GlooEnd):
    """`AttentionExchange` of attention worker `index`. Experts do not move and have no copies."""

    def __init__(
        self, shape: ExchangeShape, index: int, placement: ExpertPlacement, host: str, timeout_s: float
    ) -> None:
        super().__init__(shape, index, host, timeout_s)
        self.exposed_s = 0.0
        self._step = 0
        self._participants: list[int] = []
        self._sent: dict[int, tuple[int, list[_Sent]]] = {}  # by micro-batch: its rows, and where they went
        self.place(placement)

    def place(self, placement: ExpertPlacement) -> None:
        """Where experts are."""
        assert all(len(workers) == 1 for owners in placement.owners.values() for workers in owners), "no copies"
        self._version = placement.version
        self._owner_of = {
            layer: torch.tensor([workers[0] for workers in owners], dtype=torch.int32)
            for layer, owners in placement.owners.items()
        }

    def take_counts(self) -> bytes:
        return b""

    def begin_step(self, step: int, participants: list[list[int]]) -> None:
        self._step = step
        self._participants = [sum(1 << index for index in indices) for indices in participants]
        self._sent.clear()

    def dispatch(self, layer: int, micro_batch: int, rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        rows_TH, ids_TK, weights_TK = rows_TH.cpu(), ids_TK.cpu().int(), weights_TK.cpu().float()
        owner_TK = self._owner_of[layer][ids_TK.long()]
        sent = []
        for worker in range(self._shape.num_experts):
            here_TK = owner_TK == worker
            rows = here_TK.any(dim=1).nonzero()[:, 0]
            ids_RK = torch.where(here_TK, ids_TK, -1)[rows]
            rank = self._shape.num_attention + worker
            header = torch.tensor(
                [self._step, layer, micro_batch, len(rows), self._participants[micro_batch], self._version]
            )
            answer = torch.empty(self._answer_bytes(len(rows)), dtype=torch.uint8)
            reply = self._receive(answer, rank, _REPLY + micro_batch) if len(rows) else None
            works = [(self._send(header, rank, _HEADER), header)]
            if len(rows):
                data = torch.cat([_as_bytes(each) for each in (ids_RK, weights_TK[rows], rows_TH[rows])])
                works.append((self._send(data, rank, _ROWS), data))
            sent.append(_Sent(rank, rows, works, answer, reply))
        self._sent[micro_batch] = len(rows_TH), sent

    def _answer_bytes(self, num_rows: int) -> int:
        return num_rows * self._shape.hidden_size * self._shape.dtype.itemsize + 8 * _TRAILER_WORDS

    def combine(self, layer: int, micro_batch: int, timeout_s: float) -> Tensor:
        num_rows, sent = self._sent.pop(micro_batch)
        sum_TH = torch.zeros(num_rows, self._shape.hidden_size, dtype=torch.float32)
        started_ns = time.monotonic_ns()
        computed_ns = 0
        for each in sent:
            for work, _ in each.works:
                self._wait(work, each.rank, "dispatch", timeout_s)
            if each.reply is not None:
                self._wait(each.reply, each.rank, "combine", timeout_s)
                rows_bytes, trailer = each.answer[: -8 * _TRAILER_WORDS], each.answer[-8 * _TRAILER_WORDS :]
                part_RH = rows_bytes.view(self._shape.dtype).view(len(each.rows), self._shape.hidden_size)
                sum_TH.index_add_(0, each.rows, part_RH.float())
                begin_ns, end_ns = trailer.clone().view(torch.int64).tolist()
                computed_ns = max(computed_ns, end_ns - max(begin_ns, started_ns))
        waited_ns = time.monotonic_ns() - started_ns
        self.wait_s += waited_ns * 1e-9
        self.exposed_s += max(0, waited_ns - max(0, computed_ns)) * 1e-9
        return sum_TH.to(self._shape.dtype)


class _Arrived(NamedTuple):
    """A dispatch of one attention worker, as an expert worker gets it. `error`: what ended its connection instead."""

    source: int
    header: list[int]
    data: Tensor
    error: str = ""


class GlooExpertExchange(_GlooEnd):
    """`ExpertExchange` of expert worker `index`."""

    def __init__(self, shape: ExchangeShape, index: int, host: str, timeout_s: float) -> None:
        super().__init__(shape, shape.num_attention + index, host, timeout_s)
        self._arrived: queue.SimpleQueue[_Arrived] = queue.SimpleQueue()
        self._partial: dict[tuple[int, int, int], dict[int, _Arrived]] = defaultdict(dict)
        self._replies: list[tuple[Any, Tensor, int]] = []
        self._listeners: list[threading.Thread] = []
        if index == 0:
            self._store = _store(host, 0, timeout_s, keeps=True)

    @property
    def ticket(self) -> bytes:
        """Where the ranks meet; only the first expert worker knows. Never empty, which would mean a lost worker."""
        return b"-" if self._store is None else f"{self._host}:{self._store.port}".encode()

    def _join(self, ticket: bytes) -> None:
        super()._join(ticket)
        for source in range(self._shape.num_attention):
            listener = threading.Thread(target=self._listen, args=(source,), name=f"gloo-{source}", daemon=True)
            listener.start()
            self._listeners.append(listener)

    def close(self) -> None:
        """Wait until the attention workers have left: Python cannot end while a thread waits inside gloo."""
        deadline = time.monotonic() + _LEAVE_S
        for listener in self._listeners:
            listener.join(max(0.0, deadline - time.monotonic()))

    def _listen(self, source: int) -> None:
        """Hand on what one attention worker sends, until its connection ends."""
        row_bytes = self._shape.top_k * 8 + self._shape.hidden_size * self._shape.dtype.itemsize
        try:
            while True:
                header = torch.empty(_HEADER_WORDS, dtype=torch.int64)
                self._receive(header, source, _HEADER).wait()
                words: list[int] = header.tolist()
                data = torch.empty(words[3] * row_bytes, dtype=torch.uint8)
                if words[3]:
                    self._receive(data, source, _ROWS).wait()
                self._arrived.put(_Arrived(source, words, data))
        except RuntimeError as error:
            self._arrived.put(_Arrived(source, [], torch.empty(0), str(error)))

    def receive(self, idle_s: float, timeout_s: float) -> ExpertBatch | None:
        started = time.monotonic()
        try:
            return self._next_batch(started, idle_s, timeout_s)
        finally:
            self.wait_s += time.monotonic() - started

    def _next_batch(self, started_s: float, idle_s: float, timeout_s: float) -> ExpertBatch | None:
        while True:
            patience_s = timeout_s if self._partial else idle_s
            try:
                arrived = self._arrived.get(timeout=max(0.0, started_s + patience_s - time.monotonic()))
            except queue.Empty:
                if self._partial:
                    raise PeerTimeout("receive", self._missing(), timeout_s) from None
                return None
            if arrived.error:
                raise PeerLost(f"attention[{arrived.source}]", arrived.error)
            step, layer, micro_batch, _, participants, _ = arrived.header
            key = step, layer, micro_batch
            of_key = self._partial[key]
            of_key[arrived.source] = arrived
            if len(of_key) == participants.bit_count():
                del self._partial[key]
                return self._batch([of_key[source] for source in sorted(of_key)])

    def _missing(self) -> list[str]:
        """Who owes rows of the oldest incomplete batch."""
        of_key = next(iter(self._partial.values()))
        participants = next(iter(of_key.values())).header[4]
        return [
            f"attention[{i}]" for i in range(self._shape.num_attention) if participants >> i & 1 and i not in of_key
        ]

    def _batch(self, parts: list[_Arrived]) -> ExpertBatch:
        shape = self._shape
        ids, weights, rows = [], [], []
        for each in parts:
            count = each.header[3]
            of_ids, of_rows = 4 * count * shape.top_k, count * shape.hidden_size * shape.dtype.itemsize
            id_bytes, weight_bytes, row_bytes = torch.split(each.data, [of_ids, of_ids, of_rows])
            ids.append(id_bytes.view(torch.int32).view(count, shape.top_k))
            weights.append(weight_bytes.view(torch.float32).view(count, shape.top_k))
            rows.append(row_bytes.view(shape.dtype).view(count, shape.hidden_size))
        step, layer, micro_batch, _, _, version = parts[0].header
        return ExpertBatch(
            step=step,
            layer=layer,
            micro_batch=micro_batch,
            sources=tuple(each.source for each in parts),
            rows_per_source=tuple(each.header[3] for each in parts),
            placements=(version, version),
            rows_RH=torch.cat(rows),
            ids_RK=torch.cat(ids),
            weights_RK=torch.cat(weights),
        )

    def reply(self, batch: ExpertBatch, partial_RH: Tensor, computed_ns: tuple[int, int]) -> None:
        for work, _, rank in self._replies:  # of the batch before: its buffers go now
            self._wait(work, rank, "reply", self._timeout_s)
        self._replies = []
        trailer = _as_bytes(torch.tensor(computed_ns))
        on_host_RH = partial_RH.to(device="cpu", dtype=self._shape.dtype)
        parts = torch.split(on_host_RH, list(batch.rows_per_source))
        for source, part_RH in zip(batch.sources, parts, strict=True):
            if len(part_RH):
                data = torch.cat([_as_bytes(part_RH), trailer])
                self._replies.append((self._send(data, source, _REPLY + batch.micro_batch), data, source))
