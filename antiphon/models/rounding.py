"""Weights rounded to few bits: to the nearest code, with the clip of each group that errs least.

A scale that reaches a group's largest number spends codes on it. A slightly smaller one clips that number and may round
all others better, so some fractions are tried for every group and the one with the smallest squared error is taken.
MXFP4's scales are powers of two: only the next smaller one is of interest. With int8 no clip pays.
Rejected: GPTQ's and AWQ's search for codes by the activations of a calibration text, which needs a pass of the model a
layer and hours for a large one; files made that way are read (`models/packed`).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from antiphon.kernels.quantized import CodeKind, QuantizedWeight, WeightFormat, as_bits, pack_nibbles
from antiphon.models.packed import SCALE_BLOCK
from antiphon.specs.model import WEIGHT_GROUP

RoundedFormat = Literal["int8", "int4", "mxfp4"]
FRACTIONS: dict[RoundedFormat, tuple[float, ...]] = {
    "int8": (1.0,),
    "int4": (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65),
    "mxfp4": (1.0, 0.5),
}
_NUMBERS_AT_A_TIME = 1 << 18  # so that they stay in the cache


@dataclass(frozen=True, kw_only=True)
class WeightRounding:
    """What matrices that are stored in floats are rounded to: the routed experts', and all others that a product reads
    but the router's. None: nothing."""

    experts: RoundedFormat | None = None
    dense: RoundedFormat | None = None
    group: int = WEIGHT_GROUP


AS_STORED = WeightRounding()


def rounding_of(weights: str) -> WeightRounding:
    """What `--weights` means: the experts in this format, other matrices in int8, which cost little beside them."""
    if weights == "as-stored":
        return AS_STORED
    return WeightRounding(experts=weights, dense="int8")  # type: ignore[arg-type]


def format_of(kind: RoundedFormat, group: int, dtype: torch.dtype) -> WeightFormat:
    """The format that weights of this dtype are rounded to: scales have its 16 bits (what `specs/model` counts), or
    32."""
    scale_dtype = dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32
    if kind == "mxfp4":
        return WeightFormat(codes="mxfp4", columns_per_scale=32, scale_dtype=torch.float8_e8m0fnu)
    return WeightFormat(codes=kind, columns_per_scale=group, scale_dtype=scale_dtype)


def rounded(weight: Tensor, form: WeightFormat) -> QuantizedWeight:
    """The matrix [R, C] in `form`; some rows at a time, which bounds what is held besides."""
    step = max(1, _NUMBERS_AT_A_TIME // max(1, weight.shape[1]))
    parts = [_rounded_rows(weight[first : first + step], form) for first in range(0, max(weight.shape[0], 1), step)]
    scales = torch.cat([as_bits(part.scales) for part in parts]).view(form.scale_dtype)
    codes = torch.cat([part.codes for part in parts])
    return QuantizedWeight(format=form, num_columns=weight.shape[1], codes=codes, scales=scales)


def _rounded_rows(weight: Tensor, form: WeightFormat) -> QuantizedWeight:
    weight = weight.float()
    fractions = FRACTIONS[form.codes]  # type: ignore[index]
    if len(fractions) == 1:
        return quantize(weight, form)
    num_rows, num_columns = weight.shape
    width = form.columns_per_scale or max(1, num_columns)
    groups = torch.nn.functional.pad(weight, (0, -num_columns % width)).view(num_rows, -1, width)
    errors = torch.stack([_squares(groups, form, fraction) for fraction in fractions])
    return quantize(weight, form, torch.tensor(fractions)[errors.argmin(0)])


def _squares(groups: Tensor, form: WeightFormat, fraction: float) -> Tensor:
    """The squared error of every group in four bits, without packing, since most of the time is spent here."""
    is_int4 = form.codes == "int4"
    scales = groups.abs().amax(2, keepdim=True) * (fraction / (7.0 if is_int4 else 6.0))
    scales = _rounded_scales(scales, form.scale_dtype).float()
    units = groups / scales.masked_fill(scales == 0, 1.0)
    if is_int4:
        units.round_().clamp_(-8, 7)
    else:  # values of E2M1 are half a unit apart, from 2 on a whole one, from 4 on two
        step = torch.where(units.abs() < 2, 0.5, torch.where(units.abs() < 4, 1.0, 2.0))
        units.div_(step).round_().mul_(step).clamp_(-6, 6)
    return units.mul_(scales).sub_(groups).square_().sum(2)


def quantize(weight: Tensor, form: WeightFormat, clip: Tensor | float = 1.0) -> QuantizedWeight:
    """Round-to-nearest. A group's range is `clip` (a number, or one for each group [R, G]) times its largest magnitude,
    or times its extremes with zero points or offsets. Scales are rounded first, so that codes are nearest to what is
    stored. Only for formats with a scale per row, and finite numbers."""
    if form.rows_per_scale != 1 or form.has_units:
        raise ValueError("quantize makes scales of single rows, without units")
    if weight.dim() != 2 or not bool(weight.isfinite().all()):
        raise ValueError(f"a weight {tuple(weight.shape)}: quantize takes finite numbers [rows, columns]")
    num_rows, num_columns = weight.shape
    width = form.columns_per_scale or max(1, num_columns)
    padded = torch.nn.functional.pad(weight.float(), (0, -num_columns % width))
    padded = padded.view(num_rows, padded.shape[1] // width, width)
    shift: Tensor | None = None
    if form.offset == "none":
        limit = {"int8": 127.0, "int4": 7.0, "mxfp4": 6.0, "fp8": 448.0}[form.codes]
        scales = padded.abs().amax(2) * clip / limit
    else:
        top, bottom = padded.amax(2).clamp(min=0) * clip, padded.amin(2).clamp(max=0) * clip
        scales = (top - bottom) / (15 if form.codes == "int4" else 255)
        shift = bottom
    stored = _rounded_scales(scales, form.scale_dtype)
    safe = stored.float().masked_fill(stored.float() == 0, 1.0)
    zeros, offsets = None, None
    lowest = 0 if form.codes == "int4" else -128
    if form.offset == "zeros":
        assert shift is not None
        zero = (lowest - shift / safe).round().clamp(lowest, lowest + (15 if form.codes == "int4" else 255))
        zeros, units = zero.to(torch.uint8 if form.codes == "int4" else torch.int8), padded / safe[:, :, None]
        units = units + zero[:, :, None]
    elif form.offset == "offsets":
        assert shift is not None
        offsets = shift - lowest * safe
        units = (padded - offsets[:, :, None]) / safe[:, :, None]
    else:
        units = padded / safe[:, :, None] + (8 if form.codes == "int4" else 0)
    codes = _codes_of(units.flatten(1)[:, :num_columns], form.codes)
    return QuantizedWeight(
        format=form, num_columns=num_columns, codes=codes, scales=stored, zeros=zeros, offsets=offsets
    )


def _rounded_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """As they are stored."""
    if dtype != torch.float8_e8m0fnu:
        return scales.to(dtype)
    # The smallest power of two that clips nothing, as an exponent with bias 127.
    exponent = torch.ceil(torch.log2(scales.clamp(min=2.0**-126))).clamp(-127, 127)
    return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def _codes_of(units: Tensor, kind: CodeKind) -> Tensor:
    """Weights in units of their scales (zero point added) to the nearest codes."""
    if kind == "int8":
        return units.round().clamp(-128, 127).to(torch.int8)
    if kind == "int4":
        return pack_nibbles(units.round().clamp(0, 15).to(torch.uint8))
    if kind == "fp8":
        return units.clamp(-448, 448).to(torch.float8_e4m3fn)
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=units.device)
    magnitude = torch.bucketize(units.abs(), middles).to(torch.uint8)
    return pack_nibbles(magnitude | (units < 0).to(torch.uint8) << 3)


def float8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(E4M3 codes, float32 scales) of the matrix [R, C] in blocks of 128 x 128, as DeepSeek-V3 publishes its weights:
    a block's largest number becomes 448."""
    rows, columns = weight.shape
    down, across = -(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK)
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % SCALE_BLOCK, 0, -rows % SCALE_BLOCK))
    blocks = padded.view(down, SCALE_BLOCK, across, SCALE_BLOCK)
    scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    codes = blocks / scales.masked_fill(scales == 0, 1.0)[:, None, :, None]
    return codes.view(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn).contiguous(), scales
