"""The header of one `.safetensors` file: which tensors it holds, checked before anything is believed. No torch.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
The header is parsed here because the safetensors package does not say in one line what is wrong, and planning, which
may ask what weights hold, loads no torch.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from antiphon.base.errors import CheckpointError
from antiphon.models.files import MAX_JSON_BYTES, brief, open_regular, parse_json

LENGTH_BYTES = 8
MAX_AXES = 64  # as many as torch takes
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}


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


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Names and places of all tensors, checked against the file's size and against each other."""
    with open_regular(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        if file_bytes == 0:
            raise CheckpointError(f"{path.name}: empty: download it again")
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if file_bytes < LENGTH_BYTES or header_bytes > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{path.name}: not a safetensors file: its first 8 bytes promise a header of {header_bytes:,} bytes, "
                f"the file has {file_bytes:,}: download it again"
            )
        data_start = LENGTH_BYTES + header_bytes
        if data_start > file_bytes:
            raise truncated(path, file_bytes, data_start)
        data = file.read(header_bytes)
    try:
        entries = _entries(parse_json(data, unique_keys=True), data_start)
    except ValueError as error:
        raise CheckpointError(f"{path.name}: damaged safetensors header ({error}): download it again") from error
    needed = max((entry.stop for entry in entries.values()), default=data_start)
    if needed > file_bytes:
        raise truncated(path, file_bytes, needed)
    return entries


def _entries(header: object, data_start: int) -> dict[str, TensorEntry]:
    """`ValueError` if a tensor's place does not fit its shape or lies over another's."""
    if not isinstance(header, dict):
        raise ValueError(f"it holds a {type(header).__name__}, not an object")
    entries = {name: _entry(name, fields, data_start) for name, fields in header.items() if name != "__metadata__"}
    stop, before = data_start, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start < stop:
            raise ValueError(f"{brief(name)} lies over {brief(before)}")
        stop, before = entry.stop, name
    return entries


def _entry(name: str, fields: object, data_start: int) -> TensorEntry:
    if not isinstance(fields, dict):
        raise ValueError(f"{brief(name)} is a {type(fields).__name__}, not an object")
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{brief(name)} has dtype {brief(dtype)}, shape {brief(shape)}, offsets {brief(offsets)}")
    start, stop = offsets
    if stop < start:
        raise ValueError(f"{brief(name)} has data_offsets {offsets}")
    if dtype in ITEM_BYTES and math.prod(shape) * ITEM_BYTES[dtype] != stop - start:
        raise ValueError(f"{stop - start} bytes for shape {brief(shape)} of {dtype}")
    return TensorEntry(dtype, tuple(shape), data_start + start, data_start + stop)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    """A list of whole numbers from 0; long lists and large numbers are no tensor's."""
    return isinstance(value, list) and len(value) <= MAX_AXES and all(type(n) is int and 0 <= n < 2**63 for n in value)


def truncated(path: Path, file_bytes: int, needed: int) -> CheckpointError:
    return CheckpointError(
        f"{path.name}: truncated: {file_bytes:,} bytes, its header promises {needed:,}: download it again"
    )
