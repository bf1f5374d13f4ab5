"""`antiphon plan` about a layout or model of one's own: --pin, --compare, --model-set, and plans that need no files."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from antiphon.cli import main as cli
from antiphon.models.config import model_spec
from antiphon.serve.served_plan import served_plan_of
from antiphon.specs.plan import read_plan
from tests.cli.plan_harness import FIVE_EXPERTS, ODD_CLUSTER, PlanCommand

FREE = ("--slo-tpot", "none")


@pytest.fixture
def antiphon(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> PlanCommand:
    return PlanCommand(monkeypatch, capfd)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "five" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(FIVE_EXPERTS))
    return path


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "odd.toml"
    path.write_text(ODD_CLUSTER)
    return path


def test_what_is_pinned_is_kept_and_the_rest_is_searched(
    antiphon: PlanCommand, model: Path, cluster: Path, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    pins = "dp=2,experts.ep=4,micro_batches=3,batch=96"
    antiphon.plans(model, "--cluster", cluster, "--pin", pins, "--json", file, *FREE)
    phase = read_plan(file).phases["decode"]
    assert (phase.layout, phase.parallel.attention_dp, phase.parallel.expert_workers) == ("disaggregated", 2, 4)
    assert (phase.micro_batches, phase.batch) == (3, 96)


@pytest.mark.parametrize(("phase", "batch"), [("decode", 64), ("prefill", 4096)])
def test_a_pinned_colocated_layout(
    antiphon: PlanCommand, model: Path, cluster: Path, tmp_path: Path, phase: str, batch: int
) -> None:
    file, pins = tmp_path / "plan.json", f"tp=2,dp=2,experts.tp=4,ep=1,pp=2,micro_batches=2,batch={batch}"
    antiphon.plans(model, "--cluster", cluster, "--phase", phase, "--pin", pins, "--json", file, *FREE)
    (found,) = read_plan(file).phases.values()
    sizes = found.parallel
    assert (sizes.attention_tp, sizes.attention_dp, sizes.expert_tp, sizes.expert_ep, sizes.pp) == (2, 2, 4, 1, 2)
    assert found.batch == batch


def test_a_pinned_batch_is_not_lowered_for_a_promise(antiphon: PlanCommand, model: Path, cluster: Path) -> None:
    code, _, err = antiphon.run(model, "--cluster", cluster, "--pin", "batch=4096", "--slo-tpot", "1us")
    assert code == 2  # no such unit
    code, _, err = antiphon.run(model, "--cluster", cluster, "--pin", "batch=4096", "--slo-tpot", "0.1ms")
    assert (code, "the nearest feasible promise is" in err) == (1, True)


@pytest.mark.parametrize(
    ("pin", "code", "message"),
    [
        ("width=2", 2, r"--pin 'width=2': 'width' is none of attention\.tp, .*"),
        ("pp=0", 2, r"--pin 'pp=0': write a whole number from 1 to .*"),
        ("dp=2,attention.dp=4", 2, r"--pin 'attention.dp=4': attention.dp is given twice: leave one of them out"),
        ("tp=5", 1, r"decode: no layout on odd has attention.tp=5: a TP degree divides .*"),
    ],
)
def test_pins_that_cannot_be(
    antiphon: PlanCommand, model: Path, cluster: Path, pin: str, code: int, message: str
) -> None:
    pins = pin if code == 2 else f"{pin},pp=2"
    message = message.replace("tp=5:", "tp=5, pp=2:")
    antiphon.refuses(code, message, model, "--cluster", cluster, "--pin", pins, *FREE)


def test_one_batch_is_not_of_two_phases(antiphon: PlanCommand, model: Path, cluster: Path) -> None:
    message = r"--pin batch=\.\.\. means requests in decode and tokens in prefill: plan one phase at a time"
    antiphon.refuses(2, message, model, "--cluster", cluster, "--phase", "both", "--pin", "batch=8")


def test_two_plans_are_compared(antiphon: PlanCommand, model: Path, cluster: Path, tmp_path: Path) -> None:
    best, own = tmp_path / "best.json", tmp_path / "own.json"
    antiphon.plans(model, "--cluster", cluster, "--json", best, *FREE)
    antiphon.plans(model, "--cluster", cluster, "--json", own, "--pin", "batch=8", *FREE)
    text = antiphon.plans("--compare", own, best)
    ratio = read_plan(best).phases["decode"].predicted.per_gpu / read_plan(own).phases["decode"].predicted.per_gpu
    assert "Decode: best gives" in text
    assert f"{ratio:.2f} ×" in text
    assert "different questions" not in text
    assert "no model of costs tells them apart" in antiphon.plans("--compare", best, best)
    antiphon.plans(model, "--cluster", "one-h100-server", "--precision", "fp8", "--json", own, *FREE)
    differing = " ".join(antiphon.plans("--compare", own, best).split())
    assert "these plans answer different questions: cluster (" in differing
    assert "precision (combine, compute, dispatch, kv, weights)" in differing


def test_a_plan_needs_no_other_file(
    antiphon: PlanCommand,
    model: Path,
    cluster: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "plan.json"
    antiphon.plans(model, "--cluster", cluster, "--slo-tpot", "77ms", "--json", file)
    model.unlink()
    cluster.unlink()
    monkeypatch.setattr(sys, "argv", ["antiphon", "simulate", str(file), "--requests", "20"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out = capfd.readouterr().out
    assert caught.value.code == 0
    assert "within 77.00 ms" in out
    assert "it was made for another" not in out


def test_a_model_nobody_runs_is_planned_with_what_is_given(
    antiphon: PlanCommand, cluster: Path, tmp_path: Path
) -> None:
    path = tmp_path / "week.json"
    sizes = {key: value for key, value in FIVE_EXPERTS.items() if key != "num_local_experts"}
    path.write_text(json.dumps(sizes | {"model_type": "week", "num_lanes": 9}))
    missing = r"config\.json: none of num_experts, .*: the experts of this model are unknown: give --model-set .*"
    antiphon.refuses(1, missing, path, "--cluster", cluster)
    text = " ".join(antiphon.plans(path, "--cluster", cluster, "--model-set", "num_experts=5").split())
    assert "model_type = 'week' does not run here" in text
    assert "of config.json not counted, because it is unknown here: num_lanes" in text
    unlike = r"week has layers with a state .*: --phase train cannot price that, plan --phase decode, prefill or both"
    changes = ("--model-set", "num_experts=5", "--model-set", "attn_layer_period=2", "--model-set", "mamba_d_state=16")
    train = ("--phase", "train", "--sequence-length", "1024", "--global-batch", "8")
    antiphon.refuses(2, unlike, path, "--cluster", cluster, *changes, *train)


def test_only_what_the_engine_runs(antiphon: PlanCommand, model: Path, cluster: Path, tmp_path: Path) -> None:
    """Stages fill and empty in every step of the engine, so they are chosen only where they are asked for."""
    file = tmp_path / "plan.json"
    here = (model, "--runnable-here", "--nodes", cluster, *FREE)
    for layout in ("disaggregated", "tp_pp"):
        antiphon.plans(*here, "--layout", layout, "--json", file)
        phase = read_plan(file).phases["decode"]
        sizes = phase.parallel
        assert (phase.layout, sizes.pp) == (layout, 1)
        if layout == "tp_pp":
            assert (sizes.attention_dp, sizes.expert_ep, sizes.expert_tp) == (1, 1, sizes.attention_tp)
    antiphon.plans(*here, "--layout", "tp_pp", "--pin", "pp=7", "--json", file)
    assert read_plan(file).phases["decode"].parallel.pp == 7
    antiphon.refuses(1, "decode: no layout on odd has pp=7: .*", *here, "--layout", "disaggregated", "--pin", "pp=7")


SLOW_WIRE = """
name = "box"
[[groups]]
num_nodes = 2
devices_per_node = 2
scale_up_domain = 2
scale_up_bytes_per_s = 2e9
node_scale_out_bytes_per_s = 5e7
[groups.device]
name = "core"
kind = "cpu"
memory_bytes = 16e9
memory_bytes_per_s = 1e10
flops_per_s = { bfloat16 = 1e11 }
scale_up_bytes_per_s = 2e9
scale_up_domain = 2
scale_out_bytes_per_s = 2.5e7
power_w = 10.0
[efficiency]
collective_s = ROUND
exchange_s = ROUND
round_s = ROUND
"""


@pytest.mark.parametrize(
    ("round_s", "forms"),
    [(0.0, ("fused", "fused")), (5e-5, ("fused", "synchronous")), (1.0, ("synchronous", "synchronous"))],
)
def test_each_phase_of_a_hybrid_plan_has_the_form_that_is_faster_for_its_rows(
    antiphon: PlanCommand, model: Path, tmp_path: Path, round_s: float, forms: tuple[str, str]
) -> None:
    """And the server that obeys the plan takes it. A prompt is 300 tokens, a step of decode 2 a replica."""
    nodes, file, workload = tmp_path / "nodes.toml", tmp_path / "plan.json", tmp_path / "workload.toml"
    nodes.write_text(SLOW_WIRE.replace("ROUND", str(round_s)))
    workload.write_text('name = "w"\n[input_tokens]\ntrace = [300]\n[output_tokens]\ntrace = [20]\n[slo]\n')
    pins = "attention.tp=2,attention.dp=2,experts.tp=2,experts.ep=2,pp=1"
    here = (model, "--runnable-here", "--nodes", nodes, "--workload", workload, "--layout", "hybrid", *FREE)
    antiphon.plans(*here, "--phase", "prefill", "--pin", pins, "--json", file)
    prefill = read_plan(file).phases["prefill"]
    assert prefill.collectives == forms[0]
    antiphon.plans(*here, "--pin", f"{pins},batch=4", "--json", file)
    plan = read_plan(file)
    assert plan.phases["decode"].collectives == forms[1]
    both = replace(plan, phases={"prefill": prefill, **plan.phases})
    served = served_plan_of(both, model_spec(FIVE_EXPERTS), file)
    assert (served.prefill_collectives, served.decode_collectives) == forms


def test_devices_that_are_not_here(antiphon: PlanCommand, model: Path, cluster: Path) -> None:
    antiphon.refuses(
        2,
        r"--cluster odd has 21 devices of H20, this machine has \d+ GPU\(s\): give a smaller cluster, or its file as "
        r"--nodes FILE if these machines are to run it",
        *(model, "--runnable-here", "--cluster", cluster),
    )
    antiphon.refuses(
        2, "--nodes takes the place of --cluster beside --runnable-here: give these two", model, "--nodes", cluster
    )
