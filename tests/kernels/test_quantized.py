"""Weights in 4 and 8 bits as plain tensors: values by hand, slices, and the reference back-end's products."""

from dataclasses import replace
from typing import Literal

import pytest
import torch

from antiphon.kernels.api import ExpertFormats, ExpertShape
from antiphon.kernels.quantized import QuantizedWeight, WeightFormat, pack_nibbles, unpack_nibbles
from antiphon.kernels.reference import ReferenceBackend
from antiphon.kernels.stacked import StackedWeight
from antiphon.models.rounding import quantize

FORMATS = {
    "int8": WeightFormat(codes="int8", columns_per_scale=None),
    "int8 groups": WeightFormat(codes="int8", columns_per_scale=32, scale_dtype=torch.bfloat16),
    "int8 zeros": WeightFormat(codes="int8", columns_per_scale=128, offset="zeros"),
    "int4": WeightFormat(codes="int4", columns_per_scale=32, scale_dtype=torch.float16),
    "int4 zeros": WeightFormat(codes="int4", columns_per_scale=128, scale_dtype=torch.bfloat16, offset="zeros"),
    "int4 offsets": WeightFormat(codes="int4", columns_per_scale=32, offset="offsets"),
    "mxfp4": WeightFormat(codes="mxfp4", columns_per_scale=32, scale_dtype=torch.float8_e8m0fnu),
    "fp8": WeightFormat(codes="fp8", columns_per_scale=None),
}


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> WeightFormat:
    return FORMATS[request.param]


def fp8_blocks(rows: int, columns: int) -> QuantizedWeight:
    """Blocks of 128 x 128 as DeepSeek publishes them, or one scale for all where the matrix is smaller."""
    form = WeightFormat(codes="fp8", columns_per_scale=128, rows_per_scale=128)
    codes = (torch.randn(rows, columns) * 50).to(torch.float8_e4m3fn)
    return QuantizedWeight(
        format=form, num_columns=columns, codes=codes, scales=torch.rand(form.scale_shape(rows, columns)) + 0.5
    )


def test_values_by_hand() -> None:
    nibbles = torch.tensor([[0, 7, 8, 15, 9]], dtype=torch.uint8)
    codes = pack_nibbles(nibbles)
    assert torch.equal(unpack_nibbles(codes)[:, :5], nibbles)
    int4 = WeightFormat(codes="int4", columns_per_scale=4)
    scales = torch.tensor([[2.0, 0.5]])
    weight = QuantizedWeight(format=int4, num_columns=5, codes=codes, scales=scales)
    assert weight.dequantize().tolist() == [[-16.0, -2.0, 0.0, 14.0, 0.5]]
    zeros = torch.tensor([[15, 0]], dtype=torch.uint8)
    weight = replace(weight, format=replace(int4, offset="zeros"), zeros=zeros)
    assert weight.dequantize().tolist() == [[-30.0, -16.0, -14.0, 0.0, 4.5]]
    offsets = torch.tensor([[-1.0, 3.0]])
    weight = replace(weight, format=replace(int4, offset="offsets"), zeros=None, offsets=offsets)
    assert weight.dequantize().tolist() == [[-1.0, 13.0, 15.0, 29.0, 7.5]]
    exponents = torch.tensor([[126]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    mxfp4 = WeightFormat(codes="mxfp4", columns_per_scale=32, scale_dtype=torch.float8_e8m0fnu)
    weight = QuantizedWeight(format=mxfp4, num_columns=5, codes=codes, scales=exponents)
    assert weight.dequantize().tolist() == [[0.0, 3.0, -0.0, -3.0, -0.25]]


def test_blocks_of_rows_and_columns() -> None:
    weight = fp8_blocks(200, 300)
    expected = weight.codes.float() * weight.scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(weight.dequantize(), expected)
    for start, end in ((0, 128), (128, 200), (30, 190)):
        assert torch.equal(weight.rows(start, end).dequantize(), expected[start:end])


@pytest.mark.parametrize("columns", [96, 129, 200])
def test_slices(form: WeightFormat, columns: int) -> None:
    torch.manual_seed(columns)
    weight = quantize(torch.randn(40, columns), form)
    whole = weight.dequantize()
    assert weight.num_bytes == form.num_bytes(40, columns)
    assert torch.equal(weight.rows(8, 19).dequantize(), whole[8:19])
    for start, end in ((0, 64), (32, columns), (48, 90), (51, 77), (columns - 1, columns)):
        assert torch.equal(weight.columns(start, end).dequantize(), whole[:, start:end]), (start, end)


@pytest.mark.parametrize("offset", ["none", "offsets"])
def test_whole_scales_with_units(offset: Literal["none", "offsets"]) -> None:
    """As GGUF's K types: scale and offset are products of a whole number and a float16 of 256 columns."""
    torch.manual_seed(0)
    form = WeightFormat(codes="int8", columns_per_scale=32, scale_dtype=torch.int8, offset=offset)
    rows, columns = 5, 600
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    scales, offsets = torch.randint(-128, 128, (2, rows, 19), dtype=torch.int8)
    units = torch.randn(form.units_shape(rows, columns)).half()
    weight = QuantizedWeight(
        format=form, num_columns=columns, codes=codes, scales=scales, units=units,
        offsets=offsets if offset == "offsets" else None,
    )  # fmt: skip
    each = 2 if offset == "offsets" else 1
    expected = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            group, unit = column // 32, column // 256 * each
            value = codes[row, column].float() * (scales[row, group].float() * units[row, unit].float())
            if offset == "offsets":
                value += offsets[row, group].float() * units[row, unit + 1].float()
            expected[row, column] = value
    assert torch.equal(weight.dequantize(), expected)
    assert weight.num_bytes == form.num_bytes(rows, columns)
    assert torch.equal(weight.rows(1, 4).dequantize(), expected[1:4])
    assert torch.equal(weight.own_copy(torch.device("cpu")).dequantize(), expected)
    for start, end in ((0, 100), (256, 600), (256, 300), (512, 600), (32, 500), (51, 53)):
        part = weight.columns(start, end)
        assert part.format.has_units == (start % 256 == 0)
        assert torch.equal(part.dequantize(), expected[:, start:end]), (start, end)
    held = StackedWeight((1, 1, rows, columns), form, torch.device("cpu"), torch.bfloat16, has_bias=False)
    held.set(0, 0, weight, "weight")  # as GPUs read it
    assert held.scales is not None
    assert torch.equal(held.scales[0, 0], weight.with_float_scales().scales)
    with pytest.raises(ValueError, match=r"units are .* expected"):
        replace(weight, units=units[:, 1:])
    with pytest.raises(ValueError, match="units with scales in"):
        replace(weight, units=None)
    with pytest.raises(ValueError, match="int8 scales take one row, a part of 256 columns"):
        replace(form, columns_per_scale=96)


def test_rounding_is_to_nearest(form: WeightFormat) -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 256)
    error = (quantize(weight, form).dequantize() - weight).norm() / weight.norm()
    assert error < {"int8": 0.02, "int4": 0.13, "mxfp4": 0.16, "fp8": 0.04}[form.codes]
    assert torch.equal(quantize(torch.zeros(3, 40), form).dequantize(), torch.zeros(3, 40))


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_reference_products(form: WeightFormat, rows: int) -> None:
    torch.manual_seed(rows)
    backend, experts = ReferenceBackend(), 3
    gate, up, down = (
        [quantize(torch.randn(shape) * 0.1, form) for _ in range(experts)] for shape in ((40, 96), (40, 96), (96, 40))
    )
    shape = ExpertShape(experts, 96, 40, "silu")
    packed = backend.new_experts(shape, ExpertFormats(gate_up=form, down=form))
    plain = backend.new_experts(shape)
    for index, matrices in enumerate(zip(gate, up, down, strict=True)):
        packed.set_expert(index, *matrices)
        plain.set_expert(index, *(matrix.dequantize() for matrix in matrices))
    assert packed.num_bytes < plain.num_bytes
    x, ids = torch.randn(rows, 96), torch.randint(-1, experts, (rows, 2))
    weights = torch.rand(rows, 2)
    assert torch.equal(backend.grouped_ffn(x, ids, weights, packed), backend.grouped_ffn(x, ids, weights, plain))
    linear = backend.pack_linear(gate[0], torch.ones(40))
    floats = backend.pack_linear(gate[0].dequantize(), torch.ones(40))
    assert torch.equal(backend.linear(x, linear), backend.linear(x, floats))


def test_errors_name_what_was_given(form: WeightFormat) -> None:
    weight = quantize(torch.randn(8, 96), form)
    with pytest.raises(ValueError, match=r"scales are .* expected"):
        replace(weight, scales=weight.scales[:4])
    experts = ReferenceBackend().new_experts(ExpertShape(1, 96, 8, "silu"), ExpertFormats(gate_up=form))
    with pytest.raises(ValueError, match=f"gate is stored as floats, expected {form}$"):
        experts.set_expert(0, weight.dequantize(), weight, torch.zeros(96, 8))
    with pytest.raises(ValueError, match=f"down is stored as {form}, expected floats"):
        experts.set_expert(0, weight, weight, quantize(torch.zeros(96, 8), form))
    with pytest.raises(ValueError, match="fp8 codes take no zeros"):
        WeightFormat(codes="fp8", columns_per_scale=None, offset="zeros")


def test_orders_and_weights_that_cannot_be_are_refused() -> None:
    form = WeightFormat(codes="int8", columns_per_scale=8)
    parts = {
        "format": form,
        "num_columns": 16,
        "codes": torch.ones(4, 16, dtype=torch.int8),
        "scales": torch.ones(4, 2),
    }
    for order in (torch.arange(16) + 1, torch.zeros(16, dtype=torch.int64), torch.arange(16, dtype=torch.int32)):
        with pytest.raises(ValueError, match="an order"):
            QuantizedWeight(**parts, order=order)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="quantize takes finite numbers"):
        quantize(torch.tensor([[1.0, float("nan")]]), form)
    with pytest.raises(ValueError, match="a whole number of at least 1"):
        WeightFormat(codes="int8", columns_per_scale=8.0)  # type: ignore[arg-type]
    assert quantize(torch.zeros(0, 8), form).shape == (0, 8)
