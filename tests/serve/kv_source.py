"""Keys and values that say where they belong, and a process that hands them over until it is told to stop.

python -m tests.serve.kv_source        # a `Job` as one line of JSON on standard input, then one line for each layer
"""

import sys
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from antiphon.kernels.api import KVCache, KVCacheSpec
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.reference import ReferenceBackend
from antiphon.serve.policy.handover import CachePart, KVOffer
from antiphon.serve.worker.kv_transfer import KVSender
from antiphon.serve.worker.messages import KVTransferConfig
from antiphon.specs.model import KV_SCALE_BYTES, KVStorage

LAYOUT = "a test's"


class CacheShape(msgspec.Struct, frozen=True, kw_only=True):
    """Widths of a cached token, the same on both sides."""

    key_dim: int = 24
    value_dim: int = 10
    latent: bool = False
    dtype: str = "bfloat16"
    storage: KVStorage = "auto"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a source process is, and the one offer it obeys."""

    config: KVTransferConfig
    shape: CacheShape
    part: CachePart
    block_size: int
    offer: KVOffer


@dataclass(frozen=True)
class Cached:
    """A part of a cache with a scattered table of blocks for one sequence."""

    cache: KVCache
    part: CachePart
    blocks: Tensor
    shape: CacheShape

    def heads(self) -> Tensor:
        return torch.arange(len(self.part.heads), dtype=torch.int32)

    def fill(self, layer: int, first: int, last: int) -> None:
        """As the kernels would write tokens [first, last) of a layer."""
        rows = torch.cat([expected(self.shape, layer, head, first, last) for head in self.part.heads])
        self.cache.write_tokens(layer - self.part.first_layer, self.blocks, first, last - first, self.heads(), rows)

    def wrong(self, first: int, last: int) -> list[tuple[int, int]]:
        """(layer, head) of which some of the tokens are not what they should be."""
        found = []
        row_bytes = self.cache.spec.row_bytes(self.cache.dtype.itemsize) * (last - first)
        for layer in range(self.part.first_layer, self.part.last_layer):
            rows = torch.empty(len(self.part.heads) * row_bytes, dtype=torch.uint8)
            local = layer - self.part.first_layer
            self.cache.read_tokens(local, self.blocks, first, last - first, self.heads(), rows)
            for head, own in zip(self.part.heads, rows.view(len(self.part.heads), -1), strict=True):
                if not torch.equal(own, expected(self.shape, layer, head, first, last)):
                    found.append((layer, head))
        return found


def expected(shape: CacheShape, layer: int, head: int, first: int, last: int) -> Tensor:
    """Bytes of these tokens of a head: small integers, which bfloat16 holds exactly; in 8 bits codes and a scale."""
    widths = [shape.key_dim] if shape.latent else [shape.key_dim, shape.value_dim]
    tokens = torch.arange(first, last).unsqueeze(1)
    if shape.storage != "auto":
        widths = [width + KV_SCALE_BYTES for width in widths]
    parts = [
        (layer * 89 + head * 37 + tokens * 11 + torch.arange(width) + 5 * index) % 251
        for index, width in enumerate(widths)
    ]
    dtype = getattr(torch, shape.dtype) if shape.storage == "auto" else torch.uint8
    return torch.cat([part.to(dtype).flatten() for part in parts]).view(torch.uint8)


def make_cached(shape: CacheShape, part: CachePart, block_size: int, num_tokens: int, seed: int) -> Cached:
    """An empty cache; block sizes that are not multiples of 16, and latent rows, are the reference back-end's."""
    num_blocks = -(-num_tokens // block_size)
    spec = KVCacheSpec(
        num_layers=part.last_layer - part.first_layer,
        num_blocks=num_blocks + 3,
        block_size=block_size,
        num_kv_heads=len(part.heads),
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        values_in_keys=shape.latent,
        storage=shape.storage,
    )
    dtype = getattr(torch, shape.dtype)
    is_native = block_size % 16 == 0
    backend = CpuBackend(dtype) if is_native else ReferenceBackend(torch.device("cpu"), dtype)
    order = torch.randperm(num_blocks + 3, generator=torch.Generator().manual_seed(seed))
    return Cached(backend.new_kv_cache(spec), part, order[:num_blocks].to(torch.int32), shape)


def main() -> None:
    """A layer for each further line of standard input; after each it says how far it is."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    cached = make_cached(job.shape, job.part, job.block_size, job.offer.end, seed=1)
    sender = KVSender(job.config, "source", cached.cache, job.part, LAYOUT, lambda message: print(message, flush=True))
    sender.open([job.offer])
    for layer in range(job.part.first_layer, job.part.last_layer):
        cached.fill(layer, 0, job.offer.end)
        sender.layer_done(job.offer.request_id, layer, job.offer.end, lambda: cached.blocks)
        sender.flush()
        print(f"sent layer {layer}", flush=True)
        sys.stdin.readline()
    sender.close()


if __name__ == "__main__":
    main()
