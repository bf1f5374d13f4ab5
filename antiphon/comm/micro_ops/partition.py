"""Cuts a tensor into micro-ops of equal size.

A tensor of `size_bytes` becomes ceil(size / chunk) pieces whose sizes differ by at most one element: equal pieces make
waiting predictable, and no piece mixes two gradients (Lina section 6.1). Rejected: full chunks and a short rest, which
pays the fixed cost of a micro-op for a few bytes.
"""

import itertools

from antiphon.base.errors import UserError

DEFAULT_CHUNK_BYTES = 30_000_000  # Lina section 7.1: blocks all-to-all least in most of their cases


def partition(size_bytes: int, chunk_bytes: int = DEFAULT_CHUNK_BYTES, element_bytes: int = 1) -> list[tuple[int, int]]:
    """(offset, size) of each piece in bytes, in order, none larger than `chunk_bytes`; no piece for an empty tensor.

    Pieces begin at whole elements. `UserError` if a chunk cannot hold one element or the tensor has a part of one.
    """
    if element_bytes < 1 or chunk_bytes < element_bytes:
        raise UserError(f"chunks of {chunk_bytes} bytes for elements of {element_bytes}: a chunk holds at least one")
    if size_bytes < 0 or size_bytes % element_bytes:
        raise UserError(f"{size_bytes} bytes are no whole number of elements of {element_bytes} bytes")
    num_elements = size_bytes // element_bytes
    num_pieces = -(-num_elements // (chunk_bytes // element_bytes))
    bounds = [num_elements * piece // max(1, num_pieces) * element_bytes for piece in range(num_pieces + 1)]
    return [(start, end - start) for start, end in itertools.pairwise(bounds)]
