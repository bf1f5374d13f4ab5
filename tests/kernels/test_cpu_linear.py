"""Packed linear layers against float64 sums, at sizes that need padding and at sizes that cross block borders."""

import pytest
import torch

from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.reference import ReferenceBackend

DTYPES = [torch.bfloat16, torch.float32]
SIZES = [  # rows, outputs, inner
    (0, 32, 32),
    (1, 1, 1),
    (1, 64, 64),
    (2, 100, 70),
    (5, 33, 31),
    (7, 48, 96),
    (9, 128, 1024),
    (12, 16, 32),
    (13, 64, 512),
    (25, 80, 1056),
    (33, 70, 2080),
    (300, 65, 40),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "inner"), SIZES)
def test_product_bias_and_residual(
    isa: str, num_threads: int, dtype: torch.dtype, rows: int, outputs: int, inner: int
) -> None:
    torch.manual_seed(rows + outputs + inner)
    backend = CpuBackend(dtype)
    weight, bias = (torch.randn(outputs, inner) * inner**-0.5).to(dtype), torch.randn(outputs).to(dtype)
    x, residual = torch.randn(rows, inner).to(dtype), torch.randn(rows, outputs).to(dtype)
    expected = x.double() @ weight.double().T
    packed = backend.pack_linear(weight)
    torch.testing.assert_close(
        backend.linear(x, packed, out_dtype=torch.float32).double(), expected, atol=2e-5, rtol=1e-4
    )
    expected += bias.double() + residual.double()
    packed = backend.pack_linear(weight, bias)
    y = backend.linear(x, packed, residual_TO=residual, out_dtype=torch.float32)
    torch.testing.assert_close(y.double(), expected, atol=2e-5, rtol=1e-4)
    assert torch.equal(backend.linear(x, packed, residual_TO=residual), y.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [40, 1024, 1056])
def test_a_rows_bits_do_not_depend_on_its_neighbours(
    isa: str, num_threads: int, dtype: torch.dtype, inner: int
) -> None:
    torch.manual_seed(0)
    backend = CpuBackend(dtype)
    packed = backend.pack_linear((torch.randn(80, inner) * inner**-0.5).to(dtype))
    x = torch.randn(1000 if "emulated" not in isa else 70, inner).to(dtype)
    whole = backend.linear(x, packed, out_dtype=torch.float32)
    for start, count in [(0, 1), (17, 1), (3, 2), (5, 6), (1, 7), (20, 12), (9, 13), (30, 17), (2, 33), (0, 64)]:
        part = backend.linear(x[start : start + count], packed, out_dtype=torch.float32)
        assert torch.equal(part, whole[start : start + count]), (start, count)


def test_strided_rows_and_sliced_weights() -> None:
    backend = CpuBackend(torch.bfloat16)
    weight, x = torch.randn(40, 128).bfloat16(), torch.randn(9, 128).bfloat16()
    packed = backend.pack_linear(weight[:, 32:96])
    expected = x[:, 64:].float() @ weight[:, 32:96].float().T
    torch.testing.assert_close(
        backend.linear(x[:, 64:], packed, out_dtype=torch.float32), expected, atol=1e-3, rtol=1e-4
    )
    turned = torch.randn(64, 9).bfloat16().T
    assert torch.equal(backend.linear(turned, packed), backend.linear(turned.contiguous(), packed))


def test_unwritten_neighbours_do_not_leak() -> None:
    """Odd inner widths read a row's padding, not the next row's NaN."""
    backend = CpuBackend(torch.bfloat16)
    packed = backend.pack_linear(torch.randn(16, 33))
    x = torch.full((4, 40), float("nan")).bfloat16()
    x[:, :33] = 1.0
    assert backend.linear(x[:, :33], packed).isfinite().all()


def test_errors_name_what_was_given() -> None:
    backend = CpuBackend(torch.bfloat16)
    packed = backend.pack_linear(torch.randn(8, 4))
    with pytest.raises(ValueError, match=r"expected torch.bfloat16 rows of width 4, got torch.float32 \(2, 4\)"):
        backend.linear(torch.randn(2, 4), packed)
    with pytest.raises(ValueError, match=r"rows of width 4, got torch.bfloat16 \(2, 5\)"):
        backend.linear(torch.randn(2, 5).bfloat16(), packed)
    with pytest.raises(ValueError, match="residual has 3 rows, x has 2"):
        backend.linear(torch.randn(2, 4).bfloat16(), packed, residual_TO=torch.randn(3, 8).bfloat16())
    with pytest.raises(ValueError, match=r"bias has shape \(7,\), expected \(8,\)"):
        backend.pack_linear(torch.randn(8, 4), torch.randn(7))
    with pytest.raises(ValueError, match="float16 is not known to the cpu back-end: use bfloat16 or float32"):
        CpuBackend(torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("outputs", [16, 33, 48, 64, 130])
def test_heights_of_tiles_give_the_same_bits(isa: str, outputs: int, dtype: torch.dtype) -> None:
    """Around the borders of one tile, two passes over pairs of panels, and blocks; panels that are no whole group."""
    backend = CpuBackend(dtype)
    torch.manual_seed(6)
    inner = 1100  # more than a block of steps, and no whole one
    packed, x = backend.pack_linear(torch.randn(outputs, inner) * inner**-0.5), torch.randn(26, inner).to(dtype)
    alone = torch.cat([backend.linear(x[row : row + 1], packed) for row in range(26)])
    for count in (6, 7, 8, 10, 11, 12, 13, 16, 18, 24, 25, 26):
        assert torch.equal(backend.linear(x[:count], packed), alone[:count]), count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inner"), [(1, 1), (16, 32), (50, 33), (7, 96)])
def test_rows_are_taken_out_as_they_were_packed(num_threads: int, dtype: torch.dtype, outputs: int, inner: int) -> None:
    backend = CpuBackend(dtype)
    weight = torch.randn(outputs, inner).to(dtype)
    packed = backend.pack_linear(weight)
    ids = torch.randint(0, outputs, (5,))
    for wanted in (ids, ids[:0], torch.arange(outputs)):
        assert torch.equal(backend.weight_rows(packed, wanted), weight[wanted])
    with pytest.raises(IndexError, match=f"of a weight of {outputs} rows"):
        backend.weight_rows(packed, torch.tensor([0, outputs]))


def test_tensors_elsewhere_and_gradients_are_refused() -> None:
    backend, x = CpuBackend(torch.float32), torch.randn(2, 4)
    packed = backend.pack_linear(torch.randn(8, 4).requires_grad_())
    with pytest.raises(ValueError, match="a tensor on meta: native code reads host memory"):
        backend.linear(x.to("meta"), packed)
    with pytest.raises(ValueError, match=r"requires a gradient, .* use torch.no_grad\(\)"):
        backend.linear(x.clone().requires_grad_(), packed)
    with torch.no_grad():
        assert torch.equal(backend.linear(x.clone().requires_grad_(), packed), backend.linear(x, packed))


def test_results_are_on_the_host_whatever_the_default_device() -> None:
    backend, x = CpuBackend(torch.float32), torch.randn(2, 4)
    packed, expected = backend.pack_linear(torch.eye(4)), x.clone()
    with torch.device("meta"):
        found = backend.linear(x, packed)
        rows = backend.weight_rows(packed, x.new_zeros(1, dtype=torch.int64))
    assert torch.equal(found, expected)
    assert rows.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_weights_of_other_back_ends_and_no_matrices_are_refused() -> None:
    backend, x = CpuBackend(torch.float32), torch.randn(2, 4)
    for other in (CpuBackend(torch.bfloat16), ReferenceBackend("cpu", torch.float32)):
        with pytest.raises(ValueError, match=r"takes its own CpuLinear of torch\.float32"):
            backend.linear(x, other.pack_linear(torch.randn(8, 4)))
    for weight in (torch.zeros(4), torch.zeros(4, 4, dtype=torch.complex64), torch.eye(4).to_sparse()):
        with pytest.raises(ValueError, match=r"expected \[out, in\]|give dense floats"):
            backend.pack_linear(weight)
    packed = backend.pack_linear(torch.randn(8, 4))
    for ids in (torch.tensor([1], dtype=torch.int32), torch.tensor([[1, 2]])):
        with pytest.raises(ValueError, match=r"give int64 \[T\]"):
            backend.weight_rows(packed, ids)
