"""The gate and the maps of rows against PyTorch's operators, on odd sizes."""

import pytest
import torch
import torch.nn.functional as F

from antiphon.kernels.ops.route import choose_experts, row_map
from antiphon.kernels.triton import load
from antiphon.specs.model import RouterSpec

ROUTERS = [
    RouterSpec(num_experts=8, top_k=2),
    RouterSpec(num_experts=1, top_k=1),
    RouterSpec(num_experts=5, top_k=3, normalize=False),
    RouterSpec(num_experts=6, top_k=2, softmax_after_top_k=True, normalize=False),
    RouterSpec(num_experts=15, top_k=3, num_groups=3, top_k_groups=2, normalize=False, scaling=16.0),
    RouterSpec(
        num_experts=20, top_k=3, scoring="sigmoid", has_score_bias=True, num_groups=4, top_k_groups=2,
        group_score="top2", scaling=2.5,
    ),
]  # fmt: skip


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("tokens", [0, 1, 19])
def test_gate(router: RouterSpec, tokens: int, device: torch.device) -> None:
    logits = torch.randn(tokens, router.num_experts, device=device)
    bias = torch.randn(router.num_experts, device=device) * 0.3 if router.has_score_bias else None
    ids, weights, counts = load("rows").gate(logits, bias, router)
    expected_ids, expected_weights = choose_experts(logits, bias, router)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
    assert counts.sum(0).tolist() == torch.bincount(ids.flatten(), minlength=router.num_experts).tolist()
    if tokens:
        alone = load("rows").gate(logits[-1:], bias, router)
        assert torch.equal(alone[1][0], weights[-1])


def test_logits_that_are_no_numbers_choose_experts_that_exist(device: torch.device) -> None:
    logits = torch.full((2, 5), float("nan"), device=device)
    ids, _, counts = load("rows").gate(logits, None, RouterSpec(num_experts=5, top_k=3))
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert counts.tolist() == [[2, 2, 2, 0, 0]]


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(0, 2, 5), (1, 1, 1), (37, 3, 5), (50, 8, 9)])
def test_places(tokens: int, top_k: int, experts: int, device: torch.device) -> None:
    """Against the trainer's map; some choices are absent."""
    rows = load("rows")
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)] or [torch.zeros(top_k)])[:tokens].int()
    ids = ids.masked_fill(torch.rand(ids.shape) < 0.3, -1).to(device)
    starts, order, places = rows.place(ids, rows.count(ids, experts))
    expected = row_map(ids, experts)
    if tokens:
        assert starts.diff().tolist() == list(expected.counts_E)
    assert torch.equal(order[: len(expected.order_R)].long(), expected.order_R)
    assert torch.equal(places.long(), expected.place_TK.masked_fill(ids < 0, -1))


@pytest.mark.parametrize("width", [1, 7, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_their_gradients(dtype: torch.dtype, width: int, device: torch.device) -> None:
    rows = load("rows")
    ids = torch.tensor([[2, 0], [-1, -1], [1, -1], [0, 2], [0, 1]], dtype=torch.int32, device=device)
    expected = row_map(ids, 3)
    places = expected.place_TK.masked_fill(ids < 0, -1).int()
    x = torch.randn(len(expected.order_R), width, device=device, dtype=dtype)
    weights = torch.rand(ids.shape, device=device, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    wide = x.float().requires_grad_(), expected.without_absent(weights).float().requires_grad_()
    y = F.embedding_bag(expected.place_TK, wide[0], per_sample_weights=wide[1], mode="sum")
    torch.testing.assert_close(rows.sum_rows(x, places, weights).float(), y, rtol=tolerance, atol=tolerance)
    grad = torch.randn(y.shape, device=device).to(dtype)
    expected_grads = torch.autograd.grad(y, wide, grad.float())
    grad_x, grad_weights = rows.combine_gradient(grad, x, weights, expected.order_R)
    torch.testing.assert_close(grad_x.float(), expected_grads[0], rtol=tolerance, atol=tolerance)
    present = ids >= 0
    torch.testing.assert_close(
        grad_weights[present].float(), expected_grads[1][present], rtol=tolerance, atol=tolerance * width
    )
    assert not grad_weights[~present].any()
    ones = F.embedding_bag(expected.place_TK, x.float(), per_sample_weights=present.float(), mode="sum")
    found = rows.sum_rows(x, places, None, ascending=True)
    torch.testing.assert_close(found.float(), ones, rtol=tolerance, atol=tolerance)
