"""Both halves on the native CPU back-end, and in narrow dtypes: every family again, against transformers in float32."""

from typing import Any

import pytest
import torch

from antiphon.kernels.reference import ReferenceBackend
from tests.models.conftest import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_native_backend_equals_transformers(family: str, save_model: Any, tools: Any) -> None:
    pytest.importorskip("antiphon._native", reason="the native extension is not built")
    from antiphon.kernels.cpu import CpuBackend

    saved = save_model(tools.config(family))
    decoder = tools.load(saved.folder, CpuBackend(torch.float32))
    token_ids = tools.ids(37)
    expected = saved.logits(token_ids)
    for chunks in ([37], [16, 1, 20], [1] * 37):
        found = tools.run(decoder, token_ids, chunks, block_size=16)
        assert float((found - expected).abs().max()) < 2e-4, chunks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_narrow_dtypes_stay_close(family: str, dtype: torch.dtype, save_model: Any, tools: Any) -> None:
    """Rounding may turn a close choice of experts, so most rows are compared, not all."""
    saved = save_model(tools.config(family))
    decoder = tools.load(saved.folder, ReferenceBackend("cpu", dtype))
    token_ids = tools.ids(37)
    expected = saved.logits(token_ids)
    found = tools.run(decoder, token_ids, [20, 17])
    assert found.dtype == torch.float32
    distances = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(distances.median()) < 0.1
