"""The page that closes a training run."""

import json
import re
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from antiphon.base.errors import UserError
from antiphon.report.run_figures import BACKWARD_COLOUR, MOST_COLUMNS, MOST_POINTS, TRAIN_COLOUR
from antiphon.report.run_page import run_page, write_run_page
from antiphon.report.run_record import RunRecord, read_run
from antiphon.specs.training_plan import training_plan_to_json
from antiphon.train.trainer import Trainer
from tests.report import chromium
from tests.specs.training_specimen import PLAN
from tests.train.harness import config_of

FIGURES = ["run-loss", "run-rate", "run-norm", "run-balance", "run-load", "run-time"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a small run."""
    where = tmp_path_factory.mktemp("run")
    Trainer(config_of(where, "output.evaluate_every=2")).run()
    return where / "out"


def figures_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.S)
    assert found is not None
    figures: dict[str, Any] = json.loads(found[1])
    return figures


def test_the_page_of_a_run_holds_its_numbers(folder: Path) -> None:
    page = write_run_page(folder).read_text()
    figures = figures_of(page)
    assert list(figures) == FIGURES
    for name, figure in figures.items():
        go.Figure(figure)
        assert page.count(f'id="{name}"') == 1
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    train, held_out = figures["run-loss"]["data"]
    assert train["y"] == [row["loss"] for row in steps]
    assert held_out["x"] == [1, 3, 5]
    (balance,) = figures["run-balance"]["data"]
    assert balance["y"] == ["layer 0", "layer 1"]
    assert balance["z"] == [[row["fullest_expert_ratio"][layer] for row in steps] for layer in (0, 1)]
    (load,) = figures["run-load"]["data"]
    assert load["z"][0] == pytest.approx([count * 5 / 128 for count in steps[-1]["expert_rows"][0]])
    forward, backward = figures["run-time"]["data"]
    assert any(name.startswith("experts (") for name in forward["y"])
    assert forward["y"][-1].startswith("the rest (")
    assert min(forward["x"] + backward["x"]) >= 0
    assert "memory of a rank" in page
    assert "default-src 'none'" in page, "nothing is loaded from elsewhere"


def test_a_plan_stands_beside_what_was_measured(folder: Path) -> None:
    record = read_run(folder)
    record.facts["plan"] = training_plan_to_json(PLAN)
    page = run_page(record)
    for name in ("a step", "tokens/s", "MFU"):
        assert f"<tr><th>{name}</th>" in page


def test_bytes_drops_and_alarms_where_metrics_hold_them(folder: Path) -> None:
    record = read_run(folder)
    for row in record.steps:
        row |= {"collective_bytes": {"all-to-all": 3e6, "all-reduce": 1e6}, "dropped_rows": [0, 4]}
        row["exposed_comm_s"] = 0.25
    record.alarms.extend((step, f"layer 1 <{step}>") for step in range(30))
    page = run_page(record)
    figures = figures_of(page)
    assert figures["run-bytes"]["data"][0]["x"] == [3.0, 1.0]
    assert [trace["y"][0] for trace in figures["run-dropped"]["data"]] == [0, 4]
    assert "waiting for ranks" in page
    assert "250 ms" in page
    assert "Alarms, the last 20 of 30" in page
    assert "step 29: layer 1 &lt;29&gt;" in page


def test_a_long_run_is_thinned(folder: Path) -> None:
    record = read_run(folder)
    steps = [record.steps[0] | {"step": step, "fullest_expert_ratio": [1.0, 2.0]} for step in range(5000)]
    steps[777]["fullest_expert_ratio"] = [1.0, 2.5]
    long = RunRecord(facts=record.facts, steps=steps)
    figures = figures_of(run_page(long))
    assert len(figures["run-loss"]["data"][0]["x"]) <= MOST_POINTS
    (balance,) = figures["run-balance"]["data"]
    assert len(balance["x"]) <= MOST_COLUMNS
    assert max(balance["z"][1]) == 2.5, "a block shows its worst"


def test_a_run_that_logged_nothing_and_a_folder_that_is_none(folder: Path, tmp_path: Path) -> None:
    page = run_page(RunRecord(facts=read_run(folder).facts))
    assert "No step was logged." in page
    assert figures_of(page) == {}
    with pytest.raises(UserError, match="not the output of a training run"):
        write_run_page(tmp_path)


@pytest.mark.skipif(not chromium.BINARY.exists(), reason=f"no browser: {chromium.BINARY} is not installed")
def test_the_page_in_a_browser(folder: Path, tmp_path: Path) -> None:
    shot = chromium.photograph(run_page(read_run(folder)), tmp_path, width=1200, height=3400)
    assert sorted(shot.places) == sorted(FIGURES)
    assert not [line for line in shot.console if not line.startswith(("PLACE", "WIDTH"))]
    assert shot.size[0] <= 1200, "nothing sticks out"
    for name, colour in (("run-loss", TRAIN_COLOUR), ("run-time", BACKWARD_COLOUR)):
        left, top, width, height = shot.places[name]
        wanted = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
        pixels = shot.pixels[top : top + height, left : left + width].reshape(-1, 3).astype(int)
        assert (abs(pixels - wanted).max(1) < 12).sum() > 20, f"{name} shows {colour}"
