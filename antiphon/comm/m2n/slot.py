"""One slot of the exchange: a header, and room for the rows of one micro-batch, in shared memory.

The header's first word is the sequence number; publishing it makes everything written before visible to the reader.
Views of the whole slot are made once; a message uses the first `num_rows` rows of each.
"""

import torch
from torch import Tensor

from antiphon.comm.m2n.api import ExchangeShape
from antiphon.comm.m2n.layout import (
    EPOCH,
    FIRST_SOURCE,
    HEADER_BYTES,
    LAYER,
    NUM_ROWS,
    NUM_SOURCES,
    STEP,
    RegionLayout,
)
from antiphon.comm.m2n.shared_memory import Region


class Slot:
    """Reader's or writer's view of one slot. `sequence` is the last number this end has sent or consumed."""

    def __init__(self, region: Region, offset: int, rows_offset: int, shape: ExchangeShape) -> None:
        self._region = region
        self._offset = offset
        self._header = region.view(offset, (HEADER_BYTES // 4,), torch.int32).numpy()
        self.rows = region.view(offset + rows_offset, (shape.max_rows, shape.hidden_size), shape.dtype)
        self.sequence = 0
        self.synchronise()

    def synchronise(self) -> None:
        """Take whatever number stands in memory as already handled (a new epoch begins)."""
        self.sequence = self._region.load(self._offset)

    def has_news(self) -> bool:
        return self._region.load(self._offset) != self.sequence

    def consume(self) -> None:
        self.sequence = self._region.load(self._offset)

    def publish(self) -> None:
        self.sequence = (self.sequence + 1) & 0xFFFFFFFF
        self._region.publish(self._offset, self.sequence)

    def write_header(self, epoch: int, step: int, layer: int, num_rows: int, sources: list[int]) -> None:
        header = self._header
        header[EPOCH], header[STEP], header[LAYER] = epoch, step & 0x7FFFFFFF, layer
        header[NUM_ROWS], header[NUM_SOURCES] = num_rows, len(sources)
        header[FIRST_SOURCE : FIRST_SOURCE + len(sources)] = sources

    @property
    def epoch(self) -> int:
        return int(self._header[EPOCH])

    @property
    def step(self) -> int:
        return int(self._header[STEP])

    @property
    def layer(self) -> int:
        return int(self._header[LAYER])

    @property
    def num_rows(self) -> int:
        return int(self._header[NUM_ROWS])

    @property
    def sources(self) -> list[int]:
        """The attention workers announced for this (layer, micro-batch)."""
        count = int(self._header[NUM_SOURCES])
        return [int(source) for source in self._header[FIRST_SOURCE : FIRST_SOURCE + count]]


class DispatchSlot(Slot):
    """Attention to experts: rows with their expert ids and weights."""

    def __init__(self, region: Region, offset: int, layout: RegionLayout) -> None:
        shape = layout.shape
        super().__init__(region, offset, layout.rows_offset, shape)
        table = (shape.max_rows, shape.top_k)
        self.ids: Tensor = region.view(offset + layout.ids_offset, table, torch.int32)
        self.weights: Tensor = region.view(offset + layout.weights_offset, table, torch.float32)


class CombineSlot(Slot):
    """Experts to attention: weighted partial sums, rows in the order they were dispatched.

    `computed_ns` tells from when to when the expert worker computed them, on the machine's monotonic clock.
    """

    def __init__(self, region: Region, offset: int, layout: RegionLayout) -> None:
        super().__init__(region, offset, HEADER_BYTES, layout.shape)
        self._times = region.view(offset + HEADER_BYTES // 2, (2,), torch.int64).numpy()

    @property
    def computed_ns(self) -> tuple[int, int]:
        return int(self._times[0]), int(self._times[1])

    def write_times(self, start_ns: int, end_ns: int) -> None:
        self._times[0], self._times[1] = start_ns, end_ns
