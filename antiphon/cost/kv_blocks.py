"""KV memory in blocks: the arithmetic by which the serving engine admits sequences, and by which the planner counts.

A block holds `block_size` tokens of one sequence over all layers. Admission leaves a reserve free for running sequences
to grow into. Written with operators alone, so that the engine calls it with integers and the planner with arrays.

Rejected: bytes per token times tokens. Sequences then fit that the engine, rounding up to blocks and keeping its
reserve, never admits; planners elsewhere over-predicted throughput several times by that.
"""

from typing import Any, TypeVar

from antiphon.specs.model import KV_SCALE_BYTES, KVStorage, ModelSpec

Counts = TypeVar("Counts", bound=Any)
"""Whole numbers: an `int`, or an array of them."""


def kv_cache_block_bytes(spec: ModelSpec, block_size: int, bytes_per_element: int, storage: KVStorage = "auto") -> int:
    """Bytes of one KV block over all layers: keys and values of all KV heads, or latent rows (which hold both). In 8
    bits an element is a byte and every key and value has a scale."""
    if storage == "auto":
        return block_size * spec.kv_bytes_per_token(bytes_per_element)
    attention = spec.attention
    rows = 2 * attention.num_kv_heads if attention.latent is None else 1
    return block_size * (spec.kv_bytes_per_token(1) + spec.num_caching_layers * rows * KV_SCALE_BYTES)


def blocks_of(num_tokens: Counts, block_size: int) -> Counts:
    """Blocks that a sequence of `num_tokens` occupies: the last one may be partly filled."""
    num_blocks: Counts = -(-num_tokens // block_size)
    return num_blocks


def blocks_in_budget(budget_bytes: Counts, block_bytes: Any) -> Counts:
    """Whole blocks that fit in a KV budget."""
    num_blocks: Counts = budget_bytes // block_bytes
    return num_blocks


def reserved_blocks(num_blocks: Counts) -> Counts:
    """Blocks that admission leaves free while other sequences run: 1% of all, at least one."""
    reserved: Counts = num_blocks // 100 + (num_blocks < 100)
    return reserved


def admitted_sequences(num_blocks: Counts, blocks_per_sequence: Any, num_reserved: Any) -> Counts:
    """Sequences of equal length that are admitted side by side. The first needs no reserve; where it is the only one
    that fits the reserve does not keep it out."""
    beside: Any = (num_blocks - num_reserved) // blocks_per_sequence
    alone: Any = num_blocks // blocks_per_sequence
    admitted: Counts = beside * (beside > 0) + (alone > 0) * (beside <= 0)
    return admitted
