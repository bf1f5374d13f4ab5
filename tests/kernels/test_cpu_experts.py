"""The grouped feed-forward against a loop over rows in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.cpu.weights import CpuExperts

DTYPES = [torch.bfloat16, torch.float32]
SIZES = [  # experts, hidden, intermediate, rows, top_k
    (1, 32, 32, 1, 1),
    (5, 96, 48, 9, 2),
    (4, 64, 40, 0, 2),
    (3, 17, 19, 4, 3),
    (8, 100, 33, 70, 3),
    (2, 64, 16, 600, 2),
    (32, 1024, 64, 20, 4),
]


def make(
    backend: CpuBackend, num_experts: int, hidden: int, intermediate: int, activation: str = "silu"
) -> tuple[CpuExperts, Tensor, Tensor, Tensor]:
    gate = torch.randn(num_experts, intermediate, hidden) * hidden**-0.5
    up = torch.randn(num_experts, intermediate, hidden) * hidden**-0.5
    down = torch.randn(num_experts, hidden, intermediate) * intermediate**-0.5
    experts = backend.new_experts(num_experts, hidden, intermediate, activation)
    for index in range(num_experts):
        experts.set_expert(index, gate[index], up[index], down[index])
    return experts, gate.to(backend.dtype), up.to(backend.dtype), down.to(backend.dtype)


def routed(rows: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    ids = torch.rand(rows, num_experts).argsort(1)[:, :top_k].int()
    ids[torch.rand(rows, top_k) < 0.2] = -1
    return ids, torch.rand(rows, top_k)


def loop(x: Tensor, ids: Tensor, weights: Tensor, matrices: tuple[Tensor, ...], activation: str) -> Tensor:
    act = F.silu if activation == "silu" else F.gelu
    y = torch.zeros(x.shape, dtype=torch.float64)
    for row, chosen in enumerate(ids.tolist()):
        for slot, expert in enumerate(chosen):
            if expert >= 0:
                gate, up, down = (matrix[expert].double() for matrix in matrices)
                hidden = act(gate @ x[row].double()) * (up @ x[row].double())
                y[row] += weights[row, slot].double() * (down @ hidden.to(x.dtype).double())
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("num_experts", "hidden", "intermediate", "rows", "top_k"), SIZES)
def test_against_a_loop(
    isa: str,
    dtype: torch.dtype,
    activation: str,
    num_experts: int,
    hidden: int,
    intermediate: int,
    rows: int,
    top_k: int,
) -> None:
    torch.manual_seed(hidden + rows)
    backend = CpuBackend(dtype)
    experts, *matrices = make(backend, num_experts, hidden, intermediate, activation)
    ids, weights = routed(rows, num_experts, top_k)
    x = torch.randn(rows, hidden).to(dtype)
    y = backend.grouped_ffn(x, ids, weights, experts)
    assert y.dtype == dtype
    tolerance = 1.5e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        y.double(), loop(x, ids, weights, tuple(matrices), activation), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_do_not_depend_on_its_neighbours(isa: str, num_threads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    backend = CpuBackend(dtype)
    experts, *_ = make(backend, 4, 64, 48)
    rows = 1000 if "emulated" not in isa else 90
    ids, weights = routed(rows, 4, 2)
    x = torch.randn(rows, 64).to(dtype)
    whole = backend.grouped_ffn(x, ids, weights, experts)
    for start, count in [(0, 1), (5, 1), (7, 3), (2, 13), (11, 30), (0, 80)]:
        part = slice(start, start + count)
        assert torch.equal(backend.grouped_ffn(x[part], ids[part], weights[part], experts), whole[part])
    order = torch.randperm(rows)
    assert torch.equal(backend.grouped_ffn(x[order], ids[order], weights[order], experts), whole[order])


def test_rows_without_experts_are_zero() -> None:
    backend = CpuBackend(torch.bfloat16)
    experts, *_ = make(backend, 2, 32, 32)
    y = backend.grouped_ffn(
        torch.randn(3, 32).bfloat16(), torch.full((3, 2), -1, dtype=torch.int32), torch.ones(3, 2), experts
    )
    assert torch.equal(y, torch.zeros_like(y))


def test_errors_name_what_was_given() -> None:
    backend = CpuBackend(torch.bfloat16)
    experts = backend.new_experts(2, 32, 16, "silu")
    with pytest.raises(ValueError, match=r"expert index 2 is outside 0\.\.1"):
        experts.set_expert(2, torch.zeros(16, 32), torch.zeros(16, 32), torch.zeros(32, 16))
    with pytest.raises(ValueError, match=r"up has shape \(32, 16\), expected \(16, 32\)"):
        experts.set_expert(0, torch.zeros(16, 32), torch.zeros(32, 16), torch.zeros(32, 16))
    with pytest.raises(ValueError, match="'relu' is not known to the cpu back-end: use silu or gelu"):
        backend.new_experts(2, 32, 16, "relu")
