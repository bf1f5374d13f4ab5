"""Native products of quantized weights against plain products of what the weights multiply out to."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from antiphon.kernels.api import ExpertFormats, ExpertShape
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.quantized import QuantizedWeight, WeightFormat
from antiphon.kernels.reference import ReferenceBackend
from antiphon.models.rounding import quantize

E8M0 = torch.float8_e8m0fnu
FORMATS = {
    "int8 row": WeightFormat(codes="int8", columns_per_scale=None),
    "int8 g32": WeightFormat(codes="int8", columns_per_scale=32, scale_dtype=torch.float16),
    "int8 g128 zeros": WeightFormat(codes="int8", columns_per_scale=128, scale_dtype=torch.bfloat16, offset="zeros"),
    "int8 g16": WeightFormat(codes="int8", columns_per_scale=16),
    "int8 g16 offsets": WeightFormat(codes="int8", columns_per_scale=16, offset="offsets"),
    "int8 g16 units": WeightFormat(codes="int8", columns_per_scale=16, scale_dtype=torch.int8),
    "int8 g5": WeightFormat(codes="int8", columns_per_scale=5),
    "int4 row": WeightFormat(codes="int4", columns_per_scale=None, scale_dtype=torch.float16),
    "int4 g32": WeightFormat(codes="int4", columns_per_scale=32, scale_dtype=torch.bfloat16),
    "int4 g64 zeros": WeightFormat(codes="int4", columns_per_scale=64, scale_dtype=torch.float16, offset="zeros"),
    "int4 g128 zeros": WeightFormat(codes="int4", columns_per_scale=128, offset="zeros"),
    "int4 g32 offsets": WeightFormat(codes="int4", columns_per_scale=32, offset="offsets"),
    "int4 g32 units": WeightFormat(codes="int4", columns_per_scale=32, scale_dtype=torch.int8, offset="offsets"),
    "int4 g12": WeightFormat(codes="int4", columns_per_scale=12),
    "mxfp4": WeightFormat(codes="mxfp4", columns_per_scale=32, scale_dtype=E8M0),
    "mxfp4 g4": WeightFormat(codes="mxfp4", columns_per_scale=4, scale_dtype=E8M0),
    "fp8 tensor": WeightFormat(codes="fp8", columns_per_scale=None, rows_per_scale=None),
    "fp8 row": WeightFormat(codes="fp8", columns_per_scale=None, scale_dtype=torch.bfloat16),
    "fp8 blocks": WeightFormat(codes="fp8", columns_per_scale=128, rows_per_scale=128),
}
DTYPES = [torch.bfloat16, torch.float32]
LINEAR_SIZES = [  # rows, outputs, inner
    (0, 32, 32),
    (1, 1, 1),
    (1, 65, 96),
    (2, 100, 70),
    (3, 48, 200),
    (4, 33, 31),
    (7, 64, 1056),
    (40, 130, 640),
]
EXPERT_SIZES = [  # experts, hidden, intermediate, rows, top_k
    (1, 96, 40, 1, 1),
    (4, 64, 40, 0, 2),
    (3, 17, 19, 4, 3),
    (5, 96, 72, 30, 2),
]


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> WeightFormat:
    return FORMATS[request.param]


def stored(rows: int, columns: int, form: WeightFormat) -> QuantizedWeight:
    """A random matrix in this format; blocks of rows get random scales, and so do groups whose scales have units."""
    weight = torch.randn(rows, columns) * columns**-0.5
    if form.has_units:
        floats = quantize(weight, form.with_float_scales())
        whole = {"scales": torch.randint(-32, 64, floats.scales.shape, dtype=torch.int8)}
        if form.offset == "offsets":
            whole["offsets"] = torch.randint(0, 64, floats.scales.shape, dtype=torch.int8)
        units = (torch.rand(form.units_shape(rows, columns)) * 2e-3).half()
        return replace(floats, format=form, units=units, **whole)
    if form.rows_per_scale == 1:
        return quantize(weight, form)
    codes = (weight * 100).to(torch.float8_e4m3fn)
    scales = torch.rand(form.scale_shape(rows, columns)) * 0.02 + 0.001
    scales = scales.to(form.scale_dtype)
    return QuantizedWeight(format=form, num_columns=columns, codes=codes, scales=scales)


def assert_near(y: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    largest = max(1.0, float(expected.abs().amax())) if expected.numel() else 1.0
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance * 0.3 * largest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(isa: str, form: WeightFormat, dtype: torch.dtype) -> None:
    backend = CpuBackend(dtype)
    torch.manual_seed(0)
    for rows, outputs, inner in LINEAR_SIZES:
        weight = stored(outputs, inner, form)
        bias, residual = torch.randn(outputs).to(dtype), torch.randn(rows, outputs).to(dtype)
        x = torch.randn(rows, inner).to(dtype)
        packed = backend.pack_linear(weight, bias)
        expected = x.double() @ weight.dequantize().double().T + bias.double() + residual.double()
        y = backend.linear(x, packed, residual_TO=residual, out_dtype=torch.float32)
        assert_near(y, expected, torch.float32)  # rows and weights are exact, sums in float32
        assert torch.equal(backend.linear(x, packed, residual_TO=residual), y.to(dtype))


def test_the_same_bits_as_float32_weights(isa: str, form: WeightFormat) -> None:
    """The product is that of the float32 kernels with the weights multiplied out, where these are exact."""
    torch.manual_seed(3)
    if not form.has_units and form.scale_dtype != E8M0:
        form = replace(form, scale_dtype=torch.bfloat16)
    if form.offset == "offsets":
        pytest.skip("scale * code + offset is rounded once by the kernels, twice by PyTorch")
    backend, weight = CpuBackend(torch.float32), stored(80, 344, form)
    floats = backend.pack_linear(weight.dequantize())
    packed, x = backend.pack_linear(weight), torch.randn(40, 344)
    assert torch.equal(backend.linear(x, packed), backend.linear(x, floats))


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(isa: str, form: WeightFormat, dtype: torch.dtype) -> None:
    backend, exact = CpuBackend(dtype), ReferenceBackend(dtype=torch.float64)
    torch.manual_seed(0)
    for num_experts, hidden, intermediate, rows, top_k in EXPERT_SIZES:
        shape = ExpertShape(num_experts, hidden, intermediate, "silu")
        held = backend.new_experts(shape, ExpertFormats(gate_up=form, down=form))
        expected = exact.new_experts(shape)
        sizes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
        for index in range(num_experts):
            gate, up, down = (stored(*size, form) for size in sizes)
            held.set_expert(index, gate, up, down)
            expected.set_expert(index, gate.dequantize(), up.dequantize(), down.dequantize())
        ids = torch.rand(rows, num_experts).argsort(1)[:, :top_k].int()
        ids[torch.rand(rows, top_k) < 0.2] = -1
        x, weights = torch.randn(rows, hidden).to(dtype), torch.rand(rows, top_k)
        y = backend.grouped_ffn(x, ids, weights, held)
        assert y.dtype == dtype
        assert_near(y, exact.grouped_ffn(x.double(), ids, weights, expected), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_and_up_in_one_format_and_down_in_another(isa: str, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    backend, exact = CpuBackend(dtype), ReferenceBackend(dtype=torch.float64)
    shape, (gate, up, down) = ExpertShape(1, 96, 40, "silu"), (torch.randn(3, 96, 40) * 0.1).to(dtype)
    x = torch.randn(9, 96).to(dtype)
    ids, weights = torch.zeros(9, 1, dtype=torch.int32), torch.ones(9, 1)
    for gate_up_form, down_form in ((None, "int4 g32"), ("mxfp4", None), ("int8 row", "int4 g64 zeros")):
        formats = ExpertFormats(gate_up=FORMATS.get(gate_up_form or ""), down=FORMATS.get(down_form or ""))
        wide = [gate.T, up.T] if formats.gate_up is None else [stored(40, 96, formats.gate_up) for _ in range(2)]
        narrow = down if formats.down is None else stored(96, 40, formats.down)
        held, expected = backend.new_experts(shape, formats), exact.new_experts(shape)
        held.set_expert(0, wide[0], wide[1], narrow)
        floats = [part if isinstance(part, Tensor) else part.dequantize() for part in (*wide, narrow)]
        expected.set_expert(0, floats[0], floats[1], floats[2])
        assert_near(
            backend.grouped_ffn(x, ids, weights, held), exact.grouped_ffn(x.double(), ids, weights, expected), dtype
        )


def test_a_rows_bits_do_not_depend_on_its_neighbours(isa: str, num_threads: int, form: WeightFormat) -> None:
    torch.manual_seed(0)
    backend = CpuBackend(torch.bfloat16)
    packed = backend.pack_linear(stored(80, 584, form))
    x = torch.randn(300 if "emulated" not in isa else 40, 584).bfloat16()
    whole = backend.linear(x, packed, out_dtype=torch.float32)
    for start, count in [(0, 1), (17, 1), (3, 2), (6, 3), (9, 4), (5, 6), (1, 7), (20, 13), (2, 33)]:
        part = backend.linear(x[start : start + count], packed, out_dtype=torch.float32)
        assert torch.equal(part, whole[start : start + count]), (start, count)


def test_slices_of_a_weight(form: WeightFormat) -> None:
    """As tensor parallelism cuts it, groups that straddle a border included."""
    torch.manual_seed(1)
    backend, weight = CpuBackend(torch.float32), stored(96, 200, form)
    x = torch.randn(3, 200)
    for start, end in ((0, 100), (100, 200), (24, 120), (51, 52)):
        packed = backend.pack_linear(weight.columns(start, end).rows(30, 90))
        expected = x[:, start:end].double() @ weight.dequantize()[30:90, start:end].double().T
        assert_near(backend.linear(x[:, start:end], packed), expected, torch.float32)


def test_packed_bytes_are_those_of_the_format() -> None:
    """Nothing is multiplied out in memory: at sizes that need no padding, what the format says."""
    backend = CpuBackend(torch.bfloat16)
    for name in ("int8 row", "int8 g32", "int4 g32", "int4 g64 zeros", "int4 g32 units", "mxfp4", "fp8 row"):
        form = FORMATS[name]
        packed = backend.pack_linear(stored(64, 512, form))
        page = 16384
        assert packed.num_bytes - form.num_bytes(64, 512) < page, name
        held = backend.new_experts(ExpertShape(8, 512, 128, "silu"), ExpertFormats(gate_up=form, down=form))
        expected = 8 * (2 * form.num_bytes(128, 512) + form.num_bytes(512, 128))
        assert held.num_bytes < 1.02 * expected + page, name  # a panel of 16 rows ends at a multiple of 64 bytes


def test_damaged_weights_are_refused() -> None:
    backend = CpuBackend(torch.bfloat16)
    weight = stored(8, 32, FORMATS["fp8 row"])
    weight.codes.view(torch.uint8)[3, 5] = 0x7F
    with pytest.raises(ValueError, match="weight holds values that are not finite numbers"):
        backend.pack_linear(weight)
    weight = stored(8, 32, FORMATS["mxfp4"])
    weight.scales.view(torch.uint8)[0] = 255
    with pytest.raises(ValueError, match="weight holds values that are not finite numbers"):
        backend.pack_linear(weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int8 g32", "int4 g32", "int4 g64 zeros"])
def test_experts_with_columns_in_orders_of_their_own(isa: str, name: str, dtype: torch.dtype) -> None:
    """Each expert another; one has none."""
    torch.manual_seed(4)
    backend, exact, form = CpuBackend(dtype), ReferenceBackend(dtype=torch.float64), FORMATS[name]
    shape = ExpertShape(4, 96, 64, "silu")
    held = backend.new_experts(shape, ExpertFormats(gate_up=form, down=form, ordered=True))
    expected = exact.new_experts(shape)
    for index in range(4):
        order = None if index == 2 else torch.randperm(96)
        gate, up = (replace(stored(64, 96, form), order=order) for _ in range(2))
        down = stored(96, 64, form)
        held.set_expert(index, gate, up, down)
        expected.set_expert(index, gate.dequantize(), up.dequantize(), down.dequantize())
    for rows in (0, 1, 5, 70):
        ids = torch.rand(rows, 4).argsort(1)[:, :2].int()
        x, weights = torch.randn(rows, 96).to(dtype), torch.rand(rows, 2)
        y = backend.grouped_ffn(x, ids, weights, held)
        assert_near(y, exact.grouped_ffn(x.double(), ids, weights, expected), dtype)
        for row in range(min(rows, 5)):
            alone = backend.grouped_ffn(x[row : row + 1], ids[row : row + 1], weights[row : row + 1], held)
            assert torch.equal(alone[0], y[row])


def test_orders_that_do_not_fit() -> None:
    form = FORMATS["int4 g32"]
    gate, up, down = (stored(*size, form) for size in ((32, 64), (32, 64), (64, 32)))
    shape, order = ExpertShape(1, 64, 32, "silu"), torch.randperm(64)
    ordered = CpuBackend().new_experts(shape, ExpertFormats(gate_up=form, down=form, ordered=True))
    plain = CpuBackend().new_experts(shape, ExpertFormats(gate_up=form, down=form))
    with pytest.raises(ValueError, match="gate and up have their columns in different orders"):
        ordered.set_expert(0, replace(gate, order=order), up, down)
    with pytest.raises(ValueError, match="down has its columns in an order of its own"):
        ordered.set_expert(0, gate, up, replace(down, order=torch.randperm(32)))
    with pytest.raises(ValueError, match="gate has its columns in an order of its own"):
        plain.set_expert(0, replace(gate, order=order), replace(up, order=order), down)
