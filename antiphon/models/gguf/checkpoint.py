"""A GGUF file, or the files it is split over, as a checkpoint: tensors by llama.cpp's names.

1. What is stored in blocks comes back as codes and scales (`read_blocks`), one expert of a stacked tensor at a time.
2. llama.cpp turns the rows of q and k of some architectures, so that a pair that is rotated together lies side by side.
   They are turned back, row by row, which leaves blocks whole.
3. DeepSeek's up projection of keys and values is stored as two (`attn_k_b`, transposed, and `attn_v_b`) and put
   together; a shared expert's gate is a vector there and a matrix of one row here.

A row is whole blocks, each with its scales in front of or behind its numbers (ggml-common.h). They become one matrix of
codes and one of scales (`kernels/quantized`):

    Q8_0, Q5_0         int8, a float16 a group of 32            Q4_0        int4, a float16 a group of 32
    Q5_1               the same with a minimum                  Q4_1        the same with a minimum
    Q5_K               int8, groups of 32, with a minimum       Q4_K        int4, groups of 32, with a minimum
    Q6_K               int8, groups of 16                       MXFP4       mxfp4, an exponent a group of 32

The K types have 6-bit (Q6_K: 8-bit) scales in units of a float16 for 256 numbers. Both are kept, scales in 8 bits, so
nothing is rounded. Codes of 5 and 6 bits become 8, which products read fastest.

The native module reads the blocks (`csrc/kernels/ggml_blocks.cpp`), in one pass. Rejected: PyTorch's operations, which
make ten passes over single bytes and took longer than a disk reads.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from antiphon import _native
from antiphon.base.errors import CheckpointError
from antiphon.kernels.api import address
from antiphon.kernels.quantized import CODE_DTYPES, CodeKind, QuantizedWeight, WeightFormat
from antiphon.models.checkpoint import DTYPES, Checkpoint, MadeTensor, Rows, SafetensorsFile
from antiphon.models.gguf.container import BlockType, GgufHeader, gguf_files, read_gguf
from antiphon.models.gguf.metadata import PERMUTED
from antiphon.models.packed import multiplied_out
from antiphon.models.rounding import rounding_of
from antiphon.models.shard_index import AGAIN
from antiphon.models.tensor_names import GGUF_NAMES, TensorNames

_SHARED_GATE = "ffn_gate_inp_shexp.weight"
_KEY_UP, _VALUE_UP, _BOTH_UP = "attn_k_b.weight", "attn_v_b.weight", "attn_kv_b.weight"


def _format(codes: CodeKind, per_scale: int, scale_dtype: torch.dtype, *, minimum: bool = False) -> WeightFormat:
    offset = "offsets" if minimum else "none"
    return WeightFormat(codes=codes, columns_per_scale=per_scale, scale_dtype=scale_dtype, offset=offset)  # type: ignore[arg-type]


_FORMATS = {  # of `TYPES`, see there
    "Q4_0": _format("int4", 32, torch.float16),
    "Q4_1": _format("int4", 32, torch.float16, minimum=True),
    "Q5_0": _format("int8", 32, torch.float16),
    "Q5_1": _format("int8", 32, torch.float16, minimum=True),
    "Q8_0": _format("int8", 32, torch.float16),
    "Q4_K": _format("int4", 32, torch.int8, minimum=True),
    "Q5_K": _format("int8", 32, torch.int8, minimum=True),
    "Q6_K": _format("int8", 16, torch.int8),
    "MXFP4": _format("mxfp4", 32, torch.float8_e8m0fnu),
}


def read_blocks(kind: BlockType, data: Tensor, num_columns: int) -> QuantizedWeight:
    """The rows uint8 [R, bytes of a row] of a type with blocks, as a new matrix [R, num_columns]."""
    num_rows, num_blocks, form = data.shape[0], num_columns // kind.size, _FORMATS[kind.name]
    assert data.dtype == torch.uint8, data.dtype
    assert data.shape[1] == num_blocks * kind.num_bytes, data.shape
    if data.stride(1) != 1:
        data = data.contiguous()
    width = num_columns // 2 if form.nibbles else num_columns
    codes = torch.empty((num_rows, width), dtype=CODE_DTYPES[form.codes], device="cpu")
    scales = torch.empty(form.scale_shape(num_rows, num_columns), dtype=form.scale_dtype, device="cpu")
    offsets = torch.empty(scales.shape, dtype=form.offset_dtype, device="cpu") if form.offset == "offsets" else None
    units = None
    if form.has_units:
        units = torch.empty(form.units_shape(num_rows, num_columns), dtype=torch.float16, device="cpu")
    _native.read_ggml_rows(
        *(kind.name, address(data), data.stride(0), num_rows, num_blocks),
        *(address(codes), address(scales), address(offsets), address(units)),
    )
    return QuantizedWeight(
        format=form, num_columns=num_columns, codes=codes, scales=scales, offsets=offsets, units=units
    )


class _StoredTensor:
    """A tensor that is stored in blocks, or in another order or shape than it is read."""

    column_groups: Tensor | None = None

    def __init__(
        self, file: SafetensorsFile, name: str, kind: BlockType, shape: tuple[int, ...], order: Tensor | None
    ) -> None:
        self.file = file
        self.parts = (name,)
        self.kind = kind
        self.shape = shape
        self.order = order

    def matrices(self, rows: Rows) -> list[QuantizedWeight] | None:
        if self.kind.size == 1:
            return None
        data = self._view(rows)
        by_matrix = [data] if len(self.shape) == 2 else data.unbind(0)
        return [read_blocks(self.kind, each, self.shape[-1]) for each in by_matrix]

    def floats(self, rows: Rows) -> Tensor:
        data = self._view(rows)
        return data if len(self.shape) == data.ndim else data.view(self.shape)

    def _view(self, rows: Rows) -> Tensor:
        if self.order is None:
            return self.file.view(self.parts[0], rows)
        return self.file.view(self.parts[0]).index_select(0, self.order if rows is None else self.order[slice(*rows)])


class _LatentUp:
    """Head by head the rows of `attn_k_b` [heads, rank, keys], transposed, and of `attn_v_b` [heads, values, rank]."""

    column_groups: Tensor | None = None

    def __init__(self, key: MadeTensor, value: MadeTensor) -> None:
        self.key = key
        self.value = value
        self.parts = (*key.parts, *value.parts)
        num_heads, rank, num_keys = key.shape
        self.shape = (num_heads * (num_keys + value.shape[1]), rank)

    def matrices(self, rows: Rows) -> list[QuantizedWeight] | None:
        return None

    def floats(self, rows: Rows) -> Tensor:
        per_head = self.shape[0] // self.key.shape[0]
        first, last = rows or (0, self.shape[0])
        heads = first // per_head, -(-last // per_head)
        key, value = _wide(self.key, heads), _wide(self.value, heads)
        whole = torch.cat((key.transpose(1, 2), value), dim=1).flatten(0, 1)
        return whole[first - heads[0] * per_head : last - heads[0] * per_head]


def _wide(tensor: MadeTensor, rows: Rows) -> Tensor:
    matrices = tensor.matrices(rows)
    if matrices is None:
        return tensor.floats(rows).float()
    return torch.stack([multiplied_out(each, torch.float32) for each in matrices])


class GgufCheckpoint(Checkpoint):
    """`path`: the file, one of the files it is split over, or a folder with them."""

    def __init__(self, path: str | Path) -> None:
        files = gguf_files(Path(path))
        self.folder = files[0].parent
        self.bytes_read = 0
        self.prefix = None
        self._file_of, self._shards, self._made = {}, {}, {}
        headers = [read_gguf(file) for file in files]
        for file, header in zip(files, headers, strict=True):
            if twice := next((name for name in header.entries if name in self._file_of), None):
                raise CheckpointError(f"{file.name}: tensor {twice} is in {self._file_of[twice]} too: {AGAIN}")
            self._file_of |= dict.fromkeys(header.entries, file.name)
            self._shards[file.name] = SafetensorsFile(file, header.entries)
        self._check_count(headers)
        for header in headers:
            self._add(header, headers[0].metadata.get("general.architecture"), headers[0])
        self._add_latent_up()

    def family_names(self, family: str) -> TensorNames:
        return GGUF_NAMES[family]

    def is_packed(self, name: str) -> bool:
        """What is stored in another order may have floats all the same."""
        return name in self._made and self._made[name].matrices((0, 1)) is not None

    @property
    def notes(self) -> list[str]:
        return []

    def _check_count(self, headers: Sequence[GgufHeader]) -> None:
        """A part that was exchanged for another model's has another number of tensors than the first part says."""
        stated = headers[0].metadata.get("split.tensors.count")
        if stated is not None and stated != len(self._file_of):
            raise CheckpointError(
                f"{next(iter(self._shards))}: split.tensors.count is {stated}, the parts have {len(self._file_of)} "
                f"tensors: they are of different models, {AGAIN}"
            )

    def _add(self, header: GgufHeader, architecture: object, first: GgufHeader) -> None:
        permuted = {}
        if architecture in PERMUTED:
            num_heads = first.metadata.get(f"{architecture}.attention.head_count")
            permuted = {
                "attn_q": num_heads,
                "attn_k": first.metadata.get(f"{architecture}.attention.head_count_kv", num_heads),
            }
        for name, kind in header.types.items():
            shape, order = header.shapes[name], None
            if (heads := permuted.get(name.split(".")[-2] if "." in name else "")) is not None:
                order = _turned_back(name, shape[0], heads)
            if name.endswith(_SHARED_GATE) and len(shape) == 1:
                shape = (1, *shape)
            if kind.size > 1 or order is not None or shape != header.shapes[name]:
                self._made[name] = _StoredTensor(self._shard(name), name, kind, shape, order)
            assert kind.size > 1 or kind.name in DTYPES, kind

    def _add_latent_up(self) -> None:
        for name in self.names:
            if not name.endswith(_KEY_UP):
                continue
            stem = name.removesuffix(_KEY_UP)
            both = [self._as_made(stem + each) for each in (_KEY_UP, _VALUE_UP)]
            if stem + _BOTH_UP in self or any(len(each.shape) != 3 for each in both):
                continue
            key, value = both
            if key.shape[0] != value.shape[0] or key.shape[1] != value.shape[2]:
                raise CheckpointError(
                    f"{self.file_of(name)}: tensor {name} has shape {list(key.shape)}, {stem}{_VALUE_UP} "
                    f"{list(value.shape)}: they are of different models, {AGAIN}"
                )
            self._made[stem + _BOTH_UP] = _LatentUp(key, value)

    def _as_made(self, name: str) -> MadeTensor:
        shard = self._shard(name)
        if name in self._made:
            return self._made[name]
        return _StoredTensor(shard, name, BlockType("", 1, 1), self.stored_shape(name), None)


def _turned_back(name: str, num_rows: int, num_heads: object) -> Tensor:
    """For every row its place in the file, where halves of a head's rows lie in turns."""
    if type(num_heads) is not int or num_heads < 1 or num_rows % (2 * num_heads):
        raise CheckpointError(f"tensor {name} has {num_rows} rows, which are not {num_heads!r} heads of pairs: {AGAIN}")
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()


def open_weights(path: str | Path, weights: str = "as-stored") -> Checkpoint:
    """The checkpoint in a folder, or a GGUF file's. Of a folder with both, the first counts. `weights`: what floats are
    rounded to as they are read (`models/rounding`)."""
    path = Path(path)
    has_gguf = path.suffix == ".gguf" or (not any(path.glob("*.safetensors*")) and bool(gguf_files(path)))
    checkpoint = GgufCheckpoint(path) if has_gguf else Checkpoint(path)
    checkpoint.rounding = rounding_of(weights)
    return checkpoint
