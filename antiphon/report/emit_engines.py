"""The vLLM and SGLang commands nearest to a plan: a server for each of its phases, or one that does both.

These engines know only colocated layouts: `report/colocated.py` finds the nearest one.

vLLM's terms: `--tensor-parallel-size` and `--data-parallel-size` are attention's; experts are split over all
TP x DP ranks of a stage, as whole experts with `--enable-expert-parallel`, as slices of each without. `--max-num-seqs`
and `--max-num-batched-tokens` are limits of one data-parallel rank. Ranks are numbered copy by copy, stages inside.

SGLang's terms: `--tp-size` counts all devices of a pipeline stage; attention is data-parallel in
`--attn-dp-size` groups of them; experts are split in `--ep-size` groups, inside a group by tensor.
`--max-running-requests` and `--chunked-prefill-size` count the whole server's. Ranks are numbered stage by stage, so
that a stage's experts stay together.

`scripts/engine_flags.py` reads which flags a release takes; a test holds the commands to that.

Limits of their exchange kernels, DeepEP (github.com/deepseek-ai/DeepEP):

1. Ranks: all in one node of at most 8, or whole nodes of 8 (`csrc/deep_ep.cpp`, constructor of `Buffer`). The normal
   kernels are built for 2, 4 and 8 ranks of a node and for 2, 4, 8, 16, 18 and 20 nodes (`SWITCH_RANKS`,
   `SWITCH_RDMA_RANKS`, `csrc/kernels/launch.cuh`); the low-latency ones for some hidden sizes (`SWITCH_HIDDEN`).
2. Low-latency kernels: at most 1,024 rows of a rank in a call (`FINISHED_SUM_TAG`, `csrc/kernels/configs.cuh`; SGLang's
   `layers/moe/token_dispatcher/deepep.py` asserts it). SGLang takes 128, or the number in
   `SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK`; vLLM takes `--max-num-batched-tokens`.
3. Their buffers are made for that number of rows to every expert, twice (`LowLatencyLayout`, `csrc/config.hpp`).
4. NVSHMEM's queue holds two entries for each row and two more; its own default is 1,024
   (`NVSHMEM_QP_DEPTH`, `deep_ep/buffer.py`).

Rejected: a flag that cannot be tried here. What an engine's kernels refuse is left out and listed as lost. Rejected:
commands without those limits. They start, answer a health check, and end at the first full batch.
"""

import json
from collections.abc import Callable

from antiphon.report.colocated import Colocated, Target, nearest_colocated, preamble
from antiphon.report.words import commented, plural
from antiphon.specs.cluster import NodeGroup
from antiphon.specs.model import WEIGHTS_ONLY, PrecisionSpec
from antiphon.specs.plan import PHASES, Plan

Options = list[tuple[str, str | int | None]]
"""Command line options with their values; None: a switch."""
Server = Callable[[Colocated, Target, NodeGroup, bool], tuple[str, list[str]]]
"""(the nearest deployment of a phase, what else is needed, its nodes, whether it is one pool of two) -> the commands
that start it, and what they lose."""
VLLM, SGLANG = "0.32", "0.5.23"
SGLANG_PORT = 5000
LEAST_BATCHED_TOKENS = 8192
"""Batched tokens of a server that also prefills: what vLLM takes for one with an API."""
KV_TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
ROUTED = "two kinds of server: {router} sends a prompt to a prefill server, then its keys and values to a decode server"
DEEPEP_MOST_ROWS = 1024
DEEPEP_RANKS_IN_NODE = 8
NORMAL_RANKS, NORMAL_NODES = (2, 4, 8), (2, 4, 8, 16, 18, 20)
LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
SGLANG_DEFAULT_ROWS = 128
NVSHMEM_DEFAULT_DEPTH = 1024
_SCALED_TOGETHER = 128  # elements of a row in FP8 that share a scale


def vllm_command(plan: Plan, target: Target) -> str:
    """A shell script: per phase, comments that tell what is lost, then the command (two where ranks span nodes)."""
    return _script(plan, target, "vLLM", VLLM, "a proxy, such as vLLM's llm-d,", _vllm_server)


def sglang_command(plan: Plan, target: Target) -> str:
    """A shell script: per phase, comments that tell what is lost, then the command."""
    return _script(plan, target, "SGLang", SGLANG, "SGLang's router (--pd-disaggregation)", _sglang_server)


def _script(plan: Plan, target: Target, engine: str, version: str, router: str, server: Server) -> str:
    text = commented(ROUTED.format(router=router)) if len(plan.phases) > 1 else ""
    for name in PHASES:
        if name in plan.phases:
            nearest = nearest_colocated(plan, name, target.workload.slo)
            # a decode server is given prompts that another has computed
            is_pool = len(plan.phases) > 1 or name == "decode"
            commands, lost = server(nearest, target, _nodes(nearest, target), is_pool)
            text += preamble(plan, nearest, target, engine, version, lost) + commands
    return text


def _nodes(nearest: Colocated, target: Target) -> NodeGroup:
    """The smallest nodes that the deployment uses."""
    used = {use.device for use in nearest.plan.devices}
    groups = [group for group in target.cluster.groups if group.device.name in used]
    return min(groups, key=lambda group: group.devices_per_node)


def _format_options(precision: PrecisionSpec, fp8_kv: str) -> Options:
    """Options both engines share: formats of keys and values and of weights; `fp8_kv` is how fp8 is spelled there."""
    options: Options = [("--kv-cache-dtype", fp8_kv if precision.kv == "fp8" else "auto")]
    if precision.weights in WEIGHTS_ONLY or precision.experts in WEIGHTS_ONLY:
        return options
    return [*options, ("--quantization", "fp8") if precision.weights == "fp8" else ("--dtype", precision.weights)]


def _shell_command(program: str, options: Options, variables: dict[str, int] | None = None) -> str:
    """``NAME=1 program \\`` and one option a line. `variables`: of its environment."""
    start = " ".join([*(f"{name}={value}" for name, value in (variables or {}).items()), program])
    return " \\\n  ".join([start, *(name if value is None else f"{name} {value}" for name, value in options)]) + "\n"


def _proposed_tokens(nearest: Colocated, target: Target, engine: str) -> tuple[int, list[str]]:
    """(tokens of a step that the model's own layers propose, those that the command cannot ask for)."""
    drafts = 0 if nearest.name == "prefill" else target.workload.draft_tokens
    if target.draft_layers or not drafts:
        return drafts, []
    lost = f"{plural(drafts, 'proposed token')} a step: {engine} needs a draft model, and this one has no layers for it"
    return 0, [lost]


def _exchange(nearest: Colocated, target: Target, nodes: NodeGroup) -> tuple[str, bool, list[str]]:
    """(the library whose kernels send rows to whole experts, whether by its low-latency ones, kernels that the plan
    would have and that do not run so). DeepEP on NVIDIA, MoRI on AMD; "": the engine's own."""
    if not nearest.is_exchanged or nodes.device.kind != "gpu":
        return "", False, []
    library = "mori" if nodes.device.name.startswith("MI") else "deepep"
    decodes = nearest.name == "decode"  # a serving step has prompts, too
    why_not = why_no_low_latency(
        nearest.rows_of_rank(target.workload),
        hidden_size=target.hidden_size,
        num_experts=nearest.num_experts + nearest.redundant_experts,
        room_bytes=nodes.device.memory_bytes * target.cluster.efficiency.memory_reserve,
    )
    is_short, ranks = decodes and not why_not, nearest.devices_per_stage
    if library == "deepep" and not takes_ranks(ranks, is_low_latency=is_short):
        built = "DeepEP's run on 2, 4 or 8 ranks or some numbers of nodes of 8"
        return "", False, [f"exchange kernels: {built}, not on {ranks} ranks"]
    return library, is_short, [f"low-latency exchange kernels: {why_not}"] if decodes and why_not else []


def why_no_low_latency(num_rows: int, *, hidden_size: int, num_experts: int, room_bytes: float) -> str:
    """Why DeepEP's low-latency kernels do not run in steps of `num_rows` rows of a rank, `room_bytes` being free on a
    device; empty where they do. `hidden_size` 0: not known, and then not checked."""
    if num_rows > DEEPEP_MOST_ROWS:
        return f"{num_rows:,} rows of a rank in a step: DeepEP's low-latency kernels take {DEEPEP_MOST_ROWS:,}"
    if hidden_size and hidden_size not in LOW_LATENCY_HIDDEN:
        return f"DeepEP has none for rows of {hidden_size:,} elements"
    needed = low_latency_bytes(num_rows, hidden_size, num_experts)
    if needed <= room_bytes:
        return ""
    return f"low-latency buffers of {needed / 1e9:.3g} GB: a device has {room_bytes / 1e9:.3g} GB beside the plan"


def low_latency_bytes(num_rows: int, hidden_size: int, num_experts: int) -> int:
    """Bytes of a device that DeepEP's low-latency buffers take: both ways, two sets, `num_rows` to every expert."""
    scales = hidden_size // _SCALED_TOGETHER
    sent = 16 + max(2 * hidden_size, hidden_size + 4 * scales)
    returned = 2 * hidden_size + 4 * scales
    sending = max(num_rows * sent, num_experts * num_rows * returned)
    return 2 * (sending + num_experts * num_rows * max(sent, returned))


def takes_ranks(num_ranks: int, *, is_low_latency: bool) -> bool:
    """Whether DeepEP's kernels run on this many ranks."""
    if is_low_latency:
        return num_ranks < DEEPEP_RANKS_IN_NODE or num_ranks % DEEPEP_RANKS_IN_NODE == 0
    num_nodes, rest = divmod(num_ranks, DEEPEP_RANKS_IN_NODE)
    return num_ranks in NORMAL_RANKS or (rest == 0 and num_nodes in NORMAL_NODES)


def _queue(num_rows: int) -> dict[str, int]:
    """The variable that NVSHMEM needs for steps of `num_rows` rows, whatever the engine."""
    depth = 2 * (num_rows + 1)
    return {"NVSHMEM_QP_DEPTH": depth} if depth > NVSHMEM_DEFAULT_DEPTH else {}


def _vllm_losses(nearest: Colocated, nodes: NodeGroup) -> list[str]:
    parallel, lost = nearest.plan.parallel, []
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


def _vllm_server(nearest: Colocated, target: Target, nodes: NodeGroup, is_pool: bool) -> tuple[str, list[str]]:
    parallel = nearest.plan.parallel
    drafts, no_drafts = _proposed_tokens(nearest, target, "vLLM")
    library, is_short, no_kernels = _exchange(nearest, target, nodes)
    rows = nearest.rows_of_rank(target.workload)
    options: Options = [("--tensor-parallel-size", parallel.attention_tp)]
    if parallel.pp > 1:
        options.append(("--pipeline-parallel-size", parallel.pp))
    if parallel.attention_dp > 1:
        options.append(("--data-parallel-size", parallel.attention_dp))
    if parallel.expert_ep > 1:
        options.append(("--enable-expert-parallel", None))
        if library:
            options.append(("--all2all-backend", f"{library}_{'low_latency' if is_short else 'high_throughput'}"))
        if library == "deepep" and nearest.overlaps_two_batches:
            options.append(("--enable-dbo", None))
        if target.is_skewed or nearest.redundant_experts:
            redundant = {"num_redundant_experts": nearest.redundant_experts}
            options += [("--enable-eplb", None), ("--eplb-config", _quoted(redundant))]
    if nearest.name == "prefill":
        options.append(("--max-num-batched-tokens", nearest.per_rank))
    else:
        options += [("--max-num-seqs", nearest.per_rank), ("--max-num-batched-tokens", rows)]
    if drafts:
        options.append(("--speculative-config", _quoted({"method": "mtp", "num_speculative_tokens": drafts})))
    options += [("--gpu-memory-utilization", f"{target.memory_used:.2f}"), *_format_options(target.precision, "fp8")]
    if is_pool:
        options.append(("--kv-transfer-config", _quoted(KV_TRANSFER)))
    commands = _vllm_commands(nearest, nodes, f"vllm serve {target.model}", options, _queue(rows) if is_short else {})
    return commands, [*_vllm_losses(nearest, nodes), *no_drafts, *no_kernels]


def _vllm_commands(
    nearest: Colocated, nodes: NodeGroup, program: str, options: Options, variables: dict[str, int]
) -> str:
    """One command, or one for each kind of node that its ranks span."""
    parallel, per_node = nearest.plan.parallel, nodes.devices_per_node
    per_rank = parallel.attention_tp * parallel.pp
    if per_rank * parallel.attention_dp <= per_node:
        return _shell_command(program, options, variables)
    if per_rank <= per_node:
        return _on_several_nodes(program, options, variables, parallel.attention_dp, per_node // per_rank)
    note = commented(f"a rank of {per_rank} devices spans nodes of {per_node}: start Ray on all of them first")
    if parallel.attention_dp == 1:
        return note + _shell_command(program, [*options, ("--distributed-executor-backend", "ray")], variables)
    options = [*options, ("--data-parallel-backend", "ray")]
    return note + "VLLM_RAY_DP_PACK_STRATEGY=span " + _shell_command(program, options, variables)


def _quoted(value: object) -> str:
    return f"'{json.dumps(value)}'"


def _on_several_nodes(program: str, options: Options, variables: dict[str, int], num_ranks: int, local: int) -> str:
    """Data-parallel ranks that span nodes: the first node serves, the others run without a front end."""
    shared: Options = [*options, ("--data-parallel-size-local", local), ("--data-parallel-address", "$HEAD")]
    others: Options = [*shared, ("--headless", None), ("--data-parallel-start-rank", f"$((NODE*{local}))")]
    num_nodes, uneven = -(-num_ranks // local), num_ranks % local
    text = commented(f"on the first of {num_nodes} nodes; HEAD is its address")
    text += _shell_command(program, shared, variables)
    text += commented(f"on the others, NODE = 1 to {num_nodes - 1}" if num_nodes > 2 else "on the other, NODE = 1")
    if uneven:
        text += commented(f"the last one runs fewer ranks: --data-parallel-size-local {uneven} there")
    return text + _shell_command(program, others, variables)


def _sglang_server(nearest: Colocated, target: Target, nodes: NodeGroup, is_pool: bool) -> tuple[str, list[str]]:
    parallel, batch = nearest.plan.parallel, nearest.plan.batch
    drafts, no_drafts = _proposed_tokens(nearest, target, "SGLang")
    library, is_short, no_kernels = _exchange(nearest, target, nodes)
    if parallel.expert_tp > 1:  # its exchange kernels need whole experts on every device of a stage
        library, is_short = "", False
    options: Options = [("--model-path", target.model), ("--tp-size", nearest.devices_per_stage)]
    if parallel.attention_dp > 1:
        options.append(("--attn-dp-size", parallel.attention_dp))
    if parallel.expert_ep > 1:
        options += _sglang_experts(nearest, target, library, is_short)
    if parallel.pp > 1:
        options.append(("--pp-size", parallel.pp))
    if nearest.name != "prefill":
        options.append(("--max-running-requests", batch))
    if nearest.name != "decode":
        each_step = (nearest.plan.step_tokens or LEAST_BATCHED_TOKENS) * parallel.attention_dp
        options.append(("--chunked-prefill-size", batch if nearest.name == "prefill" else each_step))
    if drafts:
        options += [("--speculative-algorithm", "EAGLE"), ("--speculative-num-steps", drafts)]
        options += [("--speculative-eagle-topk", 1), ("--speculative-num-draft-tokens", drafts + 1)]
    options += [("--mem-fraction-static", f"{target.memory_used:.2f}"), *_format_options(target.precision, "fp8_e4m3")]
    if is_pool:
        options.append(("--disaggregation-mode", nearest.name))
    text, num_nodes = "", _equal_nodes(nearest.devices_per_stage * parallel.pp, nodes.devices_per_node)
    if num_nodes > 1:
        last = num_nodes - 1
        text = commented(f"on each of {num_nodes} nodes; HEAD is the first one's address, RANK = 0 to {last}")
        options += [("--nnodes", num_nodes), ("--node-rank", "$RANK"), ("--dist-init-addr", f"$HEAD:{SGLANG_PORT}")]
    variables, rows = {}, nearest.rows_of_rank(target.workload)
    if is_short and rows > SGLANG_DEFAULT_ROWS:
        variables["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] = rows
    if is_short:
        variables |= _queue(rows)
    return text + _shell_command("python -m sglang.launch_server", options, variables), [*no_drafts, *no_kernels]


def _sglang_experts(nearest: Colocated, target: Target, library: str, is_short: bool) -> Options:
    """How experts are split and balanced, and how rows reach them."""
    options: Options = [("--ep-size", nearest.plan.parallel.expert_ep)]
    if library:
        options += [("--moe-a2a-backend", library), ("--deepep-mode", "low_latency" if is_short else "normal")]
    if library and nearest.overlaps_two_batches:
        options.append(("--enable-two-batch-overlap", None))
    if target.is_skewed or nearest.redundant_experts:
        options.append(("--enable-eplb", None))
    if nearest.redundant_experts:
        options.append(("--ep-num-redundant-experts", nearest.redundant_experts))
    return options


def _equal_nodes(num_devices: int, most: int) -> int:
    """The fewest nodes that take equally many devices each, at most this many: SGLang knows no others."""
    return next(count for count in range(-(-num_devices // most), num_devices + 1) if num_devices % count == 0)
