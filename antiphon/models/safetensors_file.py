"""One `.safetensors` file as a read-only memory map: tensors are views, and their pages can be given back.

Rejected: the safetensors package, which does not let go of pages.
"""

import mmap
import os
import warnings
from pathlib import Path

import torch
from torch import Tensor

from antiphon.base.errors import CheckpointError
from antiphon.models.files import open_regular
from antiphon.models.safetensors_header import TensorEntry, truncated

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}


class SafetensorsFile:
    """Header and lazily made memory map of one file. Views keep the map alive; they must not be written to."""

    def __init__(self, path: Path, entries: dict[str, TensorEntry]) -> None:
        """`entries`: the file's header (`read_header`)."""
        self.path = path
        self.entries = entries
        self._map: mmap.mmap | None = None

    def view(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor, or rows [start, stop) of its first axis, without copying."""
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.path.name}: tensor {name} has dtype {entry.dtype}: use weights in {', '.join(DTYPES)}"
            )
        dtype = DTYPES[entry.dtype]
        first, last = self._span(entry, rows)
        shape = entry.shape if rows is None else (rows[1] - rows[0], *entry.shape[1:])
        if first == last:
            return torch.empty(shape, dtype=dtype)
        if first % dtype.itemsize:  # a foreign writer that does not align: one copy is the price
            data = torch.frombuffer(bytearray(self._mapped()[first:last]), dtype=dtype)
            return data.view(shape)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            count = (last - first) // dtype.itemsize
            return torch.frombuffer(self._mapped(), dtype=dtype, count=count, offset=first).view(shape)

    def release(self, name: str, rows: tuple[int, int] | None = None) -> None:
        """Give the tensor's pages back to the system. A later access reads them from the file again."""
        first, last = self._span(self.entries[name], rows)
        if self._map is None or first == last:
            return
        first -= first % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def num_bytes(self, name: str, rows: tuple[int, int] | None = None) -> int:
        first, last = self._span(self.entries[name], rows)
        return last - first

    @staticmethod
    def _span(entry: TensorEntry, rows: tuple[int, int] | None) -> tuple[int, int]:
        if rows is None:
            return entry.start, entry.stop
        row_bytes = entry.num_bytes // entry.shape[0]
        return entry.start + rows[0] * row_bytes, entry.start + rows[1] * row_bytes

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            needed = max(entry.stop for entry in self.entries.values())
            with open_regular(self.path) as file:
                file_bytes = os.fstat(file.fileno()).st_size
                if file_bytes < needed:  # it may have changed since its header was read
                    raise truncated(self.path, file_bytes, needed)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._map
