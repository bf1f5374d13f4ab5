"""A plan in the terms of what runs it: this engine, vLLM, SGLang, Kubernetes; for `--emit` and for the page."""

from antiphon.base.errors import UserError
from antiphon.cli.plan_inputs import PlanInputs
from antiphon.report.colocated import Target
from antiphon.report.emit_engines import sglang_command, vllm_command
from antiphon.report.emit_k8s import kubernetes_manifest
from antiphon.specs.plan import Plan

EMITTERS = ("vllm", "sglang", "k8s")
TITLES = {"vllm": "vLLM, the nearest settings", "sglang": "SGLang, the nearest settings", "k8s": "Kubernetes"}


def emitted(name: str, found: Plan, inputs: PlanInputs) -> str:
    """The plan in the terms of another engine, or as objects for Kubernetes."""
    if name == "k8s":
        kinds = {group.device.name: group.device.kind for group in inputs.cluster.groups}
        experts = inputs.model.router.num_experts
        return kubernetes_manifest(found, model=served_path(inputs), num_experts=experts, device_kinds=kinds)
    target = Target(
        model=served_path(inputs), precision=inputs.precision, workload=inputs.workload, cluster=inputs.cluster
    )
    return vllm_command(found, target) if name == "vllm" else sglang_command(found, target)


def served_path(inputs: PlanInputs) -> str:
    """Where an engine finds the weights: the folder, where MODEL is one; else the usual place of a mount with the
    model's name, for the reader to change."""
    return str(inputs.path) if inputs.path.is_dir() else f"/models/{inputs.model_name}"


def launch(found: Plan, inputs: PlanInputs) -> list[tuple[str, str]]:
    """(what starts the plan, its commands), this engine first; those that cannot run it, and why, come last."""
    note = "# starts, or names what of the plan this engine does not run"
    own = f"{note}\nantiphon serve {served_path(inputs)} --plan plan.json"
    ways = [("This engine", own), *((TITLES[name], _or_why_not(name, found, inputs)) for name in EMITTERS)]
    return sorted(ways, key=lambda way: all(line.startswith("#") for line in way[1].splitlines()))


def _or_why_not(name: str, found: Plan, inputs: PlanInputs) -> str:
    try:
        return emitted(name, found, inputs)
    except UserError as error:
        return f"# {error}"
