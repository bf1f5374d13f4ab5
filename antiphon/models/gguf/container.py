"""The container of a GGUF file: its metadata, and which tensor lies where. No torch, no numpy.

"GGUF", a version, the numbers of tensors and of metadata entries; the entries; a name, sizes, a type and a place for
every tensor; the data (ggml's docs/gguf.md, versions 2 and 3). A file is a stranger's: counts are bounded by the bytes
that are left before anything is made of them, and every tensor must lie inside the file, beside all others.

A model may be split over files (`-00001-of-00003.gguf`). The first has the metadata, each has its own tensors.

Rejected: the `gguf` package. It makes an array of numpy for every word of the vocabulary, which takes seconds in each
process, and of a damaged file it says no more than that an index is out of range. Tests compare with it.
"""

import math
import mmap
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon.base.errors import CheckpointError
from antiphon.models.checkpoint_folder import brief, open_regular
from antiphon.models.shard_index import AGAIN, TensorEntry, truncated

SUFFIX = ".gguf"
MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf")
_MAX_COUNT = 16_000_000  # elements of one array; the largest vocabularies have 300,000 words and as many merges
_MAX_NAME_BYTES = 65_535
_MAX_AXES = 4
_MOST_FREQUENCIES = 65_536
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class BlockType:
    """Rows are whole blocks of `size` numbers in `num_bytes` bytes. `kept`: bytes of a number in memory, where
    floats have 16 bits, and scales of super-blocks 8."""

    name: str
    size: int
    num_bytes: int
    kept: float = 2.0


# A type with blocks has a line here, in `_FORMATS` of `checkpoint`, and in `csrc/kernels/ggml_blocks.cpp`.
TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18, 0.5 + 2 / 32),
    3: BlockType("Q4_1", 32, 20, 0.5 + 6 / 32),
    6: BlockType("Q5_0", 32, 22, 1 + 2 / 32),
    7: BlockType("Q5_1", 32, 24, 1 + 6 / 32),
    8: BlockType("Q8_0", 32, 34, 1 + 2 / 32),
    12: BlockType("Q4_K", 256, 144, 0.5 + 2 / 32 + 4 / 256),
    13: BlockType("Q5_K", 256, 176, 1 + 2 / 32 + 4 / 256),
    14: BlockType("Q6_K", 256, 210, 1 + 1 / 16 + 2 / 256),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17, 0.5 + 1 / 32),
}  # by ggml's numbers
_OTHER_TYPES = {
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"},
}
SUPPORTED = ", ".join(each.name for each in TYPES.values())
ROPE_TABLES = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


@dataclass(frozen=True, repr=False)
class GgufArray:
    """An array of the metadata that nothing was made of yet: `values` does."""

    data: mmap.mmap
    kind: int
    count: int
    start: int

    def __repr__(self) -> str:  # errors show it
        return f"an array of {self.count}"

    def values(self) -> list[Any]:
        """Texts, or numbers. `ValueError` where a text is no UTF-8."""
        if self.kind != _STRING:
            return list(struct.unpack_from(f"<{self.count}{_SCALARS[self.kind]}", self.data, self.start))
        return list(self._texts())

    def _texts(self) -> Iterator[str]:
        position = self.start
        for _ in range(self.count):
            (length,) = struct.unpack_from("<Q", self.data, position)
            yield self.data[position + 8 : position + 8 + length].decode()
            position += 8 + length


@dataclass(frozen=True)
class GgufHeader:
    """`entries`: the rows of each tensor, in bytes where its `types` has blocks of several numbers. `shapes`: in
    numbers, slowest axis first. `rope_factors`: what `ROPE_TABLES` hold, divisors of the rotary frequencies."""

    metadata: dict[str, Any]
    entries: dict[str, TensorEntry]
    types: dict[str, BlockType]
    shapes: dict[str, tuple[int, ...]]
    rope_factors: dict[str, list[float]] = field(default_factory=dict)


class _Cursor:
    """Reads forward through the head of a file; `ValueError` where it ends too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def take(self, num_bytes: int) -> int:
        """The place of the next `num_bytes` bytes, which are then behind."""
        start = self.position
        if num_bytes > len(self.data) - start:
            raise ValueError(f"it ends at byte {len(self.data):,}, in the middle of its head")
        self.position += num_bytes
        return start

    def number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code)))[0]

    def name(self) -> str:
        return self.text(_MAX_NAME_BYTES)

    def text(self, most_bytes: int) -> str:
        length = self.number("Q")
        if length > most_bytes:
            raise ValueError(f"a text of {length:,} bytes")
        start = self.take(length)
        return self.data[start : start + length].decode()

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return self.text(len(self.data))
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"a value of the unknown type {kind}")
        return self._array()

    def _array(self) -> GgufArray:
        kind, count = self.number("I"), self.number("Q")
        if kind != _STRING and kind not in _SCALARS:
            raise ValueError(f"an array of the type {kind}")
        if count > _MAX_COUNT:
            raise ValueError(f"an array of {count:,} elements, at most {_MAX_COUNT:,} are read")
        if kind != _STRING:
            return GgufArray(self.data, kind, count, self.take(count * struct.calcsize("<" + _SCALARS[kind])))
        start = self.position
        for _ in range(count):
            self.take(self.number("Q"))
        return GgufArray(self.data, kind, count, start)


def read_gguf(path: Path) -> GgufHeader:
    """The head of one file, checked against the file's size. `CheckpointError` for whatever is wrong with it."""
    with open_regular(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        magic = file.read(4)
        if magic != MAGIC:
            raise CheckpointError(f"{path.name}: not a GGUF file: it begins with {magic!r}, not {MAGIC!r}: {AGAIN}")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        header = _header(_Cursor(data))
    except CheckpointError as error:
        raise CheckpointError(f"{path.name}: {error}") from error
    except (ValueError, OverflowError) as error:  # among them texts that are no UTF-8
        raise CheckpointError(f"{path.name}: damaged GGUF head ({error}): {AGAIN}") from error
    needed = max((entry.stop for entry in header.entries.values()), default=0)
    if needed > file_bytes:
        raise truncated(path, file_bytes, needed)
    for name in ROPE_TABLES:
        shape = header.shapes.get(name, ())
        if header.types.get(name) == TYPES[0] and len(shape) == 1 and shape[0] <= _MOST_FREQUENCIES:
            count, start = shape[0], header.entries[name].start
            header.rope_factors[name] = list(struct.unpack_from(f"<{count}f", data, start))
    return header


def _header(cursor: _Cursor) -> GgufHeader:
    cursor.take(len(MAGIC))
    version = cursor.number("I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        what = "of a big-endian machine" if swapped else f"version {version}"
        raise CheckpointError(
            f"GGUF {what} is not supported, versions {_VERSIONS[0]} and {_VERSIONS[1]} of little-endian machines are: "
            f"download another file"
        )
    num_tensors, num_entries = cursor.number("Q"), cursor.number("Q")
    least = 24  # bytes of an entry and of a tensor
    if (num_tensors + num_entries) * 8 > len(cursor.data) or max(num_tensors, num_entries) * least > len(cursor.data):
        raise ValueError(f"{num_tensors:,} tensors and {num_entries:,} entries in {len(cursor.data):,} bytes")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.name()
        if key in metadata:
            raise ValueError(f"{brief(key)} stands there twice")
        metadata[key] = cursor.value()
    found = [_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise ValueError(f"general.alignment = {brief(alignment)}")
    data_start = -(-cursor.position // alignment) * alignment
    return _placed(metadata, found, data_start)


_Tensor = tuple[str, tuple[int, ...], BlockType, int]  # name, shape, type, place


def _tensor(cursor: _Cursor) -> _Tensor:
    name, num_axes = cursor.name(), cursor.number("I")
    if not 0 < num_axes <= _MAX_AXES:
        raise ValueError(f"{brief(name)} has {num_axes} axes")
    shape = tuple(cursor.number("Q") for _ in range(num_axes))[::-1]
    number, place = cursor.number("I"), cursor.number("Q")
    if number not in TYPES:
        raise _unsupported(name, number)
    kind = TYPES[number]
    if max(shape) >= 2**40 or min(shape) < 1:
        raise ValueError(f"{brief(name)} has the shape {list(shape)}")
    if shape[-1] % kind.size:
        raise ValueError(f"{brief(name)} has rows of {shape[-1]} numbers, {kind.name} has blocks of {kind.size}")
    return name, shape, kind, place


def _unsupported(name: str, number: int) -> CheckpointError:
    kind = _OTHER_TYPES.get(number, f"number {number}")
    return CheckpointError(
        f"tensor {brief(name)} is stored as {kind}, which is not supported: download the model's GGUF file in Q4_K_M, "
        f"Q8_0 or another mix of {SUPPORTED}"
    )


def _placed(metadata: dict[str, Any], found: list[_Tensor], data_start: int) -> GgufHeader:
    """`ValueError` if two tensors share a name or a byte."""
    header = GgufHeader(metadata, {}, {}, {})
    for name, shape, kind, place in found:
        if name in header.entries:
            raise ValueError(f"{brief(name)} stands there twice")
        num_bytes = math.prod(shape) // kind.size * kind.num_bytes
        if kind.size == 1:
            stored = TensorEntry(kind.name, shape, data_start + place, data_start + place + num_bytes)
        else:
            rows = (*shape[:-1], shape[-1] // kind.size * kind.num_bytes)
            stored = TensorEntry("U8", rows, data_start + place, data_start + place + num_bytes)
        header.entries[name] = stored
        header.types[name], header.shapes[name] = kind, shape
    stop, before = data_start, ""
    for name, entry in sorted(header.entries.items(), key=lambda item: item[1].start):
        if entry.start < stop:
            raise ValueError(f"{brief(name)} lies over {brief(before)}")
        stop, before = entry.stop, name
    return header


def gguf_files(path: Path) -> list[Path]:
    """The file of a model, or all it is split over, the first one first. `path`: one of them, or a folder with them.
    Empty where there is none. `CheckpointError` if a part is missing, or a folder holds several models."""
    if path.suffix != SUFFIX:
        return _in_folder(path)
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    total = int(split["total"])
    parts = [path.with_name(f"{split['stem']}-{number:05}-of-{total:05}.gguf") for number in range(1, total + 1)]
    if missing := [part for part in parts if not part.exists()]:
        raise CheckpointError(
            f"{path.parent}: {len(missing)} of {total} parts missing, the first is {missing[0].name}: download it"
        )
    return parts


def _in_folder(folder: Path) -> list[Path]:
    try:
        found = sorted(each for each in folder.iterdir() if each.suffix == SUFFIX and "mmproj" not in each.name)
    except OSError:  # what reads config.json there says what is wrong
        return []
    models: dict[str, list[Path]] = {}
    for each in found:
        split = _SPLIT.fullmatch(each.name)
        models.setdefault(each.name if split is None else split["stem"], []).append(each)
    if len(models) > 1:
        raise CheckpointError(f"{folder}: GGUF files of {len(models)} models: give one of them, for example {found[0]}")
    return gguf_files(found[0]) if found else []
