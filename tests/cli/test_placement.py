"""`antiphon placement`: from a recorded trace to a table and a file that a server takes."""

import json
from pathlib import Path

import numpy as np
import pytest

from antiphon.cli.main import app
from antiphon.cli.output import run_command
from antiphon.placement.routing_trace import RoutingTraceWriter, TraceHeader
from antiphon.placement.sample_paths import read_path_profile
from antiphon.specs.placement import read_placement


def call(*arguments: str) -> int:
    return run_command(lambda: app(["placement", *arguments], prog_name="antiphon", standalone_mode=False))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """20 steps of 64 rows, two MoE layers (1 and 2) of 8 experts, of which the first takes half of all rows."""
    file = tmp_path / "routing.trace"
    writer = RoutingTraceWriter(file, TraceHeader(model="m", layers=(1, 2), num_experts=8, top_k=1))
    random = np.random.default_rng(0)
    for step in range(20):
        ids = np.where(random.random((2, 64, 1)) < 0.5, 0, random.integers(1, 8, (2, 64, 1)))
        writer.append_step(step, 0, ids.astype("<u2").tobytes())
    writer.close()
    return file


def test_a_hot_expert_gets_copies(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = trace.with_name("placement.json")
    assert call(str(trace), "--workers", "4", "--slots", "3", "--out", str(out), "--json", "-") == 0
    payload = json.loads(capsys.readouterr().out)
    assert [layer["layer"] for layer in payload["layers"]] == [1, 2]
    for layer in payload["layers"]:
        assert layer["copies"] == 4
        assert layer["contiguous"] < 0.5
        assert layer["contiguous"] < layer["even_shares"] <= layer["split"]
        assert layer["split"] > 0.9
        assert layer["split_p5"] <= layer["split"]
    made = read_placement(out)
    made.check_fits([1, 2], 8, 4, 3)
    assert all(len(owners[0]) >= 3 for owners in made.owners.values())


def test_sample_paths_are_judged_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows choose in layer 1 what follows from layer 0, which changes from step to step: paths know it, the steps
    before do not."""
    trace, out = tmp_path / "routing.trace", tmp_path / "paths"
    writer = RoutingTraceWriter(trace, TraceHeader(model="m", layers=(0, 2), num_experts=8, top_k=1))
    for step in range(20):
        first = np.where(np.arange(64) % 4, 3 * step % 8, np.arange(64) % 8)
        ids = np.stack([first, (first + 5) % 8])[..., None]
        writer.append_step(step, 0, ids.astype("<u2").tobytes())
    writer.close()
    options = ["--workers", "4", "--slots", "3", "--profile-paths", str(out)]
    assert call(str(trace), *options, "--path-length", "2") != 0
    assert "paths have at most 1" in capsys.readouterr().err
    assert not out.exists()
    assert call(str(trace), *options, "--path-length", "1", "--json", "-") == 0
    (layer,) = json.loads(capsys.readouterr().out)["paths"]
    assert layer["layer"] == 2
    assert (layer["paths_right"], layer["paths_elsewhere"]) == (1.0, pytest.approx(0.0))
    assert layer["window_elsewhere"] > 0.3
    assert layer["router_right"] is None, "the trace has no forecasts"
    assert read_path_profile(out).layers == (0, 2)


def test_copies_ahead_of_a_layer_are_judged_by_the_forecasts_of_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In layer 1 another expert is hot in each step, and foreseen. No placement of before helps."""
    file = tmp_path / "routing.trace"
    writer = RoutingTraceWriter(file, TraceHeader(model="m", layers=(0, 1), num_experts=8, top_k=1))
    for step in range(20):
        ids = np.full((2, 64, 1), 3 * step % 8, dtype="<u2")
        ids[:, ::4, 0] = np.arange(16) % 8
        writer.append_step(step, 0, ids.tobytes(), ids[1:].tobytes())
    writer.close()
    assert call(str(file), "--workers", "4", "--slots", "3", "--json", "-") == 0
    first, second = json.loads(capsys.readouterr().out)["layers"]
    assert first["ahead"] is None, "no layer before it could tell"
    assert second["split"] < 0.7
    assert second["ahead"] > 0.9


def test_the_table_names_its_columns(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(trace), "--workers", "4", "--slots", "2", "--speeds", "1,1,1,0.5", "--knee", "2") == 0
    printed = capsys.readouterr().out.splitlines()
    assert " ".join(printed[0].split()) == "layer contiguous shared evenly split 5th percentile ahead copies"
    assert len(printed) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--workers", "2", "--slots", "3"), "8 experts do not fit in 2 x 3 slots: give each worker at least 4"),
        (("--workers", "4", "--slots", "2", "--speeds", "1,2"), "--speeds 1,2: give 4 numbers above 0"),
        (("--workers", "4", "--slots", "2", "--speeds", "1,x,1,1"), "--speeds 1,x,1,1: write one number"),
    ],
)
def test_mistakes_are_named(
    trace: Path, options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(str(trace), *options) == 2
    assert words in capsys.readouterr().err
