"""An attention half whose layers are one native call each, for micro-batches of sequences with one row each.

A worker apart from its experts sends rows to them in every layer and turns to other micro-batches, so a step cannot be
one call. A layer can: attention and gate are noted at a micro-batch's first visit, and made again at the later ones
(`kernels/noted_calls`). So is the shared expert or the dense feed-forward, apart, because it runs while rows travel.
Callers do not know: what comes out is the same.

Micro-batches under way at once have a lane each: buffers for what a layer reads and makes. A lane is free when the
`AttentionBatch` of its micro-batch is collected. Rows of prompts, and layers in which PyTorch computes something, are
computed kernel by kernel.

Letters as in `antiphon.kernels.api`; T is the most rows of a micro-batch.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from antiphon.base.logging import get_logger
from antiphon.kernels.api import AttentionBatch, KVCache
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.noted_calls import CallBuffers, CannotNote, NotedCalls
from antiphon.models.attention_half import AttentionHalf
from antiphon.models.batch import refilled_batch

_log = get_logger("kernels")
_Result = TypeVar("_Result")


class _Made(NamedTuple):
    """What attention makes of a layer's rows, and the gate, if there is one."""

    x_TH: Tensor
    y_TH: Tensor
    choice: tuple[Tensor, Tensor] | None

    def first(self, num_rows: int) -> "_Made":
        choice = None if self.choice is None else (self.choice[0][:num_rows], self.choice[1][:num_rows])
        return _Made(self.x_TH[:num_rows], self.y_TH[:num_rows], choice)


class _Lane:
    """Buffers of one micro-batch at a time, and the calls of each layer."""

    def __init__(self, most_rows: int, most_blocks: int, block_size: int, hidden: int, dtype: torch.dtype) -> None:
        numbers = torch.zeros((3, most_rows), dtype=torch.int32)
        tables_TB = torch.zeros((most_rows, most_blocks), dtype=torch.int32)
        self.batch = refilled_batch(numbers[0], numbers[1], numbers[2], tables_TB, block_size=block_size)
        self.x_TH = torch.zeros((most_rows, hidden), dtype=dtype)
        self.delta_TH = torch.zeros((most_rows, hidden), dtype=dtype)
        self.buffers, self.local_buffers = CallBuffers(), CallBuffers()
        self.calls: dict[int, tuple[NotedCalls, _Made]] = {}
        self.local_calls: dict[int, tuple[NotedCalls, Tensor]] = {}
        self.own: dict[int, _Made] = {}  # by layer, the rows of the present micro-batch
        self.layer = -1  # computed last
        self.num_rows = 0
        self._of: weakref.ref[AttentionBatch] | None = None

    @property
    def is_free(self) -> bool:
        return self._of is None or self._of() is None

    def has(self, batch: AttentionBatch) -> bool:
        return self._of is not None and self._of() is batch

    def begin(self, batch: AttentionBatch, x_TH: Tensor) -> None:
        """A micro-batch of sequences with one row each is about to enter its first layer."""
        rows = batch.num_tokens
        if rows != self.num_rows:
            self.own.clear()
        self.num_rows, self._of = rows, weakref.ref(batch)
        self.batch.positions_T[:rows] = batch.positions_T
        self.batch.slots_T[:rows] = batch.slots_T
        self.batch.context_lens_S[:rows] = batch.context_lens_S
        self.batch.block_tables_SB[:rows, : batch.block_tables_SB.shape[1]] = batch.block_tables_SB
        self.x_TH[:rows] = x_TH

    def run(self, layer: int, delta_TH: Tensor | None) -> _Made:
        """The calls of a layer that has been noted."""
        if delta_TH is not None:
            self.delta_TH[: self.num_rows] = delta_TH
        calls, made = self.calls[layer]
        calls.run(self.num_rows)
        self.layer = layer
        if layer not in self.own:
            self.own[layer] = made.first(self.num_rows)
        return self.own[layer]


@dataclass(kw_only=True, eq=False)
class NotedHalf(AttentionHalf):
    """`most_rows`: of a micro-batch; `most_tokens`: of one of its sequences, which may have a block more."""

    most_rows: int
    most_tokens: int
    block_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lanes: list[_Lane] = []
        self._first_layer = next(iter(self.layers))
        self._cannot = False

    @staticmethod
    def of(half: AttentionHalf, most_rows: int, most_tokens: int, block_size: int) -> AttentionHalf:
        """`half`, with its layers noted where that may be: where no other rank has parts, and kernels are native."""
        if not isinstance(half.backend, CpuBackend) or half.ranks.size > 1:
            return half
        own = {each.name: getattr(half, each.name) for each in fields(half)}
        return NotedHalf(**own, most_rows=most_rows, most_tokens=most_tokens, block_size=block_size)

    def attend(
        self, layer: int, x_TH: Tensor, delta_TH: Tensor | None, cache: KVCache, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        lane = self._lane_of(layer, x_TH, batch)
        if lane is None:
            return super().attend(layer, x_TH, delta_TH, cache, batch)
        if layer not in lane.calls and not self._note(lane, layer, cache, has_delta=delta_TH is not None):
            return super().attend(layer, x_TH, delta_TH, cache, batch)
        made = lane.run(layer, delta_TH)
        return made.x_TH, made.y_TH

    def gate(self, layer: int, y_TH: Tensor) -> tuple[Tensor, Tensor]:
        found = self._made(layer, y_TH)
        return super().gate(layer, y_TH) if found is None or found[1].choice is None else found[1].choice

    def local_feed_forward(self, layer: int, y_TH: Tensor) -> Tensor | None:
        found = self._made(layer, y_TH)
        if found is None or self.layers[layer].local is None or not self._note_local(found[0], layer):
            return super().local_feed_forward(layer, y_TH)
        calls, local_TH = found[0].local_calls[layer]
        calls.run(y_TH.shape[0])
        return local_TH[: y_TH.shape[0]]

    def dense_feed_forward(self, layer: int, y_TH: Tensor) -> Tensor:
        local_TH = self.local_feed_forward(layer, y_TH)
        assert local_TH is not None, "a layer without experts has a dense feed-forward"
        return local_TH

    def _made(self, layer: int, y_TH: Tensor) -> tuple[_Lane, _Made] | None:
        """The lane in which attention has just made these very rows, and what else it made."""
        for lane in self._lanes:
            if lane.layer == layer and (made := lane.own.get(layer)) is not None and made.y_TH is y_TH:
                return lane, made
        return None

    def _lane_of(self, layer: int, x_TH: Tensor, batch: AttentionBatch) -> _Lane | None:
        """That of a micro-batch under way; at the first layer, one for a new one."""
        if self._cannot:
            return None
        found = next((each for each in self._lanes if each.has(batch)), None)
        if layer != self._first_layer:
            return found
        rows = batch.num_tokens
        if len(batch.query_lens) != rows or rows > self.most_rows:
            return None
        free = found or next((each for each in self._lanes if each.is_free), None)
        if free is None:
            most_blocks = -(-self.most_tokens // self.block_size) + 1
            free = _Lane(self.most_rows, most_blocks, self.block_size, self.spec.hidden_size, self.backend.dtype)
            self._lanes.append(free)
        free.begin(batch, x_TH)
        return free

    def _note(self, lane: _Lane, layer: int, cache: KVCache, *, has_delta: bool) -> bool:
        """Note attention and gate of a layer; False if that cannot be done."""
        calls = NotedCalls(lane.buffers)
        before = lane.x_TH if layer == self._first_layer else lane.calls[self._layer_before(layer)][1].x_TH

        def work() -> _Made:
            calls.next_layer()
            delta_TH = lane.delta_TH if has_delta else None
            x_TH, y_TH = AttentionHalf.attend(self, layer, before, delta_TH, cache, lane.batch)
            return _Made(x_TH, y_TH, AttentionHalf.gate(self, layer, y_TH) if self.routes(layer) else None)

        if (made := self._noted(calls, work)) is not None:
            lane.calls[layer] = calls, made
        return not self._cannot

    def _note_local(self, lane: _Lane, layer: int) -> bool:
        """The same of its shared expert or dense feed-forward."""
        local, y_TH = self.layers[layer].local, lane.calls[layer][1].y_TH
        assert local is not None, "it is noted where there is one"
        if layer not in lane.local_calls:
            calls = NotedCalls(lane.local_buffers)

            def work() -> Tensor:
                calls.next_layer()
                return local(y_TH)

            if (made := self._noted(calls, work)) is not None:
                lane.local_calls[layer] = calls, made
        return not self._cannot

    def _noted(self, calls: NotedCalls, work: Callable[[], _Result]) -> _Result | None:
        """What `work` makes; None if it cannot be noted, and then no layer is from now on."""
        try:
            return calls.note(work)
        except CannotNote as error:
            self._cannot = True
            _log.info("layers of decode steps are not one native call each: %s between their kernels", error)
            return None
        except BaseException:
            self._cannot = True  # buffers may have gone to another layer
            raise

    def _layer_before(self, layer: int) -> int:
        layers = list(self.layers)
        return layers[layers.index(layer) - 1]
