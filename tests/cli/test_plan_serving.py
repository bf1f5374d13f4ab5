"""`antiphon plan` for the whole service: what it does without being asked, and that its promise is tried first."""

import json
from pathlib import Path

import pytest

from tests.cli.plan_harness import FIVE_EXPERTS, ODD_CLUSTER, PlanCommand

WORKLOAD = """
name = "asked"
requests_per_s = {rate}
[input_tokens]
median = 60
sigma = 0.5
[output_tokens]
median = 30
sigma = 0.5
[slo]
ttft_s = 1.0
tpot_s = 0.05
percentile = 0.9
"""


@pytest.fixture
def antiphon(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> PlanCommand:
    return PlanCommand(monkeypatch, capfd)


@pytest.fixture
def asked(tmp_path: Path) -> list[object]:
    model, cluster, workload = tmp_path / "config.json", tmp_path / "odd.toml", tmp_path / "asked.toml"
    model.write_text(json.dumps(FIVE_EXPERTS))
    cluster.write_text(ODD_CLUSTER)
    workload.write_text(WORKLOAD.format(rate=20))
    return [model, "--cluster", cluster, "--workload", workload]


def test_a_rate_asks_for_the_whole_service(antiphon: PlanCommand, asked: list[object], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    out = antiphon.plans(*asked, "--json", file)
    assert "End to end" in out
    assert "keep the targets" in out
    plan = json.loads(file.read_text())
    assert plan["workload_config"]["slo"]["ttft_s"] == 1.0, "the promise that was asked for"
    assert set(plan["phases"]) in ({"serve"}, {"prefill", "decode"})
    assert "keep the targets" not in antiphon.plans(*asked, "--no-check")
    assert "Decode only" in antiphon.plans(*asked, "--phase", "decode")


def test_no_check_is_refused_where_nothing_is_checked(antiphon: PlanCommand, asked: list[object]) -> None:
    antiphon.refuses(2, r".*--no-check leaves out the simulation.*", *asked, "--phase", "decode", "--no-check")


def test_a_pinned_batch_is_of_servers(antiphon: PlanCommand, asked: list[object], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    antiphon.plans(*asked, "--pin", "tp=1,dp=1,ep=1,pp=1,batch=24", "--layout", "tp_pp", "--no-check", "--json", file)
    (phase,) = json.loads(file.read_text())["phases"].values()
    assert (phase["batch"], phase["attention_tp"]) == (24, 1)
    assert phase["step_tokens"] >= 24


def test_too_high_a_rate_names_one_that_is_taken(antiphon: PlanCommand, asked: list[object]) -> None:
    message = r".*requests/s are too many for odd: it takes [0-9.e+]+ \(\w+\): lower the rate, loosen .*"
    antiphon.refuses(1, message, *asked, "--rate", "1e7")


def test_requests_longer_than_the_models_context_are_what_the_check_names(antiphon: PlanCommand) -> None:
    asked = ("mixtral-8x7b", "--cluster", "one-h100-server", "--workload", "chat", "--rate", "1")
    message = r".*the plan found refuses \d+ of \d+ requests in simulation, .* context length of 10: .*--no-check"
    antiphon.refuses(1, message, *asked, "--model-set", "max_position_embeddings=10")
