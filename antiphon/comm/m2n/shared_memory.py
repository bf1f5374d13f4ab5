"""A block of memory shared by the processes of one machine, and the words in it that processes wait on.

The region is an anonymous memory file (`memfd_create`): it has no name that could collide or leak, and it goes away
with the last process that holds it, however that one dies. Workers receive the file descriptor when they are started.
"""

import mmap
import os

import torch
from torch import Tensor

from antiphon import _native
from antiphon.base.errors import ResourceError
from antiphon.base.units import format_bytes


def create_region(num_bytes: int) -> int:
    """A new memory file of `num_bytes` zero bytes; returns its descriptor. Pages are used only once written."""
    descriptor = os.memfd_create("antiphon-m2n")
    try:
        os.ftruncate(descriptor, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise ResourceError(
            f"cannot reserve {format_bytes(num_bytes)} of shared memory: {error.strerror}; "
            "use fewer workers, fewer micro-batches or a smaller --max-batch-tokens"
        ) from error
    return descriptor


class Region:
    """A mapping of the region into this process, with typed views and atomic words at byte offsets."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._address = self._bytes.data_ptr()

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor on the shared bytes; writes are seen by the other side after a later `publish`."""
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        return self._bytes[offset : offset + num_bytes].view(dtype).view(shape)

    def load(self, offset: int) -> int:
        """Read a 32-bit word; all writes made before its `publish` are visible afterwards."""
        return _native.load_u32(self._address + offset)

    def publish(self, offset: int, value: int) -> None:
        """Store a 32-bit word after all earlier writes, and wake whoever waits on it."""
        _native.store_wake_u32(self._address + offset, value & 0xFFFFFFFF)

    def ring(self, offset: int) -> None:
        """Add one to a doorbell and wake its owner."""
        _native.fetch_add_wake_u32(self._address + offset, 1)

    def wait(self, offset: int, old_value: int, timeout_s: float, spin_s: float) -> bool:
        """Wait until the word differs from `old_value`; False at the timeout. Spins first, then sleeps."""
        return _native.wait_u32(self._address + offset, old_value, int(timeout_s * 1e9), int(spin_s * 1e9))
