"""A checkpoint folder in Hugging Face format: one index over one or many `.safetensors` shards.

1. Shards are opened when one of their tensors is first asked for; only headers are read until then.
2. A shard is a read-only memory map: tensors are views, and their pages can be given back. Rejected: the safetensors
   package, which does not let go of pages.
3. `read` returns a view on the memory map. Its reader calls `release` after a copy, so that loading never holds more
   than what it keeps and the tensor in hand.
4. A matrix in few bits is codes and scales (`packed`, a `QuantizedWeight`) or multiplied out (`read`): float8 and int8
   with a scale beside them, MXFP4 as `<stem>_blocks` with `<stem>_scales`, and what several tensors make
   (`models/packed`), under the name that a plain checkpoint gives it.
5. A part of a tensor is some rows of its first axis, and of those a cut of one axis: (axis, start, stop). Where a scale
   covers a block, the blocks that the cut touches are read.
6. Names under a wrapper's prefix (`model.language_model.`) are read as those of the model in it.
"""

import json
import mmap
import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from antiphon.base.errors import CheckpointError
from antiphon.kernels.quantized import QuantizedWeight
from antiphon.models import packed
from antiphon.models.checkpoint_folder import INDEX_NAME, open_regular, read_json
from antiphon.models.packed import (
    MXFP4_BLOCK,
    PACKED_SUFFIXES,
    SCALE_SUFFIXES,
    PackedMatrix,
    multiplied_out,
    packed_matrices,
)
from antiphon.models.quantization import PackedLayout, packing_of, quantization_beside
from antiphon.models.rounding import AS_STORED, WeightRounding
from antiphon.models.shard_index import TensorEntry, file_of_each_tensor, read_header, truncated, unused_files
from antiphon.models.tensor_names import BLOCKS_SUFFIX, NAMES, TensorNames
from antiphon.specs.model import ModelSpec

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
_NARROW = ("F8_E4M3", "I8", "U8")  # of matrices with a scale beside them
_PARTS = {"I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F8_E8M0": torch.float8_e8m0fnu}  # of matrices


class SafetensorsFile:
    """Header and lazily made memory map of one file. Views keep the map alive; they must not be written to.

    A file that takes another's place is not seen by a map that is there already. One that is written anew in its place
    is: `CheckpointError` then."""

    def __init__(self, path: Path, entries: dict[str, TensorEntry]) -> None:
        """`entries`: the file's header (`read_header`)."""
        self.path = path
        self.entries = entries
        self._map: mmap.mmap | None = None
        self._written = _writing_of(path)

    def view(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor, or rows [start, stop) of its first axis, without copying."""
        entry = self.entries[name]
        dtype = (DTYPES | _PARTS).get(entry.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{self.path.name}: tensor {name} has dtype {entry.dtype}: use weights in {', '.join(DTYPES)}"
            )
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

    def some_bytes(self, name: str) -> bytes:
        """A few bytes from the middle of a tensor."""
        first, last = self._span(self.entries[name], None)
        middle = (first + last) // 2
        return self._mapped()[middle : min(middle + _SAMPLE_BYTES, last)] if first < last else b""

    def will_need(self, name: str, rows: tuple[int, int] | None = None) -> None:
        """Have the system read the tensor from the disk meanwhile. Does not wait."""
        first, last = self._span(self.entries[name], rows)
        if first < last:
            start = first - first % mmap.PAGESIZE
            self._mapped().madvise(mmap.MADV_WILLNEED, start, last - start)

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
                is_changed = _writing_of(file.fileno()) != self._written
        else:
            now = _writing_of(self.path)
            is_changed = now[:1] == self._written[:1] and now != self._written
        if is_changed:
            raise CheckpointError(
                f"{self.path.name}: was changed after it was opened: put back what it held, or start again"
            )
        return self._map


def _writing_of(file: Path | int) -> tuple[object, ...]:
    """Which file it is, and since when it holds what it holds; nothing where there is none."""
    try:
        status = os.stat(file)  # noqa: PTH116  # a descriptor too
    except OSError:
        return ()
    return (status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns


_EMBEDDING, _HEAD, _PREFIX = "embed_tokens.weight", "lm_head.", "model."
_SAMPLE_BYTES, _SAMPLES_OF_A_KIND = 64, 8
_Held = TypeVar("_Held")
Rows = tuple[int, int] | None
Cut = tuple[int, int, int] | None


class MadeTensor(Protocol):
    """A tensor that is not stored as such: `parts` are."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def parts(self) -> tuple[str, ...]: ...

    @property
    def column_groups(self) -> Tensor | None:
        """The group of every column, where groups are not in order; its matrix then has a `QuantizedWeight.order`."""

    def matrices(self, rows: Rows) -> list[QuantizedWeight] | None:
        """Some rows of its first axis in few bits: one matrix, or one for each of them; None where it has floats."""

    def floats(self, rows: Rows) -> Tensor:
        """The same as floats; only asked for where `matrices` are None."""


class Checkpoint:
    """Tensors by name. `bytes_read` counts the bytes of every tensor handed out, as stored. `made` are those that are
    not stored under their name. `rounding`: what readers round weights to that are stored in floats."""

    rounding: WeightRounding = AS_STORED
    _packing: PackedLayout | None = None

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.bytes_read = 0
        stored, opened = file_of_each_tensor(self.folder)
        self.prefix = _foreign_prefix(stored)
        self._file_of = self._renamed(stored)
        self._shards = {
            file: SafetensorsFile(self.folder / file, self._renamed(entries)) for file, entries in opened.items()
        }
        self._made: dict[str, MadeTensor] = {}
        self._made |= self._packed_matrices()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of or name in self._made

    def family_names(self, family: str) -> TensorNames:
        """How this checkpoint names the tensors of a family's model."""
        return NAMES[family]

    @property
    def names(self) -> list[str]:
        """The names of all stored tensors."""
        return sorted(self._file_of)

    @property
    def made_of(self) -> dict[str, str]:
        """The matrix that each of these stored tensors is a part of."""
        return {part: name for name, made in self._made.items() for part in made.parts}

    @property
    def notes(self) -> list[str]:
        """Lines for a log: what lies in the folder and is not used, and names that were understood."""
        notes = []
        if unused := unused_files(self.folder, self._file_of.values()):
            notes.append(f"not used, beside the weights in {self.folder}: {', '.join(unused)}")
        if self.prefix is not None:
            notes.append(f"tensors are named {self.prefix}*: read as model.*")
        return notes

    def open_shards(self) -> None:
        """Read every shard's header now: `CheckpointError` if one is damaged, or lacks what the index says it has."""
        for name in self._file_of:
            self._shard(name)

    def fingerprint(self, spec: ModelSpec) -> dict[str, str]:
        """A digest of each thing that decides what is computed: `weights`, their `packing`, and the fields of `spec`,
        which was read beside them. The tokens that end a text are left out, because only the server asks for them.

        That of the weights is of names, sizes and a few bytes of some tensors of each kind: equal for the same weights,
        into whatever files they are cut. Reads little: two that differ in few numbers may have the same."""
        digest = blake2b(digest_size=8)
        by_kind: dict[str, list[str]] = {}
        for name in self.names:
            entry = self._shard(name).entries[name]
            digest.update(f"{name} {entry.dtype} {entry.shape}\n".encode(errors="replace"))
            by_kind.setdefault(re.sub(r"\d+", "#", name), []).append(name)
        for alike in by_kind.values():
            for name in alike[:: -(-len(alike) // _SAMPLES_OF_A_KIND)]:
                digest.update(self._shard(name).some_bytes(name))
        parts = {**asdict(spec), "packing": None if self._packing is None else asdict(self._packing)}
        del parts["eos_token_ids"]
        texts = {what: json.dumps(part, sort_keys=True).encode() for what, part in parts.items()}
        found = {what: blake2b(text, digest_size=8).hexdigest() for what, text in texts.items()}
        return {"weights": digest.hexdigest()} | found

    def is_packed(self, name: str) -> bool:
        """Whether the stored tensor is one of those that make a matrix in 4 or 8 bits; float8 is none."""
        return name.endswith((*PACKED_SUFFIXES, BLOCKS_SUFFIX)) or name in self._made

    def column_groups(self, name: str) -> Tensor | None:
        """The group of every column, where the groups of a matrix in few bits are not in order; then it has a
        `QuantizedWeight.order`."""
        return self._made[name].column_groups if name in self._made else None

    def shape(self, name: str) -> tuple[int, ...]:
        return self._made[name].shape if name in self._made else self.stored_shape(name)

    def stored_shape(self, name: str) -> tuple[int, ...]:
        return self._shard(name).entries[name].shape

    def stored_view(self, name: str) -> Tensor:
        return self._shard(name).view(name)

    def file_of(self, name: str) -> str:
        """The name of the file that holds the tensor."""
        return self._file_of[self.parts(name)[0]]

    def stored_bytes(self, name: str, rows: Rows = None, cut: Cut = None) -> int:
        """Bytes that the tensor (or a part of it) takes in the file, scales included; in whole blocks of scales it may
        be a little more that is read."""
        if not self.shape(name):
            return self._shard(name).num_bytes(name)
        sizes = [(rows[1] - rows[0], self.shape(name)[0])] if rows is not None else []
        if cut is not None:
            axis, whole = cut[0], self.shape(name)
            columns = MXFP4_BLOCK if name.endswith(BLOCKS_SUFFIX) and axis == len(whole) - 2 else 1
            sizes.append((cut[2] - cut[1], whole[axis] * columns))
        num_bytes = sum(self._shard(part).num_bytes(part) for part in self.parts(name))
        for part, size in sizes:
            num_bytes = num_bytes * part // max(size, 1)
        return num_bytes

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """`CheckpointError` unless the tensor is there and has this shape."""
        found = self.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{self.file_of(name)}: tensor {name} has shape {list(found)}, config.json asks for {list(shape)}: "
                f"weights and config.json are of different models, download both again"
            )

    def read(
        self, name: str, *, rows: Rows = None, cut: Cut = None, dequantize_to: torch.dtype = torch.float32
    ) -> Tensor:
        """The tensor or a part of it: a read-only view, or a new tensor where it is stored in few bits.

        The axes of `cut` are those of the tensor as it comes back: MXFP4's are the matrix's."""
        self.bytes_read += self.stored_bytes(name, rows, cut)
        matrices = self._matrices(name, rows)
        if matrices is None:
            return _narrowed(self._floats(name, rows), cut)
        num_axes = self._num_axes(name)
        if num_axes == 2:
            return multiplied_out(_cut_matrix(matrices[0], num_axes, cut), dequantize_to)
        return torch.stack([multiplied_out(_cut_matrix(each, num_axes, cut), dequantize_to) for each in matrices])

    def packed(self, name: str, *, rows: Rows = None, cut: Cut = None) -> QuantizedWeight | None:
        """The matrix, or a part of it, as the codes and scales that are stored; None where it is stored in floats, or
        has several matrices. `cut` as for `read`."""
        matrices = self._matrices(name, rows)
        if matrices is None or len(matrices) != 1:
            return None
        return _cut_matrix(matrices[0], self._num_axes(name), cut)

    def will_need(self, name: str, rows: Rows = None) -> None:
        """Have the system read the tensor from the disk while something else is done."""
        for part in self.parts(name):
            self._shard(part).will_need(part, self._rows_of(part, name, rows))

    def release(self, name: str, rows: Rows = None) -> None:
        """Give the pages of a tensor read before back to the system; views of it stay valid and re-read the file."""
        for part in self.parts(name):
            self._shard(part).release(part, self._rows_of(part, name, rows))

    def _rows_of(self, part: str, name: str, rows: Rows) -> Rows:
        """The rows of a stored tensor that makes `name`: all where it is shared between several of these."""
        return None if self.stored_shape(part)[:1] != self.shape(name)[:1] else rows

    def _floats(self, name: str, rows: Rows) -> Tensor:
        if name in self._made:
            return self._made[name].floats(rows)
        entry = self._shard(name).entries[name]
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.file_of(name)}: tensor {name} has dtype {entry.dtype}: use weights in {', '.join(DTYPES)}"
            )
        return self._shard(name).view(name, rows)

    def _matrices(self, name: str, rows: Rows) -> list[QuantizedWeight] | None:
        if name in self._made:
            return self._made[name].matrices(rows)
        dtype = self._shard(name).entries[name].dtype
        scale = self._scale_name(name)
        if dtype not in _NARROW or (dtype == "I8" and scale is None):
            return None
        make = packed.mxfp4_matrices if dtype == "U8" else packed.scaled_matrices
        if len(self.stored_shape(name)) == 2 and dtype != "U8":  # rows of a matrix may share a scale with others
            scales = None if scale is None else self.stored_view(scale)
            [whole] = make(self.file_of(name), name, self.stored_view(name), scale, scales)
            return [whole if rows is None else whole.rows(*rows)]
        view, scales = self._shard(name).view(name, rows), None
        if scale is not None:
            shared = self.stored_shape(scale)[:1] != self.stored_shape(name)[:1]
            scales = self._shard(scale).view(scale, None if shared else rows)
        return make(self.file_of(name), name, view, scale, scales)

    def _num_axes(self, name: str) -> int:
        """The axes of the tensor as it comes back."""
        return len(self.shape(name)) - (name not in self._made and name.endswith(BLOCKS_SUFFIX))

    def parts(self, name: str) -> tuple[str, ...]:
        """The stored tensors that make it."""
        if name in self._made:
            return self._made[name].parts
        scale = self._scale_name(name)
        return (name,) if scale is None else (name, scale)

    def _scale_name(self, name: str) -> str | None:
        if self._shard(name).entries[name].dtype not in _NARROW:
            return None
        names = [name + suffix for suffix in SCALE_SUFFIXES]
        if name.endswith(BLOCKS_SUFFIX):
            names = [packed.scales_name(name)]
        return next((scale for scale in names if scale in self._file_of), None)

    def _packed_matrices(self) -> dict[str, PackedMatrix]:
        """What `config.json` says is packed; it is read only where a name looks like it."""
        if not any(name.endswith(PACKED_SUFFIXES) for name in self._file_of):
            return {}
        config = read_json(self.folder / "config.json")
        self._packing = packing_of(config | quantization_beside(self.folder, config))
        return {} if self._packing is None else packed_matrices(self.names, self._packing, self)

    def _renamed(self, stored: dict[str, _Held]) -> dict[str, _Held]:
        """By the names that a family gives its tensors."""
        if self.prefix is None:
            return stored
        renamed = {}
        for name, held in stored.items():
            head = name[name.find(_HEAD) :] if _HEAD in name else ""
            inner = _PREFIX + name.removeprefix(self.prefix) if name.startswith(self.prefix) else name
            renamed[head or inner] = held
        return renamed

    def _shard(self, name: str) -> SafetensorsFile:
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.folder}: tensor {name} is missing: config.json and weights do not belong together, or the "
                f"download is incomplete"
            )
        file_name = self._file_of[name]
        if file_name not in self._shards:
            path = self.folder / file_name
            self._shards[file_name] = SafetensorsFile(path, self._renamed(read_header(path)))
        shard = self._shards[file_name]
        if name not in shard.entries:
            raise CheckpointError(
                f"{file_name}: tensor {name} is missing, though {INDEX_NAME} says it is there: download both again"
            )
        return shard


def _foreign_prefix(names: Iterable[str]) -> str | None:
    """What stands in the place of "model." where a wrapper, or a part of it, was saved; None in a model's own names."""
    found = [name for name in names if name == _EMBEDDING or name.endswith("." + _EMBEDDING)]
    prefix = found[0].removesuffix(_EMBEDDING) if len(found) == 1 else _PREFIX
    return None if prefix == _PREFIX else prefix


def _narrowed(tensor: Tensor, cut: Cut) -> Tensor:
    return tensor if cut is None else tensor.narrow(cut[0], cut[1], cut[2] - cut[1])


def _cut_matrix(weight: QuantizedWeight, num_axes: int, cut: Cut) -> QuantizedWeight:
    """`cut` counts `num_axes` axes, of which the last two are the matrix's."""
    if cut is None:
        return weight
    axis, start, stop = cut
    return weight.rows(start, stop) if axis == num_axes - 2 else weight.columns(start, stop)
