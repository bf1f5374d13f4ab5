"""Keys and values in 8 bits: half the memory, a bounded error, and a row's bits that do not depend on chunks."""

from dataclasses import replace

import pytest
import torch

from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.reference import ReferenceBackend
from antiphon.specs.model import KVStorage
from tests.kernels.attention_harness import Heads, Sequences

STORAGES: list[KVStorage] = ["int8", "fp8"]
ERRORS = {"int8": 0.015, "fp8": 0.05}  # of the output's norm, on random rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    "heads",
    [
        Heads(),
        Heads(num_heads=6, num_kv_heads=1, key_dim=40, value_dim=24, rotary_dim=16, block_size=32),
        Heads(key_dim=128, value_dim=128, window=70, sinks=True),
    ],
)
def test_error_and_bits(isa: str, heads: Heads, storage: KVStorage, dtype: torch.dtype) -> None:
    backend, sequences = CpuBackend(dtype), Sequences(heads, [150, 3, 64], dtype)
    spec = replace(heads.cache_spec(sequences.num_blocks), storage=storage)
    whole = sequences.run(backend, backend.new_kv_cache(spec), [[150, 3, 64]])
    for sequence, output in enumerate(whole):
        expected = sequences.expected(sequence)
        error = (output.double() - expected).norm() / expected.norm()
        assert error < ERRORS[storage] + (0.005 if dtype == torch.bfloat16 else 0.0), sequence
    steps = [[100, 0, 33], [1, 2, 0], [49, 1, 31]]
    for output, chunked in zip(whole, sequences.run(backend, backend.new_kv_cache(spec), steps), strict=True):
        assert torch.equal(chunked, output)


@pytest.mark.parametrize("storage", STORAGES)
def test_both_back_ends_store_the_same(isa: str, storage: KVStorage) -> None:
    heads = Heads(norm=False)
    sequences = Sequences(heads, [70, 9], torch.float32)
    spec = replace(heads.cache_spec(sequences.num_blocks), storage=storage)
    native, reference = (
        sequences.run(backend, backend.new_kv_cache(spec), [[60, 9], [10, 0]])  # type: ignore[arg-type]
        for backend in (CpuBackend(torch.float32), ReferenceBackend())
    )
    for ours, theirs in zip(native, reference, strict=True):
        # Single codes may round the other way where keys differ in their last bit.
        assert (ours - theirs).norm() / theirs.norm() < 3e-3


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("latent", [False, True])
def test_memory(storage: KVStorage, latent: bool) -> None:
    spec = replace(Heads(key_dim=128, value_dim=128).cache_spec(64), storage=storage, values_in_keys=latent)
    halved, full = spec.block_bytes(2), replace(spec, storage="auto").block_bytes(2)
    assert halved < 0.52 * full
    cache = ReferenceBackend(dtype=torch.bfloat16).new_kv_cache(spec)
    held = (*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales)
    assert sum(part.nbytes for part in held) == 64 * halved
    if not latent:
        assert CpuBackend(torch.bfloat16).new_kv_cache(spec).native.num_bytes == 64 * halved  # type: ignore[attr-defined]


def test_rows_of_zeros_and_stale_values(isa: str) -> None:
    """A row of zeros has scale zero; blocks may hold anything beyond a sequence's end."""
    heads = Heads(norm=False)
    backend, sequences = CpuBackend(torch.float32), Sequences(heads, [5], torch.float32)
    cache = backend.new_kv_cache(replace(heads.cache_spec(sequences.num_blocks), storage="int8"))
    sequences.rows[0][2:] = 0.0
    output = sequences.run(backend, cache, [[5]])[0]
    assert output.isfinite().all()
    sequences.rows[0][:] = float("inf")
    sequences.run(backend, cache, [[5]])
    again = Sequences(heads, [5], torch.float32)
    again.rows[0][2:] = 0.0
    assert torch.equal(again.run(backend, cache, [[5]])[0], output)
