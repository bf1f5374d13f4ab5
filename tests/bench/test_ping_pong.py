"""Ping-pong measured: what is read from spans, what is predicted beside it, what is refused, and a small run."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from antiphon.base.errors import UserError
from antiphon.bench.box import box_unavailable
from antiphon.bench.ping_pong import (
    COLUMNS,
    MeasuredLayer,
    PingPongCase,
    bench_over_links,
    bench_ping_pong,
    ping_pong_rows,
)
from antiphon.cli.bench import app
from tests.serve.engine_harness import save_tiny_model


def test_measured_beside_predicted() -> None:
    one, two = (
        MeasuredLayer(m, 2e-3, 4e-3, layer_s, rate) for m, layer_s, rate in ((1, 8e-3, 100.0), (2, 8e-3, 200.0))
    )
    first, second = ping_pong_rows([one, two], share=0.25)
    assert first["exchange_s"] == pytest.approx(1e-3)
    assert second["predicted_layer_s"] == pytest.approx(8e-3)
    assert (second["gain"], second["predicted_gain"]) == (2.0, pytest.approx(2.0))
    assert second["share"] == 0.25
    assert len(COLUMNS.cells([first, second])) == 2


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny", max_position_embeddings=64).folder
    with pytest.raises(UserError, match="--m begins with 2: begin with 1"):
        bench_ping_pong(folder, PingPongCase(), [2, 3], None, lambda done, total: None)
    with pytest.raises(UserError, match="more than the model's context of 64"):
        bench_ping_pong(folder, PingPongCase(), [1], None, lambda done, total: None)
    for options, said in (
        (["--m", "x"], "--m 'x' is not a list of numbers"),
        (["--m", "1,2", "--shares", "0"], "--shares has '0'"),
        (["--shares", "0.5", "--traces", str(tmp_path)], "--traces does not apply with --shares"),
        (["--experts", "0"], "--experts is 0"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            CliRunner().invoke(app, ["ping-pong", str(folder), *options], catch_exceptions=False)


def test_a_small_run_writes_its_traces(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny", max_position_embeddings=64).folder
    case = PingPongCase(micro_batch=3, input_tokens=8, output_tokens=32)
    first, second = bench_ping_pong(folder, case, [1, 2], tmp_path / "traces", lambda done, total: None)
    assert first["gain"] == 1.0
    assert second["gain"] > 0
    assert all(row["attention_s"] > 0 and row["experts_s"] > 0 for row in (first, second))
    assert json.loads((tmp_path / "traces" / "m2.json").read_text(encoding="utf-8"))["traceEvents"]


@pytest.mark.slow
@pytest.mark.skipif(box_unavailable() is not None, reason=str(box_unavailable()))
def test_over_slow_links(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny", max_position_embeddings=64).folder
    case = PingPongCase(micro_batch=8, input_tokens=8, output_tokens=40)
    rows = bench_over_links(folder, case, [1.0], [1, 2], lambda done, total: None)
    assert [(row["micro_batches"], row["share"]) for row in rows] == [(1, 1.0), (2, 1.0)]
