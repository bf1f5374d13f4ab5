"""`antiphon simulate`: what it shows and writes, and every way of asking wrongly."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from antiphon.cli import main as cli
from antiphon.specs.cluster import cluster_to_json, load_cluster
from antiphon.specs.plan import plan_to_json
from tests.sim.serving_specimens import apart, plan, together, workload

CLUSTER = """
name = "odd"
[[groups]]
device = "H20"
num_nodes = 3
devices_per_node = 7
scale_up_domain = 7
scale_up_bytes_per_s = 450e9
node_scale_out_bytes_per_s = 175e9
"""
WORKLOAD = """
name = "small"
requests_per_s = 300.0
[input_tokens]
median = 60
sigma = 0.6
[output_tokens]
median = 20
sigma = 0.6
[slo]
ttft_s = 0.5
tpot_s = 0.01
percentile = 0.9
"""


class Cli:
    """Runs the command in this process, in a folder with a plan of each kind."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.columns = 150
        self._monkeypatch = monkeypatch
        self._capfd = capfd
        (folder / "odd.toml").write_text(CLUSTER)
        (folder / "small.toml").write_text(WORKLOAD)
        of = workload(rate=300.0)
        (folder / "decode.json").write_text(json.dumps(plan_to_json(plan(of, decode=apart()))))
        (folder / "both.json").write_text(
            json.dumps(plan_to_json(plan(of, prefill=together(dp=2, batch=512), decode=apart(instances=2))))
        )
        (folder / "colocated.json").write_text(json.dumps(plan_to_json(plan(of, decode=together(pp=2)))))

    def run(self, *arguments: object) -> tuple[int, str, str]:
        """(exit code, standard output, standard error) of ``antiphon simulate ...``"""
        self._monkeypatch.chdir(self.folder)
        self._monkeypatch.setattr(sys, "argv", ["antiphon", "simulate", *map(str, arguments)])
        self._monkeypatch.setenv("COLUMNS", str(self.columns))
        with pytest.raises(SystemExit) as caught:
            cli.main()
        printed = self._capfd.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, printed.out, printed.err

    def simulates(self, file: str, *arguments: object) -> str:
        code, out, err = self.run(
            file, "--cluster", "odd.toml", "--workload", "small.toml", "--requests", "40", *arguments
        )
        assert code == 0, err
        return out

    def json_of(self, file: str, *arguments: object) -> dict[str, Any]:
        self.simulates(file, "--json", "out.json", *arguments)
        found = json.loads((self.folder / "out.json").read_text())
        assert isinstance(found, dict)
        return found

    def refuses(self, code: int, message: str, *arguments: object) -> None:
        """It must fail with `code` and one line that `message`, a pattern, describes whole."""
        found, out, err = self.run(*arguments)
        (line,) = [text for text in err.splitlines() if not text.startswith("simulating")]
        assert re.fullmatch(f"error: {message}", line), line
        assert found == code
        assert out == ""


@pytest.fixture
def antiphon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, monkeypatch, capfd)


def test_predicted_stands_beside_simulated(antiphon: Cli) -> None:
    out = antiphon.simulates("both.json")
    assert out.startswith("40 requests, ")
    assert "40 served in" in out
    for pattern in (
        r"phase +predicted +simulated +simulated / predicted",
        r"prefill +time to first token, p90 +\S+ \S+ +\S+ \S+ +\d+\.\d\d",
        r"decode +time per output token, p90 +\S+ \S+ +\S+ \S+ +\d+\.\d\d",
        r"decode +one step at the simulated batch .* (0\.9\d|1\.[012]\d) *\n",
        r"between two tokens( +\S+ \S+){5}",
        r"prefill +1 +\d+% ",
        r"decode +2 +\d+% ",
        r"\d+\.\d% of all requests keep first token within 500.00 ms and each token within 10.00 ms \(promised: 90%\)",
    ):
        assert re.search(pattern, out), pattern


def test_json_holds_all_of_it_and_is_the_same_again(antiphon: Cli) -> None:
    first = antiphon.json_of("decode.json", "--seed", "3")
    assert first == antiphon.json_of("decode.json", "--seed", "3")
    assert first != antiphon.json_of("decode.json", "--seed", "4")
    assert first["num_requests"] == first["num_finished"] == 40
    assert set(first["ttft_s"]) == {"mean", "p50", "p90", "p99", "max"}
    (pool,) = first["pools"]
    assert pool["predicted"]["tpot_s"] > 0
    assert pool["step_s"] == pytest.approx(pool["predicted_step_at_batch_s"], rel=0.3)
    series = first["series"]
    assert len(series["time_s"]) == len(series["decode"]["running"]) > 10
    assert series["decode"]["running"][-1] == series["decode"]["waiting"][-1] == 0
    assert series["decode"]["kv_usage"][-1] == 0
    assert first["notes"] == [
        "prompts come computed, as the prediction assumes (--prefill mixed computes them in the steps)"
    ]
    elsewhere = antiphon.json_of("decode.json", "--prefill", "elsewhere", "--seed", "3")
    assert elsewhere == first | {"notes": []}
    assert antiphon.json_of("decode.json", "--prefill", "mixed")["notes"] == [
        "the plan has no prefill phase: prompts are computed in the steps, which the prediction leaves out "
        "(--prefill elsewhere leaves them out here too)"
    ]


def test_json_on_standard_output_is_alone_there(antiphon: Cli) -> None:
    out = antiphon.simulates("colocated.json", "--json", "-")
    assert json.loads(out)["pools"][0]["layout"] == "dp_ep"


def test_failures_and_moving_experts_are_told(antiphon: Cli) -> None:
    out = antiphon.simulates(
        "decode.json",
        *("--kill", "attention[1]@0.05", "--kill", "experts[0]@0.1", "--restart-s", "0.2"),
        *("--skew", "1.5", "--shift-every", "0.05", "--rebalance-every", "0.04"),
    )
    assert re.search(r"attention\[1\] was down from 0\.1 to 0\.[23] s, \d+ requests left it", out)
    assert re.search(r"experts\[0\] was down from 0\.1 to 0\.3 s, 0 requests left it", out)
    assert re.search(r"experts moved \d+ times, .* of pauses: the share of the busiest worker went from", out)
    assert "experts never moved" in antiphon.simulates("decode.json", "--rebalance-every", "1000")
    assert "all experts are equally popular" in antiphon.simulates("decode.json", "--shift-every", "1")
    out = antiphon.simulates("decode.json", "--kill", "attention[1]@1000")
    assert re.search(r"attention\[1\] did not die at 1000 s: the run ended at 0\.\d s", out)


def test_a_trace_of_requests(antiphon: Cli) -> None:
    lines = [{"arrival_s": 0.01 * number, "input_tokens": 50, "output_tokens": 5} for number in range(30)]
    (antiphon.folder / "with.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (antiphon.folder / "without.csv").write_text("input_tokens,output_tokens\n" + "50,5\n" * 30)
    options = ("--cluster", "odd.toml", "--workload", "small.toml", "--json", "out.json")
    assert antiphon.run("decode.json", "--trace", "with.jsonl", *options)[0] == 0
    found = json.loads((antiphon.folder / "out.json").read_text())
    assert (found["num_requests"], found["output_tokens"]) == (30, 150)
    assert found["arrival_rate"] == pytest.approx(100)
    for extra in (("--rate", "50"), ("--all-at-once",)):
        assert antiphon.run("decode.json", "--trace", "without.csv", *options, *extra)[0] == 0
        assert json.loads((antiphon.folder / "out.json").read_text())["output_tokens"] == 150
    message = r"--trace without.csv has no arrival_s: give --rate R, or --all-at-once"
    antiphon.refuses(2, message, "decode.json", "--trace", "without.csv", *options)


def test_a_run_in_which_everything_is_refused(antiphon: Cli) -> None:
    (antiphon.folder / "long.csv").write_text("input_tokens,output_tokens\n" + "9000,5\n" * 3)
    options = ("--cluster", "odd.toml", "--workload", "small.toml", "--all-at-once", "--json", "out.json")
    code, out, _ = antiphon.run("decode.json", "--trace", "long.csv", *options)
    assert code == 0
    assert "3 requests refused, as the engine would, the first because: prompt (9000) plus" in " ".join(out.split())
    found = json.loads((antiphon.folder / "out.json").read_text())
    assert (found["num_refused"], found["num_finished"], found["ttft_s"]) == (3, 0, {})


def changed_plan(antiphon: Cli, file: str, **changes: object) -> str:
    """The name of a copy of a plan with other values in its decode phase."""
    mapping = json.loads((antiphon.folder / file).read_text())
    mapping["phases"]["decode"] |= changes
    (antiphon.folder / "edited.json").write_text(json.dumps(mapping))
    return "edited.json"


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("decode.json", {"devices": []}, "the plan lists devices of no role, disaggregated has attention and experts"),
        ("decode.json", {"batch": 1}, "the plan's batch is 1: 2 micro-batches on 3 attention workers are at least 6"),
        ("decode.json", {"micro_batches": 2**53}, ".*micro_batches is 9007199254740992: it must be at most 1048576"),
        ("colocated.json", {"expert_tp": 5}, "a stage of the plan has . devices by its attention and .+ by its exp"),
    ],
)
def test_a_plan_whose_sizes_contradict_each_other_is_refused(
    antiphon: Cli, file: str, changes: dict[str, object], message: str
) -> None:
    antiphon.refuses(2, f"{message}.*", changed_plan(antiphon, file, **changes), *FILES)


def test_memory_and_prompts_without_end_are_no_more_work(antiphon: Cli) -> None:
    """More blocks than any request can touch, more places than there are requests, prompts beyond the context."""
    mapping = cluster_to_json(load_cluster(antiphon.folder / "odd.toml"))
    mapping["groups"][0]["device"]["memory_bytes"] = 2**53
    (antiphon.folder / "vast.json").write_text(json.dumps(mapping))
    (antiphon.folder / "long.toml").write_text(WORKLOAD.replace("median = 60", "median = 1e10"))
    file = changed_plan(antiphon, "decode.json", batch=10**9)
    asked = ("--cluster", "vast.json", "--requests", 5, "--workload")
    assert "5 served" in antiphon.simulates(file, *asked, "small.toml")
    assert "5 requests refused" in antiphon.simulates(file, *asked, "long.toml")


def test_the_pipeline_from_inside(antiphon: Cli) -> None:
    code, out, err = antiphon.run("decode.json", "--pipeline", "--perfetto", "pipe.json", "--json", "pipe-out.json")
    assert code == 0, err
    found = json.loads((antiphon.folder / "pipe-out.json").read_text())
    assert found["iteration_s"] == pytest.approx(found["formula_s"], rel=0.02)
    assert found["num_layers"] == 6
    assert "trace of 3 attention and 2 expert workers written to pipe.json" in out
    events = json.loads((antiphon.folder / "pipe.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" and event["cat"] == "experts" for event in events) == 6 * 2 * 2


def test_a_perfetto_trace(antiphon: Cli) -> None:
    out = antiphon.simulates("both.json", "--perfetto", "trace.json")
    assert "trace written to trace.json: open it at ui.perfetto.dev" in out
    assert json.loads((antiphon.folder / "trace.json").read_text())["traceEvents"]


def test_another_precision_than_the_plans_is_noticed(antiphon: Cli) -> None:
    assert "it was made for another cluster, precision or workload" not in antiphon.simulates("decode.json")
    out = antiphon.simulates("decode.json", "--precision", "fp8")
    assert "it was made for another cluster, precision or workload" in " ".join(out.split())


FILES = ("--cluster", "odd.toml", "--workload", "small.toml")
KNOWN = r"the plan has attention\[0\] to attention\[2\], experts\[0\] to experts\[1\]"
WRONG: list[tuple[int, str, tuple[object, ...]]] = [
    (2, rf"there is no worker attention\[9\]: {KNOWN}", ("decode.json", *FILES, "--kill", "attention[9]@1")),
    (2, rf"there is no worker decode.experts\[0\]: {KNOWN}", ("decode.json", *FILES, "--kill", "decode.experts[0]@1")),
    (2, r"'experts' is no failure: write a worker and a time .*", ("decode.json", *FILES, "--kill", "experts")),
    (2, r"--restart-s is -1: it must be at least 0", ("decode.json", *FILES, "--restart-s", -1)),
    (2, r"the plan's cluster 'odd' is not a shipped one: give its file with --cluster", ("decode.json", *FILES[2:])),
    (
        2,
        r"the plan's workload 'small' is not a shipped one: give its file with --workload",
        ("decode.json", *FILES[:2]),
    ),
    (
        2,
        r"the plan uses H20, the cluster has H100: give the plan's own cluster",
        ("decode.json", "--cluster", "one-h100-server", "--workload", "small.toml"),
    ),
    (2, r"cluster 'nowhere' is unknown.*", ("decode.json", "--cluster", "nowhere", "--workload", "small.toml")),
    (2, r"--requests is 0: it must be at least 1", ("decode.json", *FILES, "--requests", 0)),
    (2, r"--requests is 10000001: it must be at most 10000000", ("decode.json", *FILES, "--requests", 10_000_001)),
    (2, r"--rate is 0: it must be above 0 requests per second", ("decode.json", *FILES, "--rate", 0)),
    (
        2,
        r"--rate 3 and --all-at-once contradict each other: leave one of them out",
        ("decode.json", *FILES, "--rate", 3, "--all-at-once"),
    ),
    (2, r"--seed is -1: it must be at least 0", ("decode.json", *FILES, "--seed", -1)),
    (2, r"--prefill is no: it must be one of mixed, elsewhere", ("decode.json", *FILES, "--prefill", "no")),
    (2, r"--max-batch-tokens is 0: it must be at least 1", ("decode.json", *FILES, "--max-batch-tokens", 0)),
    (
        2,
        r"--max-batch-tokens does not apply: no prompt is computed in a decode step; leave it out",
        ("both.json", *FILES, "--max-batch-tokens", 64),
    ),
    (
        2,
        r"max_batch_tokens is 3, max_running is 16: each running request .*",
        ("decode.json", *FILES, "--max-batch-tokens", 3),
    ),
    (2, r"--rebalance-every is 0: it must be above 0 s", ("decode.json", *FILES, "--rebalance-every", 0)),
    (2, r"--shared-prefix is -3: it must be at least 0", ("decode.json", *FILES, "--shared-prefix", -3)),
    (2, r"workload: expert_skew is -1.0: it must be at least 0", ("decode.json", *FILES, "--skew", -1)),
    (2, r"workload: expert_skew is inf: it must be a finite number", ("decode.json", *FILES, "--skew", "inf")),
    (
        2,
        r"prefill elsewhere: the plan has a prefill phase of its own, whose pool computes the prompts",
        ("both.json", *FILES, "--prefill", "elsewhere"),
    ),
    (
        2,
        r"--kill does not apply to --pipeline, which runs one step: leave one of them out",
        ("decode.json", "--pipeline", "--kill", "attention[0]@1"),
    ),
    (2, r"a dp_ep phase with times .* has no ping-pong pipeline: .*", ("colocated.json", "--pipeline")),
    (2, r"none.json.*", ("none.json",)),
    (
        2,
        r"--perfetto nowhere/x.json: the folder .* does not exist; create it",
        ("decode.json", "--perfetto", "nowhere/x.json"),
    ),
    (2, r"--json nowhere/x.json: the folder .* does not exist; create it", ("decode.json", "--json", "nowhere/x.json")),
]


@pytest.mark.parametrize(("code", "message", "arguments"), WRONG)
def test_a_wrong_question_is_answered_in_one_line(
    code: int, message: str, arguments: tuple[object, ...], antiphon: Cli
) -> None:
    antiphon.refuses(code, message, *arguments)


def test_help_fits_a_screen(antiphon: Cli) -> None:
    antiphon.columns = 80
    code, out, _ = antiphon.run("--help")
    assert code == 0
    assert len(out.splitlines()) <= 38
    assert max(map(len, out.splitlines())) <= 80
    for option in (
        "workload",
        "trace",
        "requests",
        "rate",
        "seed",
        "kill",
        "rebalance-every",
        "perfetto",
        "json",
        "pipeline",
    ):
        assert f"--{option}" in out
