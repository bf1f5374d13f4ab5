"""Batches by which an expert worker has its kernels compiled before it is ready."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from antiphon.kernels.api import ExpertFormats, ExpertShape
from antiphon.models.expert_half import ExpertHalf


@pytest.mark.parametrize(
    ("most_rows", "sizes"), [(1, [1]), (5, [1, 2, 4, 5]), (10_000, [1, 2, 4, 8, 16, 32, 64, 128, 192])]
)
def test_every_number_of_rows_that_has_code_of_its_own(most_rows: int, sizes: list[int]) -> None:
    """Three experts, two a row: 192 rows are 128 an expert. Layers alike are tried once; no expert is touched."""
    calls = []

    def grouped_ffn(x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, experts: Any) -> torch.Tensor:
        assert (ids_TK == -1).all()
        assert x_TH.shape == (len(ids_TK), 8)
        assert ids_TK.shape == weights_TK.shape == (len(ids_TK), 2)
        calls.append((experts.name, len(ids_TK)))
        return x_TH

    backend: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16, grouped_ffn=grouped_ffn)
    spec: Any = SimpleNamespace(router=SimpleNamespace(num_experts=3, top_k=2))
    shape, formats = ExpertShape(3, 8, 4, "silu"), ExpertFormats()
    experts: Any = {layer: SimpleNamespace(name=layer, shape=shape, formats=formats, num_bytes=1) for layer in range(2)}
    half = ExpertHalf(spec=spec, backend=backend, experts=experts, expert_ids={0: (0, 1, 2), 1: (0, 1, 2)})
    half.warm_up(most_rows)
    assert calls == [(1, size) for size in sizes]
