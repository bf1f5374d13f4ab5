"""The vLLM and SGLang commands nearest to a plan: a server for each of its phases, or one that does both.

These engines know only colocated layouts: `report/colocated.py` finds the nearest one. What their exchange kernels take
is in `report/engine_rules.py`.

vLLM's terms: `--tensor-parallel-size` and `--data-parallel-size` are attention's; experts are split over all
TP x DP ranks of a stage, as whole experts with `--enable-expert-parallel`, as slices of each without. `--max-num-seqs`
and `--max-num-batched-tokens` are limits of one data-parallel rank. Ranks are numbered copy by copy, stages inside.

SGLang's terms: `--tp-size` counts all devices of a pipeline stage; attention is data-parallel in
`--attn-dp-size` groups of them; experts are split in `--ep-size` groups, inside a group by tensor.
`--max-running-requests` and `--chunked-prefill-size` count the whole server's. Ranks are numbered stage by stage, so
that a stage's experts stay together.

`scripts/engine_flags.py` reads which flags a release takes; a test holds the commands to that.

Rejected: a flag that cannot be tried here. What an engine's kernels refuse is left out and listed as lost.
"""

import json

from antiphon.report.colocated import Colocated, Target, nearest_colocated, preamble
from antiphon.report.engine_rules import LowLatency, low_latency, takes_ranks
from antiphon.report.words import (
    commented,
    plural,
)
from antiphon.specs.cluster import NodeGroup
from antiphon.specs.plan import (
    PHASES,
    PhaseName,
    Plan,
)
from antiphon.specs.precision import WEIGHTS_ONLY, PrecisionSpec

Options = list[tuple[str, str | int | None]]
"""Command line options with their values; None: a switch."""


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
    text = _heading(plan, "a proxy, such as vLLM's llm-d,")
    for name in _phases(plan):
        nearest = nearest_colocated(plan, name, target.workload.slo)
        lost = _vllm_losses(nearest, _nodes(nearest, target))
        lost += _draft_losses(nearest, target, "vLLM")
        lost += _exchange_losses(nearest, target, _nodes(nearest, target))
        text += preamble(plan, nearest, target, "vLLM", VLLM, lost) + _vllm_commands(
            nearest, target, _is_pool(plan, name)
        )
    return text


def _is_pool(plan: Plan, name: PhaseName) -> bool:
    """Whether a server does one phase of two: a decode server is given prompts that another has computed."""
    return len(plan.phases) > 1 or name == "decode"


def _heading(plan: Plan, router: str) -> str:
    """What joins the servers of a plan with two pools."""
    return commented(ROUTED.format(router=router)) if len(plan.phases) > 1 else ""


def _draft_losses(nearest: Colocated, target: Target, engine: str) -> list[str]:
    """Proposed tokens that the command cannot ask for."""
    drafts = target.workload.draft_tokens
    if not drafts or nearest.phase == "prefill" or target.draft_layers:
        return []
    return [
        f"{plural(drafts, 'proposed token')} a step: {engine} needs a draft model, and this one has no layers for it"
    ]


def _exchange_losses(nearest: Colocated, target: Target, nodes: NodeGroup) -> list[str]:
    """Exchange kernels that the plan would have and that do not run so."""
    if not nearest.is_exchanged or not _exchange_library(nodes):
        return []
    if not _deepep_runs(nearest, target, nodes):
        return [
            f"exchange kernels: DeepEP's run on 2, 4 or 8 ranks or some numbers of nodes of 8, not on "
            f"{nearest.devices_per_stage} ranks"
        ]
    if nearest.phase == "decode" and (why_not := _low_latency(nearest, target, nodes).why_not):
        return [f"low-latency exchange kernels: {why_not}"]
    return []


def _deepep_runs(nearest: Colocated, target: Target, nodes: NodeGroup) -> bool:
    short = nearest.phase == "decode" and not _low_latency(nearest, target, nodes).why_not
    return _exchange_library(nodes) != "deepep" or takes_ranks(nearest.devices_per_stage, is_low_latency=short)


def _low_latency(nearest: Colocated, target: Target, nodes: NodeGroup) -> LowLatency:
    return low_latency(
        nearest.rows_of_rank(target.workload),
        hidden_size=target.hidden_size,
        num_experts=nearest.num_experts + nearest.redundant_experts,
        room_bytes=nodes.device.memory_bytes * target.cluster.efficiency.memory_reserve,
    )


def _with_environment(program: str, variables: dict[str, int]) -> str:
    return " ".join([*(f"{name}={value}" for name, value in variables.items()), program])


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


def _vllm_commands(nearest: Colocated, target: Target, is_pool: bool) -> str:
    parallel, nodes = nearest.parallel, _nodes(nearest, target)
    options = _vllm_options(nearest, target, nodes)
    if is_pool:
        options.append(("--kv-transfer-config", _quoted(KV_TRANSFER)))
    program = f"vllm serve {target.model}"
    if any(str(value).endswith("_low_latency") for _, value in options):
        program = _with_environment(program, _low_latency(nearest, target, nodes).queue)
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
        rows = nearest.rows_of_rank(target.workload)
        options += [("--max-num-seqs", nearest.per_rank), ("--max-num-batched-tokens", rows)]
    else:
        options.append(("--max-num-batched-tokens", nearest.per_rank))
    if (drafts := target.workload.draft_tokens) and nearest.phase != "prefill" and target.draft_layers:
        speculative = {"method": "mtp", "num_speculative_tokens": drafts}
        options.append(("--speculative-config", _quoted(speculative)))
    options.append(("--gpu-memory-utilization", f"{target.memory_used:.2f}"))
    return options + format_options(target.precision, "fp8")


def _vllm_experts(nearest: Colocated, target: Target, nodes: NodeGroup) -> Options:
    """How rows reach their experts, and how experts are balanced."""
    options: Options = []
    library = _exchange_library(nodes)
    if nearest.is_exchanged and library and _deepep_runs(nearest, target, nodes):
        short = nearest.phase == "decode" and not _low_latency(nearest, target, nodes).why_not
        mode = "low_latency" if short else "high_throughput"  # a serving step has prompts, too
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
    text = _heading(plan, "SGLang's router (--pd-disaggregation)")
    for name in _phases(plan):
        nearest = nearest_colocated(plan, name, target.workload.slo)
        nodes = _nodes(nearest, target)
        options = _sglang_options(nearest, target, nodes)
        if _is_pool(plan, name):
            options.append(("--disaggregation-mode", name))
        lost = [*_draft_losses(nearest, target, "SGLang"), *_exchange_losses(nearest, target, nodes)]
        text += preamble(plan, nearest, target, "SGLang", SGLANG, lost)
        num_nodes = _equal_nodes(nearest.devices_per_stage * nearest.parallel.pp, nodes.devices_per_node)
        if num_nodes > 1:
            last = num_nodes - 1
            text += commented(f"on each of {num_nodes} nodes; HEAD is the first one's address, RANK = 0 to {last}")
            options += [("--nnodes", num_nodes), ("--node-rank", "$RANK"), ("--dist-init-addr", f"$HEAD:{SGLANG_PORT}")]
        program = "python -m sglang.launch_server"
        if ("--deepep-mode", "low_latency") in options:
            program = _with_environment(program, _low_latency(nearest, target, nodes).environment)
        text += shell_command(program, options)
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
    if (drafts := target.workload.draft_tokens) and nearest.phase != "prefill" and target.draft_layers:
        options += [("--speculative-algorithm", "EAGLE"), ("--speculative-num-steps", drafts)]
        options += [("--speculative-eagle-topk", 1), ("--speculative-num-draft-tokens", drafts + 1)]
    options += [("--mem-fraction-static", f"{target.memory_used:.2f}")]
    return options + format_options(target.precision, "fp8_e4m3")


def _sglang_experts(nearest: Colocated, target: Target, nodes: NodeGroup) -> Options:
    """As `_vllm_experts`. SGLang's exchange kernels need whole experts on every device of a stage."""
    options: Options = []
    library = _exchange_library(nodes)
    if nearest.is_exchanged and library and nearest.parallel.expert_tp == 1 and _deepep_runs(nearest, target, nodes):
        short = nearest.phase == "decode" and not _low_latency(nearest, target, nodes).why_not
        mode = "low_latency" if short else "normal"  # a serving step has prompts, too
        options += [("--moe-a2a-backend", library), ("--deepep-mode", mode)]
        if nearest.overlaps_two_batches:
            options.append(("--enable-two-batch-overlap", None))
    if target.is_skewed or nearest.redundant_experts:
        options.append(("--enable-eplb", None))
        if nearest.redundant_experts:
            options.append(("--ep-num-redundant-experts", nearest.redundant_experts))
    return options
