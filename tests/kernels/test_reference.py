"""The reference back-end against naive loops over rows, heads, positions and experts (long because it has them all)."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.base.errors import ResourceError
from antiphon.kernels import reference_attention
from antiphon.kernels.api import ExpertShape, HeadRows, KVCacheSpec, RotaryTable
from antiphon.kernels.reference import ReferenceBackend, grouped_products, has_grouped_mm, loop_over_experts
from antiphon.models.batch import make_attention_batch
from antiphon.specs.model import RouterSpec

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")],
)
DEVICES = ["cpu", CUDA]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.float().cpu(), expected.float().cpu(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype: torch.dtype, device: str) -> None:
    backend = ReferenceBackend(device, dtype)
    x, weight = torch.randn(5, 12).to(device, dtype), torch.randn(7, 12)
    bias, residual = torch.randn(7), torch.randn(5, 7).to(device, dtype)
    wide = x.float().cpu() @ weight.to(dtype).float().t()
    packed, biased = backend.pack_linear(weight), backend.pack_linear(weight, bias)
    assert (packed.in_features, packed.out_features, packed.num_bytes) == (12, 7, 84 * dtype.itemsize)
    near(backend.linear(x, packed), wide, dtype)
    near(backend.linear(x, biased), wide + bias, dtype)
    near(backend.linear(x, biased, residual_TO=residual), wide + bias + residual.float().cpu(), dtype)
    logits = backend.linear(x, biased, out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    near(logits, wide + bias.to(dtype).float(), torch.float32)


def test_packing_copies_the_source() -> None:
    weight = torch.ones(2, 2)
    packed = ReferenceBackend().pack_linear(weight)
    weight.zero_()
    assert packed.weight_OI.sum() == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norms(dtype: torch.dtype) -> None:
    backend = ReferenceBackend("cpu", dtype)
    x, delta, weight = torch.randn(3, 4, 10).to(dtype), torch.randn(3, 4, 10).to(dtype), torch.rand(10).to(dtype)
    for row in range(3):
        values = x[row, 0].double()
        expected = values / math.sqrt(float((values**2).mean()) + 1e-5) * weight.double()
        near(backend.rms_norm(x, weight, 1e-5)[row, 0], expected, dtype)
    added, normed = backend.add_rms_norm(x[0], delta[0], weight, 1e-5)
    assert torch.equal(added, x[0] + delta[0])
    assert torch.equal(normed, backend.rms_norm(added, weight, 1e-5))


def naive_rotation(row: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    out, half = row.clone(), len(angles)
    for i, angle in enumerate(angles):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        a, b = row[first], row[second]
        out[first] = a * angle.cos() - b * angle.sin()
        out[second] = b * angle.cos() + a * angle.sin()
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [0, 2, 4])
@pytest.mark.parametrize("normed", [False, True])
def test_rotate_and_store(normed: bool, half: int, interleaved: bool, device: str) -> None:
    """3 query heads, 2 KV heads of width 8; all dims, some dims or none rotate."""
    backend = ReferenceBackend(device)
    spec = KVCacheSpec(num_layers=2, num_blocks=4, block_size=4, num_kv_heads=2, key_dim=8, value_dim=6)
    cache = backend.new_kv_cache(spec)
    angles = torch.rand(20, half)
    rotary = RotaryTable(cos=angles.cos().to(device), sin=angles.sin().to(device), interleaved=interleaved)
    batch = make_attention_batch([2, 1], [5, 1], [[3, 1], [2]], 4, device)
    rows = torch.randn(3, 3 * 8 + 2 * 8 + 2 * 6)
    q_norm, k_norm = (torch.rand(8), torch.rand(8)) if normed else (None, None)
    heads = HeadRows(
        num_heads=3,
        rotary=rotary,
        q_norm_D=None if q_norm is None else q_norm.to(device),
        k_norm_D=None if k_norm is None else k_norm.to(device),
    )
    q = backend.rotate_and_store(rows.to(device), cache, 1, batch, heads)

    def expected(part: Tensor, weight: Tensor | None, position: int) -> Tensor:
        if weight is not None:
            part = part / (part.square().mean() + 1e-6).sqrt() * weight
        return naive_rotation(part, angles[position], interleaved)

    for row, (position, slot) in enumerate(zip([3, 4, 0], [15, 4, 8], strict=True)):
        for head in range(3):
            near(q[row, head], expected(rows[row, 8 * head : 8 * head + 8], q_norm, position), torch.float32)
        for head in range(2):
            key, value = rows[row, 24 + 8 * head :][:8], rows[row, 40 + 6 * head :][:6]
            near(cache.keys[1][slot, head], expected(key, k_norm, position), torch.float32)
            near(cache.values[1][slot, head], value, torch.float32)
    assert not cache.keys[0].any()
    assert int(cache.keys[1].any(-1).any(-1).sum()) == 3


def test_rows_without_queries_only_store() -> None:
    backend = ReferenceBackend()
    spec = KVCacheSpec(
        num_layers=1, num_blocks=2, block_size=4, num_kv_heads=1, key_dim=6, value_dim=4, values_in_keys=True
    )
    cache = backend.new_kv_cache(spec)
    none = RotaryTable(cos=torch.ones(9, 0), sin=torch.ones(9, 0), interleaved=True)
    rows = torch.randn(2, 6)
    batch = make_attention_batch([2], [2], [[1]], 4, "cpu")
    q = backend.rotate_and_store(rows, cache, 0, batch, HeadRows(num_heads=0, rotary=none))
    assert q.shape == (2, 0, 6)
    assert torch.equal(cache.keys[0][4:6, 0], rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("window", "sunk"), [(None, False), (7, False), (None, True), (7, True)])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_attention(
    dtype: torch.dtype, latent: bool, window: int | None, sunk: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole prompts, chunks with context, decode rows, one-token prompts; 6 query heads on 2 KV heads, or on 1."""
    backend = ReferenceBackend(device, dtype)
    kv_heads = 1 if latent else 2
    spec = KVCacheSpec(
        num_layers=1,
        num_blocks=64,
        block_size=4,
        num_kv_heads=kv_heads,
        key_dim=8,
        value_dim=6 if latent else 8,
        values_in_keys=latent,
    )
    cache = backend.new_kv_cache(spec)
    cache.keys[0].normal_()
    if not latent:
        cache.values[0].normal_()
    query_lens, context_lens = [1, 9, 4, 1, 1, 1], [40, 9, 21, 1, 33, 5]
    blocks = torch.randperm(64).tolist()
    tables = [[blocks.pop() for _ in range(-(-context // 4))] for context in context_lens]
    batch = make_attention_batch(query_lens, context_lens, tables, 4, device)
    q = torch.randn(sum(query_lens), 6, 8).to(device, dtype)
    sinks = torch.randn(6) if sunk else None
    monkeypatch.setattr(
        reference_attention, "PREFILL_SCORE_ELEMENTS", 6 * 21 * 3
    )  # rows by threes, or sevens where few keys
    found = backend.paged_attention(
        q, cache, 0, batch, scale=0.3, sliding_window=window, sinks_N=None if sinks is None else sinks.to(device)
    )
    assert found.shape == (17, 6, spec.value_dim)
    keys = cache.keys[0].float().cpu()
    values = keys[..., :6] if latent else cache.values[0].float().cpu()
    row = 0
    for queries, context, table in zip(query_lens, context_lens, tables, strict=True):
        for position in range(context - queries, context):
            first = 0 if window is None else max(0, position + 1 - window)
            slots = [table[p // 4] * 4 + p % 4 for p in range(first, position + 1)]
            for head in range(6):
                group = head * kv_heads // 6
                scores = keys[slots, group] @ q[row, head].float().cpu() * 0.3
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1]))
                near(found[row, head], scores.softmax(0)[: len(slots)] @ values[slots, group], dtype)
            row += 1


def naive_gate(logits: list[float], bias: list[float], router: RouterSpec) -> dict[int, float]:
    if router.scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    else:
        total = sum(math.exp(logit) for logit in logits)
        scores = [math.exp(logit) / total for logit in logits]
    choice = [score + b for score, b in zip(scores, bias, strict=True)]
    size = len(logits) // router.num_groups
    groups = [sorted(choice[g * size : g * size + size], reverse=True) for g in range(router.num_groups)]
    ranks = [max(g) if router.group_score == "max" else sum(g[:2]) for g in groups]
    kept = sorted(range(router.num_groups), key=lambda g: -ranks[g])[: router.top_k_groups]
    allowed = [e for e in range(len(logits)) if e // size in kept]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: router.top_k]
    weights = {e: scores[e] for e in chosen}
    if router.softmax_after_top_k:
        total = sum(math.exp(logits[e]) for e in chosen)
        weights = {e: math.exp(logits[e]) / total for e in chosen}
    if router.normalize:
        total = sum(weights.values())
        weights = {e: weight / total for e, weight in weights.items()}
    return {e: weight * router.scaling for e, weight in weights.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "router",
    [
        RouterSpec(num_experts=8, top_k=2),
        RouterSpec(num_experts=5, top_k=3, normalize=False),
        RouterSpec(num_experts=6, top_k=1),
        RouterSpec(num_experts=6, top_k=2, softmax_after_top_k=True, normalize=False),
        RouterSpec(num_experts=8, top_k=3, num_groups=4, top_k_groups=2, normalize=False, scaling=16.0),
        RouterSpec(
            num_experts=8, top_k=3, scoring="sigmoid", has_score_bias=True, num_groups=4, top_k_groups=2,
            group_score="top2", scaling=2.5,
        ),
    ],
)  # fmt: skip
def test_gate(router: RouterSpec, device: str) -> None:
    backend = ReferenceBackend(device)
    x, weight = torch.randn(20, 10), torch.randn(router.num_experts, 10)
    bias = torch.randn(router.num_experts) * 0.3 if router.has_score_bias else None
    ids, weights = backend.gate(
        x.to(device), backend.pack_linear(weight), None if bias is None else bias.to(device), router
    )
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    logits = (x @ weight.t()).tolist()
    for row in range(20):
        expected = naive_gate(logits[row], [0.0] * router.num_experts if bias is None else bias.tolist(), router)
        assert ids[row].tolist() == list(expected)
        assert weights[row].tolist() == pytest.approx(list(expected.values()), rel=1e-4)


def test_sparsemixer_ignores_experts_far_below_the_best() -> None:
    router = RouterSpec(num_experts=4, top_k=2, scoring="sparsemixer", normalize=False, jitter=0.01)
    backend = ReferenceBackend()
    logits = torch.tensor([[4.0, 3.95, 1.0, -2.0]])
    ids, weights = backend.gate(logits, backend.pack_linear(torch.eye(4)), None, router)
    assert ids.tolist() == [[0, 1]]
    # first pass: 3.95 lies within 2 * 0.01 of 4.0, relative; second pass: nothing lies within that of 3.95
    assert weights[0].tolist() == pytest.approx([math.exp(4.0) / (math.exp(4.0) + math.exp(3.95)), 1.0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_oai"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 13])
def test_grouped_ffn(rows: int, dtype: torch.dtype, activation: str, device: str) -> None:
    """5 experts of which one is touched by no row; -1 means held elsewhere, also for all slots of a row. swiglu_oai
    has biases, and so low a limit that both clamps bite."""
    backend = ReferenceBackend(device, dtype)
    biased = activation == "swiglu_oai"
    experts = backend.new_experts(ExpertShape(5, 16, 24, activation, alpha=1.3, limit=0.5, has_bias=biased))
    shapes = ((24, 16), (24, 16), (16, 24), (24,), (24,), (16,))
    weights = [[torch.randn(shape) * 0.2 * (biased or len(shape) == 2) for shape in shapes] for _ in range(5)]
    for index, held in enumerate(weights):
        experts.set_expert(index, *held[:3])
        if biased:
            experts.set_bias(index, *held[3:])
    assert experts.num_bytes == 5 * (3 * 24 * 16 + biased * (24 + 24 + 16)) * dtype.itemsize
    x = torch.randn(rows, 16).to(device, dtype)
    ids = torch.stack([torch.tensor([-1, 0, 2, 4])[torch.randperm(4)[:3]] for _ in range(rows)] or [torch.zeros(3)])
    ids = ids[:rows].int()
    if rows:
        ids[0] = -1
    scales = torch.rand(rows, 3)

    def join(gate: Tensor, up: Tensor) -> Tensor:
        if biased:
            gate = gate.clamp(max=0.5)
            return gate * torch.sigmoid(1.3 * gate) * (1 + up.clamp(-0.5, 0.5))
        return (F.silu(gate) if activation == "silu" else F.gelu(gate)) * up

    expected = torch.zeros(rows, 16)
    for row in range(rows):
        for expert, scale in zip(ids[row].tolist(), scales[row].tolist(), strict=True):
            if expert >= 0:
                gate, up, down, gate_bias, up_bias, down_bias = (w.to(dtype).float() for w in weights[expert])
                wide = x[row].float().cpu()
                expected[row] += scale * (down @ join(gate @ wide + gate_bias, up @ wide + up_bias) + down_bias)
    near(backend.grouped_ffn(x, ids.to(device), scales.to(device), experts), expected, dtype)
    near(loop_over_experts(x, ids.to(device), scales.to(device), experts), expected, dtype)
    assert has_grouped_mm(experts) == (dtype == torch.bfloat16)
    if has_grouped_mm(experts):
        near(grouped_products(x, ids.to(device), scales.to(device), experts), expected, dtype)


def test_a_cache_that_does_not_fit_names_its_size() -> None:
    spec = KVCacheSpec(num_layers=1, num_blocks=2**40, block_size=16, num_kv_heads=1, key_dim=64, value_dim=64)
    with pytest.raises(ResourceError) as caught:
        ReferenceBackend().new_kv_cache(spec)
    assert str(caught.value) == (
        "cpu cannot hold a KV cache of 8192.0 TiB (1099511627776 blocks of 16 tokens): lower the number of blocks"
    )


def test_block_bytes_count_both_tables_or_the_shared_one() -> None:
    spec = KVCacheSpec(num_layers=3, num_blocks=5, block_size=4, num_kv_heads=2, key_dim=8, value_dim=6)
    cache = ReferenceBackend().new_kv_cache(spec)
    assert sum(t.nbytes for t in (*cache.keys, *cache.values)) == 5 * spec.block_bytes(4)
    shared = replace(spec, values_in_keys=True)
    cache = ReferenceBackend().new_kv_cache(shared)
    assert sum(t.nbytes for t in (*cache.keys, *cache.values)) == 5 * shared.block_bytes(4)
