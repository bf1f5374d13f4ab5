"""Candidates as columns: one numpy array per degree, one entry per candidate, so that nothing loops over candidates.

Degrees are of one instance (one copy of the model). Disaggregated: `expert_ep` is the number of expert workers.
Colocated: `pieces` of `piece_devices` devices each, one per scale-up domain, make one pipeline stage. `batch` is of
one attention worker (or DP rank) and micro-batch: sequences in decode, tokens in prefill.

Rejected: an object per candidate. 10^5 of them take longer to make than to evaluate.

Those of them that `antiphon serve` can run, by the rules of the engine (`can_be_served`):

    all                  every stage has a layer, every rank a head, some vocabulary and some columns to work on
    disaggregated        as many attention workers as a batch's header can name
    the colocated three  one TP degree divides the other, and rows can be cut into as many equal pieces as the smaller;
                         replicas that share experts are on CPUs

Rejected: `serve/served_plan`, which judges one finished plan and names what is wrong with it. A search has a million
candidates, and runs without torch.

Degrees worth a try: of tensor parallelism, of experts over workers, of devices in a pipeline stage. Rejected: powers of
two only. Nodes of 7 devices and 3 nodes exist.

Pins are degrees that somebody has fixed, for a question about a layout of one's own; what is not fixed is searched.
`experts.ep` is the number of expert workers, or of EP ranks where attention and experts share devices. `batch` is that
of one instance, as in plan.json: requests in flight in decode, tokens of a pass in prefill. It is then taken as it is,
not lowered until promises hold. Rejected: pinning columns after the search. What was never a candidate cannot be found
among them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from antiphon.base.errors import UserError
from antiphon.cost.roofline import FloatArray
from antiphon.specs.checked import Whole, checked
from antiphon.specs.model import ModelSpec
from antiphon.specs.plan import (
    LAYOUTS,
    MAX_ATTENTION_WORKERS,
    MAX_BATCH,
    MAX_MICRO_BATCHES,
    DeviceUse,
    Layout,
    Parallel,
    groups_nest,
)

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
DISAGGREGATED = LAYOUTS.index("disaggregated")
HYBRID = LAYOUTS.index("hybrid")
TP_PP = LAYOUTS.index("tp_pp")
DP_EP = LAYOUTS.index("dp_ep")
MANY_DOMAINS = 64
PIN_NAMES = {
    "attention.tp": "attention_tp",
    "attention.dp": "attention_dp",
    "experts.tp": "expert_tp",
    "experts.ep": "expert_ep",
    "pp": "pp",
    "micro_batches": "micro_batches",
    "batch": "batch",
}
Pinned = Annotated[Whole, Field(ge=1, le=MAX_BATCH)]
SHORT_NAMES = {"tp": "attention.tp", "dp": "attention.dp", "ep": "experts.ep"}


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Equal-length columns. `attention_kind`, `expert_kind`: index of the cluster's group; equal if colocated.
    `slots`: experts that the fullest expert worker (EP rank) holds. `piece_devices`: 0 if disaggregated.
    `step_tokens`: most rows of an attention worker's step that computes prompts, too; 0: it computes none. `chunk`,
    `longest_chunk`: tokens of prompts that one of its micro-batches has, of the mean and of the slowest worker."""

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
    step_tokens: IntArray
    chunk: IntArray
    longest_chunk: IntArray

    def __len__(self) -> int:
        return int(self.layout.size)

    def take(self, index: IntArray | BoolArray) -> Self:
        """The candidates at these places, or where the mask holds."""
        return type(self)(**{name: getattr(self, name)[index] for name in COLUMNS})

    def having(self, **changed: IntArray) -> Self:
        """With these columns instead of its own."""
        return type(self)(**{**{name: getattr(self, name) for name in COLUMNS}, **changed})

    @property
    def is_disaggregated(self) -> BoolArray:
        return np.asarray(self.layout == DISAGGREGATED)

    @property
    def attention_devices(self) -> IntArray:
        """Attention devices of one instance; all of its devices if colocated."""
        return self.attention_tp * self.attention_dp * self.pp

    @property
    def expert_devices(self) -> IntArray:
        """Expert devices of one instance, beside the attention devices; 0 if colocated."""
        return np.where(self.is_disaggregated, self.expert_tp * self.expert_ep, 0)

    @property
    def instance_batch(self) -> IntArray:
        """Sequences (tokens) in flight in one instance."""
        return self.batch * self.micro_batches * self.attention_dp

    def layout_of(self, index: int) -> Layout:
        return LAYOUTS[int(self.layout[index])]

    def devices_of(self, index: int, names: Sequence[str], num_instances: int) -> tuple[DeviceUse, ...]:
        """Devices of `num_instances` of one candidate together, by role. `names`: of the device kinds."""
        attention = num_instances * int(self.attention_devices[index])
        name = names[int(self.attention_kind[index])]
        if self.layout_of(index) != "disaggregated":
            return (DeviceUse(role="both", device=name, num_devices=attention),)
        experts = num_instances * int(self.expert_devices[index])
        return (
            DeviceUse(role="attention", device=name, num_devices=attention),
            DeviceUse(role="experts", device=names[int(self.expert_kind[index])], num_devices=experts),
        )

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
    """Candidates from arrays and single values, broadcast against each other and flattened; columns left out are 0."""
    arrays = np.broadcast_arrays(*(np.asarray(columns.get(name, 0), dtype=np.int64) for name in COLUMNS))
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


def largest_that(fits: Callable[[IntArray], BoolArray], low: IntArray, high: IntArray) -> IntArray:
    """By candidate the largest number that `fits`, at least `low` and below `high`, where all numbers up to it fit."""
    while np.any(high - low > 1):
        middle = (low + high) // 2
        found = fits(middle) & (middle > low)
        low, high = np.where(found, middle, low), np.where(found, high, np.maximum(middle, low + 1))
    return low


def degrees_up_to(limit: int) -> IntArray:
    """TP degrees to try: all up to 8 that divide or are powers of two, all where the limit is odd or not such a
    power."""
    powers = {2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit}
    divisors = {degree for degree in range(1, limit + 1) if limit % degree == 0}
    everything = set(range(1, limit + 1)) if limit <= 16 and limit not in powers else set()
    return np.array(sorted(powers | divisors | everything), dtype=np.int64)


def fewest_for_each_share(total: int) -> IntArray:
    """The smallest n for each value of ceil(total / n): more workers than that hold just as much."""
    return np.array(sorted({-(-total // held) for held in range(1, total + 1)}), dtype=np.int64)


def stage_sizes(num_devices: int, width: int, num_experts: int) -> list[int]:
    """Devices of a pipeline stage: any number inside a domain of `width`, then whole domains: all of them as far as
    `MANY_DOMAINS`, from there on powers of two and half of the next, up to one domain per expert."""
    most = num_devices // width
    domains = set(range(2, min(most, MANY_DOMAINS) + 1))
    steps = [start << power for power in range(64) for start in (2, 3) if start << power <= min(most, num_experts)]
    return [*range(1, min(width, num_devices) + 1), *(width * count for count in sorted(domains | set(steps)))]


def piece_of(stage_devices: int, domain: int) -> int:
    """Devices of a stage in one domain: all of them if they fit, else the most that divide the stage evenly."""
    return max(piece for piece in range(1, min(stage_devices, domain) + 1) if stage_devices % piece == 0)


@checked("pins")
@dataclass(frozen=True, kw_only=True)
class Pins:
    """None: searched."""

    attention_tp: Pinned | None = None
    attention_dp: Pinned | None = None
    expert_tp: Pinned | None = None
    expert_ep: Pinned | None = None
    pp: Pinned | None = None
    micro_batches: Pinned | None = None
    batch: Pinned | None = None

    def __str__(self) -> str:
        """As it is written: ``attention.tp=2, pp=4``; empty where nothing is fixed."""
        given = ((name, getattr(self, field)) for name, field in PIN_NAMES.items())
        return ", ".join(f"{name}={value}" for name, value in given if value is not None)

    def allow(self, candidates: Candidates) -> BoolArray:
        """Which candidates have these degrees, batch left out."""
        allowed = np.ones(len(candidates), dtype=bool)
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and field.name != "batch":
                allowed &= getattr(candidates, field.name) == value
        return allowed

    def batches(self, candidates: Candidates, limits: IntArray) -> IntArray:
        """Largest batch of a worker and micro-batch: `limits`, or the fixed one; 0 where that does not fit or cannot be
        shared out evenly."""
        if self.batch is None:
            return limits
        each, rest = np.divmod(self.batch, candidates.micro_batches * candidates.attention_dp)
        return np.asarray(np.where((rest == 0) & (each <= limits), each, 0))


def parse_pins(texts: Sequence[str]) -> Pins:
    """``["attention.tp=8", "ep=32"]``; `UserError` names what is not known or given twice."""
    return Pins(**{PIN_NAMES[name]: value for name, value in pinned_numbers(texts, PIN_NAMES, SHORT_NAMES).items()})


def pinned_numbers(texts: Sequence[str], known: Collection[str], short: Mapping[str, str]) -> dict[str, int]:
    """What ``["pp=15"]`` says, by names of `known`; `short`: other words for some of them."""
    found: dict[str, int] = {}
    for text in texts:
        name, _, written = text.partition("=")
        name = short.get(name.strip(), name.strip())
        if name not in known:
            raise UserError(f"--pin {text!r}: {name!r} is none of {', '.join(known)}")
        if not (written.strip().isdecimal() and 1 <= int(written) <= MAX_BATCH):
            raise UserError(f"--pin {text!r}: write a whole number from 1 to {MAX_BATCH:,}, for example {name}=4")
        if name in found:
            raise UserError(f"--pin {text!r}: {name} is given twice: leave one of them out")
        found[name] = int(written)
    return found
