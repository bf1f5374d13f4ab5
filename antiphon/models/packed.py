"""Matrices in few bits as files store them, and multiplying out what must be floats.

Several tensors of a `.safetensors` file make a matrix of compressed-tensors, GPTQ and AWQ:

    compressed-tensors   weight_packed int32 [R, C b / 32], element i of a row at bit i b, 2^(b - 1) added;
    (pack-quantized)     weight_scale [R, G], weight_shape [2]; weight_zero_point int32 [R b / 32, G], packed along
                         rows; weight_g_idx [C], each column's group where groups are not in order
    (mxfp4)              weight_packed uint8 [R, C / 2], weight_scale uint8 [R, C / 32]
    GPTQ                 qweight int32 [C b / 32, R], qzeros int32 [G, R b / 32], scales [G, R], g_idx [C]; version 1
                         stores zero points less 1
    AWQ (gemm)           qweight int32 [C, R / 8], qzeros int32 [G, R / 8], scales [G, R]; of each 8 the nibbles hold
                         0, 2, 4, 6, 1, 3, 5, 7

Two nibbles of a byte are neighbours in the first two, low half first, which is how `kernels/quantized` has them: bytes
are copied, nothing is unpacked. A matrix whose groups are not in order is laid group by group, and comes back with the
order of its columns (`QuantizedWeight.order`), in which products read their rows. Rejected: a scale for every column,
which takes four times the bytes of the codes.

Float8 and int8: a scale beside a weight of [..., R, C] says by its shape what it covers:

    [R, 1]                      one row: compressed-tensors "channel"
    [ceil(R/128), ceil(C/128)]  a block of 128 x 128: DeepSeek-V3, section 3.3, and compressed-tensors "block"
    [] or [1] or [1, 1]         the whole tensor

with the axes before R, those of stacked experts, in front. Rejected: asking `config.json` which of them it is, where
one strategy stands for a group of modules named by regular expressions.

MXFP4: blocks of 32 four-bit numbers that share an exponent (OCP Microscaling Formats 1.0). gpt-oss stores a matrix
[R, C] as bytes `<stem>_blocks` [R, C / 32, 16], two numbers a byte, the low half first, and as `<stem>_scales`
[R, C / 32], exponents with a bias of 127.
"""

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from antiphon.base.errors import CheckpointError
from antiphon.kernels.quantized import SCALE_DTYPES, QuantizedWeight, WeightFormat, pack_nibbles, unpack_nibbles
from antiphon.models.quantization import PackedLayout
from antiphon.models.tensor_names import BLOCKS_SUFFIX, SCALES_SUFFIX

if TYPE_CHECKING:
    from antiphon.models.checkpoint import Checkpoint

_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # nibble of each of 8 neighbouring rows
_WORD_BITS = 32
SCALE_SUFFIXES = ("_scale_inv", "_scale")  # behind the weight's name: DeepSeek's, and compressed-tensors' and AutoFP8's
SCALE_BLOCK = 128
MXFP4_BLOCK = 32  # numbers that share an exponent
_NUMBERS_AT_ONCE = 1 << 22
Rows = tuple[int, int] | None


_SUFFIXES = {"compressed-tensors": "_packed", "gptq": "qweight", "awq": "qweight"}
PACKED_SUFFIXES = tuple(set(_SUFFIXES.values()))
_BESIDE = {
    "compressed-tensors": ("_packed", "_scale", "_shape", "_zero_point", "_g_idx"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
}


class PackedMatrix:
    """One matrix [rows, columns] by the name that a plain checkpoint gives it."""

    def __init__(self, name: str, packing: PackedLayout, stored: "Checkpoint") -> None:
        self.name = name
        self.packing = packing
        self.stored = stored
        stem = name if packing.method == "compressed-tensors" else name.removesuffix("weight")
        self.named = {suffix: stem + suffix for suffix in _BESIDE[packing.method] if stem + suffix in stored}
        self._shape: tuple[int, int] | None = None

    @property
    def codes_name(self) -> str:
        """The stored tensor with the codes."""
        return self.named[_SUFFIXES[self.packing.method]]

    @property
    def shape(self) -> tuple[int, int]:
        if self._shape is None:
            self._shape = self._read_shape()
        return self._shape

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.named.values())

    @cached_property
    def column_groups(self) -> Tensor | None:
        """The group of every column, int64 [columns], where they are not in order."""
        suffix = "_g_idx" if self.packing.method == "compressed-tensors" else "g_idx"
        if suffix not in self.named:
            return None
        num_columns = self.shape[1]
        groups = self.part(suffix, num_columns).long()
        for size in self.packing.group_sizes:
            if torch.equal(groups, torch.arange(num_columns) // (size or max(num_columns, 1))):
                return None
        return None if suffix == "_g_idx" and bool((groups < 0).all()) else groups

    def matrices(self, rows: Rows) -> list[QuantizedWeight]:
        """The matrix, or some rows of it. `CheckpointError` where parts do not fit together."""
        first, last = rows or (0, self.shape[0])
        try:
            return [_READERS[self.packing.method](self, first, last)]
        except CheckpointError:
            raise
        except (ValueError, RuntimeError) as error:
            raise self.error(str(error)) from error

    def floats(self, rows: Rows) -> Tensor:
        raise AssertionError("it has matrices")

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.codes_name}: {what}: download the checkpoint again")

    def part(self, suffix: str, *shape: int) -> Tensor:
        """A stored tensor, which must have this shape, if one is given."""
        if suffix not in self.named:
            raise self.error(f"there is no {suffix.lstrip('_')} beside it")
        found = self.stored.stored_shape(self.named[suffix])
        if shape and found != shape:
            raise self.error(f"{suffix.lstrip('_')} beside it has shape {list(found)}, {list(shape)} is needed")
        return self.stored.stored_view(self.named[suffix])

    def words(self, suffix: str, *shape: int) -> Tensor:
        """A stored tensor of 32-bit words as bytes, four for each of its last axis."""
        tensor = self.part(suffix, *shape)
        if tensor.dtype != torch.int32:
            raise self.error(f"{suffix.lstrip('_')} has the dtype {tensor.dtype}, I32 is needed")
        return tensor.contiguous().view(torch.uint8)

    def group_size(self, num_groups: int) -> int | None:
        """Columns per scale. Of the sizes that the config names the one that gives this number of groups."""
        columns = self.shape[1]
        for size in self.packing.group_sizes:
            if -(-columns // (size or max(columns, 1))) == num_groups:
                return size
        raise self.error(
            f"{num_groups} scales for {columns} columns, which groups of "
            f"{' or '.join(str(size or columns) for size in self.packing.group_sizes)} do not give"
        )

    def bits(self) -> int:
        """4 or 8: what the shapes say, where the config names both."""
        if len(self.packing.bits) == 1 or (self.packing.method == "gptq" and "g_idx" not in self.named):
            return self.packing.bits[0]
        if self.packing.method == "gptq":
            words, columns = (
                self.stored.stored_shape(self.codes_name)[0],
                self.stored.stored_shape(self.named["g_idx"])[0],
            )
        else:
            words, columns = self.stored.stored_shape(self.codes_name)[1], self.shape[1]
        return next((b for b in self.packing.bits if -(-columns * b // _WORD_BITS) == words), self.packing.bits[0])

    def _read_shape(self) -> tuple[int, int]:
        found = self.stored.stored_shape(self.codes_name)
        if len(found) != 2:
            raise self.error(f"it has shape {list(found)}, two axes are needed")
        if self.packing.method == "awq":
            return found[1] * 8, found[0]
        if self.packing.method == "gptq":
            return found[1], found[0] * _WORD_BITS // self.bits()
        if "_shape" not in self.named:
            return found[0], found[1] * 2
        rows, columns = (int(size) for size in self.part("_shape", 2).tolist())
        widths = [-(-columns * bits // _WORD_BITS) for bits in self.packing.bits]
        if rows != found[0] or columns < 0 or found[1] not in widths:
            raise self.error(f"its shape {list(found)} does not hold [{rows}, {columns}] of {self.packing.bits} bits")
        return rows, columns


def _compressed(matrix: PackedMatrix, first: int, last: int) -> QuantizedWeight:
    num_rows, num_columns = matrix.shape
    packed = matrix.stored.stored_shape(matrix.codes_name)
    if "_shape" not in matrix.named:
        return _mxfp4(matrix, first, last)
    bits = matrix.bits()
    codes = matrix.words("_packed", *packed)[first:last]
    scale_shape = matrix.stored.stored_shape(matrix.named.get("_scale", matrix.codes_name))
    num_groups = scale_shape[1] if len(scale_shape) == 2 else 1
    scales = _scales(matrix, matrix.part("_scale", num_rows, num_groups)[first:last])
    zeros = None
    if "_zero_point" in matrix.named and matrix.part("_zero_point").dtype == torch.int8:  # as its versions before 0.10
        signed = matrix.part("_zero_point", num_rows, num_groups)[first:last].short()
        zeros = signed + 8 if bits == 4 else signed
    elif "_zero_point" in matrix.named:
        words = matrix.words("_zero_point", -(-num_rows * bits // _WORD_BITS), num_groups)
        zeros = _signed(_down_columns(words, num_groups, bits)[first:last], bits)
    return _grouped(matrix, _codes(codes[:, : -(-num_columns * bits // 8)], bits), scales, zeros, bits)


def _mxfp4(matrix: PackedMatrix, first: int, last: int) -> QuantizedWeight:
    num_rows, num_columns = matrix.shape
    if num_columns % MXFP4_BLOCK:
        raise matrix.error(f"rows of {num_columns} numbers are no whole blocks of 32")
    codes = matrix.part("_packed", num_rows, num_columns // 2)[first:last]
    scales = matrix.part("_scale", num_rows, num_columns // MXFP4_BLOCK)[first:last]
    if codes.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise matrix.error(f"MXFP4 is stored in U8, not in {codes.dtype} and {scales.dtype}")
    return _mxfp4_matrix(codes, scales.contiguous())


def _gptq(matrix: PackedMatrix, first: int, last: int) -> QuantizedWeight:
    num_rows, num_columns = matrix.shape
    bits, packing = matrix.bits(), matrix.packing
    words = matrix.words("qweight", num_columns * bits // _WORD_BITS, num_rows).view(-1, num_rows, 4)
    codes = words[:, first:last].transpose(0, 1).reshape(last - first, -1)
    num_groups = matrix.stored.stored_shape(matrix.named.get("scales", matrix.codes_name))[0]
    scales = matrix.part("scales", num_groups, num_rows)[:, first:last].t()
    stored = matrix.words("qzeros", num_groups, num_rows * bits // _WORD_BITS)
    zeros = (unpack_nibbles(stored) if bits == 4 else stored)[:, first:last].t().short()
    zeros = zeros + packing.zero_shift & (1 << bits) - 1  # 0 less 1 is stored as all ones
    half = 1 << bits - 1
    kept = None
    if not packing.symmetric:
        kept = zeros - (half if bits == 8 else 0)
    elif bool((zeros != half).any()):
        raise matrix.error(
            f"its zero points are {int(zeros.min())} to {int(zeros.max())}, sym in config.json asks for {half}"
        )
    return _grouped(matrix, _codes(codes, bits), _scales(matrix, scales), kept, bits)


def _awq(matrix: PackedMatrix, first: int, last: int) -> QuantizedWeight:
    num_rows, num_columns = matrix.shape
    num_groups = matrix.stored.stored_shape(matrix.named.get("scales", matrix.codes_name))[0]
    begin, end = first // 8, -(-last // 8)

    def rows_of(suffix: str, length: int) -> Tensor:
        words = matrix.words(suffix, length, num_rows // 8)[:, 4 * begin : 4 * end]
        nibbles = unpack_nibbles(words).view(length, -1, 8)[:, :, _AWQ_PLACES].view(length, -1)
        return nibbles[:, first - 8 * begin : last - 8 * begin].t()

    scales = _scales(matrix, matrix.part("scales", num_groups, num_rows)[:, first:last].t())
    codes = pack_nibbles(rows_of("qweight", num_columns))
    return _grouped(matrix, codes, scales, rows_of("qzeros", num_groups), 4)


_READERS: dict[str, Callable[[PackedMatrix, int, int], QuantizedWeight]] = {
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
}


def _grouped(matrix: PackedMatrix, codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> QuantizedWeight:
    """From parts [rows, ...], group by group."""
    num_columns = matrix.shape[1]
    size = matrix.group_size(scales.shape[1])
    groups = matrix.column_groups
    if groups is not None and num_columns and not 0 <= int(groups.min()) <= int(groups.max()) < scales.shape[1]:
        raise matrix.error("g_idx names groups that are not there")
    parts: dict[str, Any] = {}
    if zeros is not None and bits == 8:
        parts = {"offsets": -scales.float() * zeros.float()}
    elif zeros is not None:
        parts = {"zeros": zeros.to(torch.uint8).contiguous()}
    form = WeightFormat(
        codes="int4" if bits == 4 else "int8",
        columns_per_scale=size,
        scale_dtype=scales.dtype,
        offset=next(iter(parts), "none"),  # type: ignore[arg-type]
    )
    weight = QuantizedWeight(format=form, num_columns=num_columns, codes=codes, scales=scales.contiguous(), **parts)
    if groups is None:
        return weight
    columns = torch.arange(num_columns)
    return weight.grouped(groups, columns, columns, num_columns)


def _codes(packed: Tensor, bits: int) -> Tensor:
    """Bytes as codes: nibbles as they are, bytes without the 128 that was added."""
    return packed if bits == 4 else (packed ^ 0x80).view(torch.int8)


def _signed(zeros: Tensor, bits: int) -> Tensor:
    """Zero points as codes have them: nibbles as they are, bytes without the 128 that was added."""
    return zeros if bits == 4 else zeros.short() - 128


def _down_columns(words: Tensor, num_columns: int, bits: int) -> Tensor:
    """Bytes of words that are packed along rows, [rows b / 32, 4 columns], as [rows, columns]."""
    by_column = words.view(-1, num_columns, 4).transpose(1, 2)  # [words, bytes, columns]
    if bits == 4:
        by_column = torch.stack((by_column & 15, by_column >> 4), dim=2)
    return by_column.reshape(-1, num_columns)


def _scales(matrix: PackedMatrix, scales: Tensor) -> Tensor:
    if scales.dtype not in SCALE_DTYPES:
        raise matrix.error(f"its scales have the dtype {scales.dtype}: F16, BF16 or F32 is needed")
    return scales


def packed_matrices(names: Iterable[str], packing: PackedLayout, stored: "Checkpoint") -> dict[str, PackedMatrix]:
    """By the names that a plain checkpoint gives them."""
    suffix = _SUFFIXES[packing.method]
    plain = "" if packing.method == "compressed-tensors" else "weight"
    stems = [name.removesuffix(suffix) + plain for name in names if name.endswith(suffix)]
    return {name: PackedMatrix(name, packing, stored) for name in stems}


# --- a scale beside the weight


def multiplied_out(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """A new tensor [R, C] of its values, rounded once. Some rows are done at a time, which bounds what is held."""
    out = torch.empty(weight.shape, dtype=dtype)
    step = max(1, _NUMBERS_AT_ONCE // max(1, weight.num_columns) // SCALE_BLOCK) * SCALE_BLOCK
    for first in range(0, weight.num_rows, step):
        last = min(first + step, weight.num_rows)
        out[first:last] = weight.rows(first, last).dequantize(dtype)
    return out


def scale_shapes(shape: torch.Size) -> list[list[int]]:
    """The shapes a scale of a weight of `shape` may have: for rows, for blocks, for the tensor."""
    *stacked, num_rows, num_columns = shape
    blocks = [-(-num_rows // SCALE_BLOCK), -(-num_columns // SCALE_BLOCK)]
    return [[*stacked, num_rows, 1], [*stacked, *blocks], [*stacked, 1, 1], [1], []]


def scaled_matrices(
    file: str, name: str, weight: Tensor, scale_name: str | None, scale: Tensor | None
) -> list[QuantizedWeight]:
    """A weight of [R, C], or stacked ones, in float8 or int8. `CheckpointError` naming `file` where no scale fits."""
    kind = "float8" if weight.dtype == torch.float8_e4m3fn else "int8"
    if scale is None:
        beside = " or ".join(name + suffix for suffix in SCALE_SUFFIXES)
        raise CheckpointError(f"{file}: tensor {name} is {kind} without {beside}: download the checkpoint again")
    if weight.ndim < 2:
        raise CheckpointError(
            f"{file}: tensor {name} is {kind} and has shape {list(weight.shape)}: only matrices may be {kind}, "
            f"download the checkpoint again"
        )
    if scale.dtype not in SCALE_DTYPES:
        raise CheckpointError(f"{file}: {scale_name} has the dtype {scale.dtype}: F32, BF16, F16 or F8_E8M0 is needed")
    supported = scale_shapes(weight.shape)
    if list(scale.shape) not in supported:
        raise CheckpointError(
            f"{file}: {scale_name} has shape {list(scale.shape)}, {list(weight.shape)} needs {supported[0]}, "
            f"{supported[1]} or {supported[2]}: only scales of rows, of blocks of {SCALE_BLOCK} x {SCALE_BLOCK} and of "
            f"tensors are supported"
        )
    form = _form_of(weight, scale)
    weights = weight.reshape(-1, *weight.shape[-2:])
    scales = scale.reshape(-1, *scale.shape[-2:]) if scale.ndim >= 2 else scale.reshape(1, 1, 1)
    scales = scales.expand(weights.shape[0], *scales.shape[1:])
    num_columns = weight.shape[-1]
    return [
        QuantizedWeight(format=form, num_columns=num_columns, codes=codes, scales=part)
        for codes, part in zip(weights, scales, strict=True)
    ]


def _form_of(weight: Tensor, scale: Tensor) -> WeightFormat:
    codes = "fp8" if weight.dtype == torch.float8_e4m3fn else "int8"
    shape = tuple(scale.shape[-2:]) if scale.ndim >= 2 else (1, 1)
    if shape == (weight.shape[-2], 1):
        rows, columns = 1, None
    elif shape == (1, 1):
        rows, columns = None, None
    else:
        rows, columns = SCALE_BLOCK, SCALE_BLOCK
    return WeightFormat(codes=codes, columns_per_scale=columns, rows_per_scale=rows, scale_dtype=scale.dtype)  # type: ignore[arg-type]


def blocks_shape(matrix: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the blocks of a matrix of that shape; `CheckpointError` if its rows are no whole blocks."""
    rows, columns = matrix
    if columns % MXFP4_BLOCK != 0:
        raise CheckpointError(
            f"config.json: experts of width {columns} cannot be MXFP4, whose blocks are {MXFP4_BLOCK} wide: "
            f"weights and config.json are of different models, download both again"
        )
    return (rows, columns // MXFP4_BLOCK, MXFP4_BLOCK // 2)


def scales_name(blocks_name: str) -> str:
    return blocks_name.removesuffix(BLOCKS_SUFFIX) + SCALES_SUFFIX


def mxfp4_matrices(
    file: str, name: str, blocks: Tensor, scale_name: str | None, scales: Tensor | None
) -> list[QuantizedWeight]:
    """The matrices [..., R, C] of blocks [..., R, C / 32, 16] and scales [..., R, C / 32]."""
    fits = scales is not None and scales.dtype == torch.uint8 and scales.shape == blocks.shape[:-1]
    if scales is None or not fits or blocks.ndim < 3 or blocks.shape[-1] != MXFP4_BLOCK // 2:
        found = "none" if scales is None else f"{scales.dtype} {list(scales.shape)}"
        raise CheckpointError(
            f"{file}: tensor {name} has dtype U8 and shape {list(blocks.shape)}, which is MXFP4 if scales of dtype U8 "
            f"and shape {list(blocks.shape[:-1])} lie beside it; found {found}: use gpt-oss as published, or weights "
            f"in bfloat16"
        )
    num_rows, num_blocks = blocks.shape[-3:-1]
    codes = blocks.reshape(-1, num_rows, num_blocks * MXFP4_BLOCK // 2)
    exponents = scales.reshape(-1, num_rows, num_blocks)
    return [_mxfp4_matrix(each, part) for each, part in zip(codes, exponents, strict=True)]


def _mxfp4_matrix(codes: Tensor, exponents: Tensor) -> QuantizedWeight:
    form = WeightFormat(codes="mxfp4", columns_per_scale=MXFP4_BLOCK, scale_dtype=torch.float8_e8m0fnu)
    num_columns, scales = codes.shape[1] * 2, exponents.view(torch.float8_e8m0fnu)
    return QuantizedWeight(format=form, num_columns=num_columns, codes=codes, scales=scales)
