"""The exchange over shared memory of one machine: rows are written straight into the receiver's slot.

Dispatch: for each expert worker copy the rows it needs into its slot, publish the slot's sequence number, ring its
doorbell. Receive: for each micro-batch look for slots with news; when all participants named in the header are
there, the batch is complete. No order of arrival is assumed.

An epoch (word 0) numbers the incarnations of the exchange. The engine raises it when a worker dies; every wait notices
and raises `StepAborted`, late messages of an older epoch are ignored.
"""

import os
import time

import torch
from torch import Tensor

from antiphon.base.errors import PeerTimeout
from antiphon.comm.m2n.api import ExchangeShape, ExpertBatch, StepAborted
from antiphon.comm.m2n.layout import RegionLayout
from antiphon.comm.m2n.routing import Destination, RowRouter
from antiphon.comm.m2n.shared_memory import Region
from antiphon.comm.m2n.slot import CombineSlot, DispatchSlot
from antiphon.specs.placement import ExpertPlacement

_SLICE_S = 0.25  # longest sleep before looking at the epoch again; doorbells normally end a sleep at once


class ControlPage:
    """The engine's hand on the exchange: it owns the descriptor and the epoch, and can wake everyone."""

    def __init__(self, descriptor: int, shape: ExchangeShape) -> None:
        self._descriptor: int | None = descriptor
        self._region = Region(descriptor)
        self._layout = RegionLayout(shape)

    def abort_step(self) -> int:
        """Start a new epoch and wake all workers out of their waits. Returns the epoch to `reset` to."""
        epoch = self._region.load(0) + 1
        self._region.publish(0, epoch)
        for attention in range(self._layout.shape.num_attention):
            self._region.ring(self._layout.attention_doorbell(attention))
        for expert in range(self._layout.shape.num_experts):
            self._region.ring(self._layout.expert_doorbell(expert))
        return epoch

    def close(self) -> None:
        """Let go of descriptor and mapping, so that the memory goes with the last worker. Nothing may follow."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            del self._region  # a mapping holds a descriptor of its own


class _Endpoint:
    """What both ends share: waiting on a doorbell under an epoch."""

    def __init__(self, region: Region, layout: RegionLayout, doorbell: int, spin_s: float) -> None:
        self._region = region
        self._layout = layout
        self._shape = layout.shape
        self._doorbell = doorbell
        self._spin_s = spin_s
        self._epoch = region.load(0)
        self.bytes_sent = 0
        self.wait_s = 0.0
        self.exposed_s = 0.0

    def _check_epoch(self) -> None:
        if self._region.load(0) != self._epoch:
            raise StepAborted

    def _sleep(self, bell: int, deadline: float) -> bool:
        """Wait for the doorbell to leave `bell`. False when the deadline has passed."""
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return False
        self._region.wait(self._doorbell, bell, min(remaining, _SLICE_S), self._spin_s)
        return True


class SharedMemoryAttentionExchange(_Endpoint):
    """`AttentionExchange` of attention worker `index`."""

    def __init__(
        self, descriptor: int, shape: ExchangeShape, index: int, placement: ExpertPlacement, spin_s: float
    ) -> None:
        layout = RegionLayout(shape)
        super().__init__(Region(descriptor), layout, layout.attention_doorbell(index), spin_s)
        self._index = index
        self._router = RowRouter(placement)
        pairs = [(f, i) for f in range(shape.num_experts) for i in range(shape.num_micro_batches)]
        self._out = {p: DispatchSlot(self._region, layout.dispatch_slot(index, *p), layout) for p in pairs}
        self._in = {p: CombineSlot(self._region, layout.combine_slot(index, *p), layout) for p in pairs}
        self._pending: dict[int, tuple[int, list[Tensor | None], list[int]]] = {}
        self._participants: list[list[int]] = []
        self._step = 0

    def reset(self, epoch: int) -> None:
        self._epoch = epoch
        self._pending.clear()
        for slot in (*self._out.values(), *self._in.values()):
            slot.synchronise()

    def begin_step(self, step: int, participants: list[list[int]]) -> None:
        self._step = step
        self._participants = participants
        for slot in self._in.values():
            slot.synchronise()  # an expert may have published a reply of the last epoch after our `reset`

    def dispatch(self, layer: int, micro_batch: int, rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        self._check_epoch()
        num_rows = rows_TH.shape[0]
        if num_rows > self._shape.max_rows:
            raise ValueError(f"{num_rows} rows in one micro-batch: the exchange was made for {self._shape.max_rows}")
        indices: list[Tensor | None] = []
        counts: list[int] = []
        for expert, share in enumerate(self._router.split(ids_TK, weights_TK)):
            self._send(expert, micro_batch, layer, rows_TH, share)
            indices.append(share.row_index)
            counts.append(share.ids_TK.shape[0])
        self._pending[micro_batch] = (num_rows, indices, counts)

    def _send(self, expert: int, micro_batch: int, layer: int, rows_TH: Tensor, share: Destination) -> None:
        slot = self._out[expert, micro_batch]
        num_rows = share.ids_TK.shape[0]
        if num_rows:
            slot.ids[:num_rows].copy_(share.ids_TK)
            slot.weights[:num_rows].copy_(share.weights_TK)
            if share.row_index is None:
                slot.rows[:num_rows].copy_(rows_TH)
            elif rows_TH.device.type == "cpu":
                torch.index_select(rows_TH, 0, share.row_index, out=slot.rows[:num_rows])
            else:
                slot.rows[:num_rows].copy_(rows_TH[share.row_index])
        slot.write_header(self._epoch, self._step, layer, num_rows, self._participants[micro_batch])
        slot.publish()
        self._region.ring(self._layout.expert_doorbell(expert))
        self.bytes_sent += num_rows * (self._layout.row_bytes + 8 * self._shape.top_k)

    def combine(self, layer: int, micro_batch: int, timeout_s: float) -> Tensor:
        started_ns = time.monotonic_ns()
        num_rows, indices, counts = self._pending.pop(micro_batch)
        self._wait_for_replies(layer, micro_batch, started_ns * 1e-9 + timeout_s, timeout_s)
        self._account_wait(micro_batch, started_ns)
        partials = [self._in[expert, micro_batch].rows[:count] for expert, count in enumerate(counts)]
        if len(partials) == 1:
            return partials[0]
        total_TH = torch.zeros(num_rows, self._shape.hidden_size, dtype=torch.float32)
        for index, partial in zip(indices, partials, strict=True):
            assert index is not None, "several expert workers: every share has its rows listed"
            total_TH.index_add_(0, index.cpu(), partial.float())
        return total_TH.to(self._shape.dtype)

    def _account_wait(self, micro_batch: int, started_ns: int) -> None:
        """Split the wait that just ended: while the slowest expert worker computed these rows it was work, the rest
        was communication that nothing hid."""
        ended_ns = time.monotonic_ns()
        times = [self._in[expert, micro_batch].computed_ns for expert in range(self._shape.num_experts)]
        computing_ns = max(min(ended_ns, end) - max(started_ns, start) for start, end in times)
        self.wait_s += (ended_ns - started_ns) * 1e-9
        self.exposed_s += (ended_ns - started_ns - max(0, computing_ns)) * 1e-9

    def _wait_for_replies(self, layer: int, micro_batch: int, deadline: float, timeout_s: float) -> None:
        slots = [self._in[expert, micro_batch] for expert in range(self._shape.num_experts)]
        while True:
            bell = self._region.load(self._doorbell)
            missing = [expert for expert, slot in enumerate(slots) if not slot.has_news()]
            self._check_epoch()
            if not missing:
                break
            if not self._sleep(bell, deadline):
                names = [f"experts[{expert}]" for expert in missing]
                raise PeerTimeout(f"attention[{self._index}] combine, layer {layer}", names, timeout_s)
        for slot in slots:
            slot.consume()


class SharedMemoryExpertExchange(_Endpoint):
    """`ExpertExchange` of expert worker `index`."""

    def __init__(self, descriptor: int, shape: ExchangeShape, index: int, spin_s: float) -> None:
        layout = RegionLayout(shape)
        super().__init__(Region(descriptor), layout, layout.expert_doorbell(index), spin_s)
        self._index = index
        pairs = [(a, i) for a in range(shape.num_attention) for i in range(shape.num_micro_batches)]
        self._in = {(a, i): DispatchSlot(self._region, layout.dispatch_slot(a, index, i), layout) for a, i in pairs}
        self._out = {(a, i): CombineSlot(self._region, layout.combine_slot(a, index, i), layout) for a, i in pairs}
        self._next_micro_batch = 0

    def reset(self, epoch: int) -> None:
        self._epoch = epoch
        self._next_micro_batch = 0
        for slot in (*self._out.values(), *self._in.values()):
            slot.synchronise()

    def receive(self, idle_s: float, timeout_s: float) -> ExpertBatch | None:
        started = time.monotonic()
        try:
            return self._receive(started, idle_s, timeout_s)
        finally:
            self.wait_s += time.monotonic() - started

    def _receive(self, started: float, idle_s: float, timeout_s: float) -> ExpertBatch | None:
        incomplete_since: float | None = None
        while True:
            bell = self._region.load(self._doorbell)
            self._check_epoch()
            absent: set[int] = set()
            for turn in range(self._shape.num_micro_batches):
                micro_batch = (self._next_micro_batch + turn) % self._shape.num_micro_batches
                ready, missing = self._arrivals(micro_batch)
                if ready and not missing:
                    self._next_micro_batch = (micro_batch + 1) % self._shape.num_micro_batches
                    return self._collect(micro_batch, ready)
                absent.update(missing)
            if absent:
                incomplete_since = incomplete_since or time.monotonic()
                deadline = incomplete_since + timeout_s
            else:
                deadline = started + idle_s
            if not self._sleep(bell, deadline):
                if not absent:
                    return None
                names = [f"attention[{attention}]" for attention in sorted(absent)]
                raise PeerTimeout(f"experts[{self._index}] receive", names, timeout_s)

    def _arrivals(self, micro_batch: int) -> tuple[list[int], list[int]]:
        """(sources whose rows are here, sources announced but still missing) for one micro-batch."""
        ready = []
        for attention in range(self._shape.num_attention):
            slot = self._in[attention, micro_batch]
            if slot.has_news() and slot.epoch == self._epoch:
                ready.append(attention)
        if not ready:
            return [], []
        announced = self._in[ready[0], micro_batch].sources
        return ready, [attention for attention in announced if attention not in ready]

    def _collect(self, micro_batch: int, sources: list[int]) -> ExpertBatch:
        slots = [self._in[source, micro_batch] for source in sources]
        counts = [slot.num_rows for slot in slots]
        for slot in slots:
            slot.consume()
        rows = [slot.rows[:count] for slot, count in zip(slots, counts, strict=True)]
        ids = [slot.ids[:count] for slot, count in zip(slots, counts, strict=True)]
        weights = [slot.weights[:count] for slot, count in zip(slots, counts, strict=True)]
        single = len(slots) == 1
        return ExpertBatch(
            step=slots[0].step,
            layer=slots[0].layer,
            micro_batch=micro_batch,
            sources=tuple(sources),
            rows_per_source=tuple(counts),
            rows_RH=rows[0] if single else torch.cat(rows),
            ids_RK=ids[0] if single else torch.cat(ids),
            weights_RK=weights[0] if single else torch.cat(weights),
        )

    def reply(self, batch: ExpertBatch, partial_RH: Tensor, computed_ns: tuple[int, int]) -> None:
        self._check_epoch()
        first_row = 0
        for source, count in zip(batch.sources, batch.rows_per_source, strict=True):
            slot = self._out[source, batch.micro_batch]
            slot.rows[:count].copy_(partial_RH[first_row : first_row + count])
            first_row += count
            slot.write_times(*computed_ns)
            slot.publish()
            self._region.ring(self._layout.attention_doorbell(source))
            self.bytes_sent += count * self._layout.row_bytes
