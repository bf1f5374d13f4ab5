"""Loading experts beside serving: how long it rests, that it ends when it is told to, and which experts count when."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from antiphon.base.errors import UserError
from antiphon.models.expert_half import FREE, ExpertHalf
from antiphon.serve.worker import expert_moves
from antiphon.serve.worker.expert_moves import ExpertMoves
from antiphon.specs.placement import ExpertPlacement

NOW = ExpertPlacement(2, {0: ((0,), (0,), (1,)), 1: ((0,), (1,), (1,))})
NEXT = ExpertPlacement(2, {0: ((0,), (0,), (0, 1)), 1: ((0,), (0,), (1,))}, version=1)


class _Stop:
    """An `Event` that never waits, and says for how long it should have."""

    def __init__(self) -> None:
        self.rests_s: list[float] = []
        self.is_set = False

    def set(self) -> None:
        self.is_set = True

    def wait(self, rest_s: float) -> bool:
        self.rests_s.append(rest_s)
        return self.is_set


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> list[_Stop]:
    """One for each thread that loads, the newest last."""
    stops = list[_Stop]()

    def make() -> _Stop:
        stops.append(_Stop())
        return stops[-1]

    monkeypatch.setattr(expert_moves, "Event", make)
    return stops


def prepared(load: Callable[[int, int, int], None]) -> tuple[ExpertMoves, ExpertHalf]:
    """Worker 0 on its way from NOW to NEXT: it lacks expert 2 of layer 0 and expert 1 of layer 1. Loading has ended."""
    spec: Any = SimpleNamespace(router=SimpleNamespace(num_experts=3))
    backend: Any = SimpleNamespace(device="cpu")
    half = ExpertHalf(spec=spec, backend=backend, experts={}, expert_ids={0: (0, 1, FREE), 1: (FREE, 0, FREE)})
    moves = ExpertMoves(0, half, load, NOW)
    moves.prepare(NEXT)
    assert moves._thread is not None
    moves._thread.join()
    return moves, half


def test_it_rests_in_proportion_to_what_each_expert_took(stops: list[_Stop], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(expert_moves, "time", SimpleNamespace(monotonic=lambda: clock.now_s))

    def load(layer: int, expert: int, slot: int) -> None:
        clock.now_s += 1.0 + layer

    prepared(load)
    assert stops[-1].rests_s == pytest.approx([4.0, 8.0]), "a fifth of the time is loading"


def test_experts_count_once_all_have_come(stops: list[_Stop]) -> None:
    loaded = []
    moves, half = prepared(lambda *what: loaded.append(what))
    assert loaded == [(0, 2, 2), (1, 1, 0)]
    assert half.expert_ids == {0: (0, 1, FREE), 1: (FREE, 0, FREE)}, "not before the worker looks"
    assert moves.finished() == (1, None)
    assert moves.finished() is None
    assert half.expert_ids == {0: (0, 1, 2), 1: (1, 0, FREE)}
    moves.check((0, 1))
    moves.retire(1)
    assert half.expert_ids == {0: (0, 1, 2), 1: (1, 0, FREE)}, "nothing that the new map names is let go"


def test_one_that_cannot_be_read_ends_it(stops: list[_Stop]) -> None:
    loaded = []

    def load(layer: int, expert: int, slot: int) -> None:
        loaded.append(layer)
        raise UserError("the file is gone")

    moves, half = prepared(load)
    assert moves.finished() == (1, "the file is gone")
    assert loaded == [0]
    assert half.expert_ids == {0: (0, 1, FREE), 1: (FREE, 0, FREE)}


def test_closed_between_two_experts(stops: list[_Stop]) -> None:
    loaded = []

    def load(layer: int, expert: int, slot: int) -> None:
        loaded.append(layer)
        stops[-1].set()  # as `close` does meanwhile

    prepared(load)
    assert loaded == [0]
