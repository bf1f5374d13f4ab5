"""The serving benchmark with peers that cannot start, or fail later: who is left out, and what is said of it.

Peers run in their own processes as real ones do; only their engines are invented, and the limits of the machine, which
take a second to measure.
"""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import typer

from antiphon.base.errors import ResourceError
from antiphon.bench import serve
from antiphon.bench.harness.limits import MachineLimits, as_kept
from antiphon.bench.openai_peer import OpenAIPeer
from antiphon.bench.serve import WorkloadSize, bench_serve
from antiphon.bench.serving_peers import EngineProcess, Peer, vllm_peer
from antiphon.cli import bench as command
from antiphon.models.config import load_model_spec
from antiphon.models.load import open_checkpoint
from antiphon.models.rounding import WeightRounding
from antiphon.models.write_quantized import write_quantized

WORKS = """
import time
class Engine:
    def details(self):
        return {"version": "1"}
    def timed_run(self, prompts, output_tokens):
        time.sleep(0.001 * output_tokens)
        times = {"prefill_s": 0.001, "total_s": 0.001 * output_tokens, "ttft_s": [0.001]}
        return {**times, "itl_s": [0.001] * (output_tokens - 1), "token_ids": None}
def load(options):
    return Engine()
"""
FAILS_LATER = WORKS.replace("time.sleep", "assert len(prompts) == 1, 'out of pages'; time.sleep")


@pytest.fixture
def model(checkpoint: Path) -> Path:
    return checkpoint


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = MachineLimits(read_by_threads={1: 1e9}, gemm_by_threads={1: 1e9})
    monkeypatch.setattr(serve, "measure_limits", lambda device: limits)
    monkeypatch.setattr("antiphon.bench.harness.quiet.wait_for_quiet", lambda *args, **options: True)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator["Peers"]:
    made = Peers(tmp_path)
    yield made
    for peer in made.all:
        assert peer.pid is None, f"{peer.name} was left running"


class Peers:
    """Makes peers from the source of an engine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.all: list[EngineProcess] = []

    def __call__(self, name: str, source: str, interpreter: str = sys.executable) -> EngineProcess:
        file = self._folder / f"{name}.py"
        file.write_text(source)
        self.all.append(EngineProcess(name, file, {}, interpreter=interpreter, environment={}, advice="build it"))
        return self.all[-1]


def run(model: Path, peers: list[Peer], *sizes: WorkloadSize) -> tuple[list[str], list[str]]:
    """(engines of the rows, the lines about who was left out)"""
    said: list[str] = []
    rows, _ = bench_serve(model, peers, sizes or (WorkloadSize(1, 4, 3),), max_rounds=1, say=said.append)
    return [row["engine"] for row in rows], [line for line in said if "without" in line]


def test_peers_that_cannot_start_are_left_out_in_one_line_each(model: Path, peers: Peers, tmp_path: Path) -> None:
    no_file = tmp_path / "absent" / "python"
    no_program = tmp_path / "python"
    no_program.write_text("")
    broken = tmp_path / "environment" / "bin"
    broken.mkdir(parents=True)
    (broken / "python").symlink_to("/nowhere/python3.11")
    engines, said = run(
        model,
        [
            peers("missing", WORKS, str(no_file)),
            peers("unreadable", WORKS, str(no_program)),
            vllm_peer(model, environment=tmp_path / "environment"),
            peers("no-package", "import a_package_that_nobody_has"),
            peers("dies", "import os, sys\nprint('no huge pages', file=sys.stderr)\nos._exit(7)"),
            peers("killed", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"),
            OpenAIPeer("http://127.0.0.1:9"),
            OpenAIPeer("nonsense", name="no-url"),
            peers("works", WORKS),
        ],
    )
    assert engines == ["works"]
    assert said[:6] == [
        f"without missing: {no_file} cannot be started (No such file or directory); build it",
        f"without unreadable: {no_program} cannot be started (Permission denied); build it",
        f"without vllm: {broken}/python cannot be started (No such file or directory); run `make peers` to build it",
        "without no-package: ModuleNotFoundError: No module named 'a_package_that_nobody_has'",
        "without dies: it ended unexpectedly, exited with 7; its last words: no huge pages",
        "without killed: it ended unexpectedly, killed by SIGKILL: is there enough memory?",
    ]
    assert said[6].startswith("without openai: http://127.0.0.1:9/v1/models does not answer as it should: ")
    assert said[7].startswith("without no-url: nonsense/v1/models does not answer as it should: ")
    assert len(said) == 8


def test_a_peer_that_fails_later_keeps_the_rows_it_has(model: Path, peers: Peers) -> None:
    sizes = [WorkloadSize(count, 4, 3) for count in (1, 2, 1)]
    engines, said = run(model, [peers("fails", FAILS_LATER), peers("works", WORKS)], *sizes)
    assert engines == ["fails", "works", "works", "works"]
    assert said == ["from here on without fails: AssertionError: out of pages"]


def test_bounds_count_the_bytes_that_weights_take(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_quantized(model, out, WeightRounding(experts="int4", dense="int8", group=32), lambda done, total: None)
    # Each matrix stores its shape too, which counts in so small a model.
    for folder, expected in ((model, (2, 2, 2)), (out, (0.5625, 1.0625, 2))):
        spec = load_model_spec(folder)
        kept = as_kept(spec, open_checkpoint(folder, spec))
        assert (kept.expert_bytes, kept.dense_bytes, kept.head_bytes) == pytest.approx(expected, rel=0.05)


def test_nothing_ran_is_an_error(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # no .peers here
    with pytest.raises(ResourceError, match=r"nothing ran: no contestant could be started") as caught:
        bench(monkeypatch, checkpoint, "--layouts=", "--peers=vllm", "--input-tokens=4", "--output-tokens=2")
    assert caught.value.exit_code == 1
    assert "without vllm: " in capsys.readouterr().err


def test_antiphon_is_measured_though_the_default_peers_are_missing(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("antiphon.bench.serving_peers.ENGINES_FILE", tmp_path / "absent.py")
    sizes = ("--concurrency=1", "--input-tokens=4", "--output-tokens=2", "--prefill=", "--rounds=1")
    bench(monkeypatch, checkpoint, *sizes, "--json", str(tmp_path / "rows.json"))
    assert [row["engine"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == ["antiphon colocated"]
    said = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines() if line.startswith("without")]
    assert said == ["without transformers", "without vllm"]


def bench(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["antiphon"])
    typer.main.get_command(command.app)(["serve", *map(str, arguments)], standalone_mode=False)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="process states are read from /proc")
def test_sigterm_leaves_no_stopped_worker(model: Path) -> None:
    """A contestant that waits for its turn is stopped: it cannot see that the benchmark has gone."""
    layouts = [
        "--layouts",
        "colocated,1+1/m1",
        "--peers",
        "",
        "--prefill",
        "",
        "--concurrency",
        "1",
        "--rounds",
        "1000",
    ]
    sizes = ["--input-tokens", "4", "--output-tokens", "2", "--threads", "1"]
    command = [sys.executable, "-m", "antiphon.cli.main", "bench", "serve", str(model), *layouts, *sizes]
    bench = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        workers = _stopped_workers(bench)
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(timeout=60) == 128 + signal.SIGTERM
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert alive == []
    finally:
        for process in [*bench.children(recursive=True), bench] if bench.is_running() else []:
            process.kill()


def _stopped_workers(bench: psutil.Popen) -> list[psutil.Process]:
    """All worker processes, as soon as every contestant was paused at least once."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert bench.poll() is None, bench.stderr.read()
        with contextlib.suppress(psutil.NoSuchProcess):
            workers = [child for child in bench.children() if "antiphon.serve.worker.process" in child.cmdline()]
            if len(workers) == 3 and any(worker.status() == psutil.STATUS_STOPPED for worker in workers):
                return workers
        time.sleep(0.05)
    raise AssertionError("no worker was ever stopped")
