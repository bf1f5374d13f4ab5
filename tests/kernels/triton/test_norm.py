"""The norm and its gradient against PyTorch's operators, on odd sizes."""

import pytest
import torch

from antiphon.kernels.ops.attention import rms_norm
from antiphon.kernels.triton import load

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (3, 7), (35, 40)])
def test_norm(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    kernels, tolerance = load("rowwise"), TOLERANCE[dtype]
    x, delta = (torch.randn(rows, width, device=device).to(dtype) for _ in range(2))
    weight = (torch.rand(width, device=device) + 0.5).to(dtype)
    added, y, factors = kernels.norm(x, weight, 1e-5, delta)
    torch.testing.assert_close(added, x + delta, rtol=1e-2, atol=0)  # the interpreter cuts bits off bfloat16
    wide = added.cpu().float().requires_grad_(), weight.cpu().float().requires_grad_()
    expected = rms_norm(*wide, 1e-5)
    torch.testing.assert_close(y.cpu().float(), expected, rtol=tolerance, atol=tolerance)
    grad = torch.randn(rows, width, device=device).to(dtype)
    expected_grads = torch.autograd.grad(expected, wide, grad.cpu().float())
    found = kernels.norm_gradient(grad, added, weight, factors)
    for mine, theirs in zip(found, expected_grads, strict=True):
        torch.testing.assert_close(mine.cpu().float(), theirs, rtol=tolerance, atol=tolerance * max(1, rows) ** 0.5)
    if rows:
        _, alone, _ = kernels.norm(x[-1:], weight, 1e-5, delta[-1:])
        assert torch.equal(alone[0], y[-1])
