"""Where a plan goes beside the terminal: a page, another engine's settings, objects for Kubernetes."""

import os
from pathlib import Path

from antiphon.base.errors import UserError
from antiphon.cli.plan_inputs import PlanInputs
from antiphon.report.colocated import Target, nearest_colocated
from antiphon.report.emit_k8s import kubernetes_manifest
from antiphon.report.emit_sglang import sglang_command
from antiphon.report.emit_vllm import vllm_command
from antiphon.specs.plan import Plan

EMITTERS = ("vllm", "sglang", "k8s")


def emitted(name: str, found: Plan, inputs: PlanInputs) -> str:
    """The plan in the terms of another engine, or as objects for Kubernetes."""
    if name == "k8s":
        kinds = {group.device.name: group.device.kind for group in inputs.cluster.groups}
        experts = inputs.model.router.num_experts
        return kubernetes_manifest(found, model=served_path(inputs), num_experts=experts, device_kinds=kinds)
    nearest = nearest_colocated(found, inputs.workload.slo)
    used = {use.device for use in nearest.devices}
    target = Target(
        model=served_path(inputs),
        precision=inputs.precision,
        slo=inputs.workload.slo,
        memory_reserve=inputs.cluster.efficiency.memory_reserve,
        devices_per_node=min(group.devices_per_node for group in inputs.cluster.groups if group.device.name in used),
    )
    return vllm_command(found, target) if name == "vllm" else sglang_command(found, target)


def served_path(inputs: PlanInputs) -> str:
    """Where an engine finds the weights: the folder, where MODEL is one; else the usual place of a mount with the
    model's name, for the reader to change."""
    return str(inputs.path) if inputs.path.is_dir() else f"/models/{inputs.model_name}"


def write_page(text: str, path: Path) -> None:
    """Write the HTML file; it appears whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"cannot write --html {path}: {error.strerror}; name a file you can write to") from error
