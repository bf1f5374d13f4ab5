"""How many KV blocks each attention worker of a server gets, and what of its room is the express lane's."""

from typing import NamedTuple

from antiphon.base.errors import ResourceError
from antiphon.base.units import format_bytes
from antiphon.cost.kv_blocks import blocks_in_budget, blocks_of, kv_cache_block_bytes
from antiphon.models.shares import share_of
from antiphon.serve.config import ServeConfig
from antiphon.specs.model import ModelSpec

_EXPRESS_SLOTS = 8
_LEAST_BLOCKS = 64  # of a worker with an express lane


class SharedRoom(NamedTuple):
    """Slots of the main way, and what the express lane has of an attention worker."""

    max_running: int
    express_slots: int
    express_blocks: int


def kv_block_bytes(config: ServeConfig, spec: ModelSpec, bytes_per_element: int) -> int:
    """Bytes of a KV block on all ranks of an attention worker together."""
    parts = [share_of(spec, rank, config.attention_tp).local_spec(spec) for rank in range(config.attention_tp)]
    return sum(kv_cache_block_bytes(part, config.block_size, bytes_per_element) for part in parts)


def kv_blocks_per_worker(config: ServeConfig, block_bytes: int, context_length: int, free_bytes: int) -> int:
    """KV blocks of each attention worker within the budget; `ResourceError` if not even one sequence fits.

    Without a budget, 30% of the memory free now, but no more than every running request at full length needs."""
    blocks_per_sequence = blocks_of(context_length, config.block_size)
    budget = int(free_bytes * 0.3) if config.kv_bytes is None else config.kv_bytes
    num_blocks = blocks_in_budget(budget // config.num_kv_caches, block_bytes)
    if config.kv_bytes is None:
        num_blocks = min(num_blocks, config.max_running * blocks_per_sequence)
    if num_blocks < blocks_per_sequence:
        needed = blocks_per_sequence * block_bytes * config.num_kv_caches
        raise ResourceError(
            f"--kv-bytes {format_bytes(budget)} is too small: one sequence of {context_length} tokens on each of "
            f"{config.num_kv_caches} workers needs {format_bytes(needed)}; raise it or lower --max-model-len"
        )
    return num_blocks


def share_room(config: ServeConfig, num_blocks: int, context_length: int) -> SharedRoom:
    """The express lane's part: 8 slots on top of `max_running`, or out of it where a step has no rows for more; 1/64 of
    the blocks, of small caches 1/16 up to 32. Nothing where a sequence of full length needs the blocks."""
    num_spare = num_blocks - blocks_of(context_length, config.block_size)
    blocks = min(max(num_blocks // 64, min(num_blocks // 16, 32)), num_spare)
    extra = min(_EXPRESS_SLOTS, config.max_batch_tokens - config.max_running)
    slots = extra or min(_EXPRESS_SLOTS, config.max_running // 4)
    if num_blocks < _LEAST_BLOCKS or blocks < 1 or slots < 1:
        return SharedRoom(config.max_running, 0, 0)
    return SharedRoom(config.max_running if extra else config.max_running - slots, slots, blocks)
