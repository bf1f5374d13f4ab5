"""Linear layers and experts of the Triton back-end against the reference's, on odd sizes and in every format."""

import pytest
import torch

from antiphon.kernels.api import ExpertFormats, ExpertShape
from antiphon.kernels.quantized import QuantizedWeight, WeightFormat
from antiphon.kernels.reference import ReferenceBackend
from antiphon.kernels.triton import load
from antiphon.models.rounding import quantize
from antiphon.specs.model import RouterSpec

FORMATS = {
    "fp8 by blocks": WeightFormat(codes="fp8", columns_per_scale=16, rows_per_scale=8),
    "int8 by rows": WeightFormat(codes="int8", columns_per_scale=None, scale_dtype=torch.bfloat16),
    "int4": WeightFormat(codes="int4", columns_per_scale=32, scale_dtype=torch.float16),
    "int4 with zeros": WeightFormat(codes="int4", columns_per_scale=20, offset="zeros"),
    "int4 with offsets": WeightFormat(codes="int4", columns_per_scale=32, offset="offsets"),
    "mxfp4": WeightFormat(codes="mxfp4", columns_per_scale=32, scale_dtype=torch.float8_e8m0fnu),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def made(rows: int, columns: int, form: WeightFormat) -> QuantizedWeight:
    """A random matrix in that format."""
    weight = torch.randn(rows, columns) * 0.2
    if form.rows_per_scale == 1:
        return quantize(weight, form)
    scales = torch.rand(form.scale_shape(rows, columns)) * 0.01 + 0.001
    return QuantizedWeight(format=form, num_columns=columns, codes=(weight * 60).to(torch.float8_e4m3fn), scales=scales)


def near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.cpu().float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(0, 7, 5), (1, 1, 33), (19, 70, 37)])
def test_linear(rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
    mine, theirs = load("backend").TritonBackend(device, dtype), ReferenceBackend("cpu", dtype)
    x, weight, bias = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs) * 0.2, torch.randn(outputs)
    residual = torch.randn(rows, outputs).to(dtype)
    packed, expected = mine.pack_linear(weight, bias), theirs.pack_linear(weight, bias)
    assert packed.num_bytes == expected.num_bytes
    found = mine.linear(x.to(device), packed, residual_TO=residual.to(device))
    near(found, theirs.linear(x, expected, residual_TO=residual), dtype)
    logits = mine.linear(x.to(device), packed, out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    near(logits, theirs.linear(x, expected, out_dtype=torch.float32), torch.float32)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("inputs", [75, 128])
def test_linear_in_codes(inputs: int, form: WeightFormat, device: torch.device) -> None:
    mine, theirs = load("backend").TritonBackend(device, torch.float32), ReferenceBackend("cpu", torch.float32)
    weight, x = made(20, inputs, form), torch.randn(3, inputs)
    packed = mine.pack_linear(weight)
    assert packed.num_bytes == weight.num_bytes
    near(mine.linear(x.to(device), packed), theirs.linear(x, theirs.pack_linear(weight)), torch.float32)


@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_oai"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "experts"), [(0, 5), (1, 1), (37, 5)])
def test_experts(rows: int, experts: int, dtype: torch.dtype, activation: str, device: torch.device) -> None:
    """-1 means held elsewhere, also for all choices of a row; one of the five experts has no row."""
    mine, theirs = load("backend").TritonBackend(device, dtype), ReferenceBackend("cpu", dtype)
    biased = activation == "swiglu_oai"
    shape = ExpertShape(experts, 20, 35, activation, alpha=1.3, limit=0.5, has_bias=biased)
    held = [backend.new_experts(shape) for backend in (mine, theirs)]
    assert held[0].num_bytes == held[1].num_bytes
    for index in range(experts):
        matrices = [torch.randn(size) * 0.2 for size in ((35, 20), (35, 20), (20, 35))]
        biases = [torch.randn(size) for size in (35, 35, 20)]
        for each in held:
            each.set_expert(index, *matrices)
            if biased:
                each.set_bias(index, *biases)
    choices = torch.tensor([-1, 0, 2, 4] if experts == 5 else [-1, 0])
    top_k = len(choices) - 1
    ids = torch.stack([choices[torch.randperm(top_k + 1)[:top_k]] for _ in range(max(1, rows))])[:rows].int()
    if rows > 1:
        ids[0] = -1
    x, weights = torch.randn(rows, 20).to(dtype), torch.rand(rows, top_k)
    found = mine.grouped_ffn(x.to(device), ids.to(device), weights.to(device), held[0])
    near(found, theirs.grouped_ffn(x, ids, weights, held[1]), dtype)
    if rows:
        alone = mine.grouped_ffn(x[-1:].to(device), ids[-1:].to(device), weights[-1:].to(device), held[0])
        if dtype == torch.float32 and device.type == "cpu":  # NumPy's products of the interpreter round by place
            near(alone[0], found[-1].cpu(), dtype)
        else:
            assert torch.equal(alone[0], found[-1])


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_experts_in_codes(form: WeightFormat, device: torch.device) -> None:
    """What the gate counted is what the experts' rows are placed by."""
    mine, theirs = load("backend").TritonBackend(device, torch.float32), ReferenceBackend("cpu", torch.float32)
    shape, formats = ExpertShape(3, 40, 64, "silu"), ExpertFormats(gate_up=form, down=form)
    held = [backend.new_experts(shape, formats) for backend in (mine, theirs)]
    for index in range(3):
        matrices = made(64, 40, form), made(64, 40, form), made(40, 64, form)
        for each in held:
            each.set_expert(index, *matrices)
    assert held[0].num_bytes == held[1].num_bytes
    with pytest.raises(ValueError, match="gate is stored as floats"):
        held[0].set_expert(0, torch.ones(64, 40), *matrices[1:])
    x = torch.randn(9, 40)
    router = RouterSpec(num_experts=3, top_k=2)
    gate = torch.randn(3, 40)
    ids, weights = mine.gate(x.to(device), mine.pack_linear(gate), None, router)
    found = mine.grouped_ffn(x.to(device), ids, weights, held[0])
    near(found, theirs.grouped_ffn(x, ids.cpu(), weights.cpu(), held[1]), torch.float32)
