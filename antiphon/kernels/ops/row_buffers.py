"""Memory for rows whose number changes from layer to layer and step to step, used again.

Routers send a rank another number of rows each time. Tensors of ever new sizes fit no block that was freed before, so
memory splits up, and allocating it takes time that other ranks wait for (MegaScale-MoE, section 7: stragglers).

1. A buffer is as long as its first rows need, rounded up to an eighth of a power of two.
2. Rows get the smallest free buffer that is long enough and at most twice as long as they need.
3. A buffer is free as soon as the last tensor over it is gone, views and what autograd saved included.
4. Where none fits, a free one that is too short makes place for the new one: as many stay as were in use at once.

Hosts only: PyTorch's allocator for GPUs rounds sizes itself (`PYTORCH_CUDA_ALLOC_CONF=roundup_power2_divisions:8`).
Rejected: one buffer of a fixed budget for each layer. It holds for every layer what only the fullest needs.
"""

import threading
import weakref

import numpy as np
import torch
from torch import Tensor

DIVISIONS = 8
_Memory = np.ndarray[tuple[int], np.dtype[np.uint8]]


class RowBuffers:
    """The buffers of one process. `num_bytes`: of all; `num_made`: how often memory was allocated."""

    def __init__(self) -> None:
        self._free: list[_Memory] = []
        self._lock = threading.RLock()  # a tensor may end within `empty`, in the same thread
        self.num_bytes = 0
        self.num_made = 0

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[num_rows, width] of unknown numbers, on the host."""
        needed = num_rows * width * dtype.itemsize
        if not needed:
            return torch.empty(num_rows, width, dtype=dtype)
        with self._lock:
            memory = self._take(needed)
        lent = memory[:needed]  # the tensor holds this view, and ends with it
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return torch.from_numpy(lent).view(dtype).view(num_rows, width)

    def _take(self, needed: int) -> _Memory:
        fitting = [each for each in self._free if needed <= each.nbytes <= 2 * rounded_up(needed)]
        if fitting:
            chosen = min(fitting, key=lambda each: each.nbytes)
            self._free = [each for each in self._free if each is not chosen]
            return chosen
        shorter = [each for each in self._free if each.nbytes < needed]
        if shorter:
            gone = max(shorter, key=lambda each: each.nbytes)
            self._free = [each for each in self._free if each is not gone]
            self.num_bytes -= gone.nbytes
        made = np.empty(rounded_up(needed), dtype=np.uint8)
        self.num_bytes += made.nbytes
        self.num_made += 1
        return made

    def _give_back(self, memory: _Memory) -> None:
        with self._lock:
            self._free.append(memory)


def rounded_up(num_bytes: int) -> int:
    """The next eighth of a power of two.

    >>> rounded_up(1000), rounded_up(1025)
    (1024, 1152)
    """
    step = max(1, (1 << (num_bytes - 1).bit_length() >> 1) // DIVISIONS)
    return -(-num_bytes // step) * step
