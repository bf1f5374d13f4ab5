"""The manifest: what Kubernetes reads, that its commands are this program's own, odd counts, what is refused."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import typer
import yaml

from antiphon.base.errors import UserError
from antiphon.cli.main import COMMANDS
from antiphon.report.emit_k8s import kubernetes_manifest
from antiphon.report.gather import Report
from antiphon.specs.model import PrecisionSpec
from antiphon.specs.plan import Plan

KINDS = {"H20": "gpu", "L40S": "gpu"}
SCHEMAS = json.loads((Path(__file__).parent / "data" / "kubernetes_schemas.json").read_text())


def manifest(plan: Plan, num_experts: int = 8) -> dict[str, Any]:
    """The objects by kind."""
    text = kubernetes_manifest(plan, model="/models/mixtral", num_experts=num_experts, device_kinds=KINDS)
    objects = list(yaml.safe_load_all(text))
    assert len({item["kind"] for item in objects}) == len(objects)
    return {item["kind"]: item for item in objects}


def faults(item: dict[str, Any]) -> list[str]:
    """What of an object the published schema of its kind does not take."""
    schema = {**SCHEMAS["kinds"][item["kind"]], "$defs": SCHEMAS["$defs"]}
    return [
        f"{error.instance_path}: {error.message}" for error in jsonschema_rs.validator_for(schema).iter_errors(item)
    ]


def container(template: dict[str, Any]) -> dict[str, Any]:
    (found,) = template["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def command_options(script: str, command: str) -> dict[str, str]:
    """Options of ``exec antiphon COMMAND ...`` in a script."""
    words = shlex.split(script.split(f"exec antiphon {command}", 1)[1].replace("\\\n", ""))
    start = 0 if words[0].startswith("--") else 1
    return dict(zip(words[start::2], words[start + 1 :: 2], strict=True))


def known_options(command: str) -> set[str]:
    found = typer.main.get_command(COMMANDS[command].load())
    return {name for parameter in found.params for name in parameter.opts}


def test_the_leader_serves_and_waits_for_the_others(report: Report) -> None:
    group = manifest(report.plan)["LeaderWorkerSet"]["spec"]
    assert group["replicas"] == 1
    assert group["leaderWorkerTemplate"]["size"] == 9
    leader = container(group["leaderWorkerTemplate"]["leaderTemplate"])
    script = leader["command"][-1]
    assert script.startswith("exec antiphon serve /models/mixtral \\\n")
    options = command_options(script, "serve")
    assert options.keys() <= known_options("serve")
    assert options["--attention"] == "16"
    assert options["--experts"] == "8"
    assert options["--join-workers"] == "15+8"
    assert options["--join-address"] == "$POD_IP:7700"
    assert options["--micro-batches"] == "2"
    assert options["--max-running"] == "96"
    assert options["--device"] == "cuda"
    assert {entry["name"] for entry in leader["env"]} == {"ANTIPHON_JOIN_SECRET", "POD_IP"}
    assert leader["resources"] == {"limits": {"nvidia.com/gpu": 1}}


def test_expert_workers_join_their_leader(report: Report) -> None:
    template = manifest(report.plan)["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    options = command_options(container(template)["command"][-1], "worker")
    assert options.keys() <= known_options("worker")
    assert options["--role"] == "experts"
    assert options["--join"] == "$LWS_LEADER_ADDRESS:7700"
    assert template["spec"]["nodeSelector"] == {"accelerator": "L40S"}


def test_the_other_attention_workers_find_their_leader(report: Report) -> None:
    plan = replace(report.plan, phases={"decode": replace(report.plan.phases["decode"], num_instances=3)})
    objects = manifest(plan)
    attention = objects["StatefulSet"]["spec"]
    assert attention["replicas"] == 45
    assert objects["LeaderWorkerSet"]["spec"]["replicas"] == 3
    script = container(attention["template"])["command"][-1]
    assert "instance=$(( ${HOSTNAME##*-} / 15 ))" in script
    name = objects["LeaderWorkerSet"]["metadata"]["name"]
    assert f"--join {name}-$instance.{name}:7700" in script
    assert attention["template"]["spec"]["nodeSelector"] == {"accelerator": "H20"}


def test_one_attention_worker_needs_no_others(report: Report) -> None:
    decode = report.plan.phases["decode"]
    one = replace(decode, parallel=replace(decode.parallel, attention_dp=1))
    objects = manifest(replace(report.plan, phases={"decode": one}))
    assert "StatefulSet" not in objects
    script = container(objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["leaderTemplate"])["command"][-1]
    assert "--join-workers 0+8" in script


def test_tensor_parallel_devices_become_workers_and_it_says_so(report: Report) -> None:
    decode = report.plan.phases["decode"]
    sizes = replace(decode.parallel, attention_dp=3, attention_tp=2, expert_workers=5, expert_tp=2)
    plan = replace(report.plan, phases={"decode": replace(decode, parallel=sizes)})
    text = kubernetes_manifest(plan, model="/m", num_experts=8, device_kinds=KINDS)
    assert "# a worker of this engine is one device: 6 attention workers and 8 expert workers instead of" in text
    assert "# 2 expert devices of the plan stay unused" in text
    assert "--join-workers 5+8" in text


def test_a_colocated_plan_is_refused(report: Report) -> None:
    plan = replace(report.plan, phases={"prefill": report.plan.phases["prefill"]})
    with pytest.raises(
        UserError, match=r"--emit k8s writes attention and expert workers, this plan is hybrid TP-EP: use"
    ):
        manifest(plan)


def test_scripts_are_blocks_of_lines(report: Report) -> None:
    text = kubernetes_manifest(report.plan, model="/models/mixtral", num_experts=8, device_kinds=KINDS)
    assert "- |-\n" in text
    assert "exec antiphon serve /models/mixtral \\\n" in text
    assert "*id" not in text


def test_every_object_keeps_its_published_schema(report: Report) -> None:
    decode = report.plan.phases["decode"]
    sizes = replace(decode.parallel, attention_dp=1)
    plans = [
        report.plan,
        replace(report.plan, phases={"decode": replace(decode, num_instances=7)}),
        replace(report.plan, phases={"decode": replace(decode, parallel=sizes)}),
    ]
    for plan in plans:
        for item in manifest(plan).values():
            assert faults(item) == []


def test_the_schemas_find_faults(report: Report) -> None:
    group = manifest(report.plan)["LeaderWorkerSet"]
    template = group["spec"]["leaderWorkerTemplate"]
    template["restartPolicy"] = "Sometimes"
    template["workerTemplate"]["spec"]["containers"][0]["volumeMount"] = []
    template["leaderTemplate"]["spec"]["containers"][0]["ports"] = [{"containerPort": "http"}]
    group["spec"]["startupPolicies"] = "LeaderCreated"
    assert len(faults(group)) == 4


@pytest.mark.parametrize("precision", [{"weights": "fp8"}, {"experts": "int4"}, {"experts": "mxfp4"}])
def test_weights_are_served_in_few_bits_as_they_are_stored(report: Report, precision: dict[str, str]) -> None:
    plan = replace(report.plan, precision=PrecisionSpec(**precision))
    text = kubernetes_manifest(plan, model="/m", num_experts=8, device_kinds=KINDS)
    assert f"in {next(iter(precision.values()))}: what it stores is kept" in text


def test_weights_that_this_engine_does_not_read_are_refused(report: Report) -> None:
    plan = replace(report.plan, precision=PrecisionSpec(weights="fp8", experts="nvfp4"))
    with pytest.raises(UserError, match=r"counts weights in nvfp4, which this engine does not read: plan with "):
        kubernetes_manifest(plan, model="/m", num_experts=8, device_kinds=KINDS)
