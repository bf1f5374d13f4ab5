"""An attention worker's choice of copies ahead of a layer: when a load pays, and what becomes of a wrong forecast."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from antiphon.models.expert_half import FREE
from antiphon.placement.place import matrix_of
from antiphon.placement.split import BoolArray, IntArray, Prefetch
from antiphon.serve.worker.exchange import Forecast
from antiphon.serve.worker.expert_prefetch import Prefetcher, PrefetchSlots
from antiphon.specs.placement import ExpertPlacement, contiguous_placement
from tests.placement.prefetch_choice import choose_prefetches

LOAD_ROWS = 100
HOT = [5] * 60 + [2, 0, 6, 1]  # expert 5 of worker 2 gets nearly all 64 rows
EVEN = [row % 8 for row in range(64)]


class Exchange:
    """Two layers of eight experts on four workers; remembers what was asked for."""

    def __init__(self, placement: ExpertPlacement) -> None:
        self.placement = placement
        self.asked: list[tuple[int, dict[int, int]]] = []

    def prefetched(self, layer: int) -> Mapping[int, int]:
        return {w: e for of, copies in self.asked if of == layer for w, e in copies.items()}

    def prefetch(self, layer: int, copies: Mapping[int, int]) -> None:
        self.asked.append((layer, dict(copies)))

    def wanted_copies(self, layer: int, counts_E: IntArray, open_W: BoolArray) -> list[Prefetch]:
        held_EW = matrix_of(self.placement.owners[layer], self.placement.num_workers)
        for worker, expert in self.prefetched(layer).items():
            held_EW[expert, worker] = True
        return choose_prefetches(counts_E, held_EW, open_W, np.ones(len(open_W)), self.placement.knee)


@pytest.fixture
def exchange() -> Exchange:
    placement = contiguous_placement(8, 4, [0, 1])
    return Exchange(ExpertPlacement(4, placement.owners, knee=4))


@pytest.fixture
def prefetcher(exchange: Exchange) -> Prefetcher:
    return made(exchange, LOAD_ROWS)


def made(exchange: Exchange, load_rows: int) -> Prefetcher:
    return Prefetcher(8, exchange, load_rows)  # type: ignore[arg-type]


def ids_of(experts: list[int]) -> Tensor:
    return torch.tensor(experts).unsqueeze(1)


def step(prefetcher: Prefetcher, expected: list[int], actual: list[int], num_rows: int = 64) -> None:
    """Two layers with experts."""
    prefetcher.begin_step([0, num_rows])
    for layer, ids in enumerate((EVEN, actual)):
        forecast = None if layer else Forecast(1, ids_of(expected[:num_rows]))
        prefetcher.ask(layer, 1, ids_of(ids[:num_rows]), lambda forecast=forecast: forecast)


def test_a_copy_is_loaded_when_its_absence_has_cost_a_load(prefetcher: Prefetcher, exchange: Exchange) -> None:
    steps = 0
    while not exchange.asked:
        step(prefetcher, HOT, HOT)
        steps += 1
        assert steps < 50
    assert steps > LOAD_ROWS / 60  # a step misses fewer rows than it has
    assert exchange.asked == [(1, {0: 5, 1: 5, 3: 5})]
    for _ in range(20):
        step(prefetcher, HOT, HOT)
    assert len(exchange.asked) == 1, "all are there"
    counts = prefetcher.take_counts()
    assert (counts.num_copies, counts.num_late, counts.num_phase_two) == (3, 0, 0)
    assert counts.num_forecasts == steps + 20
    assert prefetcher.take_counts().num_forecasts == 0


def test_what_fades_is_never_loaded(prefetcher: Prefetcher, exchange: Exchange) -> None:
    for number in range(200):
        ids = HOT if number % 40 == 0 else EVEN
        step(prefetcher, ids, ids)
    assert exchange.asked == []


def test_few_rows_make_no_forecast(prefetcher: Prefetcher, exchange: Exchange) -> None:
    for _ in range(100):
        step(prefetcher, HOT, HOT, num_rows=7)
    assert exchange.asked == []
    assert prefetcher.counts.num_forecasts == 0


def test_phase_two_loads_only_what_pays_at_once(exchange: Exchange) -> None:
    patient, eager = (made(exchange, rows) for rows in (LOAD_ROWS, 4))
    step(patient, EVEN, HOT)
    assert exchange.asked == []
    assert patient.counts.num_phase_two == 1
    step(eager, EVEN, HOT)
    assert exchange.asked == [(1, {0: 5, 1: 5, 3: 5})]
    assert (eager.counts.num_phase_two, eager.counts.num_late, eager.counts.num_copies) == (1, 3, 0)


def test_a_step_of_two_micro_batches_counts_twice(exchange: Exchange) -> None:
    loaded_after = []
    for num_rows in ([64], [0, 64, 64]):
        exchange.asked.clear()
        prefetcher, steps = made(exchange, LOAD_ROWS), 0
        while not exchange.asked:
            prefetcher.begin_step(num_rows)
            prefetcher.ask(0, len(num_rows) // 2, ids_of(EVEN), lambda: Forecast(1, ids_of(HOT)))
            steps += 1
            assert steps < 50
        loaded_after.append(steps)
    assert loaded_after[0] in (2 * loaded_after[1], 2 * loaded_after[1] - 1)


def test_a_worker_that_is_gone_gets_no_copy(exchange: Exchange) -> None:
    owners = ((0,), (0,), (1,), (1,), (2,), (2,), (0,), (1,))
    exchange.placement = ExpertPlacement(4, {0: owners, 1: owners}, knee=4)
    step(made(exchange, 4), HOT, HOT)
    assert exchange.asked == [(1, {0: 5, 1: 5})]


def test_later_micro_batches_repeat_what_phase_two_asked_for(exchange: Exchange) -> None:
    """An expert worker may have all rows of the second one first."""
    prefetcher = made(exchange, 4)
    prefetcher.begin_step([64, 64])
    for layer, forecast in enumerate((Forecast(1, ids_of(EVEN)), None)):
        for micro_batch in (0, 1):
            prefetcher.ask(layer, micro_batch, ids_of(HOT), lambda forecast=forecast: forecast)
    assert exchange.asked == [(1, {0: 5, 1: 5, 3: 5})] * 2


class Slots:
    """An expert worker's two layers with two own slots and two for copies."""

    spec = SimpleNamespace(router=SimpleNamespace(num_experts=8))
    backend = SimpleNamespace(device=torch.device("cpu"))
    local = torch.empty(0)

    def to_local(self, layer: int, ids_RK: Tensor) -> Tensor:
        return self.local

    def __init__(self) -> None:
        self.expert_ids = dict.fromkeys((0, 1), (0, 1, FREE, FREE))
        self.loaded: list[tuple[int, int, int]] = []

    def hold(self, layer: int, slot: int, expert: int) -> None:
        ids = list(self.expert_ids[layer])
        ids[slot] = expert
        self.expert_ids[layer] = tuple(ids)

    def load(self, layer: int, expert: int, slot: int) -> None:
        assert self.expert_ids[layer][slot] == FREE
        self.loaded.append((layer, expert, slot))


@pytest.fixture
def slots() -> Iterator[tuple[Slots, PrefetchSlots]]:
    half = Slots()
    made = PrefetchSlots(half, half.load, 2)  # type: ignore[arg-type]
    yield half, made
    made.close()


def test_each_attention_worker_has_a_slot(slots: tuple[Slots, PrefetchSlots]) -> None:
    half, made = slots
    made.start([(0, 1, 5), (1, 1, 6)])
    assert half.expert_ids[1] == (0, 1, FREE, FREE)
    made.settle(1)
    assert half.expert_ids == {0: (0, 1, FREE, FREE), 1: (0, 1, 5, 6)}
    made.start([(1, 1, 7), (0, 1, 5)])
    made.start([(1, 1, 7)])
    made.settle(1)
    assert half.expert_ids[1] == (0, 1, 5, 7)
    assert half.loaded == [(1, 5, 2), (1, 6, 3), (1, 7, 3)], "what is there is not loaded again"
    with pytest.raises(AssertionError, match=r"attention\[2\]"):
        made.start([(2, 1, 5)])


def test_copies_are_forgotten_once_an_epoch(slots: tuple[Slots, PrefetchSlots]) -> None:
    half, made = slots
    made.start([(0, 1, 5)])
    made.forget(1)
    assert half.expert_ids[1] == (0, 1, FREE, FREE)
    made.start([(0, 1, 6)])
    made.settle(1)
    made.forget(1)  # said again, and rows for it are under way
    assert half.expert_ids[1] == (0, 1, 6, FREE)
    made.forget(2)
    assert half.expert_ids[1] == (0, 1, FREE, FREE)


def test_rows_for_what_is_not_here_are_an_error(slots: tuple[Slots, PrefetchSlots]) -> None:
    half, made = slots
    ids = torch.tensor([[0, -1], [5, 1]])
    there, missing = torch.tensor([[0, -1], [2, 1]]), torch.tensor([[0, -1], [-1, 1]])
    half.local = there
    assert made.local_ids(1, ids) is there
    half.local = missing
    with pytest.raises(AssertionError, match=r"rows of layer 1 for experts \[5\]"):
        made.local_ids(1, ids)
