"""`bench step`: what a step costs outside its kernels, by parts that add up; what cannot be measured is refused."""

import json
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from antiphon.base.errors import UserError
from antiphon.bench.step_cost import COLUMNS, _EngineClock
from antiphon.cli.bench import app
from antiphon.serve.fleet import Fleet
from antiphon.serve.worker.counting_recorder import CountingRecorder
from antiphon.serve.worker.spans import ATTENTION, INPUTS
from tests.serve.engine_harness import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("step") / "model").folder


@pytest.mark.parametrize(
    ("layout", "draws"),
    [
        ("colocated", ["--temperature", "1", "--top-p", "0.9", "--presence-penalty", "0.5"]),
        pytest.param("1+1/m2", [], marks=pytest.mark.slow),
    ],
)
def test_a_row_for_each_number_of_requests(folder: Path, layout: str, draws: list[str], tmp_path: Path) -> None:
    poll, report = Fleet.poll, tmp_path / "rows.json"
    options = ["--concurrency", "1,3", "--rounds", "1", "--output-tokens", "80", "--threads", "1", "--layout", layout]
    options += draws
    done = CliRunner().invoke(app, ["step", str(folder), *options, "--json", str(report)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows = json.loads(report.read_text())["rows"]
    assert [row["requests"] for row in rows] == [1, 3]
    for row in rows:
        parts = [row[f"{name}_s"] for name in ("inputs", "layers", "sampling", "answer", "orders", "engine")]
        assert all(seconds > 0 for seconds in parts)
        assert row["processor_s"] == pytest.approx(sum(parts))
        assert sum(row[name] for name in row if name.startswith("engine: ")) == pytest.approx(row["engine_s"])
        assert 0 < row["kernels_s"] < row["step_s"]
        assert row["outside_s"] == pytest.approx(row["step_s"] - row["kernels_s"])
        assert row["steps"] > 20
    assert len(COLUMNS.cells(rows)[0]) == len(COLUMNS.headings)
    assert Fleet.poll is poll, "nothing is counted any more"


def test_what_cannot_be_measured_is_refused(folder: Path) -> None:
    for options, said in (
        (["--concurrency", ""], "--concurrency is empty: name at least one number"),
        (["--concurrency", "0"], "a number is 0"),
        (["--output-tokens", "8"], "--output-tokens is 8: a window needs at least 16"),
        (["--input-tokens", "300"], "--input-tokens and --output-tokens are 396 together, the model's context has 128"),
        (["--layout", "colocated*2"], "--layout colocated*2 has several attention workers"),
        (["--layout", "sideways"], "--layout is 'sideways': write"),
        (["--threads", "0"], "--threads is 0"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--top-p", "0"], "--top-p is 0.0: it must be above 0 and at most 1"),
        (["--temperature", "101"], "--temperature is 101.0: it must be between 0 and 100"),
        (["--presence-penalty", "3"], "--presence-penalty is 3.0: it must be between -2 and 2"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            CliRunner().invoke(app, ["step", str(folder), *options], catch_exceptions=False)


def burn(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def test_processor_time_belongs_to_the_span_that_ends() -> None:
    recorder = CountingRecorder()
    recorder.add(INPUTS, 0)  # the first one has no beginning
    burn(0.002)
    recorder.add(ATTENTION, 0, 1, 0, 5)
    burn(0.001)
    recorder.add(INPUTS, 0)
    spans = recorder.take()
    assert spans.processor_ns["attention"] >= 2_000_000
    assert spans.processor_ns["inputs"] >= 1_000_000
    assert {"kernels", "sample", "answer"} <= spans.processor_ns.keys()
    assert len(spans.starts_ns) == 3


def test_a_method_within_another_is_counted_once() -> None:
    clock = _EngineClock()
    clock.enter("engine: read")
    burn(0.001)
    left = clock.enter("engine: write")
    burn(0.002)
    clock.enter(left)
    clock.enter("engine: rest")
    taken = clock.read()
    assert taken["engine: write"] >= 2_000_000
    assert taken["engine: read"] >= 1_000_000
    assert sum(taken.values()) == pytest.approx(3_000_000, rel=0.5)
