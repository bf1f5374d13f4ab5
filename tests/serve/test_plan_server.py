"""`antiphon serve --plan` as users run it: it obeys, refuses what contradicts, and measures against the prediction."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from antiphon.base.errors import UserError
from antiphon.cli.commands import single_command
from antiphon.cli.engine_run import plan_lines
from antiphon.cli.generate import generate
from antiphon.cli.serve import serve as serve_command
from antiphon.cli.top import frame
from antiphon.models.config import load_model_spec, read_config
from antiphon.serve.api.dashboard import DashboardReading
from antiphon.serve.served_plan import served_plan_of
from antiphon.specs.plan import DeviceUse, Parallel, PhasePlan, Plan, Predicted, plan_to_json
from tests.serve.server_harness import ServerProcess, serve

TPOT_S = 0.5


def make_plan(checkpoint: Path) -> Plan:
    """One attention worker, two expert workers that share expert 0, three micro-batches."""
    phase = PhasePlan(
        layout="disaggregated",
        parallel=Parallel(expert_workers=2),
        num_instances=1,
        micro_batches=3,
        batch=12,
        devices=(DeviceUse(role="experts", device="this-core", num_devices=2),),
        placement=(((0, 0.5), (1, 0.5)), *(((expert % 2, 1.0),) for expert in range(1, 8))),
        predicted=Predicted(tpot_s=TPOT_S, tokens_per_s=24.0, t_a_s=0.01, t_e_s=0.02, t_c_s=0.001),
    )
    return Plan(
        model="tiny",
        cluster="this-machine",
        workload="chat",
        objective="per-gpu",
        phases={"decode": phase},
        model_config=read_config(checkpoint),
    )


@pytest.fixture
def plan_file(checkpoint: Path, tmp_path: Path) -> Path:
    (tmp_path / "plan.json").write_text(json.dumps(plan_to_json(make_plan(checkpoint))))
    return tmp_path / "plan.json"


def error_line(server: ServerProcess) -> list[str]:
    return [line for line in server.log.splitlines() if line.startswith("error")]


def test_the_server_obeys_and_measures_against_the_prediction(
    checkpoint: Path, plan_file: Path, tmp_path: Path
) -> None:
    with serve(checkpoint, tmp_path, "--plan", str(plan_file)) as server:
        facts = server.facts
        assert (facts["layout"], facts["num_attention"], facts["num_experts_workers"]) == ("disaggregated", 1, 2)
        assert facts["num_micro_batches"] == 3
        assert facts["plan"]["file"] == str(plan_file)
        assert facts["plan"]["predicted"]["tpot_s"] == TPOT_S
        assert "predicts 500.00 ms a token and 24 tokens/s" in server.log
        assert "antiphon:prediction_error_ratio" not in server.metrics()
        assert server.complete(max_tokens=8).status_code == 200
        metrics = server.metrics()
        assert metrics["antiphon:predicted_tpot_seconds"] == TPOT_S
        assert metrics["antiphon:predicted_tokens_per_second"] == 24.0
        assert metrics["antiphon:predicted_attention_seconds"] == 0.01
        assert metrics["antiphon:predicted_experts_seconds"] == 0.02
        assert metrics["antiphon:predicted_exchange_seconds"] == 0.001
        assert "antiphon:predicted_time_to_first_token_seconds" not in metrics
        measured_s = metrics["antiphon:prediction_error_ratio"] * TPOT_S
        total_s, count = (metrics[f"antiphon:inter_token_latency_seconds_{part}"] for part in ("sum", "count"))
        assert 0 < measured_s <= total_s
        assert count == 7
        assert error_line(server) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--experts 3", "--experts 3 contradicts .*plan.json, which says 2: leave one of them out"),
        ("--attention 2", "--attention 2 contradicts .*plan.json, which says 1: leave one of them out"),
        ("--layout colocated", "--layout colocated contradicts .*plan.json, which says disaggregated: leave one .*"),
        ("--micro-batches 1", "--micro-batches 1 contradicts .*plan.json, which says 3: leave one of them out"),
        ("--max-running 256", "--max-running 256 contradicts .*plan.json, which says 12: leave one of them out"),
        ("--max-batch-tokens 8", "--max-batch-tokens is 8: .*plan.json: phases.decode has a batch of 12 on each .*"),
    ],
)
def test_what_contradicts_the_plan_is_refused(checkpoint: Path, plan_file: Path, options: str, message: str) -> None:
    arguments = [str(checkpoint), "--plan", str(plan_file), *options.split()]
    result = CliRunner().invoke(single_command(serve_command), arguments)
    assert isinstance(result.exception, UserError)
    with pytest.raises(UserError, match=message):
        raise result.exception


def test_a_plan_for_other_devices_says_so(checkpoint: Path, plan_file: Path) -> None:
    planned = make_plan(checkpoint)
    served = served_plan_of(planned, load_model_spec(checkpoint), plan_file)
    assert plan_lines(served, "this-core") == f"  plan      {plan_file}: predicts 500.00 ms a token and 24 tokens/s"
    note = "planned for this-core: what it predicts is not of this machine"
    assert plan_lines(served, "NVIDIA H20").splitlines()[1].strip() == note
    gpus = replace(served, devices=("H20",), predicted=Predicted())
    assert plan_lines(gpus, "NVIDIA H20") == f"  plan      {plan_file}: predicts nothing"


def test_another_model_is_refused_before_anything_starts(checkpoint: Path, plan_file: Path) -> None:
    written = json.loads(plan_file.read_text())
    written["model_config"]["num_hidden_layers"] += 1
    plan_file.write_text(json.dumps(written))
    for command in (serve_command, generate):
        arguments = [str(checkpoint), "--plan", str(plan_file)]
        arguments += ["--token-ids", "1"] if command is generate else []
        result = CliRunner().invoke(single_command(command), arguments)
        assert isinstance(result.exception, UserError)
        assert "is for tiny with num_layers" in str(result.exception)


def test_a_missing_plan_is_named(checkpoint: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(single_command(serve_command), [str(checkpoint), "--plan", str(tmp_path / "none.json")])
    assert isinstance(result.exception, UserError)
    assert str(tmp_path / "none.json") in str(result.exception)


def test_generate_obeys_a_plan_too(checkpoint: Path, tmp_path: Path) -> None:
    planned = make_plan(checkpoint)
    colocated = replace(planned.phases["decode"], layout="hybrid", parallel=Parallel(), micro_batches=1)
    placement = (((0, 1.0),),) * 8
    (tmp_path / "plan.json").write_text(
        json.dumps(plan_to_json(replace(planned, phases={"decode": replace(colocated, placement=placement)})))
    )
    options = ["--plan", str(tmp_path / "plan.json"), "--token-ids", "5,6", "--max-tokens", "2", "--ignore-eos"]
    out = tmp_path / "out.json"
    result = CliRunner().invoke(
        single_command(generate), [str(checkpoint), *options, "--kv-bytes", "16MiB", "--json", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert len(json.loads(out.read_text())["token_ids"]) == 2


def test_a_plan_with_both_phases_starts_both_pools(checkpoint: Path, tmp_path: Path) -> None:
    """By the command that a user types: names, a completion, what `/metrics` and the dashboard say of the hand-over."""
    planned = make_plan(checkpoint)
    decode = replace(planned.phases["decode"], predicted=Predicted(tpot_s=TPOT_S))
    sizes = {"layout": "hybrid", "parallel": Parallel(), "micro_batches": 1, "batch": 64}
    prefill = replace(decode, **sizes, placement=(((0, 1.0),),) * 8, predicted=Predicted(ttft_s=0.25))  # type: ignore[arg-type]
    plan_path = tmp_path / "plan.json"
    plan_path.write_text(json.dumps(plan_to_json(replace(planned, phases={"decode": decode, "prefill": prefill}))))
    with serve(checkpoint, tmp_path, "--plan", str(plan_path)) as server:
        names = [worker["name"] for worker in server.facts["workers"]]
        assert names == ["decode/attention[0]", "decode/experts[0]", "decode/experts[1]", "prefill/replica[0]"]
        assert server.facts["pools"]["prefill"]["layout"] == "colocated"
        assert "250.00 ms to the first token and 500.00 ms a token" in server.log
        assert server.complete(prompt=list(range(3, 53)), max_tokens=4).status_code == 200
        metrics = server.metrics()
        assert metrics["antiphon:handovers_total"] == 1
        assert metrics["antiphon:handover_tokens_total"] == 50
        assert metrics["antiphon:predicted_time_to_first_token_seconds"] == 0.25
        assert metrics['antiphon:pool_requests{pool="decode",state="arriving"}'] == 0
        reading = server.http.get("/dashboard/data").json()
        assert [pool["name"] for pool in reading["pools"]] == ["prefill", "decode"]
        assert reading["handovers"] == {"num_done": 1, "num_failed": 0, "num_recomputed": 0}
        assert "hand-overs" in _text(frame(DashboardReading.model_validate(reading), ""))


def _text(shown: RenderableType) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(shown)
    return console.export_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--prefill 1", "--prefill without --decode: name the workers of both"),
        ("--decode 1+1", "--decode without --prefill: name the workers of both"),
        ("--prefill 1 --decode 2x", "--decode is '2x': write a layout, for example"),
        ("--prefill 1*2+1 --decode 1", "--prefill is .*: replicas that share experts .* have no expert workers"),
        ("--prefill 0 --decode 1", "--prefill 0: number of attention workers or replicas is 0: it must be at least 1"),
        ("--prefill 1 --decode 1 --experts 2", "--experts does not apply with --prefill and --decode"),
        ("--prefill 1 --decode 1 --tp 2", "--tp does not apply with --prefill and --decode"),
        ("--prefill 1 --decode 1 --plan none.json", "--prefill and --decode do not apply with --plan"),
        ("--prefill 1 --decode 1 --join-workers 0+1", "--join-workers is 0[+]1: .* for example 1[+]0,0[+]2"),
        ("--prefill 1+1 --decode 1+1 --attention-dtype float16 --balance off --kv-bytes 1KiB", "--kv-bytes 1.0 KiB"),
    ],
)
def test_what_pools_cannot_be_is_refused(checkpoint: Path, options: str, message: str) -> None:
    result = CliRunner().invoke(single_command(serve_command), [str(checkpoint), "--port", "0", *options.split()])
    assert isinstance(result.exception, UserError), result.output
    with pytest.raises(UserError, match=message):
        raise result.exception
