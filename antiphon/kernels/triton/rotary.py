"""Rotary embedding: of heads alone, with its gradient, and of fused rows on their way to the cache.

    turn     heads in, heads out; the gradient is the rotation back
    store    rows [q | k | v]: each head normed and rotated; queries come out, keys and values go to the cache, as they
             are or as codes of 8 bits with a scale for each

One program a row and head. A row whose slot is negative is not stored.

Letters as in `antiphon.kernels.api`; R half the rotated width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.api import AttentionBatch, HeadRows
from antiphon.kernels.reference_attention import ReferenceCache
from antiphon.kernels.triton.launch import launch, power_of_two


@triton.jit
def _turned(x_ptr, norm_ptr, cos_ptr, sin_ptr, width, half, eps, sign, HAS_NORM: tl.constexpr,
            INTERLEAVED: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """The head at `x_ptr`, normed and rotated, in float32; `cos_ptr` and `sin_ptr` are at its position."""
    d = tl.arange(0, D)
    if INTERLEAVED:
        partner, pair, is_first = d ^ 1, d // 2, d % 2 == 0
    else:
        partner, pair, is_first = tl.where(d < half, d + half, d - half), d % tl.maximum(half, 1), d < half
    inside, turns = d < width, d < 2 * half
    x = tl.load(x_ptr + d, inside, 0.0)
    other = tl.load(x_ptr + partner, turns, 0.0)
    wide, wide_other = x.to(tl.float32), other.to(tl.float32)
    if HAS_NORM:
        factor = 1.0 / tl.sqrt(tl.sum(wide * wide) / width + eps)
        wide = wide * factor * tl.load(norm_ptr + d, inside, 0.0).to(tl.float32)
        wide_other = wide_other * factor * tl.load(norm_ptr + partner, turns, 0.0).to(tl.float32)
        wide, wide_other = wide.to(x.dtype).to(tl.float32), wide_other.to(x.dtype).to(tl.float32)
    cos, sin = tl.load(cos_ptr + pair, turns, 1.0), tl.load(sin_ptr + pair, turns, 0.0) * sign
    return wide * cos + tl.where(is_first, -wide_other, wide_other) * sin


@triton.jit
def _turn(x_ptr, cos_ptr, sin_ptr, out_ptr, num_heads, width, half, sign, INTERLEAVED: tl.constexpr, D: tl.constexpr):
    row, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, D)
    place = (row * num_heads + head) * width
    x = _turned(x_ptr + place, x_ptr, cos_ptr + row * half, sin_ptr + row * half, width, half, 0.0, sign, False,
                INTERLEAVED, D)  # fmt: skip
    tl.store(out_ptr + place + d, x.to(out_ptr.dtype.element_ty), d < width)


@triton.jit
def _fp8_code(x):
    """The byte of float8_e4m3fn nearest to x, ties to even, |x| <= 448. The exponent is brought to where one of 4 bits
    has it, then what is beyond 3 bits of mantissa is rounded away."""
    bits = (tl.abs(x) * 7.52316384526264e-37).to(tl.int32, bitcast=True)  # 2 ** -120
    code = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    return (tl.where(x < 0.0, 128, 0) | code).to(tl.uint8)


@triton.jit
def _keep(ptr, scales_ptr, place, x, d, width, CODES: tl.constexpr):
    """One head's key or value into the cache."""
    if CODES == "auto":
        tl.store(ptr + place * width + d, x.to(ptr.dtype.element_ty), d < width)
    else:
        limit = 448.0 if CODES == "fp8" else 127.0
        scale = tl.max(tl.where(d < width, tl.abs(x), 0.0)) / limit
        units = x / tl.where(scale == 0.0, 1.0, scale)
        units = tl.minimum(tl.maximum(units, -limit), limit)
        if CODES == "fp8":
            codes = _fp8_code(units)
        else:  # this sum rounds to the nearest whole number, ties to even
            codes = ((units + 12582912.0) - 12582912.0).to(tl.int8).to(tl.uint8, bitcast=True)
        tl.store(ptr + place * width + d, codes, d < width)
        tl.store(scales_ptr + place, scale)


@triton.jit
def _store(qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_ptr, keys_ptr, values_ptr,
           key_scales_ptr, value_scales_ptr, row_width, num_heads, num_kv_heads, key_dim, value_dim, half, eps,
           HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr, INTERLEAVED: tl.constexpr, CODES: tl.constexpr,
           D: tl.constexpr, V: tl.constexpr):  # fmt: skip
    row, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, D)
    position = tl.load(positions_ptr + row).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    x_ptr, cos, sin = qkv_ptr + row * row_width + head * key_dim, cos_ptr + position * half, sin_ptr + position * half
    if head < num_heads:
        x = _turned(x_ptr, q_norm_ptr, cos, sin, key_dim, half, eps, 1.0, HAS_Q_NORM, INTERLEAVED, D)
        tl.store(q_ptr + (row * num_heads + head) * key_dim + d, x.to(q_ptr.dtype.element_ty), d < key_dim)
    elif slot >= 0:
        group = head - num_heads
        if group < num_kv_heads:
            x = _turned(x_ptr, k_norm_ptr, cos, sin, key_dim, half, eps, 1.0, HAS_K_NORM, INTERLEAVED, D)
            x = x.to(qkv_ptr.dtype.element_ty).to(tl.float32)
            _keep(keys_ptr, key_scales_ptr, slot * num_kv_heads + group, x, d, key_dim, CODES)
        else:
            v, group = tl.arange(0, V), group - num_kv_heads
            first = (num_heads + num_kv_heads) * key_dim + group * value_dim
            value = tl.load(qkv_ptr + row * row_width + first + v, v < value_dim, 0.0).to(tl.float32)
            _keep(values_ptr, value_scales_ptr, slot * num_kv_heads + group, value, v, value_dim, CODES)


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, back: bool = False) -> Tensor:
    """x [..., N, D] rotated, or rotated back; cos and sin [..., R], or to be broadcast to that."""
    num_heads, width, half = x.shape[-2], x.shape[-1], cos.shape[-1]
    rows_TND = x.reshape(-1, num_heads, width).contiguous()
    table = (*x.shape[:-2], half)
    cos_TR, sin_TR = (each.expand(table).reshape(-1, half).contiguous() for each in (cos, sin))
    out_TND = torch.empty_like(rows_TND)
    launch(
        _turn, (rows_TND.shape[0], num_heads), rows_TND, cos_TR, sin_TR, out_TND, num_heads, width, half,
        -1.0 if back else 1.0, INTERLEAVED=interleaved, D=power_of_two(width), num_warps=1,
    )  # fmt: skip
    return out_TND.view(x.shape)


def cached_tables(cache: ReferenceCache, layer: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Keys, values and the scales of both, as kernels read and write them: codes as bytes, values perhaps in keys."""
    keys = cache.keys[layer]
    values = keys if cache.spec.values_in_keys else cache.values[layer]
    if cache.spec.storage == "auto":
        return keys, values, None, None
    scales = cache.key_scales[layer]
    value_scales = scales if cache.spec.values_in_keys else cache.value_scales[layer]
    return keys.view(torch.uint8), values.view(torch.uint8), scales, value_scales


def rotate_and_store(
    qkv_TX: Tensor, cache: ReferenceCache, layer: int, batch: AttentionBatch, heads: HeadRows
) -> Tensor:
    """See `antiphon.kernels.api.KernelBackend`."""
    spec, num_rows, rotary = cache.spec, qkv_TX.shape[0], heads.rotary
    qkv_TX = qkv_TX.contiguous()
    q_TND = torch.empty((num_rows, heads.num_heads, spec.key_dim), dtype=qkv_TX.dtype, device=qkv_TX.device)
    keys, values, key_scales, value_scales = cached_tables(cache, layer)
    num_parts = heads.num_heads + spec.num_kv_heads * (1 if spec.values_in_keys else 2)
    q_norm, k_norm = heads.q_norm_D, heads.k_norm_D
    launch(
        _store, (num_rows, num_parts), qkv_TX, q_norm, k_norm, rotary.cos, rotary.sin, batch.positions_T, batch.slots_T,
        q_TND, keys,
        values, key_scales, value_scales, qkv_TX.shape[1], heads.num_heads, spec.num_kv_heads, spec.key_dim,
        spec.value_dim, rotary.cos.shape[1], heads.eps, HAS_Q_NORM=q_norm is not None, HAS_K_NORM=k_norm is not None,
        INTERLEAVED=rotary.interleaved, CODES=spec.storage, D=power_of_two(spec.key_dim),
        V=power_of_two(spec.value_dim), num_warps=1 if spec.key_dim <= 256 else 4,
    )  # fmt: skip
    return q_TND
