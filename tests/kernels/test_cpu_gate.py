"""Routers against the reference back-end's choice on the same logits."""

from dataclasses import replace

import pytest
import torch

from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.ops.route import choose_experts
from antiphon.specs.model import RouterSpec

ROUTERS = {
    "softmax": RouterSpec(num_experts=64, top_k=8),
    "raw softmax": RouterSpec(num_experts=60, top_k=4, normalize=False),
    "mixtral": RouterSpec(num_experts=8, top_k=2, softmax_after_top_k=True),
    "gpt-oss": RouterSpec(
        num_experts=33, top_k=4, softmax_after_top_k=True, normalize=False, has_logit_bias=True
    ),
    "grouped": RouterSpec(num_experts=64, top_k=6, num_groups=8, top_k_groups=3, normalize=False, scaling=16.0),
    "sigmoid": RouterSpec(num_experts=32, top_k=4, scoring="sigmoid", has_score_bias=True, scaling=2.5),
    "deepseek 3": RouterSpec(
        num_experts=64, top_k=8, scoring="sigmoid", has_score_bias=True, num_groups=8, top_k_groups=4,
        group_score="top2", scaling=2.5,
    ),
    "odd": RouterSpec(num_experts=5, top_k=5),
    "sparsemixer": RouterSpec(num_experts=16, top_k=2, scoring="sparsemixer", jitter=0.01),
}  # fmt: skip


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS.keys())
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_choice_and_weights(isa: str, num_threads: int, router: RouterSpec, rows: int) -> None:
    torch.manual_seed(rows)
    backend = CpuBackend(torch.bfloat16)
    logit_bias = torch.randn(router.num_experts) * 3 if router.has_logit_bias else None
    packed = backend.pack_linear(torch.randn(router.num_experts, 96) * 0.1, logit_bias)
    x = torch.randn(rows, 96).bfloat16()
    bias = torch.randn(router.num_experts) * 0.1 if router.has_score_bias else None
    ids, weights = backend.gate(x, packed, bias, router)
    expected_ids, expected_weights = choose_experts(backend.linear(x, packed, out_dtype=torch.float32), bias, router)
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("scaling", [1.0, 0.22])
def test_a_shared_experts_gate(isa: str, scaling: float) -> None:
    torch.manual_seed(0)
    backend, weight = CpuBackend(torch.float32), torch.randn(1, 96)
    packed, x = backend.pack_linear(weight), torch.randn(9, 96)
    backend.gate(x, backend.pack_linear(torch.randn(8, 96)), None, ROUTERS["mixtral"])  # a router before it
    ids, weights = backend.shared_gate(x, packed, scaling)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert ids.tolist() == [[0]] * 9
    torch.testing.assert_close(weights, (x @ weight.t()).sigmoid() * scaling, atol=1e-6, rtol=1e-5)
    assert torch.equal(backend.shared_gate(x[3:4], packed, scaling)[1], weights[3:4])


def test_no_rows(isa: str) -> None:
    backend = CpuBackend(torch.bfloat16)
    ids, weights = backend.gate(torch.empty(0, 32).bfloat16(), backend.pack_linear(torch.zeros(40, 32)), None,
                                RouterSpec(num_experts=40, top_k=4))  # fmt: skip
    assert ids.shape == weights.shape == (0, 4)


def test_ties_go_to_the_lowest_index(isa: str) -> None:
    backend = CpuBackend(torch.bfloat16)
    packed = backend.pack_linear(torch.zeros(40, 32))
    ids, weights = backend.gate(torch.randn(3, 32).bfloat16(), packed, None, RouterSpec(num_experts=40, top_k=4))
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    torch.testing.assert_close(weights, torch.full((3, 4), 0.25))


def test_not_a_number_still_gives_distinct_experts(isa: str) -> None:
    backend = CpuBackend(torch.bfloat16)
    packed = backend.pack_linear(torch.full((8, 32), float("nan")))
    ids, _ = backend.gate(torch.randn(2, 32).bfloat16(), packed, None, RouterSpec(num_experts=8, top_k=3))
    assert ids.tolist() == [[0, 1, 2]] * 2


def test_bits_do_not_depend_on_neighbours(isa: str) -> None:
    torch.manual_seed(0)
    backend = CpuBackend(torch.bfloat16)
    router = ROUTERS["softmax"]
    packed = backend.pack_linear(torch.randn(64, 96))
    x = torch.randn(50, 96).bfloat16()
    ids, weights = backend.gate(x, packed, None, router)
    for row in (0, 13, 49):
        alone_ids, alone_weights = backend.gate(x[row : row + 1], packed, None, router)
        assert torch.equal(alone_ids[0], ids[row])
        assert torch.equal(alone_weights[0], weights[row])


@pytest.mark.parametrize(
    "changes", [{"top_k": 9}, {"top_k": 0}, {"num_groups": 3}, {"num_groups": 0}, {"num_groups": 2, "top_k_groups": 3}]
)
def test_routers_that_cannot_be_are_refused(changes: dict[str, int]) -> None:
    backend, x = CpuBackend(torch.float32), torch.randn(2, 4)
    weight = backend.pack_linear(torch.randn(8, 4))
    with pytest.raises(ValueError, match="it chooses 1 to all experts"):
        backend.gate(x, weight, None, replace(RouterSpec(num_experts=8, top_k=2), **changes))


def test_a_gate_has_an_output_and_a_bias_for_each_expert() -> None:
    backend, x, router = CpuBackend(torch.float32), torch.randn(2, 4), RouterSpec(num_experts=8, top_k=2)
    with pytest.raises(ValueError, match="a gate of 6 outputs for a router of 8 experts"):
        backend.gate(x, backend.pack_linear(torch.randn(6, 4)), None, router)
    with pytest.raises(ValueError, match=r"a bias \(3,\) for 8 experts"):
        backend.gate(x, backend.pack_linear(torch.randn(8, 4)), torch.zeros(3), router)
