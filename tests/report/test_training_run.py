"""The page that closes a training run."""

import json
from pathlib import Path

import pytest

from antiphon.base.errors import UserError
from antiphon.report.document import html
from antiphon.report.training_run import (
    BACKWARD_COLOUR,
    MOST_COLUMNS,
    MOST_POINTS,
    TRAIN_COLOUR,
    RunRecord,
    balance_chart,
    bytes_chart,
    dropped_chart,
    load_chart,
    loss_chart,
    read_run,
    run_page,
    time_chart,
    write_run_page,
)
from antiphon.specs.training_plan import training_plan_to_json
from antiphon.train.setup import prepare
from antiphon.train.trainer import Trainer
from tests.report import chromium
from tests.specs.training_specimen import PLAN
from tests.train.harness import config_of

FIGURES = ["run-loss", "run-rate", "run-norm", "run-balance", "run-load", "run-time"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a small run."""
    where = tmp_path_factory.mktemp("run")
    Trainer(prepare(config_of(where, "output.evaluate_every=2"))).run()
    return where / "out"


def test_the_page_of_a_run_holds_its_numbers(folder: Path) -> None:
    page = write_run_page(folder).read_text()
    assert [page.count(f'id="{name}"') for name in FIGURES] == [1] * len(FIGURES)
    assert page.count('class="figure wide"') == len(FIGURES)
    assert "memory of a rank" in page
    assert "default-src 'none'" in page, "nothing is loaded from elsewhere"
    assert len(page) < 200_000


def test_the_charts_of_a_run_are_its_numbers(folder: Path) -> None:
    record = read_run(folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    train, held_out = loss_chart(record).lines
    assert train.y == tuple(row["loss"] for row in steps)
    assert held_out.x == (1, 3, 5)
    balance = balance_chart(record)
    assert balance.rows == ("layer 0", "layer 1")
    assert balance.values == tuple(tuple(row["fullest_expert_ratio"][layer] for row in steps) for layer in (0, 1))
    load = load_chart(record)
    assert load.values[0] == pytest.approx([count * 5 / 128 for count in steps[-1]["expert_rows"][0]])
    time = time_chart(record)
    assert any(row.startswith("fc1 (") for row in time.rows)
    assert time.rows[-1].startswith("the rest (")
    assert {block.group for block in time.blocks} == {"forward", "backward"}
    assert min(block.length for block in time.blocks) >= 0


def test_a_plan_stands_beside_what_was_measured(folder: Path) -> None:
    record = read_run(folder)
    record.facts["plan"] = training_plan_to_json(PLAN)
    page = html(run_page(record))
    for name in ("a step", "tokens/s", "MFU"):
        assert f"<tr><th>{name}</th>" in page


def test_bytes_drops_and_alarms_where_metrics_hold_them(folder: Path) -> None:
    record = read_run(folder)
    for row in record.steps:
        row |= {"collective_bytes": {"all-to-all": 3e6, "all-reduce": 1e6}, "dropped_rows": [0, 4]}
        row["exposed_comm_s"] = 0.25
    record.alarms.extend((step, f"layer 1 <{step}>") for step in range(29))
    record.alarms.append((28, "step 28: a spike"))
    page = html(run_page(record))
    assert 'id="run-bytes"' in page
    assert [block.length for block in bytes_chart(record).blocks] == [3.0, 1.0]
    assert [line.y[0] for line in dropped_chart(record).lines] == [0, 4]
    assert "waiting for ranks" in page
    assert "250 ms" in page
    assert "Alarms, the last 20 of 30" in page
    assert "step 28: layer 1 &lt;28&gt;" in page
    assert ">step 28: a spike" in page


def test_a_long_run_is_thinned(folder: Path) -> None:
    record = read_run(folder)
    steps = [record.steps[0] | {"step": step, "fullest_expert_ratio": [1.0, 2.0]} for step in range(5000)]
    steps[777]["fullest_expert_ratio"] = [1.0, 2.5]
    long = RunRecord(facts=record.facts, steps=steps)
    assert len(loss_chart(long).lines[0].x) <= MOST_POINTS
    balance = balance_chart(long)
    assert len(balance.columns) <= MOST_COLUMNS
    assert max(balance.values[1]) == 2.5, "a block shows its worst"
    assert len(html(run_page(long))) < 1_500_000


def test_a_run_that_logged_nothing_and_a_folder_that_is_none(folder: Path, tmp_path: Path) -> None:
    page = html(run_page(RunRecord(facts=read_run(folder).facts)))
    assert "No step was logged." in page
    assert "<svg" not in page
    with pytest.raises(UserError, match="not the output of a training run"):
        write_run_page(tmp_path)


@pytest.mark.skipif(not chromium.BINARY.exists(), reason=f"no browser: {chromium.BINARY} is not installed")
def test_the_page_in_a_browser(folder: Path, tmp_path: Path) -> None:
    shot = chromium.photograph(html(run_page(read_run(folder))), tmp_path, width=1200, height=3600)
    assert sorted(shot.places) == sorted(FIGURES)
    assert not [line for line in shot.console if not line.startswith(("PLACE", "WIDTH"))]
    assert shot.size[0] <= 1200, "nothing sticks out"
    for name, colour in (("run-loss", TRAIN_COLOUR), ("run-time", BACKWARD_COLOUR)):
        left, top, width, height = shot.places[name]
        wanted = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
        pixels = shot.pixels[top : top + height, left : left + width].reshape(-1, 3).astype(int)
        assert (abs(pixels - wanted).max(1) < 12).sum() > 20, f"{name} shows {colour}"
