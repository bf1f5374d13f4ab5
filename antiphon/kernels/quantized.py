"""Weights as they are stored in 4 or 8 bits: what a format is, and one matrix of it in plain tensors.

A matrix [R rows (outputs), C columns (inputs)] is codes and scales. A scale belongs to a group of consecutive columns
of one row, of several rows or of all. The value of a code q is exact in float32 up to one rounding:

    int8    scale * q                      q signed
    int4    scale * (q - 8)                q is the nibble, 0 to 15
    mxfp4   scale * e2m1(q)                e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign
    fp8     scale * q                      q in float8_e4m3fn
    offset="zeros"    scale * (q - zero)   int8 and int4, a zero point for each scale
    offset="offsets"  scale * q + offset   int8 and int4, a float for each scale (GGUF's minimums, negated)

Scales and offsets of int8 are whole numbers, each times a float16 unit of 256 columns (GGUF's K types).

Where a file's groups are not of neighbouring columns (GPTQ's `desc_act`, act-order), codes lie group by group, and
`order` says which column each is of: products read their rows in that order.

Checkpoint readers make such matrices, back-ends lay them out (`KernelBackend.pack_linear`, `PackedExperts.set_expert`).
Rejected: a class for each format; readers, slices and tests would be written several times over.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

CodeKind = Literal["int8", "int4", "mxfp4", "fp8"]
OffsetKind = Literal["none", "zeros", "offsets"]
CODE_DTYPES: dict[CodeKind, torch.dtype] = {
    "int8": torch.int8,
    "int4": torch.uint8,
    "mxfp4": torch.uint8,
    "fp8": torch.float8_e4m3fn,
}
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.int8)
UNIT_COLUMNS = 256
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How a weight is stored. `columns_per_scale` and `rows_per_scale`: None means all of the matrix."""

    codes: CodeKind
    columns_per_scale: int | None
    rows_per_scale: int | None = 1
    scale_dtype: torch.dtype = torch.float32
    offset: OffsetKind = "none"

    def __post_init__(self) -> None:
        if self.codes not in CODE_DTYPES:
            raise ValueError(f"codes {self.codes!r} are not known: use one of {', '.join(CODE_DTYPES)}")
        if self.scale_dtype not in SCALE_DTYPES:
            names = ", ".join(str(dtype) for dtype in SCALE_DTYPES)
            raise ValueError(f"scales in {self.scale_dtype} are not known: use one of {names}")
        if self.offset != "none" and self.codes not in ("int8", "int4"):
            raise ValueError(f"{self.codes} codes take no {self.offset}: only int8 and int4 do")
        for name, count in (("columns", self.columns_per_scale), ("rows", self.rows_per_scale)):
            if count is not None and (isinstance(count, bool | float) or count < 1):
                raise ValueError(f"{count} {name} per scale: a whole number of at least 1 is needed")
        if self.has_units:
            columns, is_row = self.columns_per_scale, self.rows_per_scale == 1
            if not is_row or columns is None or UNIT_COLUMNS % columns or self.offset == "zeros":
                raise ValueError(f"int8 scales take one row, a part of {UNIT_COLUMNS} columns and no zero points")

    def __str__(self) -> str:
        columns, rows = self.columns_per_scale, self.rows_per_scale
        if rows == 1:
            return f"{self.codes} with a scale a row" if columns is None else f"{self.codes} in groups of {columns}"
        return f"{self.codes} " + ("with a scale a matrix" if rows is None else f"in blocks of {rows} x {columns}")

    @property
    def nibbles(self) -> bool:
        """Whether a byte holds two codes."""
        return self.codes in ("int4", "mxfp4")

    @property
    def has_units(self) -> bool:
        """Whether scales and offsets are whole numbers, times units."""
        return self.scale_dtype == torch.int8

    @property
    def offset_dtype(self) -> torch.dtype:
        return torch.int8 if self.has_units else torch.float32

    def units_shape(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Of every row the unit of scales and, where there are offsets, that of offsets, for 256 columns each."""
        return num_rows, math.ceil(num_columns / UNIT_COLUMNS) * (2 if self.offset == "offsets" else 1)

    def with_float_scales(self) -> "WeightFormat":
        """The format of `QuantizedWeight.with_float_scales`."""
        return replace(self, scale_dtype=torch.float32) if self.has_units else self

    def scale_shape(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        rows, columns = self.rows_per_scale or num_rows, self.columns_per_scale or num_columns
        return math.ceil(num_rows / max(1, rows)), math.ceil(num_columns / max(1, columns))

    def in_bytes(self) -> "WeightFormat":
        """The format of `QuantizedWeight.in_bytes`: int8 codes and float32 scales instead of 4-bit codes."""
        offset: OffsetKind = "zeros" if self.codes == "int4" and self.offset == "none" else self.offset
        return replace(self, codes="int8", scale_dtype=torch.float32, offset=offset)

    def num_bytes(self, num_rows: int, num_columns: int) -> int:
        """Bytes of a matrix as stored: codes, scales, zero points or offsets."""
        code_bytes = num_rows * (math.ceil(num_columns / 2) if self.nibbles else num_columns)
        extra = {"none": 0, "zeros": 1, "offsets": self.offset_dtype.itemsize}[self.offset]
        unit_bytes = 2 * math.prod(self.units_shape(num_rows, num_columns)) if self.has_units else 0
        num_scales = math.prod(self.scale_shape(num_rows, num_columns))
        return code_bytes + num_scales * (self.scale_dtype.itemsize + extra) + unit_bytes


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """One matrix [num_rows, num_columns]. `codes` is [R, C], or uint8 [R, ceil(C / 2)] with the even column in the low
    nibble. `scales` is `format.scale_shape(R, C)`; so are `zeros` (int8 for int8 codes, uint8 for int4) and `offsets`
    (float32, or int8 as scales are); `units` is float16 `format.units_shape(R, C)`. Tensors may be views; a back-end
    copies what it keeps. `ValueError` if a part does not fit.

    `order` (int64 [C]): the column that each stored one is of, or -1 for one of zeros that fills a group; C is then
    `stored_columns`, at least `num_columns`. None: as they are.
    """

    format: WeightFormat
    num_columns: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    offsets: Tensor | None = None
    units: Tensor | None = None
    order: Tensor | None = None

    def __post_init__(self) -> None:
        if self.codes.dim() != 2:
            raise ValueError(f"codes have the shape {tuple(self.codes.shape)}, expected [rows, columns]")
        self._check_order()
        form, columns = self.format, self.stored_columns
        width = math.ceil(columns / 2) if form.nibbles else columns
        _check("codes", self.codes, (self.num_rows, width), CODE_DTYPES[form.codes])
        scale_shape = form.scale_shape(self.num_rows, columns)
        _check("scales", self.scales, scale_shape, form.scale_dtype)
        zero_dtype = torch.uint8 if form.codes == "int4" else torch.int8
        for kind, tensor, dtype in (("zeros", self.zeros, zero_dtype), ("offsets", self.offsets, form.offset_dtype)):
            if (tensor is not None) != (form.offset == kind):
                raise ValueError(
                    f"{kind} are {'missing' if tensor is None else 'given'}, the format says {form.offset}"
                )
            if tensor is not None:
                _check(kind, tensor, scale_shape, dtype)
        if (self.units is not None) != form.has_units or (self.units is not None and self.order is not None):
            raise ValueError(f"units with scales in {form.scale_dtype}: int8 needs them, and takes no order")
        if self.units is not None:
            _check("units", self.units, form.units_shape(self.num_rows, columns), torch.float16)

    def _check_order(self) -> None:
        """Each column is stored once at most: products add up what is stored."""
        if (order := self.order) is None:
            return
        fits = order.dtype == torch.int64 and order.dim() == 1
        if not fits or bool(((order < -1) | (order >= self.num_columns)).any()):
            raise ValueError(f"an order {order.dtype} {tuple(order.shape)}: int64, of columns below {self.num_columns}")
        if bool((torch.bincount(order + 1)[1:] > 1).any()):
            raise ValueError("an order names a column twice")

    @property
    def num_rows(self) -> int:
        return int(self.codes.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.num_columns

    @property
    def stored_columns(self) -> int:
        """Columns of codes."""
        return self.num_columns if self.order is None else self.order.numel()

    @property
    def num_bytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros, self.offsets, self.units)
        return sum(part.nbytes for part in parts if part is not None)

    def rows(self, start: int, end: int) -> "QuantizedWeight":
        """Rows [start, end). Where a block of rows is cut, every row of the result has its own scale."""
        per_scale = self.format.rows_per_scale
        if per_scale == 1:
            return self._with_scales(self.format, self.codes[start:end], slice(start, end))
        if per_scale is None or (start % per_scale == 0 and (end % per_scale == 0 or end == self.num_rows)):
            last = None if per_scale is None else math.ceil(end / per_scale)
            first = 0 if per_scale is None else start // per_scale
            return self._with_scales(self.format, self.codes[start:end], slice(first, last))
        return self.with_scale_per_row().rows(start, end)

    def rows_at(self, places: Tensor) -> "QuantizedWeight":
        """The rows at these places, int64 [n]; only with scales of single rows."""
        assert self.format.rows_per_scale == 1
        return self._with_scales(self.format, self.codes[places], places)

    def columns(self, start: int, end: int) -> "QuantizedWeight":
        """Columns [start, end). A group that straddles `start` is cut into equal smaller groups with the same scale;
        their width divides `start`. Units that straddle it make float32 scales. Of columns with an `order` groups keep
        what they have of these, and are filled up with zeros."""
        if self.order is not None:
            kept = ((self.order >= start) & (self.order < end)).nonzero().flatten()
            groups = kept // (self.format.columns_per_scale or max(1, self.stored_columns))
            return self.in_stored_order().grouped(groups, kept, self.order[kept] - start, end - start)
        if self.units is not None and start % UNIT_COLUMNS:
            return self.with_float_scales().columns(start, end)
        count, form = end - start, self.format
        per_scale = form.columns_per_scale
        codes = _nibble_columns(self.codes, start, end) if form.nibbles else self.codes[:, start:end]
        if per_scale is None:
            return replace(self, num_columns=count, codes=codes)
        width = math.gcd(start, per_scale)
        group = torch.arange(start, end, width, device=codes.device) // per_scale
        parts = {
            name: None if part is None else as_bits(part).index_select(1, group).view(part.dtype)
            for name, part in (("scales", self.scales), ("zeros", self.zeros), ("offsets", self.offsets))
        }
        if self.units is not None:
            a_unit = form.units_shape(1, UNIT_COLUMNS)[1]
            parts["units"] = self.units[:, start // UNIT_COLUMNS * a_unit : math.ceil(end / UNIT_COLUMNS) * a_unit]
        cut = replace(form, columns_per_scale=width)
        assert parts["scales"] is not None
        return QuantizedWeight(format=cut, num_columns=count, codes=codes, **parts)  # type: ignore[arg-type]

    def in_stored_order(self) -> "QuantizedWeight":
        """The matrix whose columns are those of `codes`, as they lie there."""
        return replace(self, num_columns=self.stored_columns, order=None)

    def grouped(self, groups: Tensor, places: Tensor, columns: Tensor, num_columns: int) -> "QuantizedWeight":
        """The stored columns at `places` (int64 [n]) laid group by group, as a matrix of `num_columns` that has them at
        `columns`. `groups`: whose scale each has. Groups become as wide as takes the fewest bytes; all but the last
        one are filled up with columns of zeros."""
        form = self.format
        counts = torch.bincount(groups, minlength=max(1, self.scales.shape[1]))
        width = _best_width(counts, form)
        room = _filled_up(counts, width)
        by_group = groups.argsort(stable=True)
        groups, places, columns = groups[by_group], places[by_group], columns[by_group]
        shifts = (room - counts).cumsum(0) - (room - counts)
        target = torch.arange(len(groups), device=groups.device) + shifts[groups]
        order = torch.full((int(room.sum()),), -1, device=groups.device)
        order[target] = columns
        group_of_stored = torch.arange(len(room), device=groups.device).repeat_interleave(room)
        new_groups = group_of_stored[::width]
        scales, zeros, offsets = (
            None if part is None else as_bits(part)[:, new_groups].view(part.dtype)
            for part in (self.scales, self.zeros, self.offsets)
        )
        assert scales is not None
        codes = self._neutral_codes()[:, group_of_stored]
        codes[:, target] = (unpack_nibbles(self.codes) if form.nibbles else self.codes)[:, places]
        return QuantizedWeight(
            format=replace(form, columns_per_scale=width),
            num_columns=num_columns,
            codes=pack_nibbles(codes) if form.nibbles else codes,
            scales=scales,
            zeros=zeros,
            offsets=offsets,
            order=order,
        )

    def _neutral_codes(self) -> Tensor:
        """The code of zero in every row and group."""
        if self.zeros is not None:
            return self.zeros
        if self.offsets is not None:  # minus a whole number of scales
            least, most = (0, 15) if self.format.nibbles else (-128, 127)
            safe = self.scales.float().masked_fill(self.scales.float() == 0, 1.0)
            units = (-self.offsets / safe).round().clamp(least, most)
            return units.to(CODE_DTYPES[self.format.codes])
        neutral = 8 if self.format.codes == "int4" else 0
        dtype = CODE_DTYPES[self.format.codes]
        return torch.full(self.scales.shape, neutral, dtype=dtype, device=self.scales.device)

    def with_scale_per_row(self) -> "QuantizedWeight":
        """The same values, with scales repeated for every row."""
        per_scale = self.format.rows_per_scale
        if per_scale == 1:
            return self
        row = torch.arange(self.num_rows, device=self.codes.device) // (per_scale or max(1, self.num_rows))
        return self._with_scales(replace(self.format, rows_per_scale=1), self.codes, row)

    def with_float_scales(self) -> "QuantizedWeight":
        """The same values with scales and offsets in float32, which holds the products with their units exactly."""
        if self.units is None:
            return self
        form = self.format.with_float_scales()
        num_groups = self.scales.shape[1]
        by_kind = self.units.float().view(self.num_rows, -1, self.format.units_shape(1, UNIT_COLUMNS)[1])
        assert self.format.columns_per_scale is not None
        of_groups = by_kind.repeat_interleave(UNIT_COLUMNS // self.format.columns_per_scale, dim=1)[:, :num_groups]
        scales = self.scales.float() * of_groups[..., 0]
        offsets = None if self.offsets is None else self.offsets.float() * of_groups[..., 1]
        return replace(self, format=form, scales=scales, offsets=offsets, units=None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix multiplied out, [R, C]: computed in float32, rounded once to `dtype`."""
        weight = self.with_float_scales().with_scale_per_row()
        scales = weight._spread(weight.scales.float())
        codes = _code_values(self.format.codes, self.codes)[:, : self.stored_columns]
        if weight.zeros is not None:
            codes = codes - weight._spread(weight.zeros.float())
        elif self.format.codes == "int4" and weight.offsets is None:
            codes = codes - 8
        values = codes * scales
        if weight.offsets is not None:
            values += weight._spread(weight.offsets)
        if self.order is not None:
            stored = self.order.to(values.device)
            in_place = values.new_zeros(self.shape)
            in_place[:, stored[stored >= 0]] = values[:, stored >= 0]
            values = in_place
        return values.to(dtype)

    def in_bytes(self) -> "QuantizedWeight":
        """The same values from int8 codes; only for 4-bit codes. Twice an E2M1 value is a whole number."""
        if self.units is not None:
            return self.with_float_scales().in_bytes()
        form, scales, zeros = self.format, self.scales.float(), self.zeros
        if form.codes == "mxfp4":
            values, scales = 2 * _code_values("mxfp4", self.codes), scales / 2
        else:
            values = unpack_nibbles(self.codes)
            zeros = torch.full_like(as_bits(self.scales), 8) if form.offset == "none" else zeros
        codes = values[:, : self.stored_columns].to(torch.int8)
        zeros = None if zeros is None else zeros.to(torch.int8)
        return replace(self, format=form.in_bytes(), codes=codes, scales=scales, zeros=zeros)

    def is_finite(self) -> bool:
        """Whether every value is a number. Integers always are."""
        if self.format.codes == "fp8" and bool((self.codes.view(torch.uint8) & 127 == 127).any()):
            return False
        parts = (self.scales.float(), self.offsets, self.units)
        return all(bool(part.isfinite().all()) for part in parts if part is not None)

    def own_copy(self, device: torch.device) -> "QuantizedWeight":
        """A copy on `device` that shares nothing with a memory-mapped source."""

        def copy(part: Tensor | None) -> Tensor | None:
            return None if part is None else torch.empty(part.shape, dtype=part.dtype, device=device).copy_(part)

        codes, scales = copy(self.codes), copy(self.scales)
        assert codes is not None
        assert scales is not None
        zeros, offsets, units, order = (copy(each) for each in (self.zeros, self.offsets, self.units, self.order))
        return replace(self, codes=codes, scales=scales, zeros=zeros, offsets=offsets, units=units, order=order)

    def _with_scales(self, form: WeightFormat, codes: Tensor, chosen: slice | Tensor) -> "QuantizedWeight":
        """The chosen rows of scales, zero points, offsets and units."""
        scales, zeros, offsets, units = (
            None if part is None else as_bits(part)[chosen].view(part.dtype)
            for part in (self.scales, self.zeros, self.offsets, self.units)
        )
        assert scales is not None
        return replace(self, format=form, codes=codes, scales=scales, zeros=zeros, offsets=offsets, units=units)

    def _spread(self, per_group: Tensor) -> Tensor:
        """One value a group [R, G] as one value a column: broadcastable where the group is the whole row."""
        width = self.format.columns_per_scale
        return per_group if width is None else per_group.repeat_interleave(width, dim=1)[:, : self.stored_columns]


AnyWeight = Tensor | QuantizedWeight


def _best_width(counts: Tensor, form: WeightFormat) -> int:
    """Columns of a group, of those that divide the format's, with which these many columns of each take the fewest
    bytes; kernels want multiples of 8."""
    widest = form.columns_per_scale or max(8, int(counts.sum()))
    widths = [width for width in range(8, widest, 8) if widest % width == 0] + [widest]

    def num_bytes(width: int) -> int:
        return replace(form, columns_per_scale=width).num_bytes(1, int(_filled_up(counts, width).sum()))

    return min(reversed(widths), key=num_bytes)


def _filled_up(counts: Tensor, width: int) -> Tensor:
    """Stored columns of each group: whole groups of that width, but for the last one that is not empty."""
    room = (counts + width - 1) // width * width
    last = counts.nonzero()
    if len(last):
        room[last[-1]] = counts[last[-1]]
    return room


def _check(name: str, part: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if tuple(part.shape) != shape or part.dtype != dtype:
        raise ValueError(f"{name} are {part.dtype} {tuple(part.shape)}, expected {dtype} {shape}")


def as_bits(part: Tensor) -> Tensor:
    """What has one byte as integers: PyTorch indexes and joins few of its 8-bit floats."""
    return part.view(torch.uint8) if part.dtype.itemsize == 1 else part


def _nibble_columns(codes: Tensor, start: int, end: int) -> Tensor:
    """Columns [start, end) of packed nibbles, packed again where they begin in the middle of a byte."""
    if start % 2 == 0:
        return codes[:, start // 2 : (end + 1) // 2]
    return pack_nibbles(unpack_nibbles(codes)[:, start:end])


def unpack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [R, n] to uint8 [R, 2 n], low nibble first."""
    return torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)


def pack_nibbles(nibbles: Tensor) -> Tensor:
    """uint8 [R, C] of 0 to 15 to uint8 [R, ceil(C / 2)], low nibble first, the last high nibble 0 if C is odd."""
    if nibbles.shape[1] % 2:
        nibbles = torch.nn.functional.pad(nibbles, (0, 1))
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


@cache
def _e2m1_table(device: torch.device) -> Tensor:
    values = E2M1_VALUES + tuple(-value for value in E2M1_VALUES)
    return torch.tensor(values, dtype=torch.float32, device=device)


def _code_values(kind: CodeKind, codes: Tensor) -> Tensor:
    """Every code as a float32 of its own, before scale and zero point."""
    if kind == "int4":
        return unpack_nibbles(codes).float()
    if kind == "mxfp4":
        return _e2m1_table(codes.device)[unpack_nibbles(codes).int()]
    return codes.float()
