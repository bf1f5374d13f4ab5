"""Which form the exchanges of a step take: by phase, by what was measured, and the same on all ranks."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from antiphon.comm.rank_group import NativeRankGroup
from antiphon.comm.two_level import hybrid
from antiphon.comm.two_level.hybrid import Forms, HybridExchange, Travelling, fused_is_faster
from antiphon.comm.two_level.levels import Levels, TwoLevel
from antiphon.specs.placement import contiguous_placement
from antiphon.specs.plan import Collectives
from tests.comm.test_two_level import HIDDEN, MAX_ROWS, TOP_K, TOPOLOGIES, Box, box

ROWS = Travelling(
    hidden_size=HIDDEN,
    top_k=TOP_K,
    num_experts=12,
    dtype=torch.float32,
    max_rows=MAX_ROWS,
    device=torch.device("cpu"),
)
DIFFERENT = [name for name, each in TOPOLOGIES.items() if each.num_nodes > 1 and each.expert_tp > 1]


def exchange_of(levels: Levels) -> HybridExchange:
    placement = contiguous_placement(12, levels.topology.expert_ep, [0])
    return HybridExchange(levels, placement, lambda layer, rows_RH, *choices: rows_RH)


def steps(made: Box, prefill: Collectives, decode: Collectives, *asked: tuple[bool, int]) -> list[list[bool]]:
    """The form that every rank takes for each step, of which phase and size are given."""

    def of(levels: Levels) -> list[bool]:
        exchange = exchange_of(levels)
        chosen = Forms(exchange, levels, ROWS, prefill=prefill, decode=decode)
        found = []
        for is_prefill, rows in asked:
            chosen.begin_step(prefill=is_prefill, most_rows=rows)
            found.append(exchange.fused)
        return found

    return made.each(of)


def pretend(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int, int, bool], float]) -> list[int]:
    """Let (rank, rows, fused) take so long; returns the list of ranks that have timed something."""
    timed: list[int] = []

    def took_s(exchange: HybridExchange, levels: Levels, rows: Travelling, num_rows: int, *, fused: bool) -> float:
        timed.append(levels.rank)
        return seconds(levels.rank, num_rows, fused)

    monkeypatch.setattr(hybrid, "round_trip_s", took_s)
    return timed


def test_each_phase_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = pretend(monkeypatch, lambda *_: 1.0)
    with box(TOPOLOGIES["d_DP = d_EP"]) as made:
        for rank in steps(made, "synchronous", "fused", (True, 9), (False, 9), (True, 1), (False, 0)):
            assert rank == [False, True, False, True]
    assert not timed


@pytest.mark.parametrize("name", DIFFERENT)
def test_all_ranks_measure_and_choose_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank alone finds the fused form slow, and so slow that it is on average; of one row all find it fast."""
    topology = TOPOLOGIES[name]

    def seconds(rank: int, rows: int, fused: bool) -> float:
        if rows == 1 or not fused:
            return 1e-3 + 1e-3 * (rows == 1 and not fused)
        return 1.0 if rank == topology.size - 1 else 1e-4

    monkeypatch.setattr(hybrid, "_ROWS", (1, 8))
    timed = pretend(monkeypatch, seconds)
    with box(topology) as made:
        asked = ((False, 1), (False, 8), (True, 2), (True, 700))
        assert steps(made, "auto", "auto", *asked) == [[True, False, True, False]] * topology.size
        assert set(timed) == set(range(topology.size))
        assert steps(made, "auto", "synchronous", *asked) == [[False, False, True, False]] * topology.size


def test_every_epoch_measures_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is new has not measured: all do it again."""
    slow = {"fused": True}
    timed = pretend(monkeypatch, lambda rank, rows, fused: 1.0 + (fused == slow["fused"]))
    with box(TOPOLOGIES["d_DP = d_EP"]) as made:
        exchanges = {levels.rank: exchange_of(levels) for levels in made.levels}
        chosen = {
            levels.rank: Forms(exchanges[levels.rank], levels, ROWS, prefill="auto", decode="auto")
            for levels in made.levels
        }
        for epoch, fused in ((1, False), (2, True)):
            slow["fused"] = not fused
            made.reset(epoch)
            timed.clear()
            for _ in range(2):
                made.each(lambda levels: chosen[levels.rank].begin_step(prefill=True, most_rows=4))
                once = len(timed)
                assert {exchange.fused for exchange in exchanges.values()} == {fused}
            assert once == len(timed) > 0
            slow["fused"] = fused  # too late for this epoch


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_is_measured_is_an_exchange(name: str) -> None:
    """Bytes travel on both levels, as many for either form; the groups are of use afterwards."""
    with box(TOPOLOGIES[name]) as made:

        def sent(levels: Levels, fused: bool) -> dict[str, int]:
            levels.ledger.take()
            hybrid.round_trip_s(exchange_of(levels), levels, ROWS, MAX_ROWS, fused=fused)
            return dict(levels.ledger.take().sent_bytes)

        fused, synchronous = (made.each(lambda levels, form=form: sent(levels, form)) for form in (True, False))
        assert fused == synchronous
        assert all(each["across.dispatch"] > 0 and each["inside.combine"] > 0 for each in fused)
        times = made.each(lambda levels: hybrid.measure(exchange_of(levels), levels, ROWS))
        assert all(each == times[0] for each in times)
        assert set(times[0]) == {1}


@pytest.mark.parametrize(
    ("name", "fused", "gathers", "reduces"),
    [
        ("d_DP = d_EP", True, 2 + 1, 3),
        ("d_DP = d_EP", False, 1 + 1, 1),
        ("d_DP > d_EP", True, 2 * 2, 2),
        ("d_DP > d_EP", False, 2, 1),
    ],
)
def test_one_inner_collective_a_round_or_one_of_all_rows(
    name: str, fused: bool, gathers: int, reduces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three nodes: fused, dispatch gathers the rows of two and combine reduces those of all three; a gather completes
    the rows. Two nodes with several sets of rows: the numbers of rows go first, those of the own node too."""
    calls: Counter[str] = Counter()

    def counts(name: str) -> None:
        call = getattr(NativeRankGroup, name)

        def counted(group: NativeRankGroup, *arguments: Any) -> Any:
            calls[name] += 1
            return call(group, *arguments)

        monkeypatch.setattr(NativeRankGroup, name, counted)

    with box(TOPOLOGIES[name]) as made:
        for call in ("all_gather", "reduce_scatter"):
            counts(call)
        made.each(lambda levels: hybrid.round_trip_s(exchange_of(levels), levels, ROWS, MAX_ROWS, fused=fused))
    assert calls == {"all_gather": made.topology.size * gathers, "reduce_scatter": made.topology.size * reduces}


@pytest.mark.parametrize("topology", [TwoLevel(attention_tp=2, expert_tp=2), TwoLevel(num_nodes=2, attention_tp=2)])
def test_where_a_level_has_no_links_nothing_is_measured(topology: TwoLevel, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = pretend(monkeypatch, lambda *_: 1.0)
    with box(topology) as made:
        assert steps(made, "auto", "auto", (True, 5)) == [[True]] * topology.size
    assert not timed


def test_the_nearest_number_of_rows_counts() -> None:
    times = {1: (2.0, 1.0), 16: (1.0, 2.0), 128: (3.0, 2.0)}
    assert [fused_is_faster(times, rows) for rows in (0, 1, 3, 5, 44, 46, 5000)] == [
        False,
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    assert fused_is_faster({}, 7)
    assert fused_is_faster({1: (1.0, 1.0)}, 7)


def test_large_messages_end_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda rank, rows, fused: 0.1 * rows)
    monkeypatch.setattr(hybrid, "_ROWS", (1, 2, 3))
    with box(TOPOLOGIES["d_DP > d_EP"]) as made:
        times = made.each(lambda levels: hybrid.measure(exchange_of(levels), levels, ROWS))
        assert all(set(each) == {1} for each in times), "eight exchanges of 0.1 s are enough"
