"""Matrices in few bits that several tensors of a `.safetensors` file make: compressed-tensors, GPTQ and AWQ.

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
"""

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from antiphon.base.errors import CheckpointError
from antiphon.kernels.quantized import SCALE_DTYPES, QuantizedWeight, WeightFormat, pack_nibbles, unpack_nibbles
from antiphon.models.quantization import PackedLayout

_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # nibble of each of 8 neighbouring rows
_WORD_BITS = 32
Rows = tuple[int, int] | None


class TensorViews(Protocol):
    """A checkpoint's stored tensors by name, as views."""

    def __contains__(self, name: str, /) -> bool: ...

    def stored_shape(self, name: str) -> tuple[int, ...]: ...

    def stored_view(self, name: str) -> Tensor: ...


_SUFFIXES = {"compressed-tensors": "_packed", "gptq": "qweight", "awq": "qweight"}
PACKED_SUFFIXES = tuple(set(_SUFFIXES.values()))
_BESIDE = {
    "compressed-tensors": ("_packed", "_scale", "_shape", "_zero_point", "_g_idx"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
}


class PackedMatrix:
    """One matrix [rows, columns] by the name that a plain checkpoint gives it."""

    def __init__(self, name: str, packing: PackedLayout, stored: TensorViews) -> None:
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
        """A stored tensor, which must have this shape."""
        if suffix not in self.named:
            raise self.error(f"there is no {suffix.lstrip('_')} beside it")
        found = self.stored.stored_shape(self.named[suffix])
        if found != shape:
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
        if len(self.packing.bits) == 1 or self.packing.method != "compressed-tensors":
            return self.packing.bits[0]
        words = self.stored.stored_shape(self.codes_name)[1]
        return next(
            (b for b in self.packing.bits if -(-self.shape[1] * b // _WORD_BITS) == words), self.packing.bits[0]
        )

    def _read_shape(self) -> tuple[int, int]:
        found = self.stored.stored_shape(self.codes_name)
        if len(found) != 2:
            raise self.error(f"it has shape {list(found)}, two axes are needed")
        if self.packing.method == "awq":
            return found[1] * 8, found[0]
        if self.packing.method == "gptq":
            return found[1], found[0] * _WORD_BITS // self.packing.bits[0]
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
    if "_zero_point" in matrix.named:
        words = matrix.words("_zero_point", -(-num_rows * bits // _WORD_BITS), num_groups)
        zeros = _down_columns(words, num_groups, bits)[first:last]
    codes, zeros = (
        _codes(codes[:, : -(-num_columns * bits // 8)], bits),
        None if zeros is None else _signed(zeros, bits),
    )
    return _grouped(matrix, codes, scales, zeros, bits)


def _mxfp4(matrix: PackedMatrix, first: int, last: int) -> QuantizedWeight:
    num_rows, num_columns = matrix.shape
    if num_columns % 32:
        raise matrix.error(f"rows of {num_columns} numbers are no whole blocks of 32")
    codes = matrix.part("_packed", num_rows, num_columns // 2)[first:last]
    scales = matrix.part("_scale", num_rows, num_columns // 32)[first:last]
    if codes.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise matrix.error(f"MXFP4 is stored in U8, not in {codes.dtype} and {scales.dtype}")
    form = WeightFormat(codes="mxfp4", columns_per_scale=32, scale_dtype=torch.float8_e8m0fnu)
    return QuantizedWeight(
        format=form, num_columns=num_columns, codes=codes, scales=scales.contiguous().view(torch.float8_e8m0fnu)
    )


def _gptq(matrix: PackedMatrix, first: int, last: int) -> QuantizedWeight:
    num_rows, num_columns = matrix.shape
    bits, packing = matrix.packing.bits[0], matrix.packing
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


def packed_matrices(names: Iterable[str], packing: PackedLayout, stored: TensorViews) -> dict[str, PackedMatrix]:
    """By the names that a plain checkpoint gives them."""
    suffix = _SUFFIXES[packing.method]
    plain = "" if packing.method == "compressed-tensors" else "weight"
    stems = [name.removesuffix(suffix) + plain for name in names if name.endswith(suffix)]
    return {name: PackedMatrix(name, packing, stored) for name in stems}
