"""The choice of tiles, from measured times to a table, and from the files to launches. Times are made up here."""

import importlib
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
from antiphon.kernels import packages
from antiphon.kernels.api import ExpertShape, KVCacheSpec
from antiphon.kernels.choices import (
    choices_path,
    choose,
    near,
    process_choices,
    process_table,
    read_table,
    write_choices,
    write_table,
)
from antiphon.kernels.quantized import WeightFormat
from antiphon.kernels.stacked import StackedWeight
from antiphon.kernels.triton import is_installed, load

pytestmark = pytest.mark.skipif(not is_installed(), reason="Triton is not installed")
ROOT = Path(__file__).parents[3]


def forget() -> None:
    """The next look-up reads the table, as a new process does."""
    process_table.cache_clear()
    process_choices.cache_clear()
    if is_installed():
        load("grouped")._entry.cache_clear()


def search() -> Any:
    """What measures."""
    return importlib.import_module("antiphon.bench.tile_search")


@pytest.fixture
def table_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this process reads its table."""
    path = tmp_path / "tables" / "tiles.json"
    monkeypatch.setenv("ANTIPHON_TILES", str(path))
    forget()
    yield path
    forget()


def stacked(form: WeightFormat | None, device: torch.device, num_experts: int = 2) -> Any:
    weight = StackedWeight((num_experts, 1, 16, 256), form, device, torch.bfloat16, has_bias=False)
    search().fill_at_random(weight)
    return weight


def fake_times(tune: Any, monkeypatch: pytest.MonkeyPatch, second_bucket: float) -> None:
    """128 inputs at a time win the first bucket by a little; `second_bucket`: their time in the second, to 64's 1."""

    def time_s(way: Any) -> float:
        (x, _), tile = way.args[1:]
        slow = 1.0 if tile.inputs == 64 else 0.9 if x.shape[0] <= 4 else second_bucket
        return slow + 0.01 * tile.stages + 0.001 * tile.columns + 0.0001 * tile.rows

    monkeypatch.setattr(tune, "measure_s", time_s)


@pytest.mark.parametrize(("second_bucket", "inputs"), [(2.0, 64), (0.5, 128)])
def test_one_order_of_inputs_for_all_rows(
    second_bucket: float, inputs: int, device: torch.device, table_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all buckets and beyond the last one, and for workers with more experts than were measured."""
    tune, grouped = search(), load("grouped")
    fake_times(tune, monkeypatch, second_bucket)
    weight = stacked(None, device)
    found = tune.tune(weight, [2, 4], 2, lambda done, total: None)
    assert [(each.most_rows, each.tile.inputs, each.tile.stages) for each in found] == [(4, inputs, 3), (8, inputs, 3)]
    entry = tune.table_entry(weight, found)
    write_table(table_file, {grouped.key_of(weight, device): entry})
    assert read_table(table_file) == {grouped.key_of(weight, device): entry}
    assert list(table_file.parent.iterdir()) == [table_file]
    others = stacked(None, device, num_experts=5)
    for rows in (1, 4, 5, 8, 9, 100_000):
        assert grouped.tile_for(weight, rows, device).inputs == grouped.tile_for(others, rows, device).inputs == inputs
    assert grouped.tile_for(weight, 9, device) == found[1].tile


def test_the_rule_is_kept_where_it_is_the_quickest(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule's tile is a candidate on every card, and the table then has no tiles."""
    tune, grouped = search(), load("grouped")
    weight = stacked(FORMATS["int4"], device)
    for capability in (80, 90):
        assert grouped.default_tile(weight, 512, capability) in tune.candidates(weight, 512, capability)
    defaults = [grouped.default_tile(weight, rows, 90) for rows in (4, 32)]
    monkeypatch.setattr(tune, "capability_of", lambda device: 90)
    monkeypatch.setattr(tune, "measure_s", lambda way: 1.0 if way.args[2] in defaults else 2.0)
    found = tune.tune(weight, [2, 16], 2, lambda done, total: None)
    assert [each.tile for each in found] == defaults
    assert tune.table_entry(weight, found) == []


@pytest.mark.parametrize("name", FORMATS)
def test_wrong_tiles_are_seen_in_every_format(name: str, device: torch.device) -> None:
    """A tile that takes an expert's codes for another's, or scales, is refused."""
    tune = search()
    weight, other = stacked(FORMATS[name], device), stacked(FORMATS[name], device)
    x, rows = tune._random_rows(weight, 3, 2)
    tile = load("grouped").default_tile(weight, 6, 90)
    right = tune._product(weight, (x, rows), tile)
    assert right.isfinite().all()
    assert tune._fits(weight, x, rows, tile, right)
    assert not tune._fits(other, x, rows, tile, right)
    if weight.scales is not None:
        other.codes.copy_(weight.codes)
        assert not tune._fits(other, x, rows, tile, right)


def test_the_key_tells_formats_apart(device: torch.device) -> None:
    key_of, int4 = load("grouped").key_of, FORMATS["int4"]
    assert int4 is not None
    weights = [stacked(form, device) for form in FORMATS.values()]
    weights += [stacked(replace(int4, columns_per_scale=32), device)]
    make = StackedWeight
    weights += [make((2, 1, 16, 256), replace(int4, offset="zeros"), device, torch.bfloat16, has_bias=False)]
    weights += [make((2, 1, 16, 256), int4, device, torch.float16, has_bias=False)]
    assert len({key_of(weight, device) for weight in weights}) == len(weights)


def small_experts(backend: Any) -> Any:
    experts = backend.new_experts(ExpertShape(3, 16, 24, "swiglu_oai", has_bias=True))
    for index in range(3):
        experts.set_expert(index, torch.randn(24, 16), torch.randn(24, 16), torch.randn(16, 24))
        experts.set_bias(index, torch.randn(24), torch.randn(24), torch.randn(16))
    return experts


def test_the_choice_names_the_product(
    device: torch.device, table_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts use Triton's product but where the file beside the table says otherwise; nothing is measured; the log
    says which and why, once."""
    backend_module = load("backend")
    asked: list[str] = []
    for owner, name in ((packages, "products"), (backend_module, "expert_products")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, name=name, real=real: asked.append(name) or real(*given))
    x, ids = torch.randn(4, 16, device=device).bfloat16(), torch.tensor([[0, 2], [1, -1], [-1, -1], [2, 1]]).int()
    given = x, ids.to(device), torch.rand(4, 2, device=device)
    table_file.parent.mkdir()
    table_file.write_text('{"entries": []}')
    backend = backend_module.TritonBackend(device, torch.bfloat16)
    experts = small_experts(backend)
    by_triton = backend.grouped_ffn(*given, experts)
    key = backend_module.experts_key(experts)
    write_choices(choices_path(), {key: ("grouped_mm", "2.00 times as quick as triton (over 5 sizes)")})
    forget()
    backend = backend_module.TritonBackend(device, torch.bfloat16)
    with caplog.at_level(logging.INFO, "antiphon"):
        by_torch = [backend.grouped_ffn(*given, experts) for _ in range(2)][1]
    assert asked == ["expert_products", "products", "products"]
    assert near(by_torch, by_triton)
    (said,) = caplog.messages
    assert said.startswith("kernels: experts, ")
    assert said.endswith(", 2, 24, 16, bfloat16: grouped_mm: 2.00 times as quick as triton (over 5 sizes)")
    caplog.clear()
    with caplog.at_level(logging.INFO, "antiphon"):
        load("grouped").tile_for(experts.down, 3, device)
    assert caplog.messages == []  # the table is empty


def test_a_broken_table_is_said_at_the_start(device: torch.device, table_file: Path) -> None:
    with pytest.raises(UserError, match=r"tiles.json, which is no file: write it with antiphon tune, or unset it"):
        load("backend").TritonBackend(device, torch.bfloat16)
    table_file.parent.mkdir()
    table_file.write_text("{")
    with pytest.raises(UserError, match=r"tiles.json is no table of tiles"):
        load("backend").TritonBackend(device, torch.bfloat16)


def test_products_of_experts_are_compared(device: torch.device) -> None:
    """Ours with the tiles that were found, and PyTorch's, on the same rows; a row alone has the same bits."""
    experts = small_experts(load("backend").TritonBackend(device, torch.bfloat16))
    candidates = search().product_candidates(experts, [2, 5], 2, [], [])
    assert [(each.name, each.why_not) for each in candidates] == [
        ("triton", ""),
        ("grouped_mm", ""),
        ("deep_gemm", "takes float8 experts with float32 scales of 128 x 128"),
    ]
    for case in range(2):
        own, other = (each.run(case) for each in candidates[:2])
        assert near(other, own)
        assert candidates[0].alone(case).shape == (1, 16)
    quickest = choose(candidates, ["2 tokens", "5 tokens"], lambda way: 1.0)
    assert quickest.name == "triton"


def test_attentions_are_compared(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that computes as we do, in double, is taken; its key is the cache's."""
    spec = KVCacheSpec(num_layers=1, num_blocks=4, block_size=16, num_kv_heads=2, key_dim=16, value_dim=16)

    def attend(name: str, q_SND: torch.Tensor, cache: Any, layer: int, tables: Any, contexts: Any, **how: Any) -> Any:
        assert how == {"scale": 0.25, "window": None}
        out = []
        for row, count in enumerate(contexts.tolist()):
            places = (tables[row].long()[:, None] * 16 + torch.arange(16, device=device)).flatten()[:count]
            keys, values = (t[layer][places].double().repeat_interleave(2, 1) for t in (cache.keys, cache.values))
            shares = torch.einsum("nd,cnd->nc", q_SND[row].double(), keys).mul(0.25).softmax(-1)
            out.append(torch.einsum("nc,cnv->nv", shares, values))
        return torch.stack(out).to(q_SND.dtype)

    monkeypatch.setattr(packages, "attend", attend)
    monkeypatch.setattr(packages, "why_no_attention", lambda name, *given, **how: "" if name == "varlen_attn" else "no")
    cache, candidates = search().attention_candidates(spec, 4, [(1, 20), (3, 33)], device, torch.bfloat16)
    chosen = choose(candidates, ["a", "b"], _times([4, 4, 1, 1]))
    assert (chosen.name, chosen.why) == (
        "varlen_attn", "4.00 times as quick as triton, flashinfer: no (over 2 sizes)"
    )  # fmt: skip
    key = load("backend").attention_key(cache, 4)
    assert (key[0], *key[3:]) == ("attention", 4, 2, 16, 16, 16, "auto in bfloat16")


def _times(seconds: list[float]) -> Any:
    left = iter(seconds)
    return lambda way: next(left)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"entries": [{"key": 1}]}',
        '{"entries": [{"key": [], "tiles": [[1, {}]]}]}',
    ],
)
def test_files_that_are_no_tables(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"tiles.json is no table of tiles .*: write it with antiphon tune"):
        read_table(path)


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
    for wrong, message in (
        ("0,8", "--tokens is '0,8': give numbers from 1 to 131072"),
        ("x", "--tokens 'x' is not a list of numbers"),
    ):
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
