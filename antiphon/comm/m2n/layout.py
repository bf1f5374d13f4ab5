"""Where things lie in the shared memory of one attention-expert exchange. Pure arithmetic, no memory touched.

One region holds a control page and, for every (attention a, expert worker f, micro-batch i), one slot each way. One
slot is enough: micro-batch i of worker a cannot dispatch layer l+1 before layer l came back, so a slot is never
overwritten while in use, and flow control needs no credits.

Control page: word 0 the epoch; then one doorbell per process, each on its own cache line. A sender fills a slot,
publishes its sequence number, then adds one to the receiver's doorbell and wakes it.
"""

from dataclasses import dataclass
from functools import cached_property

from antiphon.comm.m2n.api import ExchangeShape

CACHE_LINE = 64
PAGE = 4096
HEADER_BYTES = 128

# Header words (int32), one slot: sequence is the word that publishes all others.
SEQUENCE, EPOCH, STEP, LAYER, NUM_ROWS, NUM_SOURCES, FIRST_SOURCE = 0, 1, 2, 3, 4, 5, 6
MAX_ATTENTION = HEADER_BYTES // 4 - FIRST_SOURCE  # the header names the participants of a batch


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True)
class RegionLayout:
    """Byte offsets within the region."""

    shape: ExchangeShape

    @cached_property
    def ids_offset(self) -> int:
        return HEADER_BYTES

    @cached_property
    def weights_offset(self) -> int:
        return self.ids_offset + _round_up(self.shape.max_rows * self.shape.top_k * 4, CACHE_LINE)

    @cached_property
    def rows_offset(self) -> int:
        return self.weights_offset + _round_up(self.shape.max_rows * self.shape.top_k * 4, CACHE_LINE)

    @cached_property
    def row_bytes(self) -> int:
        return self.shape.hidden_size * self.shape.dtype.itemsize

    @cached_property
    def dispatch_slot_bytes(self) -> int:
        return _round_up(self.rows_offset + self.shape.max_rows * self.row_bytes, PAGE)

    @cached_property
    def combine_slot_bytes(self) -> int:
        return _round_up(HEADER_BYTES + self.shape.max_rows * self.row_bytes, PAGE)

    @cached_property
    def control_bytes(self) -> int:
        return _round_up((1 + self.shape.num_attention + self.shape.num_experts) * CACHE_LINE, PAGE)

    @cached_property
    def num_slots(self) -> int:
        return self.shape.num_attention * self.shape.num_experts * self.shape.num_micro_batches

    @cached_property
    def total_bytes(self) -> int:
        return self.control_bytes + self.num_slots * (self.dispatch_slot_bytes + self.combine_slot_bytes)

    def attention_doorbell(self, attention: int) -> int:
        return (1 + attention) * CACHE_LINE

    def expert_doorbell(self, expert: int) -> int:
        return (1 + self.shape.num_attention + expert) * CACHE_LINE

    def _slot_index(self, attention: int, expert: int, micro_batch: int) -> int:
        return (attention * self.shape.num_experts + expert) * self.shape.num_micro_batches + micro_batch

    def dispatch_slot(self, attention: int, expert: int, micro_batch: int) -> int:
        return self.control_bytes + self._slot_index(attention, expert, micro_batch) * self.dispatch_slot_bytes

    def combine_slot(self, attention: int, expert: int, micro_batch: int) -> int:
        base = self.control_bytes + self.num_slots * self.dispatch_slot_bytes
        return base + self._slot_index(attention, expert, micro_batch) * self.combine_slot_bytes
