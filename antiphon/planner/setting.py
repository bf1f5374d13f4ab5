"""What a search is about, checked once: model, cluster, workload, phase and limits, and what follows from them.

A `Setting` is passed to everything that estimates; it holds no candidate. Tables by number of workers (shares of the
busiest one, expected destinations of a row) are computed when first asked for and kept with it. So is what the lengths
of requests mean for a batch (`LengthFacts`):

1. Of running sequences, not of requests: an output stays in the batch in proportion to its length, so its progress has
   mean E[X^2] / 2 E[X] and mean square E[X^3] / 3 E[X].
2. A batch's total context is close to normal; the spread of its mean falls with the square root of its size.
3. Percentiles above the median push context and prompt up by the normal (log-normal) quantile; at the median and below
   means are used, as the papers do.

Rejected: passing the specs one by one. Ten arguments through ten functions, of which each derives the same numbers.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist
from typing import Annotated

import numpy as np
from pydantic import Field

from antiphon.base.errors import UserError
from antiphon.cost.exchange import expected_distinct
from antiphon.cost.network import Network, network
from antiphon.cost.profile import LocalTimes, Profile
from antiphon.cost.roofline import FloatArray, Roofs, roofs
from antiphon.cost.skew import zipf_shares
from antiphon.placement.place import balance, busiest_share
from antiphon.planner.candidates import IntArray, Pins
from antiphon.specs.checked import CountFromZero, Flag, checked
from antiphon.specs.cluster import ClusterSpec, NodeGroup
from antiphon.specs.counts import context_tokens_per_row
from antiphon.specs.model import ModelSpec, PrecisionSpec
from antiphon.specs.plan import LATENCIES, Collectives, Degree, Objective, PhaseName
from antiphon.specs.workload import LengthSpec, WorkloadSpec

SHORT = 0.1
STEP_TOKENS = (2048, 8192)
"""Rows of an attention worker's step, at most, that are tried where prompts and tokens share steps."""


def most_ranks(num_experts: int) -> int:
    """EP ranks that are tried: some more than experts, whose slots hold copies, as DeepSeek runs 256 experts on 320."""
    return num_experts + num_experts // 4


def mean_cube(lengths: LengthSpec) -> float:
    """E[X^3]."""
    if lengths.trace:
        return sum(float(length) ** 3 for length in lengths.trace) / len(lengths.trace)
    return float(lengths.median**3 * math.exp(4.5 * lengths.sigma**2))


def quantile(lengths: LengthSpec, percentile: float) -> float:
    """The length that the fraction `percentile` of requests does not exceed."""
    if not 0 < percentile < 1:
        raise UserError(f"percentile is {percentile}: it must lie between 0 and 1, for example 0.99")
    if lengths.trace:
        ordered = sorted(lengths.trace)
        return float(ordered[min(math.ceil(percentile * len(ordered)), len(ordered)) - 1])
    return float(lengths.median * math.exp(lengths.sigma * NormalDist().inv_cdf(percentile)))


@dataclass(frozen=True, kw_only=True)
class LengthFacts:
    """What planning needs of a workload's lengths, in tokens.

    `context`: behind a running sequence, on average (the new token included), `context_cv` its coefficient of
    variation among running sequences. `held_tokens`: what admission counts on for a sequence. `prompt`, `output`:
    means. `prompt_by_token`: mean prompt that a prompt *token* is part of, E[X^2] / E[X]. `prompt_cv`: of the prompts.
    `tail_prompt`: the prompt at the promise's percentile; the mean up to the median. `short_output`: nine of ten are
    longer. `tail_z`: its normal quantile, 0
    up to the median. `percentile`: of the promise.
    """

    context: float
    context_cv: float
    held_tokens: float
    prompt: float
    output: float
    prompt_by_token: float
    prompt_cv: float
    tail_prompt: float
    short_output: float
    tail_z: float
    percentile: float


def length_facts(workload: WorkloadSpec) -> LengthFacts:
    """A `max_length` caps the mean prompt and the context; what is cut off the prompt leaves room for one token."""
    prompts, outputs = workload.input_tokens, workload.output_tokens
    longest = math.inf if workload.max_length is None else float(workload.max_length)
    prompt = min(prompts.mean, max(longest - 1, 1.0))
    output = min(outputs.mean, max(longest - prompt, 1.0))
    progress = outputs.mean_square / (2 * outputs.mean)
    variance = prompts.mean_square - prompts.mean**2 + mean_cube(outputs) / (3 * outputs.mean) - progress**2
    context = min(prompts.mean + progress, longest)
    percentile = workload.slo.percentile
    tail_z = max(NormalDist().inv_cdf(percentile), 0.0)
    tail_prompt = max(quantile(prompts, percentile), prompt) if tail_z > 0 else prompt
    return LengthFacts(
        context=context,
        context_cv=math.sqrt(max(variance, 0.0)) / context,
        held_tokens=min(max(context, prompt + output), longest),
        prompt=prompt,
        output=output,
        prompt_by_token=min(prompts.mean_square / prompts.mean, longest),
        prompt_cv=math.sqrt(max(prompts.mean_square / prompts.mean**2 - 1, 0.0)),
        tail_prompt=min(tail_prompt, longest),
        short_output=max(min(quantile(outputs, SHORT), output), 1.0),
        tail_z=tail_z,
        percentile=percentile,
    )


@checked("limits")
@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """Which candidates are looked at. `max_micro_batches`: N_m of MegaScale-Infer (4). `collectives`: the form of
    hybrid TP-EP's exchange; `auto`: the faster one of each candidate. `sliced`: whether devices of an attention TP
    group share out the rows they send to experts. `overlapped`: whether colocated layouts may hide an exchange behind
    arithmetic. `per_node`: whether rows may travel once per node and be forwarded there. `whole_prompts`: passes of
    prefill take prompts as they come, though no rate and no promise say so (see `Setting.takes_whole_prompts`).
    `extra_slots`: replicas of experts per worker that are tried. `prefer_simple`: a simpler layout that the model
    cannot tell from the best is taken. `servable`: only layouts that `antiphon serve` runs (`planner/candidates`).
    `pins`: what is fixed for every layout. `num_instances`: how many exactly, which share the workload's requests in
    flight; None: as many as fit or are needed."""

    max_micro_batches: Degree = 4
    collectives: Collectives = "auto"
    sliced: Flag = True
    overlapped: Flag = True
    per_node: Flag = True
    whole_prompts: Flag = False
    extra_slots: Annotated[tuple[CountFromZero, ...], Field(min_length=1)] = (0, 1)
    prefer_simple: Flag = False
    servable: Flag = False
    pins: Pins = field(default_factory=Pins)
    num_instances: Degree | None = None


@checked("setting")
@dataclass(frozen=True, kw_only=True)
class Setting:
    """One phase to be planned. `transfers_kv`: the KV cache goes from a prefill to a decode pool before the first token
    counts as delivered."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: WorkloadSpec
    phase: PhaseName
    objective: Objective = "per-gpu"
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    profile: Profile | None = None
    limits: SearchLimits = field(default_factory=SearchLimits)
    transfers_kv: Flag = False

    def __post_init__(self) -> None:
        if not self.model.num_moe_layers:
            raise UserError(f"model {self.model.family} has no MoE layer: there are no experts to place")
        loads = self.workload.expert_loads
        if loads and len(loads) != self.model.router.num_experts:
            raise UserError(
                f"workload {self.workload.name}: expert_loads has {len(loads)} shares, the model "
                f"{self.model.router.num_experts} experts: give one per expert"
            )
        if self.profile is not None and (self.workload.draft_tokens or self.workload.prefix_hit):
            raise UserError(
                f"workload {self.workload.name} has draft_tokens or prefix_hit, which no profile measures: leave out "
                "--profile"
            )
        unpriced = [group.device.name for group in self.cluster.groups if group.device.price is None]
        if self.objective == "per-cost" and unpriced:
            raise UserError(f"there is no price of {', '.join(unpriced)}: give one (--price {unpriced[0]}=...)")

    @property
    def groups(self) -> tuple[NodeGroup, ...]:
        return self.cluster.groups

    @cached_property
    def lengths(self) -> LengthFacts:
        return length_facts(self.workload)

    @property
    def tokens_of_request(self) -> float:
        """Mean tokens of a request that this phase computes: of its output, or of its prompt."""
        return self.lengths.output if self.decodes else self.lengths.prompt

    @property
    def decodes(self) -> bool:
        """Whether steps give tokens: all but prefill alone."""
        return self.phase != "prefill"

    @property
    def wants_latency(self) -> bool:
        """Whether this phase is planned for the least time: to the first token, or per token."""
        known = {"prefill": ("ttft",), "decode": ("tpot",), "serve": LATENCIES}
        return self.objective in known[self.phase]

    @property
    def holds_all(self) -> bool:
        """Whether all requests in flight must have a place: where the time of exactly that number is asked. Elsewhere
        `max_batch` is a limit."""
        return self.wants_latency and self.workload.requests_per_s is None

    @property
    def engine_times(self) -> LocalTimes | None:
        """What the profile says of the engine, from which its decode steps are then predicted."""
        return self.profile.engine if self.profile is not None and self.phase == "decode" else None

    def new_tokens(self, prompt: float) -> float:
        """Tokens of a prompt that are not in the prefix cache."""
        return prompt * (1 - self.workload.prefix_hit)

    @cached_property
    def prompt_row_cost(self) -> float:
        """What a prompt's token takes of a step's limit of rows: the engine counts rows that see much as more."""
        lengths = self.lengths
        new = self.new_tokens(lengths.prompt_by_token)
        return 1 + (lengths.prompt_by_token - new / 2) / context_tokens_per_row(self.model)

    @property
    def cuts_prompts(self) -> bool:
        """Whether prompts come in pieces that share steps with others, as the engine's admission has it. Latent
        attention takes longer for tokens that see cached ones; for other models it makes no difference."""
        whole_service = self.phase == "serve" or (self.phase == "prefill" and self.transfers_kv)
        return whole_service and self.workload.is_online and self.model.attention.latent is not None

    @property
    def takes_whole_prompts(self) -> bool:
        """Whether a pass of prefill takes the prompts that are there, and workers with shorter ones wait. With a queue
        that never ends (no rate, no promise) chunks fill every worker's pass."""
        return self.workload.is_online or self.limits.whole_prompts

    @cached_property
    def roofs(self) -> tuple[Roofs, ...]:
        """By device kind."""
        return tuple(
            roofs(group.device, self.cluster.efficiency, self.precision.compute) for group in self.cluster.groups
        )

    @cached_property
    def networks(self) -> tuple[Network, ...]:
        """By device kind."""
        return tuple(network(self.cluster, group) for group in self.cluster.groups)

    @cached_property
    def is_skewed(self) -> bool:
        return len(set(self.shares)) > 1

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Shares of the experts, in their order if measured, else in order of popularity."""
        if self.workload.expert_loads:
            return self.workload.expert_loads
        experts = self.model.router.num_experts
        if self.workload.expert_skew == 0:
            return (1.0 / experts,) * experts
        # an expert is chosen at most once per token, so no share exceeds 1 / top_k
        return capped_shares(zipf_shares(experts, self.workload.expert_skew), 1 / self.model.router.top_k)

    @cached_property
    def distinct(self) -> FloatArray:
        """Expected destinations of a row, by number of expert workers, or of nodes that share the experts out (index 0
        is not used)."""
        router = self.model.router
        counts = np.maximum(np.arange(most_ranks(router.num_experts) + 1), 1)
        return np.asarray(
            expected_distinct(
                router.num_experts,
                router.top_k,
                counts,
                num_groups=router.num_groups,
                top_k_groups=router.top_k_groups,
            )
        )

    @cached_property
    def _placements(self) -> "_Placements":
        return _placements_of(self.shares)

    def slots_used_each(self, num_workers: IntArray, slots: IntArray) -> IntArray:
        """By candidate the experts that the fullest of `num_workers` workers with `slots` slots each really holds under
        the best placement: copies may leave slots empty."""
        return self._placements.used_each(num_workers, slots) if self.is_skewed else slots

    def busiest_each(self, num_workers: IntArray, slots: IntArray) -> FloatArray:
        """By candidate the share of all rows of the busiest worker under the best placement; a slot may stay empty."""
        experts = self.model.router.num_experts
        shares = np.asarray(np.ceil(experts / num_workers) / experts)
        # equal popularity: only copies of experts can level out what does not divide
        placed = (num_workers * slots > experts) & (experts % num_workers > 0) | self.is_skewed
        if placed.any():
            shares[placed] = self._placements.busiest_each(num_workers[placed], slots[placed])
        return shares


class _Placements:
    """What the best placements of experts with these shares give, computed when first asked for. One for all settings
    with the same shares: to find it by 256 shares at every question takes longer than the rest of a search."""

    def __init__(self, shares: tuple[float, ...]) -> None:
        self._shares = shares
        self._busiest, self._used = np.full((2, most_ranks(len(shares)) + 1, len(shares) + 1), np.nan)
        self._placed: dict[tuple[int, int], tuple[float, int]] = {}

    def busiest_each(self, num_workers: IntArray, slots: IntArray) -> FloatArray:
        """The busiest worker's share where a slot may stay empty."""

        def busiest(workers: int, slots: int) -> float:
            least = -(-len(self._shares) // workers)
            return min(self._best(workers, used)[0] for used in range(least, slots + 1))

        return self._looked_up(self._busiest, busiest, num_workers, slots)

    def used_each(self, num_workers: IntArray, slots: IntArray) -> IntArray:
        """The most experts a worker holds."""

        def used(workers: int, slots: int) -> int:
            while (held := self._best(workers, slots)[1]) != slots:
                slots = held
            return slots

        return np.asarray(self._looked_up(self._used, used, num_workers, slots), np.int64)

    def _best(self, num_workers: int, slots: int) -> tuple[float, int]:
        """The busiest worker's share of all rows, and the most experts a worker holds."""
        key = num_workers, slots
        if key not in self._placed:
            fractions = balance(self._shares, num_workers, slots)
            self._placed[key] = busiest_share(fractions, self._shares), int((fractions > 0).sum(axis=0).max())
        return self._placed[key]

    @staticmethod
    def _looked_up(
        table: FloatArray, value: Callable[[int, int], float], num_workers: IntArray, slots: IntArray
    ) -> FloatArray:
        """`value(workers, slots)` of each; what the table does not have yet is computed once."""
        found = table[num_workers, slots]
        if (missing := np.isnan(found)).any():
            for pair in set(zip(num_workers[missing].tolist(), slots[missing].tolist(), strict=True)):
                table[pair] = value(*pair)
            found = table[num_workers, slots]
        return np.asarray(found)


_placements_of = functools.lru_cache(maxsize=64)(_Placements)


def capped_shares(shares: FloatArray, most: float) -> tuple[float, ...]:
    """`shares` with none above `most`; what is cut off goes to the others in proportion."""
    values = np.array(shares)
    for _ in range(values.size):
        over = values > most + 1e-12
        if not over.any():
            break
        rest = ~over & (values < most)
        spare = float((values[over] - most).sum())
        values[over] = most
        values[rest] *= 1 + spare / float(values[rest].sum())
    return tuple(float(value) for value in values)
