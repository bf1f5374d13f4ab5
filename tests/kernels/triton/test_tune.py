"""The choice of tiles and of products: from measured times to a table, and from the table to launches. Times are made
up here."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.base.errors import UserError
from antiphon.cli.tune import FORMATS
from antiphon.kernels.api import ExpertShape
from antiphon.kernels.quantized import WeightFormat
from antiphon.kernels.triton import is_installed, load

pytestmark = pytest.mark.skipif(not is_installed(), reason="Triton is not installed")
ROOT = Path(__file__).parents[3]


def forget() -> None:
    """The next look-up reads the table, as a new process does."""
    if is_installed():
        load("tiles").process_table.cache_clear()
        load("tiles")._entry.cache_clear()


@pytest.fixture
def table_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this process reads its table."""
    path = tmp_path / "tables" / "tiles.json"
    monkeypatch.setenv("ANTIPHON_TILES", str(path))
    forget()
    yield path
    forget()


def stacked(form: WeightFormat | None, device: torch.device, num_experts: int = 2) -> Any:
    weight = load("weights").StackedWeight((num_experts, 1, 16, 256), form, device, torch.bfloat16, has_bias=False)
    load("tune").fill_at_random(weight)
    return weight


def fake_times(tune: Any, monkeypatch: pytest.MonkeyPatch, second_bucket: float) -> None:
    """128 inputs at a time win the first bucket by a little; `second_bucket`: their time in the second, to 64's 1."""

    def time_s(weight: object, x: torch.Tensor, rows: object, tile: Any) -> float:
        slow = 1.0 if tile.inputs == 64 else 0.9 if x.shape[0] <= 4 else second_bucket
        return slow + 0.01 * tile.stages + 0.001 * tile.columns + 0.0001 * tile.rows

    monkeypatch.setattr(tune, "_time_s", time_s)


@pytest.mark.parametrize(("second_bucket", "inputs"), [(2.0, 64), (0.5, 128)])
def test_one_order_of_inputs_for_all_rows(
    second_bucket: float, inputs: int, device: torch.device, table_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all buckets and beyond the last one, and for workers with more experts than were measured."""
    tune, tiles = load("tune"), load("tiles")
    fake_times(tune, monkeypatch, second_bucket)
    weight = stacked(None, device)
    found = tune.tune(weight, [2, 4], 2, lambda done, total: None)
    assert [(each.most_rows, each.tile.inputs, each.tile.stages) for each in found] == [(4, inputs, 3), (8, inputs, 3)]
    entry = tune.table_entry(weight, found)
    tiles.write_table(table_file, {tiles.key_of(weight, device): entry})
    assert tiles.read_table(table_file) == {tiles.key_of(weight, device): entry}
    assert list(table_file.parent.iterdir()) == [table_file]
    others = stacked(None, device, num_experts=5)
    for rows in (1, 4, 5, 8, 9, 100_000):
        assert tiles.tile_for(weight, rows, device).inputs == tiles.tile_for(others, rows, device).inputs == inputs
    assert tiles.tile_for(weight, 9, device) == found[1].tile


def test_the_rule_is_kept_where_it_is_the_quickest(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule's tile is a candidate on every card, and the table then has no tiles."""
    tune, tiles = load("tune"), load("tiles")
    weight = stacked(FORMATS["int4"], device)
    for capability in (80, 90):
        assert tiles.default_tile(weight, 512, capability) in tune.candidates(weight, 512, capability)
    defaults = [tiles.default_tile(weight, rows, 90) for rows in (4, 32)]
    monkeypatch.setattr(tune, "capability_of", lambda device: 90)
    monkeypatch.setattr(tune, "_time_s", lambda weight, x, rows, tile: 1.0 if tile in defaults else 2.0)
    found = tune.tune(weight, [2, 16], 2, lambda done, total: None)
    assert [each.tile for each in found] == defaults
    assert tune.table_entry(weight, found) == tiles.TunedWeight()


@pytest.mark.parametrize("name", FORMATS)
def test_wrong_tiles_are_seen_in_every_format(name: str, device: torch.device) -> None:
    """A tile that takes an expert's codes for another's, or scales, is refused."""
    tune = load("tune")
    weight, other = stacked(FORMATS[name], device), stacked(FORMATS[name], device)
    x, rows = tune._random_rows(weight, 3, 2)
    tile = load("tiles").default_tile(weight, 6, 90)
    right = tune._product(weight, (x, rows), tile)
    assert right.isfinite().all()
    assert tune._fits(weight, x, rows, tile, right)
    assert not tune._fits(other, x, rows, tile, right)
    if weight.scales is not None:
        other.codes.copy_(weight.codes)
        assert not tune._fits(other, x, rows, tile, right)


def test_the_key_tells_formats_apart(device: torch.device) -> None:
    key_of, int4 = load("tiles").key_of, FORMATS["int4"]
    assert int4 is not None
    weights = [stacked(form, device) for form in FORMATS.values()]
    weights += [stacked(replace(int4, columns_per_scale=32), device)]
    make = load("weights").StackedWeight
    weights += [make((2, 1, 16, 256), replace(int4, offset="zeros"), device, torch.bfloat16, has_bias=False)]
    weights += [make((2, 1, 16, 256), int4, device, torch.float16, has_bias=False)]
    assert len({key_of(weight, device) for weight in weights}) == len(weights)


def small_experts(backend: Any) -> Any:
    experts = backend.new_experts(ExpertShape(3, 16, 24, "swiglu_oai", has_bias=True))
    for index in range(3):
        experts.set_expert(index, torch.randn(24, 16), torch.randn(24, 16), torch.randn(16, 24))
        experts.set_bias(index, torch.randn(24), torch.randn(24), torch.randn(16))
    return experts


def test_the_table_names_the_product(
    device: torch.device, table_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts use Triton's product but where the table says otherwise; nothing is measured; the log says which."""
    tiles, backend_module = load("tiles"), load("backend")
    table_file.parent.mkdir()
    table_file.write_text('{"entries": []}')
    asked: list[str] = []
    for name in ("grouped_products", "expert_products"):
        real = getattr(backend_module, name)
        monkeypatch.setattr(
            backend_module, name, lambda *given, name=name, real=real: asked.append(name) or real(*given)
        )
    x, ids = torch.randn(4, 16, device=device).bfloat16(), torch.tensor([[0, 2], [1, -1], [-1, -1], [2, 1]]).int()
    given = x, ids.to(device), torch.rand(4, 2, device=device)
    backend = backend_module.TritonBackend(device, torch.bfloat16)
    experts = small_experts(backend)
    by_triton = backend.grouped_ffn(*given, experts)
    table = {tiles.key_of(experts.gate_up, device): tiles.TunedWeight(product="grouped_mm")}
    tiles.write_table(table_file, table)
    forget()
    backend = backend_module.TritonBackend(device, torch.bfloat16)
    with caplog.at_level(logging.INFO, "antiphon"):
        by_torch = [backend.grouped_ffn(*given, experts) for _ in range(2)][1]
    assert asked == ["expert_products", "grouped_products", "grouped_products"]
    assert load("tune")._near(by_torch, by_triton)
    assert [message.split(" on ")[0] for message in caplog.messages] == ["kernels: 2 x 24 x 16 in bfloat16"]
    assert caplog.messages[0].endswith(f"product grouped_mm, tiles from {table_file}")
    caplog.clear()
    with caplog.at_level(logging.INFO, "antiphon"):
        tiles.tile_for(experts.down, 3, device)
    assert caplog.messages[0].endswith(f"product triton, tiles by rule: {table_file} has no such entry")


def test_a_broken_table_is_said_at_the_start(device: torch.device, table_file: Path) -> None:
    with pytest.raises(UserError, match=r"tiles.json, which is no file: write it with antiphon tune, or unset it"):
        load("backend").TritonBackend(device, torch.bfloat16)
    table_file.parent.mkdir()
    table_file.write_text("{")
    with pytest.raises(UserError, match=r"tiles.json is no table of tiles"):
        load("backend").TritonBackend(device, torch.bfloat16)


def test_the_quickest_product(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are measured on the same rows and compared first; times are made up."""
    tune, tiles = load("tune"), load("tiles")
    experts = small_experts(load("backend").TritonBackend(device, torch.bfloat16))
    assert tune.quickest_product([]) == "triton"
    for torch_s, chosen in ((0.9, "grouped_mm"), (1.1, "triton")):
        monkeypatch.setattr(tune, "measure_s", lambda way, s=torch_s: s if way.func is tune.grouped_products else 1.0)
        times = tune.compare_products(experts, [2, 5], 2, tiles.TunedWeight(), tiles.TunedWeight())
        assert [(each.num_tokens, each.triton_s, each.grouped_mm_s) for each in times] == [
            (2, 1.0, torch_s), (5, 1.0, torch_s)
        ]  # fmt: skip
        assert tune.quickest_product(times) == chosen
    monkeypatch.setattr(tune, "_near", lambda found, expected: False)
    times = tune.compare_products(experts, [2], 2, tiles.TunedWeight(), tiles.TunedWeight())
    assert (times[0].grouped_mm_s, tune.quickest_product(times)) == (None, "triton")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"entries": [{"key": 1}]}',
        '{"entries": [{"key": [], "tiles": [[1, {}]]}]}',
        '{"entries": [{"key": [], "product": "cublas", "tiles": []}]}',
    ],
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
