"""Norms, the greedy choice and draws."""

import pytest
import torch
from torch import Tensor

from antiphon.kernels.cpu import CpuBackend

DTYPES = [torch.bfloat16, torch.float32]


def hugging_face_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 17), (5, 1024), (2, 3, 48), (400, 100)])
def test_rms_norm(isa: str, num_threads: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    backend = CpuBackend(dtype)
    x, weight = torch.randn(shape).to(dtype), torch.rand(shape[-1]).to(dtype) + 0.5
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    y = backend.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(y, hugging_face_rms_norm(x, weight, 1e-6), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "first"), [(16, 0), (33, 5), (64, 48)])
def test_rms_norm_in_place_of_a_part_of_wider_rows(isa: str, dtype: torch.dtype, width: int, first: int) -> None:
    torch.manual_seed(0)
    backend, rows = CpuBackend(dtype), torch.randn(7, first + width + 3).to(dtype)
    weight, kept = torch.rand(width).to(dtype) + 0.5, rows.clone()
    backend.rms_norm_(rows[:, first : first + width], weight, 1e-6)
    kept[:, first : first + width] = backend.rms_norm(kept[:, first : first + width].contiguous(), weight, 1e-6)
    assert torch.equal(rows, kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (7, 33), (300, 256)])
def test_add_rms_norm(isa: str, num_threads: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    backend = CpuBackend(dtype)
    x, delta, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.rand(shape[1]).to(dtype)
    total, y = backend.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    assert torch.equal(y, backend.rms_norm(x + delta, weight, 1e-5))
    assert torch.equal(backend.add_rms_norm(x[:1], delta[:1], weight, 1e-5)[1], y[:1])


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 1024), (5, 40000), (1, 151936)])
def test_argmax(isa: str, num_threads: int, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(shape)
    assert torch.equal(CpuBackend(torch.float32).argmax_rows(logits), logits.argmax(-1))


def test_argmax_takes_the_first_of_equals(isa: str) -> None:
    logits = torch.zeros(3, 40000)
    logits[1, [39999, 20000, 16384]] = 1.0
    logits[2] = float("-inf")
    assert CpuBackend(torch.float32).argmax_rows(logits).tolist() == [0, 16384, 0]


def drawn(logits: Tensor, temperature: float, uniforms: list[float]) -> list[int]:
    """One row, with one uniform after the other."""
    rows = logits.expand(len(uniforms), -1)
    chosen: list[int] = CpuBackend(torch.float32).choose_rows(rows, [temperature] * len(uniforms), uniforms).tolist()
    return chosen


@pytest.mark.parametrize(("width", "temperature"), [(1, 1.0), (17, 0.7), (512, 1.0), (513, 2.5), (40000, 0.9)])
def test_draws_follow_the_running_sum(isa: str, num_threads: int, width: int, temperature: float) -> None:
    """The token's own part of the sum, in float64, holds the uniform, but for rounding at its borders."""
    torch.manual_seed(width)
    logits = 3.0 * torch.randn(width)
    uniforms = [0.0, *torch.rand(200, dtype=torch.float64).tolist(), 1.0 - 2.0**-53]
    ends = torch.softmax(logits.double() / temperature, 0).cumsum(0)
    for token, uniform in zip(drawn(logits, temperature, uniforms), uniforms, strict=True):
        begin = float(ends[token - 1]) if token else 0.0
        assert begin - 1e-6 <= uniform <= float(ends[token]) + 1e-6


def test_nothing_improbable_is_drawn(isa: str) -> None:
    logits = torch.full((2000,), float("-inf"))
    allowed = [3, 700, 1023, 1024, 1999]
    logits[allowed] = 0.0
    uniforms = [step / 300 for step in range(300)] + [1.0 - 2.0**-53]
    tokens = drawn(logits, 1.0, uniforms)
    assert sorted(set(tokens)) == allowed
    assert tokens == sorted(tokens)
    assert (tokens[0], tokens[-1]) == (3, 1999)


def test_greedy_rows_and_rows_without_mass_get_the_largest(isa: str, num_threads: int) -> None:
    torch.manual_seed(0)
    backend, logits = CpuBackend(torch.float32), torch.randn(5, 20000)
    logits[1] = float("-inf")
    logits[2, 7] = float("nan")
    logits[4, 9] = 90.0
    temperatures, uniforms = [0.0, 1.0, 1.0, 0.6, 0.01], [0.5, 0.5, 0.5, 0.25, 0.9]
    together = backend.choose_rows(logits, temperatures, uniforms)
    assert together[0] == logits[0].argmax()
    assert together[1] == 0
    assert together[4] == 9
    for row in (0, 1, 3, 4):
        alone = backend.choose_rows(logits[row : row + 1], temperatures[row : row + 1], uniforms[row : row + 1])
        assert alone == together[row], "a row's token does not depend on its neighbours"
    assert 0 <= int(together[2]) < 20000
    with pytest.raises(ValueError, match="5 rows, 5 temperatures and 2 uniforms"):
        backend.choose_rows(logits, temperatures, uniforms[:2])
