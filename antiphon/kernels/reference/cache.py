"""Paged keys and values as flat tables of slots: slot = block * block_size + offset.

One table per layer, [slots, heads, width], so that a sequence's context is one `index_select`. Tables start as zeros,
which costs no memory until touched on CPU and keeps garbage (NaN) out of masked positions.
"""

import torch
from torch import Tensor

from antiphon.base.errors import ResourceError
from antiphon.base.units import format_bytes
from antiphon.kernels.api import KVCacheSpec


class ReferenceCache:
    """Keys [slots, G, key_dim] and values [slots, G, value_dim] of every layer; or values within keys."""

    def __init__(self, spec: KVCacheSpec, device: torch.device, dtype: torch.dtype) -> None:
        self.spec = spec
        slots = spec.num_blocks * spec.block_size
        wanted = spec.num_blocks * spec.block_bytes(dtype.itemsize)
        try:
            self.keys = [
                torch.zeros((slots, spec.num_kv_heads, spec.key_dim), device=device, dtype=dtype)
                for _ in range(spec.num_layers)
            ]
            self.values = [
                torch.zeros((slots, spec.num_kv_heads, spec.value_dim), device=device, dtype=dtype)
                for _ in range(0 if spec.values_in_keys else spec.num_layers)
            ]
        except (RuntimeError, MemoryError) as error:
            raise ResourceError(
                f"{device} cannot hold a KV cache of {format_bytes(wanted)} "
                f"({spec.num_blocks} blocks of {spec.block_size} tokens): lower the number of blocks"
            ) from error

    def store(self, layer: int, slots_T: Tensor, k_TGD: Tensor, v_TGV: Tensor | None) -> None:
        slots_T = slots_T.long()
        self.keys[layer].index_copy_(0, slots_T, k_TGD)
        if v_TGV is not None:
            self.values[layer].index_copy_(0, slots_T, v_TGV)

    def gather(self, layer: int, slots_SC: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [S, C, G, width] at `slots_SC`."""
        keys = self.keys[layer][slots_SC]
        if self.spec.values_in_keys:
            return keys, keys[..., : self.spec.value_dim]
        return keys, self.values[layer][slots_SC]
