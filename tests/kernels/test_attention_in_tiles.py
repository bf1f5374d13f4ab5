"""Attention in AMX tiles has the bits of its order of sums, written down here in PyTorch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from antiphon import _native
from antiphon.kernels.cpu import CpuBackend
from tests.kernels.attention_harness import Heads, Sequences

MultiplyAdd = Callable[[Tensor, Tensor | float, Tensor | float], Tensor]
TILE_KEYS = 64
LOWEST = -1e30
ISAS = [name for name in _native.available_isas() if name.startswith("amx")]


def fused(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a b + c, rounded once."""
    wide = [x.double() if isinstance(x, Tensor) else x for x in (a, b, c)]
    return (wide[0] * wide[1] + wide[2]).float()


def unfused(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a b + c, rounded twice."""
    return a * b + c


def exponential(x: Tensor, add: MultiplyAdd) -> Tensor:
    """As csrc/kernels/vector_math.h; `add`: how vectors multiply and add."""
    x = x.clamp(-88.0, 88.0)
    n = (x * 1.44269504088896341).round()
    r = add(n, -0.693145751953125, x)
    r = add(n, single(-1.42860682030941723e-6), r)
    p = torch.full_like(r, 1 / 720)
    for coefficient in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        p = add(p, r, single(coefficient))
    return p * ((n.int() + 127) << 23).view(torch.float32)


def single(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))


def multiplied(rows_MK: Tensor, operand_KN: Tensor, sums_MN: Tensor) -> Tensor:
    """sums + rows x operand, 32 of the inner dimension at a time: even and odd products apart, then together."""
    for start in range(0, rows_MK.shape[1], 32):
        even, odd = torch.zeros_like(sums_MN), torch.zeros_like(sums_MN)
        for k in range(start, start + 32, 2):
            even = fused(rows_MK[:, k, None], operand_KN[k], even)
            odd = fused(rows_MK[:, k + 1, None], operand_KN[k + 1], odd)
        sums_MN = sums_MN + (even + odd)
    return sums_MN


def padded(x: Tensor, rows: int, columns: int) -> Tensor:
    out = torch.zeros(-(-x.shape[0] // rows) * rows, -(-x.shape[1] // columns) * columns)
    out[: x.shape[0], : x.shape[1]] = x
    return out


def attended(
    q_TD: Tensor, k_TD: Tensor, v_TE: Tensor, window: int | None, sink: Tensor | None, add: MultiplyAdd
) -> Tensor:
    """One head of one sequence."""
    num_tokens, dim = q_TD.shape
    q, k, v = padded(q_TD, 1, 32), padded(k_TD, TILE_KEYS, 32), padded(v_TE, TILE_KEYS, 1)
    positions = torch.arange(num_tokens)[:, None]
    highest = torch.full((num_tokens,), LOWEST if sink is None else float(sink))
    sums = torch.zeros(num_tokens, 16)
    sums[:, 0] = 0.0 if sink is None else 1.0
    out = torch.zeros(num_tokens, v.shape[1])
    for first in range(0, num_tokens, TILE_KEYS):
        keys = torch.arange(first, first + TILE_KEYS)[None]
        scores = multiplied(q, k[first : first + TILE_KEYS].T, torch.zeros(num_tokens, TILE_KEYS)) * single(dim**-0.5)
        hidden = (keys > positions) | (keys <= positions - (window or num_tokens))
        scores = scores.masked_fill(hidden, float("-inf"))
        before, highest = highest, torch.maximum(highest, scores.amax(1))
        shrink = exponential(before - highest, add)[:, None]
        weights = exponential(scores - highest[:, None], add)
        sums, out = sums * shrink, out * shrink
        for panel in weights.split(16, 1):
            sums = sums + panel
        out = multiplied(weights.bfloat16().float(), v[first : first + TILE_KEYS], out)
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return (out * (1.0 / sums)).bfloat16()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "heads",
    [
        Heads(norm=False, rotary_dim=0),
        Heads(num_heads=6, key_dim=40, value_dim=24, rotary_dim=0, norm=False, window=37, sinks=True, block_size=32),
    ],
    ids=["plain", "odd widths, window, sinks"],
)
def test_bits_of_the_order_of_sums(isa: str, heads: Heads) -> None:
    before = _native.isa()
    _native.set_isa(isa)
    try:
        backend = CpuBackend(torch.bfloat16)
        sequences = Sequences(heads, [130, 41], torch.bfloat16)
        cache = backend.new_kv_cache(heads.cache_spec(sequences.num_blocks))
        found = sequences.run(backend, cache, [[90, 1], [1, 40], [39, 0]])
    finally:
        _native.set_isa(before)
    group = heads.num_heads // heads.num_kv_heads
    for rows, out in zip(sequences.rows, found, strict=True):
        widths = [heads.num_heads * heads.key_dim, heads.num_kv_heads * heads.key_dim]
        q, k, v = rows.float().tensor_split((widths[0], sum(widths)), 1)
        for head in range(heads.num_heads):
            expected = attended(
                q.view(len(rows), -1, heads.key_dim)[:, head],
                k.view(len(rows), -1, heads.key_dim)[:, head // group],
                v.view(len(rows), -1, heads.value_dim)[:, head // group],
                heads.window,
                None if sequences.sinks is None else sequences.sinks[head],
                unfused if isa == "amx_emulated" else fused,  # the vectors around emulated tiles are plain C++
            )
            assert torch.equal(out[:, head], expected)
