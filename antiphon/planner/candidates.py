"""Candidates as columns: one numpy array per degree, one entry per candidate, so that nothing loops over candidates.

Degrees are of one instance (one copy of the model). Disaggregated: `expert_ep` is the number of expert workers.
Colocated: `pieces` of `piece_devices` devices each, one per scale-up domain, make one pipeline stage. `batch` is of
one attention worker (or DP rank) and micro-batch: sequences in decode, tokens in prefill.

Rejected: an object per candidate. 10^5 of them take longer to make than to evaluate.
"""

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from antiphon.cost.parts import FloatArray
from antiphon.specs.plan import LAYOUTS, Layout, Parallel

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
DISAGGREGATED = LAYOUTS.index("disaggregated")
HYBRID = LAYOUTS.index("hybrid")
TP_PP = LAYOUTS.index("tp_pp")
DP_EP = LAYOUTS.index("dp_ep")


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Equal-length columns. `attention_kind`, `expert_kind`: index of the cluster's group; equal if colocated.
    `slots`: experts that the fullest expert worker (EP rank) holds. `piece_devices`: 0 if disaggregated."""

    layout: IntArray
    attention_kind: IntArray
    expert_kind: IntArray
    attention_tp: IntArray
    attention_dp: IntArray
    expert_tp: IntArray
    expert_ep: IntArray
    slots: IntArray
    pp: IntArray
    micro_batches: IntArray
    piece_devices: IntArray
    batch: IntArray

    def __len__(self) -> int:
        return int(self.layout.size)

    def take(self, index: IntArray | BoolArray) -> Self:
        """The candidates at these places, or where the mask holds."""
        return type(self)(**{name: getattr(self, name)[index] for name in COLUMNS})

    def with_batch(self, batch: IntArray) -> Self:
        columns = {name: getattr(self, name) for name in COLUMNS}
        return type(self)(**{**columns, "batch": batch})

    @property
    def is_disaggregated(self) -> BoolArray:
        return np.asarray(self.layout == DISAGGREGATED)

    @property
    def attention_devices(self) -> IntArray:
        """Of one instance; all of its devices if colocated."""
        return self.attention_tp * self.attention_dp * self.pp

    @property
    def expert_devices(self) -> IntArray:
        """Of one instance, beside the attention devices; 0 if colocated."""
        return np.where(self.is_disaggregated, self.expert_tp * self.expert_ep, 0)

    @property
    def instance_batch(self) -> IntArray:
        """Sequences (tokens) in flight in one instance."""
        return self.batch * self.micro_batches * self.attention_dp

    def layout_of(self, index: int) -> Layout:
        return LAYOUTS[int(self.layout[index])]

    def parallel_of(self, index: int) -> Parallel:
        one = {name: int(getattr(self, name)[index]) for name in COLUMNS}
        apart = one["layout"] == DISAGGREGATED
        return Parallel(
            attention_tp=one["attention_tp"],
            attention_dp=one["attention_dp"],
            expert_tp=one["expert_tp"],
            expert_ep=1 if apart else one["expert_ep"],
            expert_workers=one["expert_ep"] if apart else 0,
            pp=one["pp"],
        )


COLUMNS = tuple(column.name for column in fields(Candidates))


def candidates_of(**columns: IntArray | FloatArray | int) -> Candidates:
    """Candidates from arrays and single values, broadcast against each other and flattened."""
    arrays = np.broadcast_arrays(*(np.asarray(columns[name], dtype=np.int64) for name in COLUMNS))
    return Candidates(**{name: array.reshape(-1) for name, array in zip(COLUMNS, arrays, strict=True)})


def real(values: IntArray) -> FloatArray:
    """As the cost model takes them."""
    return values.astype(np.float64)


def joined(parts: list[Candidates]) -> Candidates:
    """All of them, one after another; none is an empty table."""
    if not parts:
        return candidates_of(**{name: np.zeros(0, dtype=np.int64) for name in COLUMNS})
    return Candidates(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS})
