"""The vLLM and SGLang commands nearest to a plan.

vLLM's terms (its pages on data parallel and expert parallel deployment, version 0.12): `--tensor-parallel-size` and
`--data-parallel-size` are attention's; experts are split over all TP x DP ranks, as whole experts with
`--enable-expert-parallel`, as slices of each without. `--max-num-seqs` counts the requests of one data-parallel rank.

SGLang's terms (its pages on server arguments and expert parallelism): `--tp-size` counts all devices of a pipeline
stage; with `--enable-dp-attention` attention is data-parallel in `--dp-size` groups of tp / dp devices; experts are
split in `--ep-size` groups, inside a group by tensor. `--max-running-requests` counts the requests of the whole server.
"""

from antiphon.report.colocated import (
    Colocated,
    Options,
    Target,
    commented,
    format_options,
    nearest_colocated,
    preamble,
    shell_command,
)
from antiphon.specs.plan import Plan


def vllm_command(plan: Plan, target: Target) -> str:
    """A shell script: comments that tell what is lost, then the command (two where ranks span nodes)."""
    nearest = nearest_colocated(plan, target.slo)
    text = preamble(plan, nearest, target, "vLLM")
    parallel = nearest.parallel
    if parallel.expert_ep > 1 and parallel.expert_tp > 1:
        text += commented(
            f"  - experts in EP {parallel.expert_ep} x TP {parallel.expert_tp}: vLLM splits them over all "
            f"{nearest.devices_per_stage} ranks as whole experts"
        )
    return text + _vllm_commands(nearest, target)


def _vllm_commands(nearest: Colocated, target: Target) -> str:
    parallel = nearest.parallel
    options = _vllm_options(nearest, target)
    program = f"vllm serve {target.model}"
    per_rank = parallel.attention_tp * parallel.pp
    if per_rank * parallel.attention_dp <= target.devices_per_node:
        return shell_command(program, options)
    if per_rank > target.devices_per_node:
        note = f"a rank of {per_rank} devices spans nodes of {target.devices_per_node}: start Ray on all of them first"
        return commented(note) + shell_command(program, [*options, ("--distributed-executor-backend", "ray")])
    return _on_several_nodes(program, options, parallel.attention_dp, target.devices_per_node // per_rank)


def _vllm_options(nearest: Colocated, target: Target) -> Options:
    parallel = nearest.parallel
    options: Options = [("--tensor-parallel-size", parallel.attention_tp)]
    if parallel.pp > 1:
        options.append(("--pipeline-parallel-size", parallel.pp))
    if parallel.attention_dp > 1:
        options.append(("--data-parallel-size", parallel.attention_dp))
    if parallel.expert_ep > 1:
        options.append(("--enable-expert-parallel", None))
    options.append(("--max-num-seqs", nearest.requests_per_rank))
    options.append(("--gpu-memory-utilization", f"{1 - target.memory_reserve:.2f}"))
    return options + format_options(target.precision, "fp8")


def _on_several_nodes(program: str, options: Options, num_ranks: int, local: int) -> str:
    """Data-parallel ranks that span nodes: the first node serves, the others run without a front end."""
    shared: Options = [*options, ("--data-parallel-size-local", local), ("--data-parallel-address", "$HEAD")]
    others: Options = [*shared, ("--headless", None), ("--data-parallel-start-rank", f"$((NODE*{local}))")]
    num_nodes, uneven = -(-num_ranks // local), num_ranks % local
    text = commented(f"on the first of {num_nodes} nodes; HEAD is its address") + shell_command(program, shared)
    text += commented(f"on the others, NODE = 1 to {num_nodes - 1}")
    if uneven:
        text += commented(f"the last one runs fewer ranks: --data-parallel-size-local {uneven} there")
    return text + shell_command(program, others)


SGLANG_PORT = 5000


def sglang_command(plan: Plan, target: Target) -> str:
    """A shell script: comments that tell what is lost, then the command."""
    nearest = nearest_colocated(plan, target.slo)
    text = preamble(plan, nearest, target, "SGLang")
    num_nodes = -(-nearest.devices_per_stage * nearest.parallel.pp // target.devices_per_node)
    options = _sglang_options(nearest, target)
    if num_nodes > 1:
        text += commented(f"on each of {num_nodes} nodes; HEAD is the first one's address, RANK = 0 to {num_nodes - 1}")
        options += [("--nnodes", num_nodes), ("--node-rank", "$RANK"), ("--dist-init-addr", f"$HEAD:{SGLANG_PORT}")]
    return text + shell_command("python -m sglang.launch_server", options)


def _sglang_options(nearest: Colocated, target: Target) -> Options:
    parallel = nearest.parallel
    options: Options = [("--model-path", target.model), ("--tp-size", nearest.devices_per_stage)]
    if parallel.attention_dp > 1:
        options += [("--dp-size", parallel.attention_dp), ("--enable-dp-attention", None)]
    if parallel.expert_ep > 1:
        options.append(("--ep-size", parallel.expert_ep))
    if parallel.pp > 1:
        options.append(("--pp-size", parallel.pp))
    options.append(("--max-running-requests", nearest.batch))
    options.append(("--mem-fraction-static", f"{1 - target.memory_reserve:.2f}"))
    return options + format_options(target.precision, "fp8_e4m3")
