"""`antiphon bench dispatch`: a small run, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from antiphon.base.errors import UserError
from antiphon.bench.dispatch import VARIANTS, DispatchOptions, check_equal
from antiphon.cli.bench import app
from tests.comm.ranks import start_fork_server


def test_a_small_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    start_fork_server()
    options = ["--ranks", "2", "--tokens", "32", "--hidden", "16", "--experts", "5", "--top-k", "2", "--rounds", "1"]
    CliRunner().invoke(app, ["dispatch", *options, "--json", str(file)], catch_exceptions=False)
    rows = json.loads(file.read_text())["rows"]
    assert [row["variant"] for row in rows] == list(VARIANTS)
    assert rows[0]["time_to_all_to_all"] == 1.0
    assert rows[2]["comm_bytes"] == rows[2]["formula_bytes"] == 2 * 2 * 32 * 16 * 4
    assert rows[1]["comm_bytes"] < rows[0]["comm_bytes"]


def test_wrong_results_are_not_timed() -> None:
    right = [torch.ones(2)] * 3
    with pytest.raises(AssertionError, match=r"all-gather, float32: the gradient of rows differs by 1.0e-01"):
        check_equal("all-gather", "float32", [right[0], torch.tensor([1.0, 1.1]), right[2]], right)


def test_sizes_that_do_not_fit() -> None:
    assert DispatchOptions(num_experts=4, top_k="1,4").check() == [1, 4]
    for options, said in (
        (DispatchOptions(num_experts=4, top_k="1,5"), "--top-k is 5, --experts is 4"),
        (DispatchOptions(num_experts=4, top_k="1", ranks=5), "--ranks is 5, --experts is 4"),
        (DispatchOptions(top_k="2,x"), "--top-k is '2,x': write whole numbers"),
        (DispatchOptions(ranks=1), "--ranks is 1: one rank sends nothing"),
        (DispatchOptions(dtype="int8"), "--dtype is 'int8': use float32 or bfloat16"),
    ):
        with pytest.raises(UserError, match=said):
            options.check()
