"""Apart against together: what cannot be compared is refused, and small runs have all rows."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from antiphon.base.errors import ResourceError, UserError
from antiphon.bench.apart import (
    ABLATION,
    SLOW_WORKER,
    STEPS,
    SWEEP,
    ApartCase,
    bench_ablation,
    bench_slow_worker,
    bench_sweep,
    check_steps,
    compare_steps,
)
from antiphon.bench.harness.processes import quota_unavailable
from antiphon.cli.bench import app
from tests.serve.engine_harness import save_tiny_model


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny", max_position_embeddings=256).folder
    for options, said in (
        (["--layout", "colocated"], "--layout colocated has attention and experts together"),
        (["--together", "1+2/m2"], "--together 1+2/m2 has attention and experts apart"),
        (["--input-tokens", "300"], "more than the model's context of 256"),
        (["--attention", "two"], "--attention 'two' is not a list of numbers"),
        (["--attention", "0"], "--attention has 0"),
        (["--attention", "1", "--slice", "3"], "--slice is 3"),
        (["--slice", "0.1"], "--slice is for the sweep: add --attention N,N"),
        (["--expert-slice", "0.5"], "--expert-slice is for the sweep: add --attention N,N"),
        (["--attention", "1", "--together", "colocated"], "--together does not apply with --attention"),
        (["--attention", "1", "--layout", "2+1/m2"], "only its micro-batches count"),
        (["--requests", "0"], "--requests is 0"),
        (["--slow", "0.5"], "--slow is for the sweep: add --attention N,N"),
        (["--attention", "2,3", "--slow", "0.5"], "--attention 2,3 with --slow: write one number"),
        (["--attention", "1", "--slow", "0.5"], "--attention is 1 with --slow: one is slow and others are not"),
        (["--attention", "3", "--slow", "0.1"], "--slow is 0.1: it must be 0.2 to 1 of --slice 0.1"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            CliRunner().invoke(app, ["apart", str(folder), *options], catch_exceptions=False)


def test_a_step_is_compared_with_its_own_step_before_and_a_missing_one_is_no_success() -> None:
    rows: list[dict[str, Any]] = [
        {"engine": name, "output_tokens_per_s": rate}
        for name, rate in (
            ("together", 100.0),
            ("apart, M2N over tcp", 60.0),
            ("apart, M2N over shm", 90.0),
            ("apart, each for itself", 99.0),
        )
    ]
    compare_steps(rows)
    assert [row["over_the_row_before"] for row in rows] == [None, None, 1.5, 1.1]
    with pytest.raises(ResourceError, match="no figure of apart, gloo: what failed is said above"):
        check_steps(rows)
    with pytest.raises(ResourceError, match="no figure of together and apart, gloo and"):
        check_steps([])


@pytest.mark.slow
def test_a_small_ablation(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny", max_position_embeddings=256).folder
    case = ApartCase(requests=4, input_tokens=16, output_tokens=16, rounds=1)
    rows = bench_ablation(folder, case, print)
    assert [row["engine"] for row in rows] == list(STEPS)
    assert [row["over_the_row_before"] is None for row in rows] == [True, False, False, False, False]
    assert len(ABLATION.cells(rows)) == 5


@pytest.mark.slow
@pytest.mark.skipif(quota_unavailable() is not None, reason=str(quota_unavailable()))
def test_a_small_sweep(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny", max_position_embeddings=256).folder
    case = ApartCase(requests=2, input_tokens=8, output_tokens=40, rounds=1)
    rows = bench_sweep(folder, case, [1, 2], lambda done, total: None)
    assert [row["attention"] for row in rows] == [1, 2]
    assert rows[1]["cores"] == pytest.approx(0.7)
    assert len(SWEEP.cells(rows)) == 2


@pytest.mark.slow
@pytest.mark.skipif(quota_unavailable() is not None, reason=str(quota_unavailable()))
def test_a_small_run_beside_a_slow_worker(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny", max_position_embeddings=256).folder
    case = ApartCase(requests=4, input_tokens=8, output_tokens=60, rounds=1, slow=0.5)
    rows = bench_slow_worker(folder, case, 2, lambda done, total: None)
    assert [row["stepping"] for row in rows] == ["barrier", "free"]
    assert all(row["others_keep"] > 0 for row in rows)
    assert len(SLOW_WORKER.cells(rows)) == 2
