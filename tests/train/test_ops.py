"""The operators against naive forms, in float64: values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.comm.dispatch import Dispatcher
from antiphon.kernels.ops.attention import attention_mask, causal_attention, rms_norm, rotate
from antiphon.kernels.ops.cross_entropy import IGNORED, linear_cross_entropy
from antiphon.kernels.ops.feed_forward import activate, grouped_product
from antiphon.specs.model import FeedForwardSpec

torch.manual_seed(0)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("counts", [(3, 0, 2), (0, 0, 5), (1, 1, 1), (0, 0, 0)])
def test_grouped_product(counts: tuple[int, ...]) -> None:
    x, weight = leaf(sum(counts), 4), leaf(3, 6, 4)
    assert torch.autograd.gradcheck(lambda x, w: grouped_product(x, w, counts), (x, weight))
    experts = torch.arange(3).repeat_interleave(torch.tensor(counts))
    torch.testing.assert_close(grouped_product(x, weight, counts), torch.einsum("ri,roi->ro", x, weight[experts]))


@pytest.mark.parametrize("num_rows", [0, 1, 3, 7])
def test_dispatch_experts_and_combine_are_the_sum_over_chosen_experts(num_rows: int) -> None:
    num_experts, top_k = 5, 2
    ids = torch.rand(num_rows, num_experts).argsort(1)[:, :top_k]
    x, weights, matrices = leaf(num_rows, 4), leaf(num_rows, top_k), leaf(num_experts, 4, 4)

    def ours(x: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
        return Dispatcher(num_experts).through(
            lambda rows, counts, _: grouped_product(rows, matrices, counts), x, ids, weights
        )

    assert torch.autograd.gradcheck(ours, (x, weights, matrices))
    naive = torch.einsum("tk,tkoi,ti->to", weights, matrices[ids], x)
    torch.testing.assert_close(ours(x, weights, matrices), naive)


def test_equal_experts_are_one_dense_layer() -> None:
    x, matrix = leaf(6, 4), leaf(4, 4)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(6)])
    weights = torch.full((6, 2), 0.5, dtype=torch.float64)
    matrices = matrix.expand(5, 4, 4).contiguous()
    out = Dispatcher(5).through(lambda rows, counts, _: grouped_product(rows, matrices, counts), x, ids, weights)
    torch.testing.assert_close(out, x @ matrix.T)


@pytest.mark.parametrize("divisor", [1.0, 2.5])
@pytest.mark.parametrize("chunk_elements", [1, 100, 1 << 20])
def test_cross_entropy(divisor: float, chunk_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.kernels.ops.cross_entropy._CHUNK_ELEMENTS", chunk_elements)
    monkeypatch.setattr("antiphon.kernels.ops.cross_entropy._LEAST_ROWS", 1)
    x, weight, bias = leaf(7, 5), leaf(11, 5), leaf(11)
    targets = torch.tensor([1, 0, IGNORED, 10, 3, IGNORED, 3])
    count = torch.tensor(9)

    def naive(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.cross_entropy((x @ weight.T + bias) / divisor, targets, reduction="sum") / count

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, bias, targets, count, divisor)

    torch.testing.assert_close(ours(x, weight, bias), naive(x, weight, bias))
    for first, second in zip(
        torch.autograd.grad(ours(x, weight, bias) * 3, (x, weight, bias)),
        torch.autograd.grad(naive(x, weight, bias) * 3, (x, weight, bias)),
        strict=True,
    ):
        torch.testing.assert_close(first, second)


def test_packed_documents_are_as_if_alone() -> None:
    q, k, v = leaf(1, 9, 4, 6), leaf(1, 9, 2, 6), leaf(1, 9, 2, 6)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2]])
    for window in (None, 2):
        together = causal_attention(q, k, v, attention_mask(documents, 9, window, q.device), 0.4)
        for rows in (slice(0, 4), slice(4, 6), slice(6, 9)):
            length = rows.stop - rows.start
            mask = attention_mask(None, length, window, q.device)
            alone = causal_attention(q[:, rows], k[:, rows], v[:, rows], mask, 0.4)
            torch.testing.assert_close(together[:, rows], alone)


def test_a_sink_takes_its_share() -> None:
    q, k, v = leaf(2, 5, 4, 6), leaf(2, 5, 2, 6), leaf(2, 5, 2, 6)
    far = torch.full((4,), -1e9, dtype=torch.float64)
    torch.testing.assert_close(causal_attention(q, k, v, None, 0.4, far), causal_attention(q, k, v, None, 0.4))
    near = torch.full((4,), 1e9, dtype=torch.float64)
    assert float(causal_attention(q, k, v, None, 0.4, near).detach().abs().max()) < 1e-6


@pytest.mark.parametrize("shape", [(3, 6), (2, 3, 6), (0, 6)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = leaf(*shape), leaf(6)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, weight))
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), F.rms_norm(x, (6,), weight, 1e-3))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [4, 7])
def test_rotation_keeps_lengths_and_its_gradient_turns_back(interleaved: bool, width: int) -> None:
    x, angles = leaf(5, 3, width), torch.randn(5, 2, dtype=torch.float64)

    def turn(x: Tensor) -> Tensor:
        return rotate(x, angles.cos(), angles.sin(), interleaved)

    assert torch.autograd.gradcheck(turn, (x,))
    torch.testing.assert_close(turn(x).norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turn(x)[..., 4:], x[..., 4:])


@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_oai"])
def test_activations(activation: str) -> None:
    widths = FeedForwardSpec(intermediate=4, activation=activation, alpha=1.7, limit=7.0)
    rows = leaf(5, 8)
    assert torch.autograd.gradcheck(lambda rows: activate(rows, widths), (rows,))
    gate, up = rows.chunk(2, dim=-1)
    if activation == "silu":
        torch.testing.assert_close(activate(rows, widths), F.silu(gate) * up)
