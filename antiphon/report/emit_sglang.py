"""The SGLang command nearest to a plan.

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

PORT = 5000


def sglang_command(plan: Plan, target: Target) -> str:
    """A shell script: comments that tell what is lost, then the command."""
    nearest = nearest_colocated(plan, target.slo)
    text = preamble(plan, nearest, target, "SGLang")
    num_nodes = -(-nearest.devices_per_stage * nearest.parallel.pp // target.devices_per_node)
    options = _options(nearest, target)
    if num_nodes > 1:
        text += commented(f"on each of {num_nodes} nodes; HEAD is the first one's address, RANK = 0 to {num_nodes - 1}")
        options += [("--nnodes", num_nodes), ("--node-rank", "$RANK"), ("--dist-init-addr", f"$HEAD:{PORT}")]
    return text + shell_command("python -m sglang.launch_server", options)


def _options(nearest: Colocated, target: Target) -> Options:
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
