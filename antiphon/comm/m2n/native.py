"""The exchange over the native M2N library (`csrc/m2n`), any transport; long because both ends belong side by side.

Expert workers are the servers: each has an inbox and a ticket for it, which the engine hands to the attention workers.
An attention worker connects, and introduces itself with a ticket for its own inbox, to which the expert worker connects
back. So an attention worker that comes or returns needs only the experts' tickets.

Epochs number the incarnations of the exchange. The engine begins a new one when a worker dies: `abort` ends every wait
of the old one at once, `reset` forgets what was in flight and renews the connections that broke.
"""

import ctypes
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from antiphon import _m2n
from antiphon.base.errors import Interrupted, PeerLost, PeerTimeout, Refused, UserError
from antiphon.base.logging import get_logger
from antiphon.comm.ledger import Traffic, read_traffic
from antiphon.comm.m2n.api import CopyingExchange, ExchangeShape, ExpertBatch, StepAborted
from antiphon.comm.m2n.ready_batches import ReadyBatches, ReadyStep
from antiphon.kernels.api import address
from antiphon.placement.split import BoolArray, IntArray, Prefetch
from antiphon.specs.placement import ExpertPlacement


def dtype_name(dtype: torch.dtype) -> str:
    """As the native library spells it: `bfloat16`, `float16`, `float32`."""
    return str(dtype).removeprefix("torch.")


def view_of(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor on memory of the library's; valid as long as the library says."""
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    memory = (ctypes.c_char * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def on_host(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in host memory, of this type, without gaps; itself if it is all that. Asking first saves two passes
    through PyTorch's dispatcher, which is cold whenever weights have just passed through the caches."""
    if tensor.is_cpu and tensor.dtype is dtype and tensor.is_contiguous():
        return tensor
    return tensor.to(device="cpu", dtype=dtype).contiguous()


_log = get_logger("m2n")
# A worker of the engine waits for as long as the other side computes: some milliseconds when decoding. While it looks,
# its core is offered to others, and it sleeps at once when looking was in vain (csrc/m2n/waiting.h).
SPIN_S = 0.02
_CONNECT_S = 10.0  # for peers that are known to be there
_MAX_VIEWS = 1024  # far more than slots times usual batch sizes
_Result = TypeVar("_Result")


def aborting(call: Callable[..., _Result], *arguments: object) -> _Result:
    """A call whose wait is interrupted only because the running step is void: `StepAborted`."""
    try:
        return call(*arguments)
    except Interrupted as error:
        raise StepAborted from error


def check_rows(shape: ExchangeShape, rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
    """`UserError` unless these are rows of the exchange and their choices."""
    num_rows = len(rows_TH)
    fits = rows_TH.dtype is shape.dtype and rows_TH.shape == (num_rows, shape.hidden_size) and rows_TH.stride(1) == 1
    if not fits or not ids_TK.shape == weights_TK.shape == (num_rows, shape.top_k):
        given = ", ".join(f"{each.dtype} {tuple(each.shape)}" for each in (rows_TH, ids_TK, weights_TK))
        raise UserError(
            f"rows, ids and weights {given}: this exchange takes {shape.dtype} rows of {shape.hidden_size} with "
            f"consecutive elements, and {shape.top_k} choices of each"
        )


def check_reply(shape: ExchangeShape, batch: ExpertBatch, partial_RH: Tensor) -> None:
    """`UserError` unless there is a sum for each row of the batch."""
    wanted = (sum(batch.rows_per_source), shape.hidden_size)
    if partial_RH.shape != wanted:
        raise UserError(f"sums {tuple(partial_RH.shape)} in reply to a batch of {wanted}: give one for each row")


class _End:
    """What both ends share: an endpoint, an epoch, and waits that the engine can end."""

    def __init__(self, endpoint: _m2n.Endpoint, shape: ExchangeShape, inbox: _m2n.Inbox) -> None:
        self._endpoint = endpoint
        self._shape = shape
        self._inbox = inbox
        self._outboxes: list[_m2n.Outbox | None] = [None] * inbox.sources
        self._epoch = 0
        self._aborted_epoch = 0
        self.wait_s = 0.0
        self.exposed_s = 0.0

    def abort(self, epoch: int) -> None:
        """Any thread: the running step is void, `epoch` is about to begin."""
        self._aborted_epoch = max(self._aborted_epoch, epoch)
        self._endpoint.interrupt()

    def close(self) -> None:
        """Say goodbye to all peers."""
        self._endpoint.close()

    def _rest(self) -> None:
        """Wait until no call is under way, before what looks at all of them. Here each has ended when it returns."""

    def traffic(self) -> Traffic:
        """What this end has carried since its start."""
        self._rest()
        return read_traffic(self._inbox, (outbox for outbox in self._outboxes if outbox is not None))

    def _check_epoch(self) -> None:
        if self._aborted_epoch > self._epoch:
            raise StepAborted

    def _waiting(self, call: Callable[..., _Result], *arguments: object) -> _Result:
        """Run a call that waits; an interrupt left over from an epoch that has passed is ignored."""
        while True:
            self._check_epoch()
            try:
                return call(*arguments)
            except Interrupted:
                continue


class NativeAttentionExchange(_End, CopyingExchange):
    """`AttentionExchange` of attention worker `index`."""

    def __init__(
        self, endpoint: _m2n.Endpoint, shape: ExchangeShape, index: int, placement: ExpertPlacement, timeout_s: float
    ) -> None:
        # One slot more than micro-batches: the credit of the last message may still be on its way.
        slot_bytes = max(64, shape.max_rows * shape.hidden_size * shape.dtype.itemsize)
        names = [f"experts[{worker}]" for worker in range(shape.num_experts)]
        inbox = endpoint.inbox(shape.num_experts, shape.num_micro_batches + 1, slot_bytes, names)
        _End.__init__(self, endpoint, shape, inbox)
        CopyingExchange.__init__(self)
        self._index = index
        self._timeout_s = timeout_s
        self._side = _m2n.AttentionSide(
            shape.hidden_size,
            shape.top_k,
            shape.max_rows,
            dtype_name(shape.dtype),
            self._inbox,
            shape.num_micro_batches,
        )
        self.place(placement)
        self._tickets: list[bytes] = [b""] * shape.num_experts
        self._participants = [0] * shape.num_micro_batches
        self._steps = [0] * shape.num_micro_batches

    @property
    def bytes_sent(self) -> int:
        return self._side.bytes_sent

    def reset(self, epoch: int, tickets: list[bytes]) -> None:
        """Begin `epoch`: forget what was in flight, connect to expert workers that are new or lost, and wait until
        they have connected back. Blocks; `PeerTimeout`, `PeerLost` or `Refused` if one cannot be reached."""
        self._epoch = epoch
        self._side.forget()
        self._forget_copies()
        connected_back = self._inbox.connected()
        present = [worker for worker, ticket in enumerate(tickets) if ticket]
        for worker, ticket in enumerate(tickets):
            outbox = self._outboxes[worker]
            if not ticket:
                self._leave(worker)
            elif outbox is None or outbox.lost or ticket != self._tickets[worker] or worker not in connected_back:
                self._inbox.drop(worker)  # only a new connection counts from here on
                self._connect(worker, ticket)
        self._waiting(self._inbox.wait_connected, present, self._timeout_s)
        self._inbox.discard_below(_m2n.first_step_of(epoch))

    def _leave(self, worker: int) -> None:
        """Go on without an expert worker that is gone."""
        self._inbox.drop(worker)
        self._side.set_expert(worker, None)
        self._outboxes[worker] = None
        self._tickets[worker] = b""

    def _connect(self, worker: int, ticket: bytes) -> None:
        outbox = self._endpoint.connect(ticket, self._index, _CONNECT_S)
        own_ticket = self._endpoint.ticket(self._inbox)
        introduction = _m2n.INTRODUCTION + self._index
        self._waiting(lambda: outbox.send(introduction, own_ticket, participants=1, timeout_s=_CONNECT_S))
        self._waiting(outbox.wait_reusable, _CONNECT_S)
        self._outboxes[worker] = outbox
        self._tickets[worker] = ticket
        self._side.set_expert(worker, outbox)

    def _place_layer(self, layer: int) -> None:
        self._rest()
        placement = self.placement
        split = self._owners_of(layer), placement.speeds, placement.knee, placement.num_workers
        self._side.place(placement.version, layer, *split)

    def _request(self, worker: int, layer: int, expert: int) -> None:
        self._rest()
        self._side.prefetch(worker, layer, expert)

    def wanted_copies(self, layer: int, counts_E: IntArray, open_W: BoolArray) -> list[Prefetch]:
        self._rest()
        wanted = self._side.wanted_copies(layer, counts_E.astype(np.uint32), open_W)
        return [Prefetch(*each) for each in wanted]

    def begin_step(self, step: int, participants: list[list[int]], first: int = 0) -> None:
        """`first`: number of its first micro-batch. The others may be those of other steps, which go on."""
        for micro_batch, indices in enumerate(participants, first):
            self._steps[micro_batch] = step
            self._participants[micro_batch] = sum(1 << index for index in indices)

    def dispatch(self, layer: int, micro_batch: int, rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        rows_TH = rows_TH if rows_TH.is_cpu else rows_TH.cpu()
        ids_TK = on_host(ids_TK, torch.int32)
        weights_TK = on_host(weights_TK, torch.float32)
        num_rows = len(rows_TH)
        check_rows(self._shape, rows_TH, ids_TK, weights_TK)
        row_stride = rows_TH.stride(0)
        self._waiting(
            self._side.dispatch,
            self._epoch,
            self._steps[micro_batch],
            layer,
            micro_batch,
            self._participants[micro_batch],
            address(rows_TH),
            row_stride * self._shape.dtype.itemsize,
            address(ids_TK),
            address(weights_TK),
            num_rows,
            self._timeout_s,
        )

    def take_counts(self) -> bytes:
        self._rest()
        return self._side.take_counts()

    def is_back(self, layer: int, micro_batch: int) -> bool:
        """`combine` would not wait. Raises `StepAborted`."""
        self._check_epoch()
        return self._side.is_back(self._epoch, self._steps[micro_batch], layer, micro_batch)

    def combine(self, layer: int, micro_batch: int, timeout_s: float) -> Tensor:
        num_rows = self._side.num_pending(micro_batch)
        sum_TH = torch.empty(num_rows, self._shape.hidden_size, dtype=self._shape.dtype, device="cpu")
        wait_ns, exposed_ns = self._waiting(
            self._side.combine, self._epoch, self._steps[micro_batch], layer, micro_batch, address(sum_TH), timeout_s
        )
        self.wait_s += wait_ns * 1e-9
        self.exposed_s += exposed_ns * 1e-9
        return sum_TH


class NativeExpertExchange(_End):
    """`ExpertExchange` of expert worker `index`."""

    def __init__(
        self,
        endpoint: _m2n.Endpoint,
        shape: ExchangeShape,
        index: int,
        *,
        merges: bool = False,
        landing: _m2n.StreamDevice | None = None,
    ) -> None:
        """`merges`: rows of one layer that are ready are one batch, whatever steps they are of (`ready_batches`).
        `landing`: the device in whose memory rows arrive, for an end that puts batches there."""
        slot_bytes = _m2n.dispatch_bytes(shape.hidden_size, shape.top_k, shape.max_rows, dtype_name(shape.dtype))
        names = [f"attention[{worker}]" for worker in range(shape.num_attention)]
        # The first message is a ticket.
        inbox = endpoint.inbox(shape.num_attention, shape.num_micro_batches + 1, max(4096, slot_bytes), names, landing)
        super().__init__(endpoint, shape, inbox)
        self._index = index
        self._side = _m2n.ExpertSide(
            shape.hidden_size, shape.top_k, shape.max_rows, dtype_name(shape.dtype), self._inbox
        )
        self._ready = ReadyBatches(merges=merges)
        self._batch: tuple[_m2n.ReceivedBatch, list[ReadyStep]] | None = None
        self._views: dict[tuple[int, int, int, int], tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def ticket(self) -> bytes:
        """What attention workers need to reach this worker."""
        return self._endpoint.ticket(self._inbox)

    @property
    def bytes_sent(self) -> int:
        self._rest()
        return self._side.bytes_sent

    def reset(self, epoch: int, tickets: list[bytes]) -> None:
        """Begin `epoch`; `tickets` are the experts' own and not needed here. Peers that were lost before are not
        reported again."""
        self._epoch = epoch
        self._batch = None
        self._ready.forget()
        self._inbox.discard_below(_m2n.first_step_of(epoch))
        self._inbox.forget_losses()

    def receive(self, idle_s: float, timeout_s: float) -> ExpertBatch | None:
        started = time.monotonic()
        try:
            return self._receive(started + idle_s, timeout_s)
        finally:
            self.wait_s += time.monotonic() - started

    def _receive(self, idle_until: float, timeout_s: float) -> ExpertBatch | None:
        ready = self._ready
        while True:
            is_empty = not ready
            left_s = max(0.0, (idle_until if is_empty else ready.wait_until_s()) - time.monotonic())
            patience_s = min(left_s, timeout_s)  # a batch may become overdue before nothing at all is no error
            arrived = self._next(patience_s) if is_empty or ready.merges else None
            if arrived is not None and len(arrived) == 2:
                self._welcome(*arrived)
            elif arrived is not None:
                ready.add(ReadyStep(*arrived, time.monotonic()))
            elif not is_empty:
                if (batch := self._collect(ready.take())) is not None:
                    return batch
            elif overdue := self._overdue(timeout_s):
                raise PeerTimeout(f"experts[{self._index}] receive", overdue, timeout_s)
            elif patience_s == left_s:
                return None

    def _next(self, patience_s: float) -> tuple[int, int, int, tuple[int, ...]] | tuple[int, bytes] | None:
        return self._waiting(self._side.next, patience_s)

    def _collected(self, numbers: list[int]) -> _m2n.ReceivedBatch | None:
        return self._side.collect(numbers)

    def _overdue(self, timeout_s: float) -> list[str]:
        return self._side.overdue(timeout_s)

    def _welcome(self, source: int, ticket: bytes) -> None:
        """Connect back to an attention worker. One that is gone again already is left to the engine."""
        self._rest()
        try:
            outbox = self._endpoint.connect(ticket, self._index, _CONNECT_S)
            self._side.set_attention(source, outbox)
            self._outboxes[source] = outbox
        except (PeerTimeout, PeerLost, Refused, UserError, OSError) as error:
            _log.warning("experts[%d] cannot connect back to attention[%d]: %s", self._index, source, error)

    def _collect(self, steps: list[ReadyStep]) -> ExpertBatch | None:
        """The rows of these steps; None if their senders are gone."""
        received = self._collected([step.number for step in steps])
        if received is None:
            return None
        self._batch = received, steps
        step, layer, micro_batch, sources, rows_per_source, oldest, newest, asked, num_rows, *addresses = (
            received.fields()
        )
        rows_RH, ids_RK, weights_RK = self._views_of(num_rows, *addresses)
        return ExpertBatch(
            step=step,
            layer=layer,
            micro_batch=micro_batch,
            sources=sources,
            rows_per_source=rows_per_source,
            placements=(oldest, newest),
            rows_RH=rows_RH,
            ids_RK=ids_RK,
            weights_RK=weights_RK,
            prefetches=asked,
        )

    def _views_of(self, num_rows: int, rows: int, ids: int, weights: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors on a batch's memory. They are kept: there are few slots, and making them anew takes 50 us when the
        experts' weights have just passed through the caches."""
        key = (num_rows, rows, ids, weights)
        views = self._views.get(key)
        if views is None:
            shape, table = self._shape, (num_rows, self._shape.top_k)
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            self._views[key] = views = (
                view_of(rows, (num_rows, shape.hidden_size), shape.dtype),
                view_of(ids, table, torch.int32),
                view_of(weights, table, torch.float32),
            )
        return views

    def reply(self, batch: ExpertBatch, partial_RH: Tensor, computed_ns: tuple[int, int]) -> None:
        if self._batch is None:
            raise UserError("no batch waits for a reply: call receive first, and reply once")
        received, steps = self._batch
        check_reply(self._shape, batch, partial_RH)
        partial_RH = on_host(partial_RH, self._shape.dtype)
        self._waiting(self._side.reply, received, address(partial_RH), *computed_ns, _CONNECT_S)
        self._batch = None
        self._ready.answered(steps, (computed_ns[1] - computed_ns[0]) * 1e-9, time.monotonic())
