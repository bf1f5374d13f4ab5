"""`antiphon plan --phase train`: what it writes, every way of asking wrongly, and options that belong elsewhere."""

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from antiphon.base.errors import UserError
from antiphon.cli.plan import SERVING_ONLY, TRAINING_ONLY
from antiphon.cli.plan_training import parse_training_precision
from antiphon.cost.training.setup import TrainingPrecision
from antiphon.specs.training_plan import read_training_plan, training_plan_from_json
from tests.cli.plan_harness import FIVE_EXPERTS, ODD_CLUSTER, PlanCommand
from tests.cost.training.specimens import training_profile

ROOT = Path(__file__).parents[2]
MEGASCALE = ("msm-internal-352b", "--cluster", "msm-h800", "--phase", "train")
QUESTION = (*MEGASCALE, "--sequence-length", "8192", "--global-batch", "720", "--devices", "240")


@pytest.fixture
def antiphon(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> PlanCommand:
    return PlanCommand(monkeypatch, capfd)


@pytest.fixture
def odd(tmp_path: Path) -> tuple[Path, ...]:
    """A model and a cluster of odd counts."""
    cluster, model = tmp_path / "odd.toml", tmp_path / "five" / "config.json"
    model.parent.mkdir()
    cluster.write_text(ODD_CLUSTER)
    model.write_text(json.dumps(FIVE_EXPERTS))
    return model, cluster


def test_json_page_and_terminal_say_the_same(antiphon: PlanCommand, tmp_path: Path) -> None:
    """The paper: 15 stages of 16 devices, 272.9k tokens/s, MFU 32.48% (MegaScale-MoE, Table 3)."""
    file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    out = antiphon.plans(*QUESTION, "--explain", "--json", file, "--html", page)
    plan = read_training_plan(file)
    assert (plan.model, plan.cluster, plan.device, plan.num_devices) == ("msm-internal-352b", "msm-h800", "H800", 240)
    assert (plan.layout.attention, plan.layout.experts, plan.layout.pipeline) == ("sequence", "expert", 15)
    assert plan.predicted.tokens_per_s == pytest.approx(272.9e3, rel=0.05)
    assert plan.predicted.mfu == pytest.approx(0.3248, abs=0.01)
    assert plan.model_config["num_hidden_layers"] == 60
    assert f"{plan.predicted.tokens_per_s:,.0f}" in out
    assert f"MFU {plan.predicted.mfu:.1%}" in out
    assert f"{plan.num_candidates:,} candidates considered" in out
    for rejected in plan.rejected:
        assert f"{rejected.name}: {rejected.reason}" in " ".join(out.split())
    embedded = re.search(
        r'<script type="application/json" id="plan">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL
    )
    assert embedded is not None
    assert training_plan_from_json(json.loads(embedded.group(1))) == plan
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_json_alone_on_standard_output(antiphon: PlanCommand) -> None:
    mapping = json.loads(antiphon.plans(*QUESTION, "--json", "-"))
    assert {"version", "phase", "model", "cluster", "layout", "predicted", "rejected"} <= mapping.keys()
    assert (mapping["version"], mapping["phase"]) == (1, "train")
    assert all(rejected["reason"] for rejected in mapping["rejected"])


def test_the_dials_reach_the_search(antiphon: PlanCommand) -> None:
    def asked(*more: object) -> dict[str, Any]:
        found = json.loads(antiphon.plans(*QUESTION, "--json", "-", *more))
        assert isinstance(found, dict)
        return found

    base = asked()
    assert (base["layout"]["gradient_wire"], base["layout"]["overlap"], base["layout"]["zero"]) == (
        "bfloat16",
        "intra",
        1,
    )
    plain = asked("--no-compress", "--overlap", "none", "--zero", 3)
    assert (plain["layout"]["gradient_wire"], plain["layout"]["overlap"], plain["layout"]["zero"]) == (
        "float32",
        "none",
        3,
    )
    assert asked("--overlap", "none")["predicted"]["tokens_per_s"] < base["predicted"]["tokens_per_s"]
    fewer = asked("--devices", 120)
    assert fewer["num_devices"] == 120
    assert fewer["predicted"]["tokens_per_s"] < base["predicted"]["tokens_per_s"]
    fp8 = asked("--precision", "fp8")
    assert (fp8["weights"], fp8["compute"], fp8["gradients"], fp8["layout"]["activation_wire"]) == (
        "fp8",
        "fp8",
        "float32",
        "fp8",
    )
    assert fp8["predicted"]["tokens_per_s"] > base["predicted"]["tokens_per_s"]
    small = asked("--precision", "gradients=bf16", "--no-compress")
    assert (small["gradients"], small["layout"]["gradient_wire"]) == ("bfloat16", "bfloat16")
    once = asked("--deduplicate")
    assert once["layout"]["deduplicate"] == (once["layout"]["dispatch"] == "all_to_all")
    assert any(item.get("layout", {}).get("deduplicate") for item in [once, *once["rejected"]])


def test_a_layout_of_ones_own_is_pinned(antiphon: PlanCommand, tmp_path: Path) -> None:
    """The paper's: SP + EP over 8 devices, 15 stages, 2 copies; it measures 272.9k tokens/s."""
    file = tmp_path / "plan.json"
    antiphon.plans(*QUESTION, "--pin", "n=8,pp=15,chunks=1", "--pin", "dp=2", "--json", file)
    plan = read_training_plan(file)
    layout = plan.layout
    assert (layout.model_parallel, layout.pipeline, layout.virtual_stages, layout.data_parallel) == (8, 15, 1, 2)
    assert plan.predicted.tokens_per_s == pytest.approx(272.9e3, rel=0.05)
    why = r"no layout on 240 H800 with n=8, dp=7: it cannot be run: .*: leave some of these out"
    antiphon.refuses(1, why, *QUESTION, "--pin", "n=8,dp=7")
    antiphon.refuses(2, r"--pin 'ep=7': 'ep' is none of n, pp, .*", *QUESTION, "--pin", "ep=7")
    antiphon.refuses(2, r"--pin 'pp=2': pp is given twice: .*", *QUESTION, "--pin", "pp=4,pp=2")


def test_odd_counts_give_a_right_answer(antiphon: PlanCommand, odd: tuple[Path, ...], tmp_path: Path) -> None:
    """Three nodes of seven, one of five, five experts, seven layers, a batch of eleven."""
    model, cluster = odd
    file = tmp_path / "plan.json"
    question = (model, "--cluster", cluster, "--phase", "train", "--sequence-length", 1000, "--global-batch", 11)
    antiphon.plans(*question, "--json", file)
    plan = read_training_plan(file)
    assert plan.model == "five"
    assert plan.layout.num_devices <= {"H20": 21, "L40S": 5}[plan.device]
    antiphon.plans(*question, "--device", "l40s", "--devices", 5, "--json", file)
    assert read_training_plan(file).device == "L40S"
    antiphon.refuses(
        2, "--devices is 6: a plan uses one kind and odd has 5 L40S: .*", *question, "--device", "L40S", "--devices", 6
    )
    antiphon.refuses(2, "--devices is 22: a plan uses one kind and odd has 21 H20: .*", *question, "--devices", 22)


def test_a_group_across_nodes_says_what_is_not_modelled(antiphon: PlanCommand) -> None:
    """With every exchange hidden a layer is shared among two nodes, without overlap it stays within one."""
    plan = json.loads(antiphon.plans(*QUESTION, "--json", "-"))
    note = "devices span nodes: exchanges between nodes are modelled without congestion"
    assert plan["layout"]["model_parallel"] > 8
    assert any(note in words for words in plan["notes"])
    narrow = json.loads(antiphon.plans(*QUESTION, "--overlap", "none", "--json", "-"))
    assert narrow["layout"]["model_parallel"] == 8
    assert not any(note in words for words in narrow["notes"])


def test_what_does_not_fit_names_how_many_would(antiphon: PlanCommand, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    message = (
        r"training does not fit on 32 H800: .* per device, .* more than the 67.1 GiB it has: use at least \d+ H800"
    )
    antiphon.refuses(1, message, *QUESTION, "--devices", 32, "--json", file)
    assert not file.exists(), "a plan that cannot be met is no file"


NUMBERS = "--sequence-length 4096 --global-batch 8"
WRONG: list[tuple[str, str]] = [
    ("--cluster is missing: give a file, or one of .*msm-h800.*", f"dbrx --phase train {NUMBERS}"),
    ("cluster 'msm-h80' is unknown: did you mean .*", f"dbrx --phase train --cluster msm-h80 {NUMBERS}"),
    ("model 'dbrxx' is unknown: did you mean dbrx.*", f"dbrxx --phase train --cluster msm-h800 {NUMBERS}"),
    ("--sequence-length is missing: --phase train needs it, .*", "dbrx --phase train --cluster msm-h800"),
    (
        "--global-batch is missing: --phase train needs it, .*",
        "dbrx --phase train --cluster msm-h800 --sequence-length 1",
    ),
    ("--sequence-length is 0: it must be at least 1", "--sequence-length 0 --global-batch 8"),
    ("--global-batch is -8: it must be at least 1", "--sequence-length 4096 --global-batch -8"),
    ("--global-batch is '7.5': it must be a valid integer; .*", "--sequence-length 4096 --global-batch 7.5"),
    (r"--global-batch is 10{18}: it must be at most 1000000000", f"--sequence-length 4096 --global-batch {10**18}"),
    ("--devices is 0: it must be at least 1", f"{NUMBERS} --devices 0"),
    ("--devices is 1441: a plan uses one kind and msm-h800 has 1440 H800: .*", f"{NUMBERS} --devices 1441"),
    ("--device H20: cluster msm-h800 has no such device: .*", f"{NUMBERS} --device H20"),
    ("--zero is 4: it must be at most 3", f"{NUMBERS} --zero 4"),
    ("--zero is -1: it must be at least 0", f"{NUMBERS} --zero -1"),
    ("--overlap is all: it must be one of none, inter, intra", f"{NUMBERS} --overlap all"),
    ("--precision 'kv=fp8': 'kv' is none of weights, .*", f"{NUMBERS} --precision kv=fp8"),
    ("--html none/p.html: the folder .*none does not exist; create it", f"{NUMBERS} --html none/p.html"),
    ("--json none/p.json: the folder .*none does not exist; create it", f"{NUMBERS} --json none/p.json"),
]


@pytest.mark.parametrize(("message", "arguments"), WRONG)
def test_wrong_questions(antiphon: PlanCommand, message: str, arguments: str) -> None:
    before = "dbrx --phase train --cluster msm-h800 " if arguments.startswith("--") else ""
    antiphon.refuses(2, message, *f"{before}{arguments}".split())


def test_a_measured_machine_is_planned_for(antiphon: PlanCommand, tmp_path: Path) -> None:
    """Its ranks, formats and times come from the profile; the plan is one that the trainer runs."""
    file, found = tmp_path / "profile.json", tmp_path / "plan.json"
    file.write_text(json.dumps(asdict(training_profile(64))))
    question = ("--phase", "train", "--profile", file, "--sequence-length", "64", "--global-batch", "8")
    out = antiphon.plans(ROOT / "examples" / "demo-moe", *question, "--json", found, "--explain")
    plan = read_training_plan(found)
    assert (plan.cluster, plan.device, plan.weights, plan.compute) == (
        "this-machine",
        "this-rank",
        "float32",
        "float32",
    )
    assert plan.layout.num_devices in (1, 2, 4)
    assert (plan.layout.overlap, plan.layout.rematerialized) == ("none", ())
    assert "tokens/s" in out
    antiphon.refuses(2, "--cluster beside --profile: with --phase train .*", "dbrx", *question, "--cluster", "msm-h800")
    antiphon.refuses(
        2, ".* measured with sequences of 64 tokens, not 32: .*", "dbrx", *question[:-3], "32", *question[-2:]
    )


FLAGS = {"size", "deduplicate", "no_compress", "no_check"}
VALUES = {
    **{"max_micro_batches": "4", "percentile": "0.5", "rate": "3", "in_flight": "3", "workload": "msi-production"},
    **{"objective": "per-gpu", "emit": "vllm", "prefer": "simple"},
    **{"sequence_length": "8", "global_batch": "8", "devices": "8", "zero": "1", "overlap": "intra"},
}


def as_written(name: str) -> list[str]:
    """An option of the command line, where it has one with its default: that it was written is what counts."""
    return [f"--{name.replace('_', '-')}", *([] if name in FLAGS else [VALUES.get(name, "x")])]


@pytest.mark.parametrize("name", SERVING_ONLY)
def test_options_of_serving_are_refused_in_training(antiphon: PlanCommand, name: str) -> None:
    option = as_written(name)
    message = f"{option[0]} is for plans to serve, not for --phase train: leave it out or change --phase"
    antiphon.refuses(2, message, *QUESTION, *option)


@pytest.mark.parametrize("phase", ["decode", "prefill", "both"])
@pytest.mark.parametrize("name", TRAINING_ONLY)
def test_options_of_training_are_refused_in_serving(antiphon: PlanCommand, name: str, phase: str) -> None:
    option = as_written(name)
    message = f"{option[0]} is for --phase train, not for --phase {phase}: leave it out or change --phase"
    antiphon.refuses(2, message, "dbrx", "--cluster", "msi-hetero", "--phase", phase, *option)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (None, TrainingPrecision()),
        (["bf16"], TrainingPrecision()),
        (["fp8"], TrainingPrecision(weights="fp8", compute="fp8", activation_wire="fp8")),
        (["wire=fp8"], TrainingPrecision(activation_wire="fp8")),
        (["gradients=bf16"], TrainingPrecision(gradients="bfloat16", gradient_wire="bfloat16")),
        (["fp8,weights=bf16"], TrainingPrecision(compute="fp8", activation_wire="fp8")),
    ],
)
def test_formats(parts: list[str] | None, expected: TrainingPrecision) -> None:
    assert parse_training_precision(parts) == expected


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("int4", "training knows no weights in 'int4': use one of float32, bfloat16, fp8"),
        ("gradients=fp8", "training knows no gradients in 'fp8': use one of float32, bfloat16"),
        ("=", "training knows no weights in ''"),
        ("dispatch=fp8", "'dispatch' is none of weights, gradients, wire, compute"),
    ],
)
def test_formats_that_cannot_be_trained_in(part: str, message: str) -> None:
    with pytest.raises(UserError, match=f"--precision '{part}': {message}"):
        parse_training_precision([part])


def test_planning_needs_no_torch() -> None:
    source = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        f"sys.argv = ['antiphon', 'plan', *{QUESTION!r}]\n"
        "from antiphon.cli.main import main\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Train: SP+EP" in ended.stdout
