"""Norms and the greedy choice."""

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
