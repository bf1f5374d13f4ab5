"""A checkpoint folder in Hugging Face format: one index over one or many `.safetensors` shards.

1. Shards are opened when one of their tensors is first asked for; only headers are read until then.
2. A shard is a read-only memory map: tensors are views, and their pages can be given back. Rejected: the safetensors
   package, which does not let go of pages.
3. `read` returns a view on the memory map. Its reader calls `release` after a copy, so that loading never holds more
   than what it keeps and the tensor in hand.
4. A float8 tensor with a scale beside it (`models/dequantize`) is multiplied out here and comes back as a new tensor.
   So is `<stem>_blocks` with `<stem>_scales` beside it, which is MXFP4.
5. A part of a tensor is some rows of its first axis, and of those a cut of one axis: (axis, start, stop). Where a scale
   covers a block, the blocks that the cut touches are read.
6. Names under a wrapper's prefix (`model.language_model.`) are read as those of the model in it.
"""

import mmap
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from antiphon.base.errors import CheckpointError
from antiphon.models import dequantize
from antiphon.models.checkpoint_folder import INDEX_NAME
from antiphon.models.dequantize import SCALE_BLOCK, SCALE_SUFFIXES, multiply_out, scale_shapes
from antiphon.models.files import open_regular
from antiphon.models.names import BLOCKS_SUFFIX
from antiphon.models.shard_index import TensorEntry, file_of_each_tensor, read_header, truncated, unused_files

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


_EMBEDDING, _HEAD, _PREFIX = "embed_tokens.weight", "lm_head.", "model."
_Held = TypeVar("_Held")
Rows = tuple[int, int] | None
Cut = tuple[int, int, int] | None


class Checkpoint:
    """Tensors by name. `bytes_read` counts the bytes of every tensor handed out, as stored."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.bytes_read = 0
        stored, opened = file_of_each_tensor(self.folder)
        self.prefix = _foreign_prefix(stored)
        self._file_of = self._renamed(stored)
        self._shards = {
            file: SafetensorsFile(self.folder / file, self._renamed(entries)) for file, entries in opened.items()
        }

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def names(self) -> list[str]:
        return sorted(self._file_of)

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

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shard(name).entries[name].shape

    def file_of(self, name: str) -> str:
        """The name of the file that holds the tensor."""
        return self._file_of[name]

    def stored_bytes(self, name: str, rows: Rows = None, cut: Cut = None) -> int:
        """Bytes that reading the tensor (or a part of it) takes from the file, scales included."""
        num_bytes = self._shard(name).num_bytes(name, rows)
        in_blocks = name.endswith(BLOCKS_SUFFIX) and cut is not None and cut[0] == len(self.shape(name)) - 2
        if cut is not None:
            axis, start, stop = _block_cut(cut) if in_blocks else cut
            num_bytes = num_bytes * (stop - start) // self.shape(name)[axis]
        if scale := self._scale_name(name):
            scale_bytes = self._shard(scale).num_bytes(scale, self._scale_rows(name, scale, rows))
            if cut is not None and name.endswith(BLOCKS_SUFFIX):
                scale_bytes = scale_bytes * (stop - start) // self.shape(scale)[axis]
            num_bytes += scale_bytes
        return num_bytes

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """`CheckpointError` unless the tensor is there and has this shape."""
        found = self.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{self._file_of[name]}: tensor {name} has shape {list(found)}, config.json asks for {list(shape)}: "
                f"weights and config.json are of different models, download both again"
            )

    def read(
        self, name: str, *, rows: Rows = None, cut: Cut = None, dequantize_to: torch.dtype = torch.float32
    ) -> Tensor:
        """The tensor or a part of it: a read-only view, or a new tensor where the stored one is scaled float8 or MXFP4.

        The axes of `cut` are those of the tensor as it comes back: MXFP4's are the matrix's."""
        self.bytes_read += self.stored_bytes(name, rows, cut)
        if self._shard(name).entries[name].dtype == "F8_E4M3":
            return self._multiplied_out(name, rows, cut, dequantize_to)
        view = self._shard(name).view(name, rows)
        if view.dtype == torch.uint8:
            scale = self._scale_name(name)
            scales = None if scale is None else self._shard(scale).view(scale, rows)
            return self._expand(name, view, scales, cut, dequantize_to)
        return _narrowed(view, cut)

    def release(self, name: str, rows: Rows = None) -> None:
        """Give the pages of a tensor read before back to the system; views of it stay valid and re-read the file."""
        self._shard(name).release(name, rows)
        if scale := self._scale_name(name):
            self._shard(scale).release(scale, self._scale_rows(name, scale, rows))

    def _expand(self, name: str, blocks: Tensor, scales: Tensor | None, cut: Cut, dtype: torch.dtype) -> Tensor:
        if scales is None or scales.dtype != torch.uint8 or scales.shape != blocks.shape[:-1]:
            found = "none" if scales is None else f"{scales.dtype} {list(scales.shape)}"
            raise CheckpointError(
                f"{self._file_of[name]}: tensor {name} has dtype U8 and shape {list(blocks.shape)}, which is MXFP4 if "
                f"scales of dtype U8 and shape {list(blocks.shape[:-1])} lie beside it; found {found}: use gpt-oss as "
                f"published, or weights in bfloat16"
            )
        if cut is None or cut[0] < blocks.ndim - 2:
            return dequantize.expand_mxfp4(_narrowed(blocks, cut), _narrowed(scales, cut), dtype)
        in_blocks = _block_cut(cut)
        wide = dequantize.expand_mxfp4(_narrowed(blocks, in_blocks), _narrowed(scales, in_blocks), dtype)
        axis, start, stop = cut
        return wide.narrow(axis, start - in_blocks[1] * dequantize.MXFP4_BLOCK, stop - start)

    def _multiplied_out(self, name: str, rows: Rows, cut: Cut, dtype: torch.dtype) -> Tensor:
        scale_name = self._scale_name(name)
        if scale_name is None:
            beside = " or ".join(name + suffix for suffix in SCALE_SUFFIXES)
            raise CheckpointError(
                f"{self._file_of[name]}: tensor {name} is float8 without {beside}: download the checkpoint again"
            )
        if rows is not None and len(self.shape(name)) == 2:  # rows of a matrix may share a scale with others
            weight = self._shard(name).view(name)
            scale = self._shard(scale_name).view(scale_name)
            cuts = [(0, *rows)]
        else:
            weight = self._shard(name).view(name, rows)
            scale = self._shard(scale_name).view(scale_name, self._scale_rows(name, scale_name, rows))
            cuts = []
        if weight.ndim < 2:
            raise CheckpointError(
                f"{self._file_of[name]}: tensor {name} is float8 and has shape {list(weight.shape)}: only matrices "
                f"may be float8, download the checkpoint again"
            )
        supported = scale_shapes(weight.shape)
        if list(scale.shape) not in supported:
            raise CheckpointError(
                f"{self._file_of[name]}: {scale_name} has shape {list(scale.shape)}, {list(weight.shape)} needs "
                f"{supported[0]}, {supported[1]} or {supported[2]}: only scales of rows, of blocks of {SCALE_BLOCK} x "
                f"{SCALE_BLOCK} and of tensors are supported"
            )
        return multiply_out(weight, scale, dtype, [*cuts, *([cut] if cut is not None else [])])

    def _scale_name(self, name: str) -> str | None:
        names = [name + suffix for suffix in SCALE_SUFFIXES]
        if name.endswith(BLOCKS_SUFFIX):
            names = [dequantize.scales_name(name)]
        return next((scale for scale in names if scale in self._file_of), None)

    def _scale_rows(self, name: str, scale: str, rows: Rows) -> Rows:
        """The rows of a scale that belong to `rows` of its weight: all where one scale serves the whole tensor."""
        return rows if self.shape(scale)[:1] == self.shape(name)[:1] else None

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


def _block_cut(cut: tuple[int, int, int]) -> tuple[int, int, int]:
    """The cut of MXFP4's blocks that a cut of their numbers touches."""
    axis, start, stop = cut
    return axis, start // dequantize.MXFP4_BLOCK, -(-stop // dequantize.MXFP4_BLOCK)
