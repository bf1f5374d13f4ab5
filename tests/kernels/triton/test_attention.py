"""Rotation, the cache and attention of the Triton back-end against the reference's, on odd sizes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from antiphon.kernels.api import HeadRows, KVCacheSpec, RotaryTable
from antiphon.kernels.ops.attention import rotate
from antiphon.kernels.reference import ReferenceBackend
from antiphon.kernels.triton import load
from antiphon.models.batch import make_attention_batch
from antiphon.specs.model import KVStorage

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [1, 4])
def test_rotation_and_its_gradient(half: int, interleaved: bool, dtype: torch.dtype, device: torch.device) -> None:
    kernels, tolerance = load("rotary"), TOLERANCE[dtype]
    x = torch.randn(2, 3, 5, 11).to(dtype)
    angles = torch.rand(3, half)
    wide = x.float().requires_grad_()
    expected = rotate(wide, angles.cos().expand(2, 3, half), angles.sin().expand(2, 3, half), interleaved)
    tables = angles.cos().to(device), angles.sin().to(device)
    found = kernels.turn(x.to(device), *tables, interleaved)
    torch.testing.assert_close(found.cpu().float(), expected, rtol=tolerance, atol=tolerance)
    grad = torch.randn(x.shape).to(dtype)
    (expected_grad,) = torch.autograd.grad(expected, wide, grad.float())
    found = kernels.turn(grad.to(device), *tables, interleaved, back=True)
    torch.testing.assert_close(found.cpu().float(), expected_grad, rtol=tolerance, atol=tolerance)
    assert kernels.turn(x[:0].to(device), *tables, interleaved).shape == (0, 3, 5, 11)


CASES = {
    "grouped": (KVCacheSpec(num_layers=2, num_blocks=64, block_size=4, num_kv_heads=2, key_dim=24, value_dim=20), 6),
    "narrow": (KVCacheSpec(num_layers=2, num_blocks=64, block_size=4, num_kv_heads=1, key_dim=8, value_dim=8), 17),
    "latent": (
        KVCacheSpec(
            num_layers=2, num_blocks=64, block_size=4, num_kv_heads=1, key_dim=40, value_dim=32, values_in_keys=True
        ),
        5,
    ),
    "latent, odd": (
        KVCacheSpec(
            num_layers=2, num_blocks=64, block_size=4, num_kv_heads=1, key_dim=28, value_dim=22, values_in_keys=True
        ),
        3,
    ),
}


@pytest.mark.parametrize(
    ("case", "storage", "window", "sunk"),
    [
        ("grouped", "auto", None, False),
        ("grouped", "int8", 5, True),
        ("grouped", "fp8", None, True),
        ("narrow", "auto", 5, False),
        ("latent", "auto", None, False),
        ("latent", "fp8", 5, False),
        ("latent, odd", "auto", None, True),
    ],
)
def test_decode_rows(case: str, storage: KVStorage, window: int | None, sunk: bool, device: torch.device) -> None:
    """Prompts and single rows in one batch, then single rows alone; float32 but for codes."""
    spec, num_heads = CASES[case]
    spec = replace(spec, storage=storage)
    mine, theirs = load("backend").TritonBackend(device, torch.float32), ReferenceBackend("cpu", torch.float32)
    caches = [mine.new_kv_cache(spec), theirs.new_kv_cache(spec)]
    angles = torch.rand(64, spec.key_dim // 4)
    width = (num_heads + spec.num_kv_heads) * spec.key_dim
    width += 0 if spec.values_in_keys else spec.num_kv_heads * spec.value_dim
    norms = torch.rand(spec.key_dim), torch.rand(spec.key_dim)
    blocks = torch.randperm(64).tolist()
    tables = [[blocks.pop() for _ in range(4)] for _ in range(3)]
    sinks = torch.randn(num_heads) if sunk else None
    contexts = [0, 0, 0]
    for queries in ([9, 1, 2], [1, 3, 1], [1, 1, 1]):
        contexts = [done + new for done, new in zip(contexts, queries, strict=True)]
        rows = torch.randn(sum(queries), width)
        found = []
        for backend, cache, place in ((mine, caches[0], device), (theirs, caches[1], torch.device("cpu"))):
            batch = make_attention_batch(queries, contexts, tables, 4, place)
            rotary = RotaryTable(cos=angles.cos().to(place), sin=angles.sin().to(place), interleaved=sunk)
            heads = HeadRows(
                num_heads=num_heads, rotary=rotary, q_norm_D=norms[0].to(place), k_norm_D=norms[1].to(place)
            )
            q = backend.rotate_and_store(rows.to(place), cache, 1, batch, heads)
            out = backend.paged_attention(
                q, cache, 1, batch, scale=0.3, sliding_window=window, sinks_N=None if sinks is None else sinks.to(place)
            )
            found.append((q.cpu(), out.cpu()))
        tolerance = 1e-5 if storage == "auto" else 2e-2  # a code may fall on its neighbour
        torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[0][1], found[1][1], rtol=tolerance, atol=tolerance)
    for name in ("keys", "values", "key_scales", "value_scales"):
        for ours, reference in zip(getattr(caches[0], name), getattr(caches[1], name), strict=True):
            atol = 1e-5 if ours.dtype == torch.float32 else 16 if storage == "fp8" else 1
            torch.testing.assert_close(ours.cpu().float(), reference.float(), rtol=1e-5, atol=atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_with_many_splits_and_one_without_keys(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """600 keys are three splits. A row's bits do not depend on those beside it, nor on the width of the tables, nor on
    how many rows are taken at once."""
    attention, spec = load("attention"), CASES["grouped"][0]
    spec = replace(spec, num_blocks=400)
    backend = load("backend").TritonBackend(device, dtype)
    cache = backend.new_kv_cache(spec)
    for table in (*cache.keys, *cache.values):
        table.normal_()
    tables = torch.randperm(400)[:160].tolist()
    q = torch.randn(3, 6, 24, device=device).to(dtype)
    batch = make_attention_batch([1, 1, 1], [600, 30, 3], [tables, tables[:8], tables[8:9]], 4, device)
    out = backend.paged_attention(q, cache, 1, batch, scale=0.3, sliding_window=None)
    expected_backend = ReferenceBackend(device, torch.float32)
    wide = expected_backend.new_kv_cache(spec)
    wide.keys[1].copy_(cache.keys[1])
    wide.values[1].copy_(cache.values[1])
    expected = expected_backend.paged_attention(q.float(), wide, 1, batch, scale=0.3, sliding_window=None)
    torch.testing.assert_close(out.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    monkeypatch.setattr(attention, "DECODE_GATHER_ELEMENTS", 2 * 6 * 3 * 20)  # sums of two rows at once
    sums = []
    real = attention.launch

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        sums.append(grid[0])
        real(kernel, grid, *arguments, **options)

    monkeypatch.setattr(attention, "launch", launch)
    assert torch.equal(backend.paged_attention(q, cache, 1, batch, scale=0.3, sliding_window=None), out)
    assert sums == [2, 2, 1, 1]
    alone = make_attention_batch([1], [30], [tables[:8]], 4, device)
    assert torch.equal(backend.paged_attention(q[1:2], cache, 1, alone, scale=0.3, sliding_window=None)[0], out[1])
    plan = replace(attention.plan_rows(alone, spec, None), contexts_S=torch.zeros_like(alone.context_lens_S))
    attention.attend_rows(q[:1], out, cache, 1, plan, scale=0.3, sinks_N=None)
    assert not out[0].any()
