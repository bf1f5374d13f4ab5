"""`antiphon plan PLAN --watch URL`: counters become a load, a load a verdict, and mistakes are named."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from antiphon.base.errors import UserError
from antiphon.cli.commands import single_command
from antiphon.cli.plan import plan
from antiphon.cli.plan_watch import load_between, verdict
from antiphon.models.planned import planned_model
from antiphon.planner.replanning import SeenLoad, replan
from antiphon.specs.plan import read_plan

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
                "antiphon:num_requests_running 6",
                "antiphon:num_requests_waiting 2",
            ]
            body = "\n".join([*lines, ""]).encode() if self.path == "/metrics" else b"{}"
            self.send_response(200 if self.path in ("/metrics", "/bare/metrics") else 404)
            self.end_headers()
            self.wfile.write(body if self.path == "/metrics" else b"x 1\n")

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Metrics) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def test_counters_become_a_load() -> None:
    names = ("requests_finished_total", "prompt_tokens_total", "generation_tokens_total")
    held = {"antiphon:num_requests_running": 3.0, "antiphon:num_requests_waiting": 1.0}
    before = {f"antiphon:{name}": 0.0 for name in names} | held
    after = dict(zip((f"antiphon:{name}" for name in names), (4.0, 400.0, 80.0), strict=True)) | held
    load = load_between(before, after, 2.0)
    assert (load.num_requests, load.input_tokens, load.output_tokens, load.in_flight) == (4, 100.0, 20.0, 4.0)
    assert load.tokens_per_s == 40.0
    with pytest.raises(UserError, match="started anew"):
        load_between(after, before, 2.0)


def test_a_better_layout_pays_after_what_its_move_costs(plan_file: Path) -> None:
    found = read_plan(plan_file)
    model = planned_model(found.model_config).spec
    load = SeenLoad(seconds=60.0, num_requests=100, input_tokens=600.0, output_tokens=150.0, in_flight=1000.0)
    better = replan(found, model, load, move_s=60.0)
    assert better.running.layout == "tp_pp"
    assert better.running.parallel == found.phases["decode"].parallel
    assert better.gain > 1.05
    assert better.pays_after_s == pytest.approx(60.0 / (better.gain - 1))
    assert "pays after" in verdict(found, better, 60.0)


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
        (["--watch", "http://127.0.0.1:9"], "cannot be read"),
        (["--watch", "{url}", "--cluster", "msi-ampere"], "--cluster does not apply with --watch"),
        (["--watch", "{url}", "--look-every", "soon"], "--look-every is 'soon'"),
        (["--looks", "2"], "--looks is for --watch URL"),
    ],
)
def test_mistakes_are_named(plan_file: Path, server: str, options: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        run(str(plan_file), *(each.replace("{url}", server) for each in options))
