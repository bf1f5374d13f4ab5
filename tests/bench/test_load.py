"""Load at a rate: who is sent what and when, what is counted, and what a server that refuses or dies looks like."""

import json
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from antiphon.base.errors import UserError
from antiphon.bench.box import box_unavailable
from antiphon.bench.harness.quiet import Repetition, Repetitions
from antiphon.bench.load import (
    LoadCase,
    LoadedRequest,
    LoadOptions,
    LoadRun,
    bench_load,
    best_within,
    load_case,
    load_row,
    nodes_for,
    run_load,
    serve_options,
    spread,
    spread_over_nodes,
)
from antiphon.bench.openai_peer import OpenAIPeer
from antiphon.bench.serve import parse_contestant
from antiphon.cli import bench as command
from antiphon.models.config import load_model_spec
from antiphon.sim.demand import draw_demand
from antiphon.specs.workload import LengthSpec, SloSpec, WorkloadSpec
from tests.serve.server_harness import ServerProcess

WORKLOAD = WorkloadSpec(
    input_tokens=LengthSpec(median=4, sigma=0.5),
    output_tokens=LengthSpec(median=3, sigma=0.5),
    slo=SloSpec(ttft_s=0.5, tpot_s=0.1),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.bench.harness.quiet.wait_for_quiet", lambda *args, **options: True)


class RefusingServer(ThreadingHTTPServer):
    """Streams as an OpenAI server does, but answers every second request with 429. `seen`: how many came at once."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock, self.count = Lock(), 0
        self.prompts: list[list[int]] = []


class _Handler(BaseHTTPRequestHandler):
    server: RefusingServer

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.count += 1
            refused = self.server.count % 2 == 0
            self.server.prompts.append(body["prompt"])
        if refused:
            self._send(429, "too busy")
            return
        chunks: list[dict[str, Any]] = [{"choices": [{"text": "x"}]} for _ in range(body["max_tokens"])]
        chunks.append({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        self._send(200, "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[RefusingServer]:
    server = RefusingServer()
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def started(server: RefusingServer) -> OpenAIPeer:
    peer = OpenAIPeer(f"http://127.0.0.1:{server.server_address[1]}")
    peer.start()
    return peer


def answered(ttft_s: float, *gaps_s: float) -> LoadedRequest:
    times = [ttft_s]
    for gap in gaps_s:
        times.append(times[-1] + gap)
    return LoadedRequest(token_s=tuple(times), late_s=0.0)


def repetitions(*runs: LoadRun) -> Repetitions[LoadRun]:
    return Repetitions(tuple(Repetition(run, 0.0) for run in runs))


def test_refused_requests_are_failed_ones_and_the_others_count(refusing: RefusingServer) -> None:
    demand = draw_demand(WORKLOAD, num_requests=10, rate=1000.0)
    run = run_load(started(refusing), demand, vocab_size=50, seed=0)
    assert len(run.answered) == 5
    assert {request.error for request in run.requests if request.error} == {"openai: status 429: too busy"}
    lengths = sorted(len(prompt) for prompt in refusing.prompts)
    assert lengths == sorted(demand.input_tokens.tolist())
    assert all(0 <= token < 50 for prompt in refusing.prompts for token in prompt)
    outputs = [int(n) for n, r in zip(demand.output_tokens, run.requests, strict=True) if r.error is None]
    assert [len(request.token_s) for request in run.answered] == outputs


def test_all_contestants_get_the_same_demand_and_repeats_get_others(refusing: RefusingServer) -> None:
    case = LoadCase(workload=WORKLOAD, rates=(500.0, 1000.0), num_requests=4, num_repeats=2)
    twin = started(refusing)
    twin.name = "twin"
    rows = bench_load_quietly([started(refusing), twin], case)
    assert [(row["engine"], row["rate"]) for row in rows] == [
        ("openai", 500.0),
        ("twin", 500.0),
        ("openai", 1000.0),
        ("twin", 1000.0),
    ]
    whole = [tuple(prompt) for prompt in refusing.prompts]
    assert (len(whole), len(set(whole))) == (32, 8), "2 repeats of 4 prompts, for two contestants at two rates"
    assert all(row["num_requests"] == 8 and row["num_failed"] == 4 for row in rows)


def test_requests_that_are_cut_are_counted(refusing: RefusingServer) -> None:
    case = LoadCase(workload=replace(WORKLOAD, max_length=2), rates=(1000.0,), num_requests=4, num_repeats=2)
    said: list[str] = []
    bench_load(Path(__file__).parents[2] / "examples" / "demo-moe", [started(refusing)], case, say=said.append)
    assert said[0] == "8 of 8 requests are cut to 2 tokens, the model's context or max_length"


def bench_load_quietly(peers: list[OpenAIPeer], case: LoadCase) -> list[dict[str, Any]]:
    said: list[str] = []
    model = Path(__file__).parents[2] / "examples" / "demo-moe"
    rows = bench_load(model, peers, case, say=said.append)
    assert any("429" in line for line in said)
    return rows


def test_a_request_waits_for_its_moment_and_not_for_others(refusing: RefusingServer) -> None:
    demand = draw_demand(WORKLOAD, num_requests=4, rate=20.0, seed=3)
    run = run_load(started(refusing), demand, vocab_size=50, seed=0)
    assert run.took_s >= float(demand.arrivals_s[-1] - demand.arrivals_s[0])
    assert all(request.late_s >= 0 for request in run.requests)


def test_figures_are_of_what_was_answered() -> None:
    good, slow_start, slow_tokens = answered(0.2, 0.05, 0.05), answered(0.9, 0.05), answered(0.3, 0.05, 0.25)
    failed = LoadedRequest(token_s=(), late_s=0.0, error="429")
    run = LoadRun(requests=(good, slow_start, slow_tokens, failed), took_s=2.0)
    row = load_row("a", 4.0, repetitions(run, run), LoadCase(workload=WORKLOAD, rates=(4.0,)))
    assert row["attained"] == 0.25, "one of four kept both promises; a failure keeps none"
    assert row["goodput_requests_per_s"] == 0.5
    assert row["requests_per_s"] == 1.5
    assert row["output_tokens_per_s"] == 4.0
    assert row["ttft_s"]["p50"] == pytest.approx(0.3)
    assert row["tpot_s"]["mean"] == pytest.approx((0.05 + 0.05 + 0.15) / 3)
    assert row["itl_s"]["p99"] == pytest.approx(0.25, rel=0.05)
    assert row["ttft_s"]["std"]["p50"] == 0.0
    assert (row["num_requests"], row["num_failed"]) == (8, 2)


def test_nothing_answered_is_none_and_not_a_number() -> None:
    failed = LoadedRequest(token_s=(), late_s=0.0, error="gone")
    row = load_row(
        "a", 4.0, repetitions(LoadRun(requests=(failed,), took_s=1.0)), LoadCase(workload=WORKLOAD, rates=())
    )
    assert row["ttft_s"] is row["tpot_s"] is row["itl_s"] is None
    assert best_within([row], 1.0) == {"a": None}


def test_deviation_is_over_repeats() -> None:
    found = spread([[1.0, 1.0], [3.0, 3.0]])
    assert found is not None
    assert (found["mean"], found["p90"], found["std"]["mean"]) == (2.0, 2.0, 1.0)


def test_bursts_have_the_rate_and_another_spread() -> None:
    calm = draw_demand(WORKLOAD, num_requests=4000, rate=10.0, burstiness=4.0).arrivals_s
    wild = draw_demand(WORKLOAD, num_requests=4000, rate=10.0, burstiness=0.25).arrivals_s
    for arrivals, squared in ((calm, 0.25), (wild, 4.0)):
        gaps = arrivals[1:] - arrivals[:-1]
        assert gaps.mean() == pytest.approx(0.1, rel=0.1)
        assert gaps.var() / gaps.mean() ** 2 == pytest.approx(squared, rel=0.25)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("colocated*2", "--layout colocated --attention 2 --tp 1 --pp 1"),
        ("2t2*4", "--layout hybrid --attention 2 --tp 2 --expert-tp 4"),
        (
            "3+1/m2",
            "--layout disaggregated --attention 3 --tp 1 --expert-tp 1 --experts 1 --micro-batches 2",
        ),
    ],
)
def test_a_contestant_is_served_as_its_name_says(text: str, options: str) -> None:
    assert " ".join(serve_options(parse_contestant(text))) == options


@pytest.mark.parametrize(
    ("text", "options", "joined"),
    [
        ("colocated/t4", "--join-workers 1+0 --ranks-here 2", [["replica"] * 2]),
        ("colocated/t2/p2", "--join-workers 1+0 --ranks-here 2", [["replica"] * 2]),
        ("colocated*4", "--join-workers 2+0", [["replica"] * 2]),
        ("2t2*2", "--join-workers 1+0", [["replica"] * 2]),
        ("2+2/m2", "--join-workers 0+2", [["experts"] * 2]),
        ("3+1/m2", "--join-workers 1+1", [["attention", "experts"]]),
    ],
)
def test_every_node_has_as_many_processes(text: str, options: str, joined: list[list[str]]) -> None:
    found, roles = spread_over_nodes(parse_contestant(text), 2)
    assert " ".join(found) == options
    assert roles == joined


@pytest.mark.parametrize(
    ("text", "words"),
    [("colocated*3", "has 3 processes, not equally many"), ("3t2*2", "cut a worker"), ("1+3t2/m2", "not equally many")],
)
def test_layouts_that_nodes_cannot_share_are_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        spread_over_nodes(parse_contestant(text), 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"mbit": 5.0}, "give --nodes too"), ({"nodes": 1}, "2 at least"), ({"nodes": 2, "mbit": 0.0}, "--mbit is 0")],
)
def test_nodes_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words), nodes_for(LoadOptions(**options)):
        pass


@pytest.mark.slow
@pytest.mark.skipif(box_unavailable() is not None, reason=str(box_unavailable()))
def test_layouts_under_load_on_the_nodes_of_a_box(checkpoint: Path, tmp_path: Path) -> None:
    """Attention here, experts there; and ranks on both nodes, which sum in blocks."""
    app = typer.main.get_command(command.app)
    file, trace = tmp_path / "rows.json", tmp_path / "trace.csv"
    trace.write_text("input_tokens,output_tokens\n8,2\n")
    options = ["--rate", "20", "--lengths", str(trace), "--requests", "6", "--repeats", "1", "--nodes", "2"]
    options += ["--mbit", "50", "--layouts", "1+1/m1,colocated/t2:fused", "--json", str(file)]
    app.main(["serve", str(checkpoint), *options], standalone_mode=False)
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [(row["engine"], row["num_failed"]) for row in rows] == [
        ("antiphon 1+1/m1", 0),
        ("antiphon colocated/t2:fused", 0),
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rate": "2,x"}, "--rate 'x'"),
        ({"rate": "0"}, "--rate is 0"),
        ({"rate": "inf"}, "--rate is inf"),
        ({"rate": "2", "slo_ttft": -1.0}, "--slo-ttft is -1"),
        ({"rate": "2", "burstiness": float("nan")}, "--burstiness is nan"),
        ({"rate": "2", "lengths": "no-such"}, "no-such"),
        ({"rate": "2", "lengths": "0x4"}, "0x4"),
        (
            {"rate": "2", "lengths": "8000x193"},
            "--lengths 8000x193: 8,193 tokens are more than the model's context of 8,192",
        ),
        ({"rate": "2", "lengths": f"{10**11}x1"}, "more than the model's context of 8,192: shorten them"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str, checkpoint: Path) -> None:
    with pytest.raises(UserError, match=words.replace("'", ".")):
        load_case(LoadOptions(**options), checkpoint)


def test_load_options_need_a_rate(checkpoint: Path) -> None:
    options = ["--slo-ttft", "1", "--requests", "200"]  # a default that is written is asked for, too
    with pytest.raises(UserError, match="--requests, --slo-ttft: only of load, so give --rate"):
        CliRunner().invoke(command.app, ["serve", str(checkpoint), *options], catch_exceptions=False)


def test_requests_fit_the_model(checkpoint: Path) -> None:
    case = load_case(LoadOptions(rate="1", lengths="long-context", requests=5), checkpoint)
    demand = case.demand(1.0, 0)
    assert (demand.input_tokens + demand.output_tokens).max() <= load_model_spec(checkpoint).max_position


def test_lengths_may_be_two_numbers(checkpoint: Path) -> None:
    demand = load_case(LoadOptions(rate="1", lengths="12x3", requests=5), checkpoint).demand(1.0, 0)
    assert demand.input_tokens.tolist() == [12] * 5
    assert demand.output_tokens.tolist() == [3] * 5


def test_a_server_under_load(
    live_server: ServerProcess, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command itself, against a running server: table, JSON and page."""
    app = typer.main.get_command(command.app)
    trace, page, data = tmp_path / "trace.csv", tmp_path / "load.html", tmp_path / "load.json"
    trace.write_text("input_tokens,output_tokens\n5,4\n9,1\n3,6\n")
    options = ["--rate", "20,50", "--lengths", str(trace), "--requests", "6", "--repeats", "1", "--slo-ttft", "60"]
    options += ["--slo-tpot", "60", "--layouts", "", "--against-url", live_server.url]
    app.main(["serve", str(checkpoint), *options, "--html", str(page), "--json", str(data)], standalone_mode=False)
    rows = json.loads(data.read_text())["rows"]
    assert [row["rate"] for row in rows] == [20.0, 50.0]
    assert all(row["attained"] == 1.0 and row["num_failed"] == 0 for row in rows)
    assert "<svg" in page.read_text()
    assert "openai" in page.read_text()
    assert "TTFT" in capsys.readouterr().out
