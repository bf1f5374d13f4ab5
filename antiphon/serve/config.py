"""What `antiphon serve` was asked to run, validated once; everything else is derived from it.

Threads and cores: worker processes share the machine's cores evenly. When they divide them exactly each is pinned to
its own, otherwise the kernel schedules them. Waiting: a worker spins briefly before it sleeps only if every worker has
a core, because spinning with more processes than cores takes the core from whoever it waits for.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from antiphon.base.errors import ResourceError, UserError
from antiphon.base.units import format_bytes
from antiphon.kernels.api import KVCacheSpec
from antiphon.specs.model import ModelSpec
from antiphon.specs.placement import ExpertPlacement, contiguous_placement

Layout = Literal["colocated", "disaggregated"]
SPIN_S = 50e-6
MAX_ATTENTION_WORKERS = 10  # the exchange's header has room for the names of more


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """One running server. `num_attention` counts attention workers, or replicas in the colocated layout.

    `kv_bytes` is the KV budget of the whole server, split evenly over the attention workers; 0: a share of free memory.
    `max_batch_tokens` bounds the rows of one step of one attention worker, over all its micro-batches.
    """

    model: Path
    layout: Layout
    num_attention: int = 1
    num_experts: int = 1
    num_micro_batches: int = 1
    device: str = "cpu"
    dtype: str = "auto"
    kernels: str = "auto"
    max_model_len: int = 0
    kv_bytes: int = 0
    block_size: int = 16
    max_batch_tokens: int = 2048
    max_running: int = 256
    max_waiting: int = 1024
    num_threads: int = 0
    timeout_s: float = 30.0
    trace: bool = False
    placement: ExpertPlacement | None = None

    def __post_init__(self) -> None:
        checks = (
            (self.layout in ("colocated", "disaggregated"), "layout", self.layout, "colocated or disaggregated"),
            (1 <= self.num_attention <= MAX_ATTENTION_WORKERS, "attention", self.num_attention, "1 to 10"),
            (self.num_experts >= 1, "experts", self.num_experts, "at least 1"),
            (1 <= self.num_micro_batches <= 64, "micro-batches", self.num_micro_batches, "1 to 64"),
            (self.max_model_len >= 0, "max-model-len", self.max_model_len, "at least 1, or 0 for the model's own"),
            (self.kv_bytes >= 0, "kv-bytes", self.kv_bytes, "at least 1, or 0 for a share of free memory"),
            (self.block_size % 16 == 0 and self.block_size > 0, "block-size", self.block_size, "a multiple of 16"),
            (self.max_running >= 1, "max-running", self.max_running, "at least 1"),
            (
                self.max_batch_tokens >= self.max_running,
                "max-batch-tokens",
                self.max_batch_tokens,
                f"at least --max-running, which is {self.max_running}",
            ),
            (self.max_waiting >= 1, "max-waiting", self.max_waiting, "at least 1"),
            (self.num_threads >= 0, "threads", self.num_threads, "at least 1, or 0 to share the cores"),
            (self.timeout_s > 0, "timeout", self.timeout_s, "above 0 s"),
        )
        for holds, name, value, limit in checks:
            if not holds:
                raise UserError(f"--{name} is {value}: it must be {limit}")

    @property
    def num_workers(self) -> int:
        return self.num_attention + (self.num_experts if self.layout == "disaggregated" else 0)

    def threads_per_worker(self) -> int:
        """Cores per worker process, at least one."""
        return self.num_threads or max(1, len(os.sched_getaffinity(0)) // self.num_workers)

    def cores_of(self, worker: int) -> list[int]:
        """The cores worker number `worker` is pinned to; empty: not pinned."""
        cores = sorted(os.sched_getaffinity(0))
        threads = self.threads_per_worker()
        if self.device != "cpu" or self.num_workers == 1 or threads * self.num_workers != len(cores):
            return []
        return cores[worker * threads : (worker + 1) * threads]

    @property
    def spin_s(self) -> float:
        return SPIN_S if self.num_workers <= len(os.sched_getaffinity(0)) else 0.0

    def expert_placement(self, spec: ModelSpec) -> ExpertPlacement:
        """The given placement, checked against the model, or a contiguous one."""
        num_experts = spec.router.num_experts
        if self.placement is None:
            return contiguous_placement(num_experts, self.num_experts if self.layout == "disaggregated" else 1)
        if self.placement.num_experts != num_experts or self.placement.num_workers != self.num_experts:
            raise UserError(
                f"the placement is for {self.placement.num_experts} experts on {self.placement.num_workers} workers, "
                f"the model has {num_experts} and {self.num_experts} were asked for: make a placement that fits"
            )
        return self.placement

    def context_length(self, spec: ModelSpec) -> int:
        """Tokens a sequence may have: what was asked for, at most what the model was trained for."""
        if self.max_model_len > spec.max_position:
            raise UserError(f"--max-model-len is {self.max_model_len}: the model's context ends at {spec.max_position}")
        return self.max_model_len or spec.max_position


def kv_blocks_per_worker(config: ServeConfig, block_bytes: int, context_length: int, free_bytes: int) -> int:
    """KV blocks of each attention worker within the budget; `ResourceError` if not even one sequence fits.

    Without a budget, 30% of the memory free now, but no more than every running request at full length needs."""
    blocks_per_sequence = -(-context_length // config.block_size)
    budget = config.kv_bytes or int(free_bytes * 0.3)
    num_blocks = budget // config.num_attention // block_bytes
    if not config.kv_bytes:
        num_blocks = min(num_blocks, config.max_running * blocks_per_sequence)
    if num_blocks < blocks_per_sequence:
        needed = blocks_per_sequence * block_bytes * config.num_attention
        raise ResourceError(
            f"--kv-bytes {format_bytes(budget)} is too small: one sequence of {context_length} tokens on each of "
            f"{config.num_attention} workers needs {format_bytes(needed)}; raise it or lower --max-model-len"
        )
    return num_blocks


def kv_cache_block_bytes(spec: ModelSpec, block_size: int, bytes_per_element: int) -> int:
    """Bytes of one KV block over all layers, without building anything."""
    attention = spec.attention
    latent = attention.latent
    cache = KVCacheSpec(
        num_layers=spec.num_layers,
        num_blocks=1,
        block_size=block_size,
        num_kv_heads=1 if latent else attention.num_kv_heads,
        key_dim=latent.kv_lora_rank + latent.qk_rope_head_dim if latent else attention.head_dim,
        value_dim=latent.kv_lora_rank if latent else attention.head_dim,
        values_in_keys=latent is not None,
    )
    return cache.block_bytes(bytes_per_element)
