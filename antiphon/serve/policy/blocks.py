"""Paged key/value memory of one attention worker: who holds which block, and which full blocks can be shared.

1. A block is free (nobody refers to it) or held by one or more requests (reference count).
2. A *full* block whose keys and values are computed may be published under the digest of everything up to its end:
   digest = blake2b(parent digest, tokens). Equal digest, equal history, so its keys and values can be shared.
3. Released blocks stay published until their memory is needed: the free list is also the least-recently-used list.
   Blocks that nobody can find go to its front, published ones to its back, a sequence's tail before its head.
4. A block being written is never published, hence never shared: writing needs no copy.

Digests are 256 bits of a cryptographic hash, so a collision need not be handled (Python's 64-bit `hash` would have to
be followed by a comparison of tokens). Rejected: a radix tree over tokens. It finds hits inside a block too, but costs
splitting, locking of paths and a second eviction order; with blocks of 16 tokens the hash chain loses 8 on average.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_BYTES = 32


def extend_block_digests(digests: list[bytes], token_ids: Sequence[int], block_size: int, num_blocks: int) -> None:
    """Append the digests of blocks `len(digests)` to `num_blocks - 1` of a sequence, all of which must be full."""
    first = len(digests)
    if first >= num_blocks:
        return
    tokens = array("I", token_ids[first * block_size : num_blocks * block_size]).tobytes()
    width = len(tokens) // (num_blocks - first)
    parent = digests[-1] if digests else b""
    for begin in range(0, len(tokens), width):
        parent = blake2b(parent + tokens[begin : begin + width], digest_size=_DIGEST_BYTES).digest()
        digests.append(parent)


class BlockPool:
    """Block ids 0 to `num_blocks - 1`. All operations are O(1) per block; nothing here looks at requests."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def match(self, digests: Sequence[bytes], limit: int) -> list[int]:
        """The blocks that hold the longest published prefix of `digests[:limit]`. Takes no reference."""
        blocks = []
        for index in range(min(limit, len(digests))):
            block = self._block_of.get(digests[index])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are free now, so that sharing them takes them off the free list."""
        num_refs = self._num_refs
        return sum(1 for block in blocks if num_refs[block] == 0)

    def share(self, blocks: Sequence[int]) -> None:
        """Take one reference on each of the blocks that `match` returned."""
        for block in blocks:
            assert self._digest_of[block] is not None, f"block {block} is not published"
            if self._num_refs[block] == 0:
                del self._free[block]
            self._num_refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks for writing, least recently used first; what they published is forgotten."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free: admission must check first"
        return [self.allocate_one() for _ in range(count)]

    def allocate_one(self) -> int:
        """One block for writing. The pool must not be empty."""
        block, _ = self._free.popitem(last=False)
        digest = self._digest_of[block]
        if digest is not None:
            del self._block_of[digest]
            self._digest_of[block] = None
        self._num_refs[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each block of a sequence, its tail first, so that the head is found for longer."""
        for block in reversed(blocks):
            assert self._num_refs[block] > 0, f"block {block} released twice"
            self._num_refs[block] -= 1
            if self._num_refs[block] == 0:
                self._free[block] = None
                if self._digest_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, digest: bytes) -> None:
        """Offer a full, computed block to others. If its content is on offer already, this copy stays private."""
        assert self._num_refs[block] > 0, f"block {block} is published by nobody"
        if digest not in self._block_of and self._digest_of[block] is None:
            self._digest_of[block] = digest
            self._block_of[digest] = block

    def clear_published(self) -> None:
        """The memory behind the blocks is gone (worker lost): nothing is on offer any more."""
        self._block_of.clear()
        self._digest_of = [None] * self.num_blocks
