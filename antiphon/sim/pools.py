"""A plan's phases as pools of instances: their limits as the serving engine would set them, their costs, their links.
And what their simulation is asked beside the plan and the requests: failures, re-placement, the host.

1. KV blocks of an attention worker: what the planner's memory model leaves beside the weights, in the engine's blocks.
2. Running requests of a worker: its share of the plan's batch, as `antiphon serve --plan` takes it.
3. Decode alone: prompts are computed in the same steps, as the engine does (`mixed`), or come computed (`elsewhere`).
   `serve`: always in the same steps. Prefill alone: a request ends with its first token. Both: keys and values are
   handed over (`sim.handovers`).

Blocks that no request of this run can ever touch are not made: with 100 workers they would fill this machine's memory.

Failures are asked for by a worker's name. A plan of one phase has `attention[0]`, `attention[1]`, ... and `experts[0]`,
..., numbered through all instances; where prefill and decode have a pool each, names begin with it:
`decode.attention[0]`. Colocated ranks are `attention[...]`: they hold keys, values and experts, and what happens when
one dies is what happens when both kinds die.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

import numpy as np
from pydantic import Field

from antiphon.base.errors import ResourceError, UserError
from antiphon.cost.memory import kv_blocks, kv_bytes_per_token, tokens_of_state
from antiphon.planner.candidates import Candidates
from antiphon.planner.predict import candidate_of
from antiphon.planner.room import BLOCK_SIZE, cache_bytes
from antiphon.planner.setting import Setting
from antiphon.serve.policy.handover import MAX_PROMPTS, HandOver
from antiphon.serve.policy.handover_sides import SLOT_BYTES, SLOTS
from antiphon.serve.policy.request import SchedulerConfig
from antiphon.sim.demand import Demand
from antiphon.sim.host import CoreWaits
from antiphon.specs.checked import CountFromZero, Flag, NotNegative, Number, checked
from antiphon.specs.counts import blocks_of, context_tokens_per_row, reserved_blocks
from antiphon.specs.plan import PHASES, PhaseName, PhasePlan, Plan

Prefill = Literal["mixed", "elsewhere"]
Role = Literal["attention", "experts"]


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A worker dies at `time_s`. `pool`: its number among those it was parsed with."""

    pool: int
    role: Role
    worker: int
    time_s: float


SHORTEST_PERIOD_S, MOST_PERIODS = 1e-3, 10_000_000  # more would be simulated for hours
Period = Annotated[Number, Field(ge=SHORTEST_PERIOD_S)]


@checked("options")
@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """`shared_prefix_tokens`: equal first tokens of all prompts, which the prefix cache can find (0: nothing is
    shared). `restart_s`: how long a killed worker is away. `rebalance_every_s`, `shift_every_s`: None: never.
    `hand_over`: when keys and values leave a prefill worker: layer by layer, or all at the end of its step.
    `client_here`: clients are a process on the serving machine (`sim.host`). `core_waits`: what steps, and threads that
    are woken, wait for cores of a machine all of whose cores compute; not with times of HTTP."""

    seed: CountFromZero = 0
    shared_prefix_tokens: CountFromZero = 0
    kills: tuple[Kill, ...] = ()
    restart_s: NotNegative = 20.0
    rebalance_every_s: Period | None = None
    shift_every_s: Period | None = None
    hand_over: HandOver = "layers"
    client_here: Flag = False
    core_waits: CoreWaits | None = None


@dataclass(frozen=True, kw_only=True)
class Pool:
    """One phase of a plan as it is simulated. `kv_arrives`: keys and values of prompts come from outside the
    simulation, so that a request's first step computes one row. `first_token_only`: requests end here with their first
    token. `kv_blocks`: of one attention worker; `config.num_blocks` may be fewer, see above. `prefix`: what names of
    its workers begin with; empty if it is the only pool."""

    name: PhaseName
    phase: PhasePlan
    setting: Setting
    one: Candidates
    config: SchedulerConfig
    kv_blocks: int
    kv_arrives: bool
    first_token_only: bool
    prefix: str

    @property
    def attention_per_instance(self) -> int:
        return self.phase.parallel.attention_dp

    @property
    def experts_per_instance(self) -> int:
        """Expert workers, or EP ranks of a colocated instance."""
        return int(self.one.expert_ep[0])

    @property
    def is_apart(self) -> bool:
        return self.phase.layout == "disaggregated"

    def num_workers(self, role: Role) -> int:
        """Over all instances; no expert workers where it is colocated."""
        parallel = self.phase.parallel
        each = parallel.attention_dp if role == "attention" else parallel.expert_workers if self.is_apart else 0
        return self.phase.num_instances * each

    def name_of(self, role: Role, worker: int) -> str:
        return f"{self.prefix}{'.' if self.prefix else ''}{role}[{worker}]"

    @property
    def latency_s(self) -> float:
        """The latency of a message between machines."""
        return self.setting.cluster.scale_out_latency_s

    def wire_s(self, num_tokens: float) -> float:
        """Time on the wire of `num_tokens` tokens' keys and values, from one of this pool's workers to another's, over
        the slowest kind of NIC there is (as `planner.outcome` counts it)."""
        size = num_tokens * float(kv_bytes_per_token(self.setting.model, 1, self.setting.precision))
        return size / (self.phase.parallel.attention_tp * self._slowest_bytes_per_s)

    @property
    def slots_s(self) -> float:
        """Time on the wire of what a target takes before it has read any of it: these pages have been left."""
        return SLOTS * SLOT_BYTES / self._slowest_bytes_per_s

    @property
    def _slowest_bytes_per_s(self) -> float:
        return min(float(net.scale_out.bytes_per_s) for net in self.setting.networks)


def pools_of(
    plan: Plan, setting: Setting, demand: Demand, *, prefill: Prefill = "mixed", max_batch_tokens: int | None = None
) -> list[Pool]:
    """The plan's pools, prefill first. `setting`: of any phase, with the plan's model, cluster and precision.

    `max_batch_tokens`: rows of a worker's step where prompts are computed in the steps of decode (None: the engine's
    own limit, or as many as run at once)."""
    both = len(plan.phases) > 1
    if both and prefill == "elsewhere":
        raise UserError("prefill elsewhere: the plan has a prefill phase of its own, whose pool computes the prompts")
    if "serve" in plan.phases and prefill == "elsewhere":
        raise UserError("prefill elsewhere: this plan's servers compute the prompts in their own steps: leave it out")
    pools = []
    for name in PHASES:
        found = plan.phases.get(name)
        if found is not None:
            one_setting = replace(setting, phase=name, transfers_kv=both)
            arrives = name == "decode" and prefill == "elsewhere"
            pools.append(_pool(name, found, one_setting, demand, both, arrives, max_batch_tokens))
    return pools


def _pool(
    name: PhaseName,
    phase: PhasePlan,
    setting: Setting,
    demand: Demand,
    both: bool,
    kv_arrives: bool,
    max_batch_tokens: int | None,
) -> Pool:
    if len(phase.placement) != setting.model.router.num_experts:
        raise UserError(
            f"the plan places {len(phase.placement)} experts, the model has {setting.model.router.num_experts}: "
            "give the model that it was made for"
        )
    one = candidate_of(setting, phase)
    each = setting.lengths.prompt if name == "prefill" else 1.0  # a pass counts tokens, not sequences
    total_blocks = _kv_blocks(setting, one, math.ceil(phase.batch / phase.parallel.attention_dp / each))
    config = _config(name, phase, setting, demand, total_blocks)
    if kv_arrives:  # what arrives is not computed, and enters whole
        config = replace(config, max_batch_tokens=config.num_blocks * BLOCK_SIZE + config.max_running)
    elif max_batch_tokens is not None and name != "prefill":
        config = replace(config, max_batch_tokens=max_batch_tokens)
    elif phase.step_tokens is not None:
        config = replace(config, max_batch_tokens=phase.step_tokens)
    return Pool(
        name=name,
        phase=phase,
        setting=setting,
        one=one,
        config=config,
        kv_blocks=total_blocks,
        kv_arrives=kv_arrives,
        first_token_only=name == "prefill",
        prefix=name if both else "",
    )


def _config(name: PhaseName, phase: PhasePlan, setting: Setting, demand: Demand, total_blocks: int) -> SchedulerConfig:
    """Limits of one attention worker, as the engine would take them from the plan."""
    per_worker = -(-phase.batch // phase.parallel.attention_dp)
    max_running = min(per_worker, len(demand), MAX_PROMPTS if name == "prefill" else per_worker)
    most, allowed = setting.model.max_position, setting.workload.max_length
    max_model_len = most if allowed is None else min(most, allowed)
    tokens = np.minimum(demand.input_tokens + demand.output_tokens, max_model_len)  # longer ones are refused
    longest = np.sort(blocks_of(tokens, BLOCK_SIZE))[::-1][:max_running]
    touched = int(longest.sum()) + len(longest)
    reserved = min(reserved_blocks(total_blocks), touched)
    return SchedulerConfig(
        num_blocks=min(total_blocks, touched + reserved),
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        max_batch_tokens=per_worker if name == "prefill" else max(SchedulerConfig.max_batch_tokens, per_worker),
        context_tokens_per_row=context_tokens_per_row(setting.model),
        max_running=max_running,
        watermark_blocks=reserved,
    )


def _kv_blocks(setting: Setting, one: Candidates, num_sequences: int) -> int:
    """KV blocks of one attention worker, on its fullest device, beside the recurrent states of `num_sequences`."""
    tp, pp = int(one.attention_tp[0]), int(one.pp[0])
    per_token = float(kv_bytes_per_token(setting.model, tp, setting.precision, pp=pp))
    states_bytes = num_sequences * float(tokens_of_state(setting.model, tp, setting.precision)) * per_token
    budget_bytes = float(cache_bytes(setting, one)[0]) - states_bytes
    total = int(kv_blocks(budget_bytes, setting.model, tp, setting.precision, block_size=BLOCK_SIZE, pp=pp))
    if total < 1:
        missing, group = -budget_bytes / 2**30, setting.groups[int(one.attention_kind[0])]
        raise ResourceError(
            f"a {group.device.name} lacks {missing:.1f} GiB for weights in {setting.precision.weights} and has no room "
            "for keys and values: give the precision that the plan was made with"
        )
    return total


def parse_kill(text: str, pools: Sequence[Pool]) -> Kill:
    """``"attention[0]@12.5"``; `UserError` names what is wrong and the workers there are."""
    match = re.fullmatch(r"\s*(?:(\w+)\.)?(attention|experts)\[(\d+)\]\s*@\s*(\S+?)\s*", text)
    if match is None:
        raise UserError(f"{text!r} is no failure: write a worker and a time in seconds, for example attention[0]@12.5")
    prefix, role, number, moment = match.groups()
    try:
        time_s = float(moment)
    except ValueError:
        time_s = math.nan
    if not 0 <= time_s < math.inf:
        raise UserError(f"{text!r}: {moment!r} is no time: give seconds, at least 0")
    known = []
    for index, pool in enumerate(pools):
        for of_role in get_args(Role):
            count = pool.num_workers(of_role)
            if (pool.prefix, of_role) == (prefix or "", role) and int(number) < count:
                return Kill(pool=index, role=of_role, worker=int(number), time_s=time_s)
            if count:
                last = f" to {pool.name_of(of_role, count - 1)}" if count > 1 else ""
                known.append(pool.name_of(of_role, 0) + last)
    raise UserError(f"there is no worker {text.rpartition('@')[0].strip()}: the plan has {', '.join(known)}")
