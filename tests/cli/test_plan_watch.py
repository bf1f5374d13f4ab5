"""`antiphon plan PLAN --watch URL`: counters become a load, a load a verdict, and mistakes are named."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from antiphon.base.errors import UserError
from antiphon.cli.commands import single_command
from antiphon.cli.plan import plan
from antiphon.cli.plan_watch import layout_words, load_between, look, verdict
from antiphon.models.planned import planned_model
from antiphon.planner.replan import SeenLoad, replan
from antiphon.specs.plan import Plan, read_plan

APP = single_command(plan)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(APP, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layout that is far from the best."""
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    pins = ["--pin", "pp=4"]
    run("mixtral-8x22b", "--cluster", "msi-ampere", "--layout", "tp_pp", *pins, "--json", str(file))
    return file


@pytest.fixture
def server() -> Iterator[str]:
    """Ends ten requests of 100 + 20 tokens between two looks."""
    looks = iter(range(1000))

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            count = 10 * next(looks)
            lines = [
                f'antiphon:requests_finished_total{{reason="stop"}} {count}',
                f"antiphon:prompt_tokens_total {100 * count}",
                f"antiphon:generation_tokens_total {20 * count}",
                f"antiphon:request_queue_time_seconds_count {count}",
                "antiphon:num_requests_running 6",
                "antiphon:num_requests_waiting 2",
            ]
            bodies = {
                "/metrics": "\n".join([*lines, ""]),
                "/bare/metrics": "x 1\n",
                "/page/metrics": "<html>\nnot {metrics\n</html>\n",
                "/now-and-then/metrics": "\n".join([*lines, ""]) if count != 10 else "<html>\nbusy {\n",
            }
            self.send_response(200 if self.path in bodies else 404)
            self.end_headers()
            self.wfile.write(bodies.get(self.path, "{}").encode())

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Metrics) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def test_counters_become_a_load() -> None:
    names = (
        *("requests_finished_total", "prompt_tokens_total", "generation_tokens_total"),
        "request_queue_time_seconds_count",
    )
    held = {"antiphon:num_requests_running": 3.0, "antiphon:num_requests_waiting": 1.0}
    before = {f"antiphon:{name}": 0.0 for name in names} | held
    after = dict(zip((f"antiphon:{name}" for name in names), (4.0, 500.0, 80.0, 5.0), strict=True)) | held
    after |= {"antiphon:time_to_first_token_seconds_sum": 8.0, "antiphon:time_to_first_token_seconds_count": 4.0}
    load = load_between(before, after, 2.0)
    assert (load.num_requests, load.input_tokens, load.output_tokens, load.in_flight) == (4, 100.0, 20.0, 4.0)
    assert load.num_requests * load.output_tokens / load.seconds == 40.0
    assert (load.ttft_s, load.tpot_s) == (2.0, None)
    with pytest.raises(UserError, match="started anew"):
        load_between(after, before, 2.0)


def test_one_look_that_cannot_read_is_skipped(plan_file: Path, server: str) -> None:
    said = run(str(plan_file), "--watch", f"{server}/now-and-then", "--looks", "2", "--look-every", "0.05s")
    assert "this look is skipped: --watch" in said
    assert "answers no metrics" in said
    assert "of 100 + 20 tokens, 8 in flight" in said


def test_too_few_that_ended_say_nothing_of_lengths(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = SeenLoad(seconds=60.0, num_requests=9, input_tokens=600.0, output_tokens=9000.0, in_flight=64.0)
    look(read_plan(plan_file), load, 60.0, None)
    assert "too few to tell: 9 requests ended" in " ".join(capsys.readouterr().out.split())


def test_what_runs_is_judged_with_its_own_instances_and_batch(plan_file: Path) -> None:
    found = read_plan(plan_file)
    decode = found.phases["decode"]
    model = planned_model(found.model_config).spec
    load = SeenLoad(seconds=60.0, num_requests=100, input_tokens=600.0, output_tokens=150.0, in_flight=64.0)
    for num_instances, batch, expected in ((2, 64, 32), (2, 8, 8), (1, 64, 64)):
        four = replace(found, phases={"decode": replace(decode, num_instances=num_instances, batch=batch)})
        seen = replan(four, model, load, move_s=60.0).running
        assert seen is not None
        assert (seen.num_instances, seen.batch) == (num_instances, expected)


def test_another_number_of_instances_is_another_layout(plan_file: Path) -> None:
    found = read_plan(plan_file)
    model = planned_model(found.model_config).spec
    load = SeenLoad(seconds=60.0, num_requests=100, input_tokens=600.0, output_tokens=150.0, in_flight=64.0)
    best = replan(found, model, load, move_s=60.0).best
    assert best is not None
    two = replace(found, phases={"decode": replace(best, num_instances=2 * best.num_instances, batch=64)})
    seen = replan(two, model, load, move_s=60.0)
    assert seen.best is not None
    assert (seen.best.layout, seen.best.parallel) == (best.layout, best.parallel)
    assert seen.gain is not None
    assert seen.gain > 1.05
    assert seen.pays_after_s is not None


def test_a_better_layout_pays_after_what_its_move_costs(plan_file: Path) -> None:
    found = read_plan(plan_file)
    model = planned_model(found.model_config).spec
    load = SeenLoad(seconds=60.0, num_requests=100, input_tokens=600.0, output_tokens=150.0, in_flight=1000.0)
    better = replan(found, model, load, move_s=60.0)
    assert better.running is not None
    assert better.running.layout == "tp_pp"
    assert better.running.parallel == found.phases["decode"].parallel
    assert better.gain is not None
    assert better.gain > 1.05
    assert better.pays_after_s == pytest.approx(60.0 / (better.gain - 1))
    assert "pays after" in verdict(found, better, 60.0)


def with_targets(plan: Plan, **targets: float) -> Plan:
    """The plan with other promises."""
    return replace(plan, workload_config=plan.workload_config | {"slo": {"percentile": 0.5, **targets}})


@pytest.mark.parametrize(
    ("times", "promised_s", "broken", "kept_by"),
    [
        ({}, 0.06, "predicted), promised are 60 ms", "would keep it with at most"),
        ({"tpot_s": 0.03}, 0.06, "", ""),  # what the server measured counts before what the model says
        ({"tpot_s": 0.08}, 0.06, "80 ms a token (measured), promised are 60 ms", "would keep it with at most"),
        ({}, 1e-5, "predicted), promised are 10 µs", "No layout keeps it: decode: no layout keeps 10 µs"),
    ],
)
def test_a_broken_promise_is_said(
    plan_file: Path, times: dict[str, float], promised_s: float, broken: str, kept_by: str
) -> None:
    """Not that of the best layout: that of the one that runs."""
    found = with_targets(read_plan(plan_file), tpot_s=promised_s)
    model = planned_model(found.model_config).spec
    load = SeenLoad(seconds=60.0, num_requests=100, input_tokens=600.0, output_tokens=150.0, in_flight=1e3, **times)
    seen = replan(found, model, load, move_s=60.0)
    said = verdict(found, seen, 60.0)
    assert [broken in one for one in seen.broken] == ([True] if broken else [])
    assert (seen.gain is None) == bool(broken)
    assert not broken or said.startswith(f"{layout_words(found.phases['decode'])} breaks its promise: ")
    assert kept_by in said


def test_a_late_first_token_is_measured(plan_file: Path) -> None:
    found = with_targets(read_plan(plan_file), ttft_s=2.0)
    model = planned_model(found.model_config).spec
    load = SeenLoad(seconds=60.0, num_requests=100, input_tokens=600.0, output_tokens=150.0, in_flight=64.0, ttft_s=3.0)
    assert replan(found, model, load, move_s=60.0).broken == (
        "3.00 s to the first token (measured), promised are 2.00 s",
    )


def test_requests_that_the_running_layout_does_not_hold(plan_file: Path) -> None:
    found = read_plan(plan_file)
    model = planned_model(found.model_config).spec
    load = SeenLoad(seconds=60.0, num_requests=9, input_tokens=9e9, output_tokens=150.0, in_flight=1.0)
    seen = replan(found, model, load, move_s=60.0)
    assert seen.running is None
    assert "does not fit" in verdict(found, seen, 60.0)


def test_a_look_at_a_server(plan_file: Path, server: str, tmp_path: Path) -> None:
    said = run(str(plan_file), "--watch", server, "--looks", "1", "--look-every", "0.05s")
    assert "of 100 + 20 tokens, 8 in flight" in said
    run(str(plan_file), "--watch", server, "--looks", "1", "--look-every", "0.05s", "--json", str(tmp_path / "a.json"))
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["load"]["num_requests"] == 10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--watch", "{url}/elsewhere"], "answers 404"),
        (["--watch", "{url}/bare"], "its metrics lack"),
        (["--watch", "{url}/page"], "answers no metrics"),
        (["--watch", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["--watch", "{url}", "--cluster", "msi-ampere"], "--cluster does not apply with --watch"),
        (["--watch", "{url}", "--look-every", "soon"], "--look-every is 'soon'"),
        (["--looks", "2"], "--looks is for --watch URL"),
    ],
)
def test_mistakes_are_named(plan_file: Path, server: str, options: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        run(str(plan_file), *(each.replace("{url}", server) for each in options))
