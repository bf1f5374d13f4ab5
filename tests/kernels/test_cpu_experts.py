"""The grouped feed-forward against a loop over rows in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.api import ExpertShape
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.cpu_weights import CpuExperts

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


ALPHA, LIMIT = 1.3, 0.8  # low enough that both clamps bite


def make(
    backend: CpuBackend, num_experts: int, hidden: int, intermediate: int, activation: str = "silu"
) -> tuple[CpuExperts, *tuple[Tensor, ...]]:
    """The experts and what they hold: three matrices and three biases, which are zeros but for swiglu_oai."""
    gate = torch.randn(num_experts, intermediate, hidden) * hidden**-0.5
    up = torch.randn(num_experts, intermediate, hidden) * hidden**-0.5
    down = torch.randn(num_experts, hidden, intermediate) * intermediate**-0.5
    biases = [torch.zeros(num_experts, width) for width in (intermediate, intermediate, hidden)]
    has_bias = activation == "swiglu_oai"
    shape = ExpertShape(num_experts, hidden, intermediate, activation, ALPHA, LIMIT, has_bias)
    experts = backend.new_experts(shape)
    for index in range(num_experts):
        experts.set_expert(index, gate[index], up[index], down[index])
        if has_bias:
            biases = [bias.normal_() for bias in biases] if index == 0 else biases
            experts.set_bias(index, biases[0][index], biases[1][index], biases[2][index])
    return experts, *(tensor.to(backend.dtype) for tensor in (gate, up, down, *biases))


def routed(rows: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    ids = torch.rand(rows, num_experts).argsort(1)[:, :top_k].int()
    ids[torch.rand(rows, top_k) < 0.2] = -1
    return ids, torch.rand(rows, top_k)


def join(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return gate * torch.sigmoid(ALPHA * gate) * (up + 1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate)) * up


def loop(x: Tensor, ids: Tensor, weights: Tensor, held: tuple[Tensor, ...], activation: str) -> Tensor:
    y = torch.zeros(x.shape, dtype=torch.float64)
    for row, chosen in enumerate(ids.tolist()):
        for slot, expert in enumerate(chosen):
            if expert >= 0:
                gate, up, down, gate_bias, up_bias, down_bias = (tensor[expert].double() for tensor in held)
                hidden = join(activation, gate @ x[row].double() + gate_bias, up @ x[row].double() + up_bias)
                y[row] += weights[row, slot].double() * (down @ hidden.to(x.dtype).double() + down_bias)
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_oai"])
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
    experts, *held = make(backend, num_experts, hidden, intermediate, activation)
    ids, weights = routed(rows, num_experts, top_k)
    x = torch.randn(rows, hidden).to(dtype)
    y = backend.grouped_ffn(x, ids, weights, experts)
    assert y.dtype == dtype
    tolerance = 1.5e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        y.double(), loop(x, ids, weights, tuple(held), activation), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_do_not_depend_on_its_neighbours(
    isa: str, num_threads: int, dtype: torch.dtype, activation: str
) -> None:
    torch.manual_seed(1)
    backend = CpuBackend(dtype)
    experts, *_ = make(backend, 4, 64, 48, activation)
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
    nowhere = torch.full((3, 2), -1, dtype=torch.int32)
    y = backend.grouped_ffn(torch.randn(3, 32).bfloat16(), nowhere, torch.ones(3, 2), experts)
    assert torch.equal(y, torch.zeros_like(y))
    biased, *_ = make(backend, 2, 32, 32, "swiglu_oai")
    y = backend.grouped_ffn(torch.randn(3, 32).bfloat16(), nowhere, torch.ones(3, 2), biased)
    assert torch.equal(y, torch.zeros_like(y)), "a bias belongs to its expert's rows"


def test_not_a_number_is_not_clamped_away(isa: str) -> None:
    backend = CpuBackend(torch.float32)
    experts, *_ = make(backend, 2, 32, 32, "swiglu_oai")
    x = torch.randn(3, 32)
    x[1, 5] = float("nan")
    y = backend.grouped_ffn(x, torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1), experts)
    assert y.isnan().any(1).tolist() == [False, True, False]


def test_biases_count_as_memory_and_start_as_zeros() -> None:
    """Whole groups of 64 in float32: of 2 x 32 gates and ups, of 40 outputs."""
    backend, x = CpuBackend(torch.float32), torch.randn(3, 40)
    plain, biased = (
        backend.new_experts(ExpertShape(2, 40, 20, "silu", has_bias=has_bias)) for has_bias in (False, True)
    )
    for experts in (plain, biased):
        experts.set_expert(1, torch.ones(20, 40), torch.ones(20, 40), torch.ones(40, 20))
    assert biased.num_bytes - plain.num_bytes == 2 * (64 + 64) * 4
    ids, weights = torch.ones(3, 1, dtype=torch.int32), torch.ones(3, 1)
    assert torch.equal(backend.grouped_ffn(x, ids, weights, biased), backend.grouped_ffn(x, ids, weights, plain))


def test_errors_name_what_was_given() -> None:
    backend = CpuBackend(torch.bfloat16)
    experts = backend.new_experts(ExpertShape(2, 32, 16, "silu"))
    with pytest.raises(ValueError, match=r"expert index 2 is outside 0\.\.1"):
        experts.set_expert(2, torch.zeros(16, 32), torch.zeros(16, 32), torch.zeros(32, 16))
    with pytest.raises(ValueError, match=r"up has shape \(32, 16\), expected \(16, 32\)"):
        experts.set_expert(0, torch.zeros(16, 32), torch.zeros(32, 16), torch.zeros(32, 16))
    with pytest.raises(ValueError, match="'relu' is not known to the cpu back-end: use silu, gelu or swiglu_oai"):
        backend.new_experts(ExpertShape(2, 32, 16, "relu"))
    with pytest.raises(ValueError, match="these experts were made without room for biases"):
        experts.set_bias(0, torch.zeros(16), torch.zeros(16), torch.zeros(32))
    biased = backend.new_experts(ExpertShape(2, 32, 16, "swiglu_oai", has_bias=True))
    with pytest.raises(ValueError, match=r"down bias has shape \(16,\), expected \(32,\)"):
        biased.set_bias(0, torch.zeros(16), torch.zeros(16), torch.zeros(16))
    with pytest.raises(ValueError, match=r"expert index -1 is outside 0\.\.1"):
        biased.set_bias(-1, torch.zeros(16), torch.zeros(16), torch.zeros(32))


@pytest.mark.parametrize("expert", [2, -2, 1 << 32, 0.5])
def test_ids_of_no_expert_are_refused(expert: float) -> None:
    backend = CpuBackend(torch.float32)
    experts = backend.new_experts(ExpertShape(2, 32, 16, "silu"))
    with pytest.raises(ValueError, match=r"chose expert -?2 of 2|are no numbers of experts"):
        backend.grouped_ffn(torch.ones(1, 32), torch.tensor([[expert]]), torch.ones(1, 1), experts)


def test_sizes_beyond_all_memory_are_refused() -> None:
    backend = CpuBackend(torch.float32)
    with pytest.raises(MemoryError):
        backend.new_experts(ExpertShape(1 << 40, 1 << 20, 1 << 20, "silu"))
    with pytest.raises(ValueError, match="no size may be below 0"):
        ExpertShape(-1, 32, 16, "silu")
