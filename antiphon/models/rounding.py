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

from antiphon.kernels.quantized import QuantizedWeight, WeightFormat, as_bits, quantize, rounded_scales
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
    scales = rounded_scales(scales, form.scale_dtype).float()
    units = groups / scales.masked_fill(scales == 0, 1.0)
    if is_int4:
        units.round_().clamp_(-8, 7)
    else:  # values of E2M1 are half a unit apart, from 2 on a whole one, from 4 on two
        step = torch.where(units.abs() < 2, 0.5, torch.where(units.abs() < 4, 1.0, 2.0))
        units.div_(step).round_().mul_(step).clamp_(-6, 6)
    return units.mul_(scales).sub_(groups).square_().sum(2)


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
