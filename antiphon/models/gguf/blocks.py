"""Rows of ggml's blocks as codes and scales, every value as ggml computes it in float32.

A row is whole blocks, each with its scales in front of or behind its numbers (ggml-common.h). They become one matrix of
codes and one of scales (`kernels/quantized`):

    Q8_0, Q5_0         int8, a float16 a group of 32            Q4_0        int4, a float16 a group of 32
    Q5_1               the same with a minimum                  Q4_1        the same with a minimum
    Q5_K               int8, groups of 32, with a minimum       Q4_K        int4, groups of 32, with a minimum
    Q6_K               int8, groups of 16                       MXFP4       mxfp4, an exponent a group of 32

The K types have 6-bit (Q6_K: 8-bit) scales in units of a float16 for 256 numbers. The product of both is exact in
float32 and is what is kept, so nothing is rounded: 5 to 6 bits become 8, which the next multiplication reads fastest.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from antiphon.kernels.quantized import QuantizedWeight, WeightFormat
from antiphon.models.gguf.container import BlockType

_NIBBLE = 15


def read_blocks(kind: BlockType, data: Tensor, num_columns: int) -> QuantizedWeight:
    """The rows [R, bytes of a row] of a type with blocks, as a new matrix [R, num_columns]."""
    blocks = data.reshape(data.shape[0], num_columns // kind.size, kind.num_bytes)
    return _READERS[kind.name](blocks, num_columns)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """The float16 at a byte of every block, [R, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def _int4(codes: Tensor, num_columns: int, scales: Tensor, offsets: Tensor | None = None) -> QuantizedWeight:
    return _made(codes.reshape(-1, num_columns // 2), num_columns, scales, offsets, 32, "int4")


def _made(
    codes: Tensor, num_columns: int, scales: Tensor, offsets: Tensor | None, per_scale: int, kind: str
) -> QuantizedWeight:
    num_rows = codes.shape[0]
    form = WeightFormat(
        codes=kind,  # type: ignore[arg-type]
        columns_per_scale=per_scale,
        scale_dtype=scales.dtype,
        offset="none" if offsets is None else "offsets",
    )
    return QuantizedWeight(
        format=form,
        num_columns=num_columns,
        codes=codes.reshape(num_rows, -1),
        scales=scales.reshape(num_rows, -1),
        offsets=None if offsets is None else offsets.reshape(num_rows, -1),
    )


def _two_halves(packed: Tensor) -> Tensor:
    """Low nibbles of all bytes, then high ones: [..., 16] to [..., 32]."""
    return torch.cat((packed & _NIBBLE, packed >> 4), dim=-1)


def _neighbours(packed: Tensor) -> Tensor:
    """Bytes [..., n] that hold number j low and number j + n high, as bytes that hold neighbours: those of the low
    halves, then those of the high ones. Eight bytes at a time: PyTorch is slow with single ones."""
    words, half = packed.contiguous().view(torch.int64), packed.shape[-1] // 2
    out = torch.empty(packed.shape, dtype=torch.uint8)
    for start, shift in ((0, 0), (half, 4)):
        nibbles = words >> shift & 0x0F0F0F0F0F0F0F0F
        pairs = nibbles.bitwise_or_(nibbles >> 4).bitwise_and_(0x00FF00FF00FF00FF)
        out[..., start : start + half].copy_(pairs.view(torch.int16))
    return out


def _q8_0(blocks: Tensor, num_columns: int) -> QuantizedWeight:
    codes = blocks[..., 2:].contiguous().view(torch.int8).view(-1, num_columns)
    return _made(codes, num_columns, _halves(blocks, 0), None, 32, "int8")


def _q4_0(blocks: Tensor, num_columns: int) -> QuantizedWeight:
    return _int4(_neighbours(blocks[..., 2:]), num_columns, _halves(blocks, 0))


def _q4_1(blocks: Tensor, num_columns: int) -> QuantizedWeight:
    return _int4(_neighbours(blocks[..., 4:]), num_columns, _halves(blocks, 0), _halves(blocks, 2).float())


def _fifth_bits(stored: Tensor) -> Tensor:
    """The bits of 4 bytes as the fifth bits of 32 numbers: [..., 4] to [..., 32]."""
    bits = stored.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2) << 4


def _q5_0(blocks: Tensor, num_columns: int) -> QuantizedWeight:
    codes = (_two_halves(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])).view(torch.int8) - 16
    return _made(codes.reshape(-1, num_columns), num_columns, _halves(blocks, 0), None, 32, "int8")


def _q5_1(blocks: Tensor, num_columns: int) -> QuantizedWeight:
    codes = (_two_halves(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])).view(torch.int8)
    offsets = _halves(blocks, 2).float()
    return _made(codes.reshape(-1, num_columns), num_columns, _halves(blocks, 0), offsets, 32, "int8")


def _mxfp4(blocks: Tensor, num_columns: int) -> QuantizedWeight:
    codes = _neighbours(blocks[..., 1:]).reshape(-1, num_columns // 2)
    scales = blocks[..., 0].contiguous().view(torch.float8_e8m0fnu)
    return _made(codes, num_columns, scales, None, 32, "mxfp4")


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and (negative) minimums of Q4_K and Q5_K, float32 [R, blocks, 8]: six bits each, in 12 bytes."""
    first, second, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (high & _NIBBLE) | first >> 6 << 4), dim=-1)
    minimums = torch.cat((second & 63, (high >> 4) | second >> 6 << 4), dim=-1)
    unit, minimum_unit = _halves(blocks, 0).float().unsqueeze(-1), _halves(blocks, 2).float().unsqueeze(-1)
    return unit * scales, -minimum_unit * minimums


def _by_chunks(packed: Tensor) -> Tensor:
    """Of each 32 bytes the low nibbles, then the high ones: [..., 128] to [..., 256]."""
    return _two_halves(packed.reshape(*packed.shape[:-1], 4, 32)).flatten(-2)


def _q4_k(blocks: Tensor, num_columns: int) -> QuantizedWeight:
    scales, offsets = _k_scales(blocks)
    return _int4(_neighbours(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)), num_columns, scales, offsets)


def _q5_k(blocks: Tensor, num_columns: int) -> QuantizedWeight:
    scales, offsets = _k_scales(blocks)
    fifth = blocks[..., 16:48].unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1) & 1
    codes = (_by_chunks(blocks[..., 48:]) | fifth.flatten(-2) << 4).view(torch.int8)
    return _made(codes.reshape(-1, num_columns), num_columns, scales, offsets, 32, "int8")


def _q6_k(blocks: Tensor, num_columns: int) -> QuantizedWeight:
    """Of each half of a block: 64 bytes of low nibbles, 32 of two high bits for four numbers."""
    axes = blocks.shape[:-1]
    low, high = blocks[..., :128].reshape(*axes, 2, 64), blocks[..., 128:192].reshape(*axes, 2, 1, 32)
    nibbles = _two_halves(low).view(*axes, 2, 4, 32)
    two_bits = high >> torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1) & 3
    codes = (nibbles | two_bits << 4).view(torch.int8) - 32
    scales = blocks[..., 192:208].view(torch.int8).float() * _halves(blocks, 208).float().unsqueeze(-1)
    return _made(codes.reshape(-1, num_columns), num_columns, scales, None, 16, "int8")


_READERS: dict[str, Callable[[Tensor, int], QuantizedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
