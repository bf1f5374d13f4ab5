"""One `.safetensors` file as a read-only memory map: tensors are views, and their pages can be given back.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
The header is parsed here because the safetensors package neither lets go of pages nor says in one line what is wrong.
"""

import json
import mmap
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from antiphon.base.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 256 * 2**20


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in its file, in bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


class SafetensorsFile:
    """Header and lazily made memory map of one file. Views keep the map alive; they must not be written to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = read_header(path)
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
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._map


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Names and places of all tensors, checked against the file's size."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if file_bytes < LENGTH_BYTES or header_bytes > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path.name}: not a safetensors file: its first 8 bytes promise a header of {header_bytes:,} bytes, "
                f"the file has {file_bytes:,}: download it again"
            )
        data_start = LENGTH_BYTES + header_bytes
        if data_start > file_bytes:
            raise _truncated(path, file_bytes, data_start)
        try:
            header = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            entries = {name: _entry(fields, data_start) for name, fields in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path.name}: damaged safetensors header ({error}): download it again") from error
    needed = max((entry.stop for entry in entries.values()), default=data_start)
    if needed > file_bytes:
        raise _truncated(path, file_bytes, needed)
    return entries


def _entry(fields: dict[str, object], data_start: int) -> TensorEntry:
    shape, offsets = fields["shape"], fields["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise ValueError("shape or data_offsets is not a list")
    start, stop = (int(offset) for offset in offsets)
    entry = TensorEntry(str(fields["dtype"]), tuple(int(n) for n in shape), data_start + start, data_start + stop)
    if start < 0 or stop < start:
        raise ValueError(f"data_offsets {offsets}")
    if entry.dtype in DTYPES:
        elements = 1
        for size in entry.shape:
            elements *= size
        if elements * DTYPES[entry.dtype].itemsize != entry.num_bytes:
            raise ValueError(f"{entry.num_bytes} bytes for shape {shape} of {entry.dtype}")
    return entry


def _truncated(path: Path, file_bytes: int, needed: int) -> CheckpointError:
    return CheckpointError(
        f"{path.name}: truncated: {file_bytes:,} bytes, its header promises {needed:,}: download it again"
    )
