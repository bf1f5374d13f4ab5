"""Experts read when they are needed: what a read that fails leaves behind."""

from queue import Queue
from types import SimpleNamespace

import pytest
import torch

from antiphon.models.expert_half import OffloadedExperts


def test_an_expert_whose_read_failed_is_read_again() -> None:
    fails = [True]
    read: list[tuple[int, int]] = []
    failed: Queue[int] = Queue()

    def load(layer: int, expert: int, slot: int) -> None:
        if fails:
            failed.put(expert)
            raise OSError(5, "Input/output error")
        read.append((layer, expert))

    pool = SimpleNamespace(shape=SimpleNamespace(num_experts=2), num_bytes=0)
    experts = OffloadedExperts(None, pool, 8, load)  # type: ignore[arg-type]  # nothing is computed
    try:
        for _ in range(3):  # more often than there are slots
            with pytest.raises(OSError, match="Input/output"):
                experts.need(0, torch.tensor([[3]]))
            assert failed.get(timeout=10) == 3
        experts.fetch_ahead(1, torch.tensor([[4, 5]]))
        assert [failed.get(timeout=10) for _ in range(2)] == [4, 5]
        fails.clear()
        experts.need(0, torch.tensor([[3, -1]]))
        assert read == [(0, 3)]
        with pytest.raises(OSError, match="Input/output"):
            experts.need(1, torch.tensor([[5]]))
        experts.need(1, torch.tensor([[5]]))
        assert read == [(0, 3), (1, 5)]
    finally:
        experts.close()
