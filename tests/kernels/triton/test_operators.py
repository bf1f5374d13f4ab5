"""The trainer's operators with Triton's kernels against the same operators without: values and gradients.

In float32, because the interpreter cuts bits off bfloat16; compiled in every type by `test_compile`.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from antiphon.kernels.api import ExpertShape
from antiphon.kernels.ops import CPU_ALONE, attention, cross_entropy, feed_forward, route
from antiphon.kernels.triton import load

Run = Callable[[], tuple[Tensor, ...]]


@pytest.fixture
def both(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Runs it with PyTorch's operators, then with the kernels, and compares."""

    def compare(run: Run) -> None:
        used = []

        def kernels_for(x: Tensor, name: str, *, native: bool = True) -> object:
            if name in CPU_ALONE:
                return None
            used.append(name)
            return load(name)

        modules = (attention, cross_entropy, feed_forward, route)
        for module in modules:
            monkeypatch.setattr(module, "kernels_for", lambda x, name, native=True: None)
        expected = run()
        for module in modules:
            monkeypatch.setattr(module, "kernels_for", kernels_for)
        for mine, theirs in zip(run(), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)
        assert used

    return compare


def with_gradients(y: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return y.detach(), *torch.autograd.grad(y, inputs, torch.randn(y.shape))


@pytest.mark.parametrize("rows", [0, 1, 35])
def test_norm(rows: int, both: Callable[[Run], None]) -> None:
    x, weight = torch.randn(rows, 3, 7, requires_grad=True), torch.rand(7, requires_grad=True)
    both(lambda: with_gradients(attention.rms_norm(x, weight, 1e-5), x, weight))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved: bool, both: Callable[[Run], None]) -> None:
    x, angles = torch.randn(2, 5, 3, 9, requires_grad=True), torch.rand(5, 4)
    both(lambda: with_gradients(attention.rotate(x, angles.cos(), angles.sin(), interleaved), x))


@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_oai"])
@pytest.mark.parametrize("rows", [0, 6])
def test_activation(rows: int, activation: str, both: Callable[[Run], None]) -> None:
    """So low a limit that both clamps bite."""
    x, shape = torch.randn(rows, 2 * 11, requires_grad=True), ExpertShape(1, 1, 11, activation, alpha=1.3, limit=0.5)
    both(lambda: with_gradients(feed_forward.activate(x, shape), x))


@pytest.mark.parametrize("absent", [False, True])
def test_rows_to_experts_and_back(absent: bool, both: Callable[[Run], None]) -> None:
    ids = torch.stack([torch.randperm(5)[:3] for _ in range(9)])
    if absent:
        ids = ids.masked_fill(torch.rand(ids.shape) < 0.4, -1)
        ids[0] = -1
    rows = route.row_map(ids, 5)
    x, weights = torch.randn(9, 13, requires_grad=True), torch.rand(9, 3, requires_grad=True)

    def run() -> tuple[Tensor, ...]:
        there = route.to_experts(x, rows)
        back = route.combine(there * torch.linspace(0.5, 2, there.shape[0]).unsqueeze(1), weights, rows)
        return with_gradients(back, x, weights)

    both(run)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [0, 7])
def test_cross_entropy(rows: int, biased: bool, both: Callable[[Run], None]) -> None:
    x, head = torch.randn(rows, 6, requires_grad=True), torch.randn(5001, 6, requires_grad=True)
    bias = torch.randn(5001, requires_grad=True) if biased else None
    targets = torch.randint(5001, (rows,))
    targets[1::3] = cross_entropy.IGNORED
    inputs = (x, head) if bias is None else (x, head, bias)
    both(
        lambda: with_gradients(
            cross_entropy.linear_cross_entropy(x, head, bias, targets, torch.tensor(3), 1.7), *inputs
        )
    )


def test_a_gradient_that_is_not_wanted(both: Callable[[Run], None]) -> None:
    """Of the router's weights, where they are fixed."""
    rows = route.row_map(torch.tensor([[0, 1], [1, 0]]), 2)
    rows = replace(rows)
    y, weights = torch.randn(4, 3, requires_grad=True), torch.rand(2, 2)
    both(lambda: with_gradients(route.combine(y, weights, rows), y))
