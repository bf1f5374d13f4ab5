"""Attention halves that have computed every variant of their kernels before the first request."""

from pathlib import Path

import pytest
import torch

from antiphon.kernels.triton import load
from antiphon.models import attention_half
from antiphon.models.attention_half import AttentionHalf
from tests.models.conftest import load_decoder
from tests.serve.engine_harness import save_tiny_model


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
@torch.inference_mode()
def test_all_numbers_of_rows_are_computed_and_nothing_is_kept(
    family: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny_model(tmp_path / "model", family).folder
    half = load_decoder(folder, load("backend").TritonBackend(device, torch.float32)).attention_half
    cache = half.new_cache(4, 16)
    tables = [table for table in (*cache.keys, *cache.values) if table.numel()]
    for table in tables:
        table.normal_()
    kept = [table.clone() for table in tables]
    seen = []
    compute = AttentionHalf._compute_alone
    monkeypatch.setattr(attention_half, "LAST_ROWS", 3)
    monkeypatch.setattr(
        AttentionHalf, "_compute_alone", lambda *given: seen.append(given[2].query_lens) or compute(*given)
    )
    with caplog.at_level("INFO"):
        half.warm_up(cache, 256)
    assert seen == [(1,), (1, 1), (2,), (1, 1, 1), (3,)]
    assert all(torch.equal(table, old) for table, old in zip(tables, kept, strict=True))
    assert "kernels of attention for up to 256 rows: ready after" in caplog.text
