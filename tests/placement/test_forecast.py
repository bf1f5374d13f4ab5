"""Copies ahead of a layer: only what relieves the fullest worker, never what makes anything worse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon import _m2n
from antiphon.placement.split import split_rows
from tests.placement.prefetch_choice import choose_prefetches


def contiguous(num_experts: int, num_workers: int) -> np.ndarray:
    return np.eye(num_workers, dtype=bool)[np.arange(num_experts) * num_workers // num_experts]


def fullest(counts: np.ndarray, held: np.ndarray, speeds: np.ndarray, knee: int) -> float:
    """Rows of the fullest worker, at the mean speed."""
    rows = split_rows(counts, held, speeds, knee)
    costs = np.where(rows > 0, np.maximum(rows, knee), 0)
    return float((costs.sum(axis=0) * speeds.mean() / speeds).max())


def test_a_hot_expert_is_copied_to_the_idle_workers() -> None:
    held, equal = contiguous(8, 4), np.ones(4)
    counts = np.array([400, 0, 10, 10, 10, 10, 10, 10])
    chosen = choose_prefetches(counts, held, np.ones(4, dtype=bool), equal, 8)
    assert sorted((each.expert, each.worker) for each in chosen) == [(0, 1), (0, 2), (0, 3)]
    assert sum(each.gain for each in chosen) == pytest.approx(400 - 115, abs=8)
    alone = choose_prefetches(counts, held, np.array([False, False, True, False]), equal, 8)
    assert [(each.expert, each.worker) for each in alone] == [(0, 2)]


def test_the_fast_worker_takes_more() -> None:
    held, speeds = contiguous(2, 2), np.array([1.0, 3.0])
    assert choose_prefetches(np.array([100, 100]), held, np.ones(2, dtype=bool), speeds, 4)[0].worker == 1
    assert choose_prefetches(np.array([50, 150]), held, np.ones(2, dtype=bool), speeds, 4) == []


@pytest.mark.parametrize("counts", [[0] * 8, [3] * 8, [64] * 8, [15, 0, 0, 0, 0, 0, 0, 0]])
def test_even_load_and_few_rows_need_no_copy(counts: list[int]) -> None:
    assert choose_prefetches(np.array(counts), contiguous(8, 4), np.ones(4, dtype=bool), np.ones(4), 8) == []


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_fullest_worker_gets_no_fuller(data: st.DataObject) -> None:
    num_workers = data.draw(st.integers(1, 6))
    num_experts = data.draw(st.integers(num_workers, 16))
    knee = data.draw(st.integers(1, 16))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    counts = random.zipf(1.3, num_experts).clip(0, 5000)
    held = contiguous(num_experts, num_workers) | (random.random((num_experts, num_workers)) < 0.1)
    speeds, open_W = random.uniform(0.3, 1.0, num_workers), random.random(num_workers) < 0.7
    chosen = choose_prefetches(counts, held, open_W, speeds, knee)
    native = _m2n.ExpertSplit(num_workers, [np.flatnonzero(w).tolist() for w in held], speeds.tolist(), knee)
    assert native.wanted_copies(counts.astype(np.uint32), open_W) == [
        (each.expert, each.worker, pytest.approx(each.gain)) for each in chosen
    ]
    after = held.copy()
    for each in chosen:
        assert open_W[each.worker]
        assert not held[each.expert, each.worker]
        assert each.gain > 0
        after[each.expert, each.worker] = True
    assert len({each.worker for each in chosen}) == len(chosen)
    assert fullest(counts, after, speeds, knee) <= fullest(counts, held, speeds, knee) * 1.02 + 2 * knee
