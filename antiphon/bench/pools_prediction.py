"""What the simulator says of a run of `antiphon bench pools`: the same requests in the same order on the same layouts.

Layouts become a plan, and steps cost what was measured on this machine: by `antiphon profile`, or here, at the sizes
that the run has. Long prompts end with their first token: what is compared is the answers' time between tokens and the
prompts' time to the first one.

Rejected: the planner's formulas. They know a steady state, and here one prompt follows the other. `antiphon profile
--quick` as the measurement here: a prompt of 64 tokens mostly reads weights, one of 2,048 computes, so that the second
one's time, taken from the first one's, depends on how fast the memory is at the moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, Self

import numpy as np

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.bench.profile.local_times import Wanted, measure
from antiphon.bench.profile.measure import QUICK
from antiphon.bench.profile.this_machine import cost_profile, this_cluster
from antiphon.bench.served_plans import HEADERS
from antiphon.cost.profile import Profile, read_serving_profile
from antiphon.models.config import load_model_spec, read_config, refuse_other_model
from antiphon.planner.setting import Setting
from antiphon.serve.config import ServeConfig
from antiphon.serve.policy.request import rows_for_cost
from antiphon.sim.demand import Demand
from antiphon.sim.host import CoreWaits
from antiphon.sim.pools import ServingOptions, pools_of
from antiphon.sim.serve_results import summary
from antiphon.sim.serving_run import simulate_serving
from antiphon.specs.cluster import ClusterSpec, load_cluster
from antiphon.specs.counts import context_tokens_per_row
from antiphon.specs.model import PrecisionSpec
from antiphon.specs.plan import DeviceUse, Parallel, PhaseName, PhasePlan, Plan, Predicted
from antiphon.specs.workload import LengthSpec, WorkloadSpec

_CLUSTER_FILE = "this-machine.json"
_POINT_S = 0.1  # of a measurement


@dataclass(frozen=True, kw_only=True)
class MeasuredMachine:
    """What `antiphon profile` wrote: of the model, and of the machine as a cluster, with a device for each core."""

    profile: Profile
    cluster: ClusterSpec

    @classmethod
    def read(cls, file: Path, mbit: float | None) -> Self:
        """`file` and the cluster beside it; with `mbit` its devices are nodes behind links of that rate."""
        beside = file.parent / _CLUSTER_FILE
        if not beside.is_file():
            raise UserError(f"--profile {file}: there is no {_CLUSTER_FILE} beside it; antiphon profile writes both")
        cluster = load_cluster(str(beside))
        if len(cluster.groups) != 1:
            raise UserError(
                f"{beside} has {len(cluster.groups)} groups of devices: give the one that antiphon profile wrote"
            )
        return cls._of(read_serving_profile(file), cluster, mbit)

    @classmethod
    def measured(cls, configs: Sequence[ServeConfig], mbit: float | None, answer_tokens: int) -> Self:
        """This machine now, for servers with the same limits: with a worker's threads, as many answers as there may be,
        at their beginning and `answer_tokens` long, the first piece of a prompt and one in its middle. Blocks for some
        seconds. `UserError` if the machine is at fault."""
        config = configs[0]
        spec = load_model_spec(config.model)
        longest, ratio = config.context_length(spec), context_tokens_per_row(spec)
        first, middle = (
            max(64, min(longest, int(rows_for_cost(start, config.max_batch_tokens, ratio))))
            for start in (0, longest // 2)
        )
        effort = replace(
            QUICK,
            prompts=tuple(sorted({64, middle, first // 2, first})),
            later_piece=(middle, longest // 2),
            contexts=(64, max(512, answer_tokens)),
            beside_rows=(),
            apart=any(pool.layout != "colocated" for each in configs for pool in each.pools),
            point_s=_POINT_S,
        )
        wanted = Wanted(
            model=config.model,
            effort=effort,
            threads=(config.own("attention").num_threads or 1,),
            max_rows=config.max_running,
            max_context=longest,
        )
        with progress("measuring this machine") as report:
            times = measure(wanted, report)
        profile = cost_profile(times, spec, "antiphon bench pools --profile here")
        return cls._of(profile, this_cluster(times, spec), mbit)

    @classmethod
    def _of(cls, profile: Profile, cluster: ClusterSpec, mbit: float | None) -> Self:
        """What HTTP takes is left out: `bench pools` calls its engines itself."""
        if mbit is not None:
            (group,) = cluster.groups
            rate = HEADERS * mbit * 1e6 / 8
            group = replace(
                group,
                num_nodes=group.num_devices,
                devices_per_node=1,
                scale_up_domain=1,
                node_scale_out_bytes_per_s=rate,
            )
            cluster = replace(cluster, groups=(group,), efficiency=replace(cluster.efficiency, scale_out=1.0))
        return cls(profile=replace(profile, host=None), cluster=cluster)


def predict_mix(
    config: ServeConfig,
    machine: MeasuredMachine,
    answers: tuple[int, int, int],
    prompts: tuple[int, int],
    core_waits: CoreWaits | None = None,
) -> dict[str, float | None]:
    """`itl_s_median`, `itl_s_p99`, `ttft_s_median` (None where there is none), and with two pools `exposed_share` of
    the prompts' time to the first token. `answers`: how many, tokens of their prompts, tokens of each; they come at
    time 0. `prompts`: how many long ones, tokens of each. They come one at a time: the first when all answers have
    begun, the next when the one before has its first token, while answers run; the run is simulated anew with each. As
    in those that are measured, gaps between tokens count from the first long prompt on until the last one's first
    token. `core_waits`: of the machine, beside the run. `UserError` for another model's profile."""
    num_prompts, prompt_tokens = prompts
    phases = _phases(config, machine.cluster.groups[0].device.name)
    spec = load_model_spec(config.model)
    if machine.profile.model_config:
        refuse_other_model(machine.profile.model_config, spec, "--profile")
    dtype: Literal["float32", "bfloat16"] = "float32" if machine.profile.dtype == "float32" else "bfloat16"
    setting = Setting(
        model=replace(spec, max_position=config.context_length(spec)),
        cluster=machine.cluster,
        workload=_workload([answers[1], prompt_tokens], [answers[2], 1]),
        phase=next(reversed(phases)),
        profile=machine.profile,
        precision=PrecisionSpec(weights=dtype, kv=dtype, dispatch=dtype, combine=dtype, compute=dtype),
    )
    plan = Plan(
        model=config.model.name,
        cluster=machine.cluster.name,
        workload=setting.workload.name,
        objective="per-gpu",
        phases=phases,
        model_config=read_config(config.model),
    )
    options, sent_s = ServingOptions(hand_over=config.hand_over, core_waits=core_waits), list[float]()
    while True:
        demand = _demand(answers, prompt_tokens, sent_s)
        run = simulate_serving(pools_of(plan, setting, demand), demand, options)
        own, others = run.records[: answers[0]], run.records[answers[0] :]
        begun_s = max(record.first_token_s or 0.0 for record in others[-1:] or own)
        if len(others) == num_prompts or begun_s >= max(record.finished_s or 0.0 for record in own):
            break
        sent_s.append(begun_s)  # what comes later changes nothing before it
    ttft_s = [record.ttft_s or 0.0 for record in others]
    gaps = summary(*run.log.gaps_between(after_s=sent_s[0], until_s=begun_s)) if sent_s else {}
    found: dict[str, float | None] = {
        "itl_s_median": gaps.get("p50"),
        "itl_s_p99": gaps.get("p99"),
        "ttft_s_median": median(ttft_s) if ttft_s else None,
    }
    if run.handovers is not None and ttft_s:
        found["exposed_share"] = run.handovers.exposed_s / sum(ttft_s)
    return found


def _demand(answers: tuple[int, int, int], prompt_tokens: int, sent_s: Sequence[float]) -> Demand:
    num, short, output = answers
    return Demand(
        arrivals_s=np.asarray([0.0] * num + list(sent_s)),
        input_tokens=np.asarray([short] * num + [prompt_tokens] * len(sent_s), dtype=np.int64),
        output_tokens=np.asarray([output] * num + [1] * len(sent_s), dtype=np.int64),
    )


def _workload(inputs: Sequence[int], outputs: Sequence[int]) -> WorkloadSpec:
    return WorkloadSpec(name="pools", input_tokens=_trace(inputs), output_tokens=_trace(outputs))


def _trace(values: Sequence[int]) -> LengthSpec:
    return LengthSpec(median=float(np.median(values)), trace=tuple(values))


def _phases(config: ServeConfig, device: str) -> dict[PhaseName, PhasePlan]:
    """The pools of a configuration, prefill first."""
    if config.prefill is None:
        return {"serve": _phase("serve", config, device)}
    return {"prefill": _phase("prefill", config.prefill, device), "decode": _phase("decode", config, device)}


def _phase(name: PhaseName, config: ServeConfig, device: str) -> PhasePlan:
    if config.attention_ranks > 1 or config.expert_tp > 1 or config.layout == "hybrid":
        raise UserError(
            f"--profile predicts replicas and attention workers of one rank, not {config.layout_text}: leave it out"
        )
    workers, experts = config.num_attention, config.num_experts
    common: dict[str, Any] = {
        "batch": config.max_batch_tokens if name == "prefill" else config.max_running,
        "predicted": Predicted(),
    }
    num_experts = load_model_spec(config.model).router.num_experts
    if config.layout == "colocated":
        return PhasePlan(
            layout="tp_pp",
            parallel=Parallel(),
            num_instances=workers * config.num_instances,
            micro_batches=1,
            step_tokens=config.max_batch_tokens if name == "serve" else None,
            devices=(DeviceUse(role="both", device=device, num_devices=workers * config.num_instances),),
            placement=(((0, 1.0),),) * num_experts,
            **common,
        )
    return PhasePlan(
        layout="disaggregated",
        parallel=Parallel(attention_dp=workers, expert_workers=experts),
        num_instances=config.num_instances,
        micro_batches=config.num_micro_batches,
        step_tokens=config.max_batch_tokens if name == "serve" else None,
        devices=(
            DeviceUse(role="attention", device=device, num_devices=workers * config.num_instances),
            DeviceUse(role="experts", device=device, num_devices=experts * config.num_instances),
        ),
        placement=tuple(((expert * experts // num_experts, 1.0),) for expert in range(num_experts)),
        **common | {"batch": common["batch"] * workers},
    )
