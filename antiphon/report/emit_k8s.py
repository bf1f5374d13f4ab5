"""Kubernetes objects that run a disaggregated plan with this engine: `antiphon serve` and `antiphon worker --join`.

1. one LeaderWorkerSet, a replica per instance: the leader pod runs the engine and the first attention worker, every
   worker pod is one expert worker that joins the leader (`LWS_LEADER_ADDRESS`)
2. one StatefulSet for the other attention workers, on attention's kind of node; an ordinal says which leader to join
3. a Service in front of the leaders, and a Secret to fill in: both sides must prove that they know it

A LeaderWorkerSet has one template for all its workers, so attention and experts of different devices cannot share it.
A worker of this engine is one device: where the plan has TP, each of its devices becomes a worker, and a comment says
so. Rejected: a colocated plan here. `antiphon serve` runs that in one pod, without any of this.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from antiphon.base.errors import UserError
from antiphon.report.words import LAYOUT_TITLES, commented, degrees_text, devices_text, plural
from antiphon.specs.plan import PhaseName, PhasePlan, Plan

IMAGE = "antiphon:latest"
JOIN_PORT = 7700
HTTP_PORT = 8000
PATIENCE_S = 600  # workers start before the leader has loaded its part
SERVED = ("bfloat16", "float16", "float32", "fp8", "int4", "mxfp4")
"""Formats of weights that this engine reads and keeps in memory as they are stored."""
RESOURCES = {"gpu": "nvidia.com/gpu", "npu": "huawei.com/Ascend910", "cpu": "cpu"}


def kubernetes_manifest(plan: Plan, *, model: str, num_experts: int, device_kinds: Mapping[str, str]) -> str:
    """YAML for ``kubectl apply -f``. `model`: the checkpoint's folder inside the pods; `num_experts`: of the model, the
    most expert workers there can be; `device_kinds`: device name -> gpu, npu or cpu. `UserError` if colocated."""
    name, phase = chosen_phase(plan)
    if phase.layout != "disaggregated":
        raise UserError(
            f"--emit k8s writes attention and expert workers, this plan is {LAYOUT_TITLES[phase.layout]}: "
            f"use --emit vllm or sglang, or plan with --layout disaggregated"
        )
    formats = [plan.precision.weights, plan.precision.experts or plan.precision.weights]
    if unknown := sorted(set(formats) - set(SERVED)):
        raise UserError(
            f"--emit k8s: the plan counts weights in {', '.join(unknown)}, which this engine does not read: plan with "
            f"--precision weights= one of {', '.join(SERVED)}"
        )
    sizes = _sizes(phase, num_experts)
    head = commented(
        f"{plan.model} on {plan.cluster}, {name}, workload {plan.workload}",
        f"plan: {degrees_text(phase.layout, phase.parallel)}; {devices_text(phase.devices)}",
        *_notes(phase, sizes),
        f"the checkpoint has weights in {formats[0]}, routed experts' in {formats[1]}: what it stores is kept",
        "fill in: the image, the label 'accelerator' of the nodes, the claim 'model', the secret",
    )
    deployment = _Deployment(plan=plan, phase=phase, sizes=sizes, model=model, device_kinds=device_kinds)
    objects: str = yaml.dump_all(deployment.objects(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return head + objects


def chosen_phase(plan: Plan) -> tuple[PhaseName, PhasePlan]:
    """The phase that one engine for both is configured for: the one that gives tokens, if it was planned."""
    names: tuple[PhaseName, ...] = ("serve", "decode", "prefill")
    name = next(name for name in names if name in plan.phases)
    return name, plan.phases[name]


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Scripts as blocks of lines, which people read and edit; nothing by reference."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def _sizes(phase: PhasePlan, num_experts: int) -> dict[str, int]:
    """Workers of one device each: attention, experts, and attention workers outside the leader's pod."""
    attention = phase.parallel.attention_dp * phase.parallel.attention_tp
    experts = min(phase.parallel.expert_workers * phase.parallel.expert_tp, num_experts)
    return {"attention": attention, "experts": experts, "others": attention - 1}


def _notes(phase: PhasePlan, sizes: dict[str, int]) -> list[str]:
    parallel = phase.parallel
    notes = []
    if parallel.attention_tp > 1 or parallel.expert_tp > 1:
        notes.append(
            f"a worker of this engine is one device: {plural(sizes['attention'], 'attention worker')} and "
            f"{plural(sizes['experts'], 'expert worker')} instead of tensor parallelism; the prediction is not of these"
        )
    if sizes["experts"] < parallel.expert_workers * parallel.expert_tp:
        unused = parallel.expert_workers * parallel.expert_tp - sizes["experts"]
        notes.append(f"{plural(unused, 'expert device')} of the plan stay unused: there are no more experts to hold")
    return notes


@dataclass(frozen=True, kw_only=True)
class _Deployment:
    """The objects of one plan. All of them carry the same name, which is also the leaders' host name."""

    plan: Plan
    phase: PhasePlan
    sizes: dict[str, int]
    model: str
    device_kinds: Mapping[str, str]

    @property
    def name(self) -> str:
        return _dns_label(self.plan.model)

    def objects(self) -> list[dict[str, Any]]:
        objects = [self._secret(), self._service(), self._group()]
        return objects + ([self._attention()] if self.sizes["others"] else [])

    def _secret(self) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": self.name},
            "stringData": {"secret": "at least 16 bytes, for example from: openssl rand -hex 32"},
        }

    def _service(self) -> dict[str, Any]:
        label = "leaderworkerset.sigs.k8s.io/"
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": f"{self.name}-http"},
            "spec": {
                "selector": {f"{label}name": self.name, f"{label}worker-index": "0"},
                "ports": [{"name": "http", "port": HTTP_PORT}],
            },
        }

    def _group(self) -> dict[str, Any]:
        experts = f"exec antiphon worker --role experts --join $LWS_LEADER_ADDRESS:{JOIN_PORT} --host $POD_IP"
        return {
            "apiVersion": "leaderworkerset.x-k8s.io/v1",
            "kind": "LeaderWorkerSet",
            "metadata": {"name": self.name},
            "spec": {
                "replicas": self.phase.num_instances,
                "leaderWorkerTemplate": {
                    "size": 1 + self.sizes["experts"],
                    "restartPolicy": "None",
                    "leaderTemplate": {"spec": self._pod("attention", self._serve_script(), is_leader=True)},
                    "workerTemplate": {"spec": self._pod("experts", f"{experts} --patience {PATIENCE_S}")},
                },
            },
        }

    def _attention(self) -> dict[str, Any]:
        """Attention workers beyond the leaders' own: pod number n joins instance n / workers per instance."""
        others = self.sizes["others"]
        labels = {"app": f"{self.name}-attention"}
        script = (
            f"instance=$(( ${{HOSTNAME##*-}} / {others} ))\n"
            f"exec antiphon worker --role attention --join {self.name}-$instance.{self.name}:{JOIN_PORT} "
            f"--host $POD_IP --patience {PATIENCE_S}"
        )
        return {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": labels["app"]},
            "spec": {
                "replicas": self.phase.num_instances * others,
                "podManagementPolicy": "Parallel",
                "serviceName": self.name,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": self._pod("attention", script)},
            },
        }

    def _serve_script(self) -> str:
        attention, experts = self.sizes["attention"], self.sizes["experts"]
        max_running = -(-self.phase.batch // attention)
        device = "cpu" if self._kind("attention") == "cpu" else "cuda"
        options = (
            f"--host 0.0.0.0 --port {HTTP_PORT}",
            f"--layout disaggregated --attention {attention} --experts {experts}",
            f"--micro-batches {self.phase.micro_batches} --device {device}",
            f"--max-running {max_running} --max-batch-tokens {max(2048, max_running)}",
            f"--join-address $POD_IP:{JOIN_PORT} --join-workers {self.sizes['others']}+{experts}",
        )
        return " \\\n  ".join((f"exec antiphon serve {self.model}", *options))

    def _kind(self, role: str) -> str:
        return self.device_kinds[self._device(role)]

    def _device(self, role: str) -> str:
        return next(use.device for use in self.phase.devices if use.role == role)

    def _pod(self, role: str, script: str, *, is_leader: bool = False) -> dict[str, Any]:
        """A pod's specification: one container, one device."""
        container: dict[str, Any] = {"name": role, "image": IMAGE, "command": ["/bin/sh", "-ec", script]}
        if is_leader:
            container["ports"] = [{"containerPort": HTTP_PORT}, {"containerPort": JOIN_PORT}]
            container["readinessProbe"] = {"httpGet": {"path": "/health", "port": HTTP_PORT}}
        secret = {"secretKeyRef": {"name": self.name, "key": "secret"}}
        container["env"] = [
            {"name": "ANTIPHON_JOIN_SECRET", "valueFrom": secret},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ]
        container["resources"] = {"limits": {RESOURCES[self._kind(role)]: 1}}
        container["volumeMounts"] = [{"name": "model", "mountPath": self.model, "readOnly": True}]
        return {
            "nodeSelector": {"accelerator": _label(self._device(role))},
            "containers": [container],
            "volumes": [{"name": "model", "persistentVolumeClaim": {"claimName": "model", "readOnly": True}}],
        }


def _dns_label(name: str) -> str:
    """A name Kubernetes takes: lower case, digits and dashes, starting with a letter, room for the pods' suffixes."""
    cleaned = re.sub(r"[^a-z0-9]+", "-", name.rsplit("/", 1)[-1].lower()).strip("-")
    return f"antiphon-{cleaned}"[:40].rstrip("-")


def _label(device: str) -> str:
    """A label's value: letters, digits, dashes, dots and underscores, at most 63."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", device).strip("-._")[:63]
