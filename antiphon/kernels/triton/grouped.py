"""Products of rows with the matrices of their experts, with what comes before and after them in the same launch.

    before   rows are read where their tokens lie; codes become values: fp8, int8, int4, mxfp4, and their scales
    after    bias; activation(gate) * up; the router's weight; a residual

A program makes one tile: some rows of one expert by some columns. Which rows is found on the device, from the starts of
the experts; the grid is an upper bound that the host knows, so nothing waits and a launch can be captured. A linear
layer is the case of one expert. A row's sum runs over blocks of inputs in order, whatever its neighbours are.
Codes are multiplied out in registers, rounded to the type of the rows as the reference does, then multiplied.
Tiles are from the table of `antiphon tune` (`antiphon.kernels.choices`), or by rule.

Letters: R rows in order of expert, T tokens, K choices a token, E experts, N outputs, I inputs.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.base.logging import get_logger
from antiphon.kernels.api import ExpertShape
from antiphon.kernels.choices import ProductTile, Tiles, process_table, table_path
from antiphon.kernels.stacked import StackedWeight, TritonExperts
from antiphon.kernels.triton.launch import capability_of, launch, power_of_two, product, wide_products
from antiphon.kernels.triton.rows import count, place, sum_rows
from antiphon.kernels.triton.rowwise import activated

_log = get_logger("kernels")


def tile_for(weight: StackedWeight, num_rows: int, device: torch.device) -> ProductTile:
    """The tile for this weight and about `num_rows` rows over all its experts."""
    return tuned_tile(_entry(key_of(weight, device)), weight, num_rows, device)


def tuned_tile(tiles: Tiles, weight: StackedWeight, num_rows: int, device: torch.device) -> ProductTile:
    """That of an entry, or the rule's where it has none. Beyond the last bucket it is the last one's, because the
    rule's may sum in another order."""
    if tiles:
        return next((tile for most, tile in tiles if num_rows <= most * weight.num_experts), tiles[-1][1])
    return default_tile(weight, num_rows, capability_of(device))


def default_tile(weight: StackedWeight, num_rows: int, capability: int) -> ProductTile:
    """By rule: as many rows as an expert gets on average, within what a program holds."""
    rows = min(128, max(16, power_of_two(-(-num_rows // weight.num_experts))))
    if weight.dtype == torch.float32:
        return ProductTile(rows=32, columns=32, inputs=32, warps=4, stages=2)
    inputs = 64
    if weight.format is not None:
        columns = 32 if weight.format.nibbles and capability < 90 else 64
        warps = 8 if weight.format.nibbles and columns == 64 else 4
        return ProductTile(rows=min(64, rows), columns=columns, inputs=inputs, warps=warps, stages=3)
    if rows >= 64:
        columns = 64 if weight.num_parts == 2 and capability < 90 else 128  # two sums a tile need registers
        return ProductTile(rows=rows, columns=columns, inputs=inputs, warps=8 if rows == 128 else 4, stages=3)
    return ProductTile(rows=rows, columns=64, inputs=inputs, warps=4, stages=4)


def key_of_gpu(device: torch.device) -> tuple[str, str]:
    """The GPU and Triton's version."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return gpu, str(triton.__version__)


def key_of(weight: StackedWeight, device: torch.device) -> tuple[Any, ...]:
    """What an entry is for: GPU, Triton's version, parts, outputs, inputs, and how numbers are stored."""
    kind, form = str(weight.dtype).removeprefix("torch."), weight.format
    if form is not None:
        blocks = f"{form.rows_per_scale or 'all'} x {form.columns_per_scale or 'all'}"
        kind = f"{form.codes} in {kind}, scales of {blocks}, offset {form.offset}"
    return *key_of_gpu(device), weight.num_parts, weight.num_rows, weight.num_columns, kind


@cache
def _entry(key: tuple[Any, ...]) -> Tiles:
    """The entry for a weight; the log says once for each whether there is one, if there is a table."""
    table = process_table()
    found = table.get(key, [])
    if table:
        gpu, _, parts, outputs, inputs, kind = key
        source = f"from {table_path()}" if key in table else f"by rule: {table_path()} has no such entry"
        _log.info(
            "kernels: %d x %d x %d in %s on %s: tiles %s", parts, outputs, inputs, kind, gpu, source
        )  # fmt: skip
    return found


PLAIN = ExpertShape(1, 0, 0, "none")


@dataclass(frozen=True, kw_only=True)
class GroupedRows:
    """Rows in order of expert: where each expert's begin, which slot t * K + k is at each place, weights of slots."""

    starts_E1: Tensor
    order_R: Tensor
    weights_TK: Tensor

    @property
    def top_k(self) -> int:
        return int(self.weights_TK.shape[1])


@triton.jit
def _spread(ptr, n, inside, first, width, ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, BN: tl.constexpr,
            BK: tl.constexpr):  # fmt: skip
    """Scales (or zero points) of a tile [BN, BK] that begins at column `first`, or [BN, 1] if it has one a row.
    `width`: scales a row."""
    rows = ptr + (n // ROW_BLOCK) * width
    if COLUMN_BLOCK % BK == 0:
        found = tl.load(rows + first // COLUMN_BLOCK, inside, 0)[:, None]
    elif BK % COLUMN_BLOCK == 0:
        column = first // COLUMN_BLOCK + tl.arange(0, BK // COLUMN_BLOCK)
        found = tl.load(rows[:, None] + column[None, :], inside[:, None] & (column < width)[None, :], 0)
        found = tl.reshape(tl.broadcast_to(found[:, :, None], (BN, BK // COLUMN_BLOCK, COLUMN_BLOCK)), (BN, BK))
    else:
        column = (first + tl.arange(0, BK)) // COLUMN_BLOCK
        found = tl.load(rows[:, None] + column[None, :], inside[:, None] & (column < width)[None, :], 0)
    return found


@triton.jit
def code_values(codes, KIND: tl.constexpr):
    """Codes of one byte, or nibbles, as float32."""
    if KIND == "fp8":  # sign, 4 bits of exponent, 3 of mantissa, moved to where float16 has them
        bits = ((codes.to(tl.uint16) & 0x80) << 8) | ((codes.to(tl.uint16) & 0x7F) << 7)
        values = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif KIND == "mxfp4":
        exponent, half = ((codes >> 1) & 3).to(tl.int32), (codes & 1).to(tl.float32)
        size = tl.where(exponent == 0, half * 0.5, (2.0 + half) * (1 << exponent).to(tl.float32) * 0.25)
        values = tl.where(codes >= 8, -size, size)
    elif KIND == "int8":
        values = codes.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        values = codes.to(tl.float32)
    return values


@triton.jit
def _weights(codes_ptr, scales_ptr, shifts_ptr, n, inside, first, num_inputs, num_scales, KIND: tl.constexpr,
             OFFSET: tl.constexpr, ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, DTYPE: tl.constexpr,
             BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """The tile [BK, BN] of one matrix."""
    k = first + tl.arange(0, BK)
    if KIND == "float":
        places = n[None, :].to(tl.int64) * num_inputs + k[:, None]
        tile = tl.load(codes_ptr + places, inside[None, :] & (k < num_inputs)[:, None], 0.0)
    else:
        if (KIND == "int4") | (KIND == "mxfp4"):
            byte, width = first // 2 + tl.arange(0, BK // 2), (num_inputs + 1) // 2
            places = n[:, None].to(tl.int64) * width + byte[None, :]
            both = tl.load(codes_ptr + places, inside[:, None] & (byte < width)[None, :], 0)
            codes = tl.interleave(both & 15, both >> 4)
        else:
            places = n[:, None].to(tl.int64) * num_inputs + k[None, :]
            codes = tl.load(codes_ptr + places, inside[:, None] & (k < num_inputs)[None, :], 0)
        values = code_values(codes, KIND)
        scales = _spread(scales_ptr, n, inside, first, num_scales, ROW_BLOCK, COLUMN_BLOCK, BN, BK)
        if scales.dtype == tl.uint8:  # an exponent with bias 127
            scales = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        scales = scales.to(tl.float32)
        if OFFSET == "none":
            if KIND == "int4":
                values -= 8.0
            values *= scales
        else:
            shifts = _spread(shifts_ptr, n, inside, first, num_scales, ROW_BLOCK, COLUMN_BLOCK, BN, BK).to(tl.float32)
            if OFFSET == "zeros":
                values = (values - shifts) * scales
            else:
                values = values * scales + shifts
        tile = tl.trans(values.to(DTYPE))
    return tile


@triton.jit
def _expert_of_tile(starts_ptr, tile, num_experts, E: tl.constexpr, BM: tl.constexpr):
    """(expert, its first row in this tile, the end of its rows); `num_experts` if the tile is beyond the last."""
    experts = tl.arange(0, E)
    starts = tl.load(starts_ptr + experts, experts < num_experts, 0)
    ends = tl.load(starts_ptr + 1 + experts, experts < num_experts, 0)
    tiles = tl.cdiv(ends - starts, BM)
    expert = tl.sum(((tl.cumsum(tiles, 0) <= tile) & (experts < num_experts)).to(tl.int32), 0)
    before = tl.sum(tl.where(experts < expert, tiles, 0), 0)
    start = tl.sum(tl.where(experts == expert, starts, 0), 0)
    return expert, start + (tile - before) * BM, tl.sum(tl.where(experts == expert, ends, 0), 0)


@triton.jit(do_not_specialize=["num_rows"])
def _grouped(x_ptr, codes_ptr, scales_ptr, shifts_ptr, bias_ptr, residual_ptr, out_ptr, starts_ptr, order_ptr,
             routing_ptr, num_rows, num_experts, num_outputs, num_inputs, code_stride, scale_stride, num_scales, alpha,
             limit, GROUPED: tl.constexpr, GATHERS: tl.constexpr, WEIGHS: tl.constexpr, TOP_K: tl.constexpr,
             ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, KIND: tl.constexpr,
             OFFSET: tl.constexpr, ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, WIDE: tl.constexpr,
             E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """`code_stride`, `scale_stride`: from one matrix to the next, of which gated experts have two."""
    num_tiles_n = tl.cdiv(num_outputs, BN)
    tile = tl.program_id(0) // num_tiles_n
    expert, first_row, end = 0, tile * BM, num_rows
    if GROUPED:
        expert, first_row, end = _expert_of_tile(starts_ptr, tile, num_experts, E, BM)
        if expert >= num_experts:
            return
    rows = first_row + tl.arange(0, BM)
    held = rows < end
    slots = rows
    if GROUPED:
        slots = tl.load(order_ptr + rows, held, 0)
    sources = (slots // TOP_K if GATHERS else rows).to(tl.int64)
    n = (tl.program_id(0) % num_tiles_n) * BN + tl.arange(0, BN)
    inside = n < num_outputs
    DTYPE: tl.constexpr = tl.float32 if WIDE else x_ptr.dtype.element_ty
    GATED: tl.constexpr = ACTIVATION != "none"
    matrix = tl.cast(expert, tl.int64) * (2 if GATED else 1) if GROUPED else 0
    codes, scales, shifts = codes_ptr + matrix * code_stride, scales_ptr, shifts_ptr
    if KIND != "float":
        scales += matrix * scale_stride
        shifts += matrix * scale_stride
    sums, up_sums = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for first in range(0, num_inputs, BK):
        k = first + tl.arange(0, BK)
        x = tl.load(x_ptr + sources[:, None] * num_inputs + k[None, :], held[:, None] & (k < num_inputs)[None, :], 0.0)
        w = _weights(codes, scales, shifts, n, inside, first, num_inputs, num_scales, KIND, OFFSET, ROW_BLOCK,
                     COLUMN_BLOCK, DTYPE, BN, BK)  # fmt: skip
        sums = product(x, w, sums, WIDE)
        if GATED:
            w = _weights(codes + code_stride, scales + scale_stride, shifts + scale_stride, n, inside, first,
                         num_inputs, num_scales, KIND, OFFSET, ROW_BLOCK, COLUMN_BLOCK, DTYPE, BN, BK)  # fmt: skip
            up_sums = product(x, w, up_sums, WIDE)
    if HAS_BIAS:
        bias = bias_ptr + matrix * num_outputs + n
        sums += tl.load(bias, inside, 0.0).to(tl.float32)[None, :]
        if GATED:
            up_sums += tl.load(bias + num_outputs, inside, 0.0).to(tl.float32)[None, :]
    if GATED:
        sums = activated(sums, up_sums, alpha, limit, ACTIVATION)
    if WEIGHS:
        sums *= tl.load(routing_ptr + slots, held, 0.0).to(tl.float32)[:, None]
    places = rows[:, None].to(tl.int64) * num_outputs + n[None, :]
    stored = held[:, None] & inside[None, :]
    if HAS_RESIDUAL:
        sums += tl.load(residual_ptr + places, stored, 0.0).to(tl.float32)
    tl.store(out_ptr + places, sums.to(out_ptr.dtype.element_ty), stored)


def linear(x_TI: Tensor, weight: StackedWeight, residual_TN: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x @ weight.T + bias + residual, summed in float32."""
    x_TI = x_TI.contiguous()
    out_TN = torch.empty((x_TI.shape[0], weight.num_rows), dtype=out_dtype, device=x_TI.device)
    residual_TN = None if residual_TN is None else residual_TN.contiguous()
    _launch(x_TI, weight, out_TN, None, residual=residual_TN)
    return out_TN


def gated_product(
    x_TH: Tensor, weight: StackedWeight, shape: ExpertShape, rows: GroupedRows, tile: ProductTile | None = None
) -> Tensor:
    """[R, I]: activation(gate(x)) * up(x) of each row's token; rows beyond the last expert's are not written."""
    out_RI = torch.empty((rows.order_R.shape[0], weight.num_rows), dtype=x_TH.dtype, device=x_TH.device)
    _launch(x_TH.contiguous(), weight, out_RI, rows, shape=shape, gathers=True, tile=tile)
    return out_RI


def weighed_product(x_RI: Tensor, weight: StackedWeight, rows: GroupedRows, tile: ProductTile | None = None) -> Tensor:
    """[R, N]: each row times its expert's matrix, plus bias, times the router's weight."""
    out_RN = torch.empty((x_RI.shape[0], weight.num_rows), dtype=x_RI.dtype, device=x_RI.device)
    _launch(x_RI, weight, out_RN, rows, weighs=True, tile=tile)
    return out_RN


def expert_products(
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: TritonExperts,
    counts_BE: Tensor | None = None,
    tiles: tuple[ProductTile | None, ProductTile | None] = (None, None),
) -> Tensor:
    """[T, H]: the weighted sum of each token's experts. `counts_BE`: what `rows.count` finds, if it is known; `tiles`
    of both products, if not those of the table or rule."""
    if counts_BE is None:
        ids_TK = ids_TK.contiguous()
        counts_BE = count(ids_TK, experts.shape.num_experts)
    starts_E1, order_R, places_TK = place(ids_TK, counts_BE)
    grouped = GroupedRows(starts_E1=starts_E1, order_R=order_R, weights_TK=weights_TK.contiguous())
    hidden_RI = gated_product(x_TH, experts.gate_up, experts.shape, grouped, tile=tiles[0])
    y_RH = weighed_product(hidden_RI, experts.down, grouped, tile=tiles[1])
    return sum_rows(y_RH, places_TK, None, ascending=True)


def _launch(
    x: Tensor,
    weight: StackedWeight,
    out: Tensor,
    rows: GroupedRows | None,
    *,
    residual: Tensor | None = None,
    shape: ExpertShape = PLAIN,
    gathers: bool = False,
    weighs: bool = False,
    tile: ProductTile | None = None,
) -> None:
    num_rows, num_experts = out.shape[0], weight.num_experts
    tile = tile or tile_for(weight, num_rows, x.device)
    form, wide = weight.format, wide_products(x.dtype)
    num_tiles = -(-num_rows // tile.rows)
    if rows is not None:
        num_tiles = min(num_rows, num_rows // tile.rows + min(num_experts, num_rows))
    codes, scales = weight.codes, weight.scales
    starts, order, routing = (None,) * 3 if rows is None else (rows.starts_E1, rows.order_R, rows.weights_TK)
    launch(
        _grouped, (num_tiles * -(-weight.num_rows // tile.columns),),
        x, codes, scales, weight.shifts, weight.bias, residual, out, starts, order, routing,
        num_rows, num_experts, weight.num_rows, weight.num_columns, codes.stride(1),
        0 if scales is None else scales.stride(1), 0 if scales is None else scales.shape[3], shape.alpha, shape.limit,
        GROUPED=rows is not None, GATHERS=gathers, WEIGHS=weighs, TOP_K=1 if rows is None else rows.top_k,
        ACTIVATION=shape.activation, HAS_BIAS=weight.bias is not None, HAS_RESIDUAL=residual is not None,
        KIND="float" if form is None else form.codes, OFFSET="none" if form is None else form.offset,
        ROW_BLOCK=1 if form is None else form.rows_per_scale or weight.num_rows,
        COLUMN_BLOCK=1 if form is None else form.columns_per_scale or power_of_two(weight.num_columns, tile.inputs),
        WIDE=wide, E=power_of_two(num_experts), BM=tile.rows, BN=tile.columns, BK=tile.inputs,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
