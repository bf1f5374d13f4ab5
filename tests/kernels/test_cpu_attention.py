"""Rotary embedding, the packed cache and paged attention: values, chunks, batch mates, reused blocks."""

import pytest
import torch

from antiphon.base.errors import ResourceError
from antiphon.kernels.api import AttentionBatch, HeadRows, KVCacheSpec, RotaryTable
from antiphon.kernels.cpu import CpuBackend
from tests.kernels.attention_harness import Heads, Sequences

DTYPES = [torch.bfloat16, torch.float32]
HEADS = {
    "plain": Heads(),
    "window, interleaved, odd groups": Heads(
        num_heads=6, num_kv_heads=2, key_dim=40, value_dim=24, rotary_dim=20, interleaved=True, window=7,
        block_size=32, norm=False,
    ),
    "one kv head, window past a tile": Heads(
        num_heads=3, num_kv_heads=1, key_dim=16, value_dim=16, rotary_dim=16, window=70
    ),
    "wide, partly rotated": Heads(
        num_heads=2, key_dim=256, value_dim=256, rotary_dim=64, norm=False, block_size=64
    ),
    "odd widths, not rotated": Heads(num_heads=5, num_kv_heads=5, key_dim=33, value_dim=17, rotary_dim=0, norm=False),
    "sinks": Heads(sinks=True),
    "sinks, window, odd groups": Heads(
        num_heads=15, num_kv_heads=3, key_dim=24, value_dim=20, rotary_dim=24, window=19, norm=False, sinks=True
    ),
    "more heads than rows in an item": Heads(num_heads=56, num_kv_heads=1, key_dim=32, value_dim=32, rotary_dim=32),
}  # fmt: skip
LENGTHS = [130, 1, 77]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
def test_values_and_chunks(isa: str, dtype: torch.dtype, heads: Heads) -> None:
    backend = CpuBackend(dtype)
    sequences = Sequences(heads, LENGTHS, dtype)
    spec = heads.cache_spec(sequences.num_blocks)
    whole = sequences.run(backend, backend.new_kv_cache(spec), [LENGTHS])
    tolerance = 3e-2 if dtype == torch.bfloat16 else 2e-5
    for index, out in enumerate(whole):
        torch.testing.assert_close(out.double(), sequences.expected(index), atol=tolerance, rtol=tolerance)
    steps = [[5, 0, 70], [1, 1, 1], [64, 0, 0], [1, 0, 6], [59, 0, 0]]
    chunked = sequences.run(backend, backend.new_kv_cache(spec), steps)
    for one, other in zip(whole, chunked, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("heads", [Heads(), Heads(sinks=True, window=40)], ids=["plain", "sinks and window"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_batch_mates(isa: str, num_threads: int, dtype: torch.dtype, heads: Heads) -> None:
    backend = CpuBackend(dtype)
    sequences = Sequences(heads, LENGTHS, dtype)
    spec = sequences.heads.cache_spec(sequences.num_blocks)
    together = sequences.run(backend, backend.new_kv_cache(spec), [[100, 1, 70], [30, 0, 7]])
    alone = sequences.run(backend, backend.new_kv_cache(spec), [[130, 0, 0], [0, 1, 0], [0, 0, 77]])
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_may_weigh_nothing_or_all(isa: str, dtype: torch.dtype) -> None:
    """Head 0 as if there were no sink, to the bit; heads 1 to 3 attend to nothing."""
    backend = CpuBackend(dtype)
    sequences = Sequences(Heads(sinks=True), LENGTHS, dtype)
    spec = sequences.heads.cache_spec(sequences.num_blocks)
    sequences.sinks = torch.tensor([float("-inf"), 1e4, 1e30, 3e38])
    found = sequences.run(backend, backend.new_kv_cache(spec), [[100, 1, 70], [30, 0, 7]])
    sequences.sinks = None
    without = sequences.run(backend, backend.new_kv_cache(spec), [LENGTHS])
    for one, other in zip(found, without, strict=True):
        assert torch.equal(one[:, 0], other[:, 0])
        assert one[:, 1:].eq(0).all()


def test_sinks_must_fit_the_heads() -> None:
    backend = CpuBackend(torch.bfloat16)
    sequences = Sequences(Heads(sinks=True), [3], torch.bfloat16)
    sequences.sinks = torch.zeros(5)
    cache = backend.new_kv_cache(sequences.heads.cache_spec(sequences.num_blocks))
    with pytest.raises(ValueError, match=r"sinks are torch.float32 \(5,\): 4 in float32 are needed"):
        sequences.run(backend, cache, [[3]])


@pytest.mark.parametrize("stale", [3.0, float("inf"), float("nan")])
def test_reused_blocks_leave_no_trace(isa: str, stale: float) -> None:
    backend = CpuBackend(torch.bfloat16)
    fresh = Sequences(Heads(norm=False), [37, 50], torch.bfloat16)
    cache = backend.new_kv_cache(fresh.heads.cache_spec(fresh.num_blocks))
    before = Sequences(Heads(norm=False), [64, 64], torch.bfloat16)
    before.tables = fresh.tables.clone()
    for rows in before.rows:
        rows.fill_(stale)
    before.run(backend, cache, [[64, 64]])
    reused = fresh.run(backend, cache, [[20, 50], [1, 0], [16, 0]])
    clean = fresh.run(backend, backend.new_kv_cache(fresh.heads.cache_spec(fresh.num_blocks)), [[37, 50]])
    for one, other in zip(reused, clean, strict=True):
        assert torch.equal(one, other)


def test_latent_caches_are_the_references() -> None:
    backend = CpuBackend(torch.bfloat16)
    spec = KVCacheSpec(
        num_layers=1, num_blocks=2, block_size=16, num_kv_heads=1, key_dim=24, value_dim=16, values_in_keys=True
    )
    assert type(backend.new_kv_cache(spec)).__name__ == "ReferenceCache"


def test_impossible_caches_are_refused() -> None:
    backend = CpuBackend(torch.bfloat16)
    with pytest.raises(ValueError, match="block_size 20 does not fit the cpu back-end: use a multiple of 16"):
        backend.new_kv_cache(Heads(block_size=20).cache_spec(4))
    with pytest.raises(ResourceError, match="lower the number of blocks"):
        backend.new_kv_cache(Heads().cache_spec(1 << 40))
    with pytest.raises(ResourceError, match="lower the number of blocks"):
        backend.new_kv_cache(Heads(key_dim=1 << 30).cache_spec(1 << 40))  # its bytes pass 64 bits
    with pytest.raises(ValueError, match="no size may be below 0"):
        Heads().cache_spec(-1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("positions_T", [99], r"position 99 is outside 0\.\.31"),
        ("positions_T", [-1], "position -1 is below 0"),
        ("slots_T", [64], r"slot 64 is outside 0\.\.63"),
        ("query_starts", [0, 9], r"begin with 0 and end with 9: they go from 0 to the 1 rows"),
        ("query_starts", [0], r"here \(2,\), got torch.int32 \(1,\)"),
        ("context_lens_S", [33], "a context of 33 tokens: the table has 2 blocks of 16"),
        ("context_lens_S", [0], "sequence 0 has 1 rows and sees 0 keys"),
        ("block_tables_SB", [[4, 0]], r"block 4 is outside 0\.\.3"),
        ("layer", 2, r"layer 2 is outside 0\.\.1"),
        ("num_heads", 3, "do not fit the cache"),
        ("num_heads", 0, "do not fit the cache"),
    ],
)
def test_places_outside_of_the_cache_are_refused(name: str, value: object, message: str) -> None:
    backend, heads = CpuBackend(torch.float32), Heads()
    cache, at = backend.new_kv_cache(heads.cache_spec(4)), {"layer": 0, "num_heads": 4}
    arrays: dict[str, object] = {"positions_T": [0], "slots_T": [0], "query_starts": [0, 1], "context_lens_S": [1]}
    arrays["block_tables_SB"] = [[0, 1]]
    (at if name in at else arrays)[name] = value  # type: ignore[index]
    tensors = {key: torch.tensor(each, dtype=torch.int32) for key, each in arrays.items()}
    batch = AttentionBatch(**tensors, query_lens=(1,), context_lens=(1,))
    rotary = RotaryTable(cos=torch.ones(32, 32), sin=torch.zeros(32, 32), interleaved=False)
    rows = torch.randn(1, (at["num_heads"] + 4) * 64)

    def attend() -> None:
        heads_of_rows = HeadRows(num_heads=at["num_heads"], rotary=rotary)
        q = backend.rotate_and_store(rows, cache, at["layer"], batch, heads_of_rows)
        backend.paged_attention(q, cache, at["layer"], batch, scale=1.0, sliding_window=None)

    with pytest.raises(ValueError, match=message):
        attend()
