"""The choice of tiles: from measured times to a table, and from the table to launches. Times are made up here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from antiphon.base.errors import UserError
from antiphon.kernels.triton import is_installed, load

pytestmark = pytest.mark.skipif(not is_installed(), reason="Triton is not installed")
ROOT = Path(__file__).parents[3]


def test_one_order_of_inputs_for_all_buckets(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 inputs at a time win the first bucket by a little and lose the second by much."""
    tune, tiles = load("tune"), load("tiles")
    weight = load("weights").StackedWeight((2, 1, 16, 24), None, device, torch.bfloat16, has_bias=False)
    weight.codes.normal_()

    def time_s(weight: object, x: torch.Tensor, rows: object, tile: object) -> float:
        if tile is None:
            return 9.0
        slow = 1.0 if tile.inputs == 64 else 0.9 if x.shape[0] <= 4 else 2.0
        return slow + 0.01 * tile.stages + 0.001 * tile.columns + 0.0001 * tile.rows

    monkeypatch.setattr(tune, "_time_s", time_s)
    monkeypatch.setattr(tune, "candidates", lambda weight, rows: [
        tiles.ProductTile(rows=16, columns=32, inputs=inputs, warps=4, stages=stages)
        for inputs in (64, 128) for stages in (3, 4)
    ])  # fmt: skip
    found = tune.tune(weight, [2, 4], 2, lambda done, total: None)
    assert [(each.most_rows, each.tile.inputs, each.tile.stages) for each in found] == [(4, 64, 3), (8, 64, 3)]
    path = tmp_path / "tables" / "tiles.json"
    entries = {tiles.key_of(weight, device): [(each.most_rows, each.tile) for each in found]}
    tiles.write_table(path, entries)
    assert tiles.read_table(path) == entries
    monkeypatch.setenv("ANTIPHON_TILES", str(path))
    tiles._entries.cache_clear()
    try:
        assert tiles.tile_for(weight, 5, device) == found[1].tile
        assert tiles.tile_for(weight, 9, device) == tiles.default_tile(weight, 9, 90)
    finally:
        tiles._entries.cache_clear()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"entries": [{"key": 1}]}', '{"entries": [{"key": [], "tiles": [[1, {}]]}]}']
)
def test_files_that_are_no_tables(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"tiles.json is no table of tiles .*: write it with antiphon tune"):
        load("tiles").read_table(path)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`antiphon tune` on the shipped model, compiling."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "antiphon.cli.main", "tune", "examples/demo-moe", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so() -> None:
    ended = run()
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith(
        "error: antiphon tune measures on a GPU (only --compile-only needs none): --device cuda"
    )
    ended = run("--compile-only", "--out", "tiles.json")
    assert ended.returncode == 2
    assert "--out tiles.json does not apply with --compile-only" in ended.stderr
    for wrong, message in (("0,8", "--tokens is '0,8': give numbers from 1 to 131072"), ("x", "--tokens is 'x'")):
        ended = run("--compile-only", "--tokens", wrong)
        assert ended.returncode == 2
        assert message in ended.stderr


@pytest.mark.slow
def test_what_tiles_need() -> None:
    """Of both products, for both generations; the default tile is among those that fit."""
    ended = run("--compile-only", "--tokens", "1024", "--json", "-")
    assert ended.returncode == 0, ended.stderr
    tiles = json.loads(ended.stdout)["tiles"]
    assert {(each["weight"], each["capability"]) for each in tiles} == {
        (weight, capability) for weight in ("gate and up", "down") for capability in (80, 90)
    }
    assert any(each["fits"] and each["num_wgmma"] for each in tiles if each["capability"] == 90)
