"""Kernels of other packages, where they are installed: what they give on this GPU beside the reference, rows alone
beside rows among others, and the choice among them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from antiphon.kernels import packages
from antiphon.kernels.reference_attention import ReferenceCache
from tests.kernels.test_packages import SPEC, bfloat16_experts, check_products, dense, fp8_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
CUDA = torch.device("cuda")
MADE: dict[str, tuple[Any, float]] = {"grouped_mm": (bfloat16_experts, 0.02), "deep_gemm": (fp8_experts, 0.1)}


@pytest.mark.parametrize("num_tokens", [1, 37, 600])
@pytest.mark.parametrize("name", packages.PRODUCTS)
def test_products_of_experts(name: str, num_tokens: int) -> None:
    make, tolerance = MADE[name]
    experts = make(3, CUDA)
    if why := packages.why_no_products(name, experts[0]):
        pytest.skip(f"{name}: {why}")
    check_products(name, num_tokens, experts, tolerance, CUDA)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", packages.ATTENTIONS)
def test_attention_over_the_paged_cache(name: str, window: int | None) -> None:
    spec = replace(SPEC, key_dim=64, value_dim=64)  # widths that their kernels have
    if why := packages.why_no_attention(name, spec, torch.bfloat16, has_sinks=False):
        pytest.skip(f"{name}: {why}")
    torch.manual_seed(0)
    cache = ReferenceCache(spec, CUDA, torch.bfloat16)
    for table in (*cache.keys, *cache.values):
        table.normal_()
    q = torch.randn(3, 4, 64).bfloat16().to(CUDA)
    tables = torch.tensor([[1, 3], [5, 0], [2, 4]]).int().to(CUDA)
    contexts = torch.tensor([20, 1, 32]).int().to(CUDA)

    def attend(rows: slice) -> torch.Tensor:
        return packages.attend(name, q[rows], cache, 0, tables[rows], contexts[rows], scale=0.3, window=window)

    found = attend(slice(None))
    torch.testing.assert_close(found.float(), dense(q, cache, tables, contexts, window), rtol=2e-2, atol=2e-2)
    assert torch.equal(attend(slice(2, 3))[0], found[2]), "a row's bits do not depend on its neighbours"
