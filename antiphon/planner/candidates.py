"""Candidates as columns: one numpy array per degree, one entry per candidate, so that nothing loops over candidates.

Degrees are of one instance (one copy of the model). Disaggregated: `expert_ep` is the number of expert workers.
Colocated: `pieces` of `piece_devices` devices each, one per scale-up domain, make one pipeline stage. `batch` is of
one attention worker (or DP rank) and micro-batch: sequences in decode, tokens in prefill.

Rejected: an object per candidate. 10^5 of them take longer to make than to evaluate.

Those that `antiphon serve` can run, by the rules of the engine (`can_be_served`):

    all                  every stage has a layer, every rank a head, some vocabulary and some columns to work on
    disaggregated        as many attention workers as a batch's header can name
    the colocated three  one TP degree divides the other, and rows can be cut into as many equal pieces as the smaller;
                         replicas that share experts are on CPUs

Rejected: `serve/served_plan`, which judges one finished plan and names what is wrong with it. A search has a million
candidates, and runs without torch.
"""

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from antiphon.cost.parts import FloatArray
from antiphon.specs.model import ModelSpec
from antiphon.specs.plan import LAYOUTS, MAX_ATTENTION_WORKERS, MAX_MICRO_BATCHES, Layout, Parallel, groups_nest

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


def can_be_served(model: ModelSpec, candidates: Candidates, on_cpu: BoolArray) -> BoolArray:
    """Whether each candidate is one that this engine runs. `on_cpu`: of each, whether its devices are CPUs."""
    widths = model.feed_forward
    local = [widths.shared_intermediate] if widths.shared_intermediate else []
    local += [widths.dense_intermediate] if not all(model.moe_layers) else []
    most_attention = min(model.attention.num_heads, model.vocab_size, *local)
    has_parts = (candidates.attention_tp <= most_attention) & (candidates.expert_tp <= widths.intermediate)
    apart = candidates.attention_dp <= MAX_ATTENTION_WORKERS
    num_ranks = candidates.attention_dp * candidates.attention_tp
    together = apart & groups_nest(num_ranks, candidates.attention_tp, candidates.expert_tp)
    is_one = (candidates.attention_dp == 1) & (candidates.expert_ep == 1)
    together &= is_one | (on_cpu & (model.hidden_size % np.minimum(candidates.attention_tp, candidates.expert_tp) == 0))
    together &= candidates.pp <= min(model.num_layers, MAX_MICRO_BATCHES)
    shape = np.where(candidates.layout == DISAGGREGATED, apart, together)
    return np.asarray(has_parts & shape)
