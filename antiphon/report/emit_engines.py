"""The vLLM and SGLang commands nearest to a plan: a server for each of its phases, or one that does both.

These engines know only colocated layouts. The nearest one is found so:

1. a plan that is colocated already is its own nearest
2. else the best of the losing colocated layouts, by the plan's objective; one that keeps the promises comes first
3. the losses are stated in words and, as far as they are predicted, in numbers

Rejected: turning a disaggregated plan's own sizes into colocated ones. They may not fit, and the search never looked.

vLLM's terms: `--tensor-parallel-size` and `--data-parallel-size` are attention's; experts are split over all
TP x DP ranks of a stage, as whole experts with `--enable-expert-parallel`, as slices of each without. `--max-num-seqs`
and `--max-num-batched-tokens` are limits of one data-parallel rank. Ranks are numbered copy by copy, stages inside.

SGLang's terms: `--tp-size` counts all devices of a pipeline stage; attention is data-parallel in
`--attn-dp-size` groups of them; experts are split in `--ep-size` groups, inside a group by tensor.
`--max-running-requests` and `--chunked-prefill-size` count the whole server's. Ranks are numbered stage by stage, so
that a stage's experts stay together.

`scripts/engine_flags.py` reads which flags a release takes; a test holds the commands to that.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from antiphon.base.errors import ResourceError
from antiphon.report.words import (
    LAYOUT_TITLES,
    OBJECTIVE_UNITS,
    commented,
    degrees_text,
    devices_text,
    latency_text,
    milliseconds,
    number,
    plural,
    score,
)
from antiphon.specs.cluster import ClusterSpec, NodeGroup
from antiphon.specs.plan import (
    PHASES,
    DeviceUse,
    Layout,
    Parallel,
    PhaseName,
    Placement,
    Plan,
    Predicted,
    Rejected,
)
from antiphon.specs.precision import WEIGHTS_ONLY, PrecisionSpec
from antiphon.specs.workload import SloSpec, WorkloadSpec

Options = list[tuple[str, str | int | None]]
"""Command line options with their values; None: a switch."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What another engine's command needs beside the plan. `model`: folder or name as that engine takes it."""

    model: str
    precision: PrecisionSpec
    workload: WorkloadSpec
    cluster: ClusterSpec

    @property
    def is_skewed(self) -> bool:
        """Whether some experts are more popular than others."""
        return self.workload.expert_skew > 0 or len(set(self.workload.expert_loads)) > 1

    @property
    def memory_used(self) -> float:
        """Fraction of device memory for weights and KV."""
        return 1 - self.cluster.efficiency.memory_reserve


@dataclass(frozen=True, kw_only=True)
class Colocated:
    """A colocated deployment of one phase.

    `batch`: requests at once (decode, serve), tokens of a pass (prefill). `num_experts`: of the model, 0 if the plan
    does not say. `placement` empty: the engine's own. `why_not`: the promise it breaks, empty if it keeps all."""

    phase: PhaseName
    layout: Layout
    parallel: Parallel
    batch: int
    micro_batches: int
    devices: tuple[DeviceUse, ...]
    predicted: Predicted
    step_tokens: int | None = None
    num_experts: int = 0
    placement: Placement = ()
    why_not: str = ""

    @property
    def per_rank(self) -> int:
        """The share of `batch` of one data-parallel rank; the odd ones on top."""
        return math.ceil(self.batch / self.parallel.attention_dp)

    @property
    def redundant_experts(self) -> int:
        """Copies of experts beyond the first: the plan's, and as many as make all ranks hold equally many."""
        copies, ranks = max(sum(map(len, self.placement)), self.num_experts), self.parallel.expert_ep
        return math.ceil(copies / ranks) * ranks - self.num_experts

    @property
    def is_exchanged(self) -> bool:
        """Whether rows go between data-parallel ranks to whole experts, by an all-to-all."""
        return self.parallel.expert_ep > 1 and self.parallel.attention_dp > 1

    @property
    def overlaps_two_batches(self) -> bool:
        """Whether two halves of a batch take turns at devices and network; several stages take turns by themselves."""
        return self.micro_batches > 1 and self.parallel.pp == 1 and self.is_exchanged

    @property
    def devices_per_stage(self) -> int:
        return self.parallel.attention_dp * self.parallel.attention_tp

    @property
    def num_instances(self) -> int:
        """Copies of the model; a command starts one of them."""
        return sum(use.num_devices for use in self.devices) // (self.devices_per_stage * self.parallel.pp)


def nearest_colocated(plan: Plan, name: PhaseName, slo: SloSpec) -> Colocated:
    """The deployment to configure; `ResourceError` if no colocated layout of this model runs on the cluster at all."""
    phase = plan.phases[name]
    if phase.layout != "disaggregated":
        return Colocated(
            phase=name,
            layout=phase.layout,
            parallel=phase.parallel,
            batch=phase.batch,
            step_tokens=phase.step_tokens,
            micro_batches=phase.micro_batches,
            devices=phase.devices,
            predicted=phase.predicted,
            num_experts=len(phase.placement),
            placement=phase.placement,
        )
    candidates = [loser for loser in phase.rejected if loser.layout != "disaggregated" and _runs(loser)]
    if not candidates:
        reasons = "; ".join(f"{LAYOUT_TITLES[loser.layout]}: {loser.reason}" for loser in phase.rejected)
        raise ResourceError(
            f"no colocated layout of {plan.model} runs on {plan.cluster} ({reasons or 'none was searched'}): "
            f"plan with --layout auto, or on a cluster with more memory"
        )
    best = max(candidates, key=lambda loser: _order(loser, slo, plan))
    assert best.parallel is not None, "only candidates with sizes are compared"
    assert best.predicted is not None, "only candidates with a prediction are compared"
    return Colocated(
        phase=name,
        layout=best.layout,
        parallel=best.parallel,
        batch=best.batch or 1,
        step_tokens=phase.step_tokens,
        micro_batches=best.micro_batches or 1,
        num_experts=len(phase.placement),
        devices=best.devices,
        predicted=best.predicted,
        why_not=broken_promise(best.predicted, slo),
    )


def _runs(loser: Rejected) -> bool:
    return loser.parallel is not None and loser.predicted is not None and loser.batch is not None


def _order(loser: Rejected, slo: SloSpec, plan: Plan) -> tuple[bool, float]:
    assert loser.predicted is not None, "only candidates with a prediction are compared"
    keeps = not broken_promise(loser.predicted, slo)
    return keeps, score(loser.predicted, plan.objective) or loser.predicted.per_gpu


def broken_promise(predicted: Predicted, slo: SloSpec) -> str:
    """The first target that is missed, in words; empty if none is."""
    for what, value, target in (
        ("a token takes", predicted.tpot_s, slo.tpot_s),
        ("the first token takes", predicted.ttft_s, slo.ttft_s),
    ):
        if value is not None and target is not None and value > target:
            return f"{what} {milliseconds(value)}, the target is {milliseconds(target)}"
    return ""


def losses(plan: Plan, nearest: Colocated) -> Iterator[str]:
    """What running `nearest` gives up, one line each."""
    phase = plan.phases[nearest.phase]
    if phase.layout == "disaggregated":
        kinds = {use.device for use in phase.devices}
        yield f"attention and experts apart: {degrees_text(phase.layout, phase.parallel)}"
        if len(kinds) > 1:
            yield f"a kind of device for each: {devices_text(phase.devices)}"
        if phase.micro_batches > 1:
            yield f"{phase.micro_batches} micro-batches in turn, which keep both sides busy"
    replicated = sum(len(owners) > 1 for owners in phase.placement)
    if replicated and not nearest.placement:
        yield f"the plan's placement: {plural(replicated, 'expert')} with replicas"
    elif replicated:
        yield f"which experts have replicas: the engine chooses by the load it sees, the plan by {plan.workload}"
    if nearest.overlaps_two_batches and nearest.micro_batches > 2:
        yield f"{nearest.micro_batches} micro-batches at once: the engine overlaps two"
    if nearest.why_not:
        yield f"a promise: {nearest.why_not}"


def comparison(plan: Plan, nearest: Colocated) -> Iterator[str]:
    """The plan and the nearest deployment beside each other, with predicted numbers."""
    name, phase = nearest.phase, plan.phases[nearest.phase]
    unit = OBJECTIVE_UNITS[plan.objective]
    yield f"{plan.model} on {plan.cluster}, {name}, workload {plan.workload}"
    yield f"plan:    {_line(phase.layout, phase.parallel, phase.devices)}"
    yield f"         {_rates(phase.predicted, plan)}"
    if phase.layout == "disaggregated":
        yield f"nearest: {_line(nearest.layout, nearest.parallel, nearest.devices)}"
        mine, theirs = score(phase.predicted, plan.objective), score(nearest.predicted, plan.objective)
        share = f"; {theirs / mine - 1:+.0%} {unit}" if mine and theirs else ""
        yield f"         {_rates(nearest.predicted, plan)}{share}"


def _line(layout: Layout, parallel: Parallel, devices: tuple[DeviceUse, ...]) -> str:
    return f"{LAYOUT_TITLES[layout]}: {degrees_text(layout, parallel)}; {devices_text(devices)}"


def _rates(predicted: Predicted, plan: Plan) -> str:
    rate = f"{number(score(predicted, plan.objective))} {OBJECTIVE_UNITS[plan.objective]}"
    return f"predicted {latency_text(predicted)}, {rate}"


def preamble(
    plan: Plan, nearest: Colocated, target: Target, engine: str, version: str, more: Sequence[str] = ()
) -> str:
    """Comments above a command: plan and nearest deployment side by side, then what is lost, `more` of it as the
    engine has it."""
    lost = [*losses(plan, nearest), *more, *_format_losses(target.precision, engine)]
    lines = [f"{engine} {version}: the nearest settings to this plan", *comparison(plan, nearest)]
    if nearest.num_instances > 1:
        lines.append(
            f"this starts one of {nearest.num_instances} instances: run it for each, and balance requests between them"
        )
    return commented(*lines, *(["lost:", *(f"  - {line}" for line in lost)] if lost else []))


def _format_losses(precision: PrecisionSpec, engine: str) -> Iterator[str]:
    if precision.dispatch != precision.combine or precision.dispatch not in ("bfloat16", "float16"):
        yield f"rows sent as {precision.dispatch} and back as {precision.combine}: {engine}'s exchange decides"
    for name in sorted({precision.weights, precision.experts or precision.weights} & set(WEIGHTS_ONLY)):
        yield f"{name} weights: give {engine} a checkpoint that is quantised already"


def format_options(precision: PrecisionSpec, fp8_kv: str) -> Options:
    """Options both engines share: formats of keys and values and of weights; `fp8_kv` is how fp8 is spelled there."""
    options: Options = [("--kv-cache-dtype", fp8_kv if precision.kv == "fp8" else "auto")]
    if precision.weights in WEIGHTS_ONLY or precision.experts in WEIGHTS_ONLY:
        return options
    if precision.weights == "fp8":
        options.append(("--quantization", "fp8"))
    else:
        options.append(("--dtype", precision.weights))
    return options


def shell_command(program: str, options: Options) -> str:
    """``program \\`` and one option a line."""
    lines = [program, *(name if value is None else f"{name} {value}" for name, value in options)]
    return " \\\n  ".join(lines) + "\n"


VLLM, SGLANG = "0.32", "0.5.23"
SGLANG_PORT = 5000
LEAST_BATCHED_TOKENS = 8192
"""Batched tokens of a server that also prefills: what vLLM takes for one with an API."""
KV_TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
ROUTED = "two kinds of server: {router} sends a prompt to a prefill server, then its keys and values to a decode server"


def vllm_command(plan: Plan, target: Target) -> str:
    """A shell script: per phase, comments that tell what is lost, then the command (two where ranks span nodes)."""
    text = commented(ROUTED.format(router="a proxy, such as vLLM's llm-d,")) if len(plan.phases) > 1 else ""
    for name in _phases(plan):
        nearest = nearest_colocated(plan, name, target.workload.slo)
        lost = _vllm_losses(nearest, _nodes(nearest, target))
        text += preamble(plan, nearest, target, "vLLM", VLLM, lost) + _vllm_commands(
            nearest, target, len(plan.phases) > 1
        )
    return text


def _phases(plan: Plan) -> list[PhaseName]:
    return [name for name in PHASES if name in plan.phases]


def _nodes(nearest: Colocated, target: Target) -> NodeGroup:
    """The smallest nodes that the deployment uses."""
    used = {use.device for use in nearest.devices}
    groups = [group for group in target.cluster.groups if group.device.name in used]
    return min(groups, key=lambda group: group.devices_per_node)


def _vllm_losses(nearest: Colocated, nodes: NodeGroup) -> list[str]:
    parallel, lost = nearest.parallel, []
    if parallel.expert_ep > 1 and parallel.expert_tp > 1:
        lost.append(
            f"experts in EP {parallel.expert_ep} x TP {parallel.expert_tp}: vLLM splits them over all "
            f"{nearest.devices_per_stage} ranks as whole experts"
        )
    stage, per_node = nearest.devices_per_stage, nodes.devices_per_node
    if nearest.is_exchanged and stage <= per_node < stage * parallel.pp:
        lost.append(
            f"a stage's {stage} devices beside each other: vLLM numbers ranks copy by copy, so "
            f"its experts exchange rows between nodes"
        )
    return lost


def _vllm_commands(nearest: Colocated, target: Target, is_one_of_two: bool) -> str:
    parallel, nodes = nearest.parallel, _nodes(nearest, target)
    options = _vllm_options(nearest, target, nodes)
    if is_one_of_two:
        options.append(("--kv-transfer-config", _quoted(KV_TRANSFER)))
    program = f"vllm serve {target.model}"
    per_rank, per_node = parallel.attention_tp * parallel.pp, nodes.devices_per_node
    if per_rank * parallel.attention_dp <= per_node:
        return shell_command(program, options)
    if per_rank <= per_node:
        return _on_several_nodes(program, options, parallel.attention_dp, per_node // per_rank)
    note = commented(f"a rank of {per_rank} devices spans nodes of {per_node}: start Ray on all of them first")
    if parallel.attention_dp == 1:
        return note + shell_command(program, [*options, ("--distributed-executor-backend", "ray")])
    spanning = f"VLLM_RAY_DP_PACK_STRATEGY=span {program}"
    return note + shell_command(spanning, [*options, ("--data-parallel-backend", "ray")])


def _vllm_options(nearest: Colocated, target: Target, nodes: NodeGroup) -> Options:
    parallel = nearest.parallel
    options: Options = [("--tensor-parallel-size", parallel.attention_tp)]
    if parallel.pp > 1:
        options.append(("--pipeline-parallel-size", parallel.pp))
    if parallel.attention_dp > 1:
        options.append(("--data-parallel-size", parallel.attention_dp))
    if parallel.expert_ep > 1:
        options += [("--enable-expert-parallel", None), *_vllm_experts(nearest, target, nodes)]
    if nearest.phase != "prefill":
        tokens = max(nearest.per_rank, nearest.step_tokens or LEAST_BATCHED_TOKENS)
        options += [("--max-num-seqs", nearest.per_rank), ("--max-num-batched-tokens", tokens)]
    else:
        options.append(("--max-num-batched-tokens", nearest.per_rank))
    options.append(("--gpu-memory-utilization", f"{target.memory_used:.2f}"))
    return options + format_options(target.precision, "fp8")


def _vllm_experts(nearest: Colocated, target: Target, nodes: NodeGroup) -> Options:
    """How rows reach their experts, and how experts are balanced."""
    options: Options = []
    library = _exchange_library(nodes)
    if nearest.is_exchanged and library:
        mode = "low_latency" if nearest.phase == "decode" else "high_throughput"  # a serving step has prompts, too
        options.append(("--all2all-backend", f"{library}_{mode}"))
        if nearest.overlaps_two_batches and library == "deepep":
            options.append(("--enable-dbo", None))
    if target.is_skewed or nearest.redundant_experts:
        redundant = {"num_redundant_experts": nearest.redundant_experts}
        options += [("--enable-eplb", None), ("--eplb-config", _quoted(redundant))]
    return options


def _exchange_library(nodes: NodeGroup) -> str:
    """Kernels that send a row to whole experts: DeepEP on NVIDIA, MoRI on AMD; elsewhere the engine's own."""
    if nodes.device.kind != "gpu":
        return ""
    return "mori" if nodes.device.name.startswith("MI") else "deepep"


def _quoted(value: object) -> str:
    return f"'{json.dumps(value)}'"


def _on_several_nodes(program: str, options: Options, num_ranks: int, local: int) -> str:
    """Data-parallel ranks that span nodes: the first node serves, the others run without a front end."""
    shared: Options = [*options, ("--data-parallel-size-local", local), ("--data-parallel-address", "$HEAD")]
    others: Options = [*shared, ("--headless", None), ("--data-parallel-start-rank", f"$((NODE*{local}))")]
    num_nodes, uneven = -(-num_ranks // local), num_ranks % local
    text = commented(f"on the first of {num_nodes} nodes; HEAD is its address") + shell_command(program, shared)
    text += commented(f"on the others, NODE = 1 to {num_nodes - 1}" if num_nodes > 2 else "on the other, NODE = 1")
    if uneven:
        text += commented(f"the last one runs fewer ranks: --data-parallel-size-local {uneven} there")
    return text + shell_command(program, others)


def sglang_command(plan: Plan, target: Target) -> str:
    """A shell script: per phase, comments that tell what is lost, then the command."""
    is_one_of_two = len(plan.phases) > 1
    text = commented(ROUTED.format(router="SGLang's router (--pd-disaggregation)")) if is_one_of_two else ""
    for name in _phases(plan):
        nearest = nearest_colocated(plan, name, target.workload.slo)
        nodes = _nodes(nearest, target)
        options = _sglang_options(nearest, target, nodes)
        if is_one_of_two:
            options.append(("--disaggregation-mode", name))
        text += preamble(plan, nearest, target, "SGLang", SGLANG)
        num_nodes = _equal_nodes(nearest.devices_per_stage * nearest.parallel.pp, nodes.devices_per_node)
        if num_nodes > 1:
            last = num_nodes - 1
            text += commented(f"on each of {num_nodes} nodes; HEAD is the first one's address, RANK = 0 to {last}")
            options += [("--nnodes", num_nodes), ("--node-rank", "$RANK"), ("--dist-init-addr", f"$HEAD:{SGLANG_PORT}")]
        text += shell_command("python -m sglang.launch_server", options)
    return text


def _equal_nodes(num_devices: int, most: int) -> int:
    """The fewest nodes that take equally many devices each, at most this many: SGLang knows no others."""
    return next(count for count in range(-(-num_devices // most), num_devices + 1) if num_devices % count == 0)


def _sglang_options(nearest: Colocated, target: Target, nodes: NodeGroup) -> Options:
    parallel = nearest.parallel
    options: Options = [("--model-path", target.model), ("--tp-size", nearest.devices_per_stage)]
    if parallel.attention_dp > 1:
        options.append(("--attn-dp-size", parallel.attention_dp))
    if parallel.expert_ep > 1:
        options += [("--ep-size", parallel.expert_ep), *_sglang_experts(nearest, target, nodes)]
    if parallel.pp > 1:
        options.append(("--pp-size", parallel.pp))
    if nearest.phase != "prefill":
        options.append(("--max-running-requests", nearest.batch))
    if nearest.phase != "decode":
        each_step = (nearest.step_tokens or LEAST_BATCHED_TOKENS) * nearest.parallel.attention_dp
        options.append(("--chunked-prefill-size", nearest.batch if nearest.phase == "prefill" else each_step))
    options += [("--mem-fraction-static", f"{target.memory_used:.2f}")]
    return options + format_options(target.precision, "fp8_e4m3")


def _sglang_experts(nearest: Colocated, target: Target, nodes: NodeGroup) -> Options:
    """As `_vllm_experts`. SGLang's exchange kernels need whole experts on every device of a stage."""
    options: Options = []
    library = _exchange_library(nodes)
    if nearest.is_exchanged and library and nearest.parallel.expert_tp == 1:
        mode = {"decode": "low_latency", "prefill": "normal", "serve": "auto"}[nearest.phase]
        options += [("--moe-a2a-backend", library), ("--deepep-mode", mode)]
        if nearest.overlaps_two_batches:
            options.append(("--enable-two-batch-overlap", None))
    if target.is_skewed or nearest.redundant_experts:
        options.append(("--enable-eplb", None))
        if nearest.redundant_experts:
            options.append(("--ep-num-redundant-experts", nearest.redundant_experts))
    return options
