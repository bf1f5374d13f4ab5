"""Foreign CPU share and the repeat-until-quiet rule, with invented clocks; no timing is asserted."""

import os
from collections.abc import Callable, Iterator

import pytest

from antiphon.bench.harness import quiet
from antiphon.bench.harness.quiet import CpuWatch, MeasuredAround, Repetition, Repetitions


def test_busy_time_adds_up_everything_but_idle() -> None:
    text = "cpu  100 20 30 99999 88888 4 5 6 7 8\ncpu0 1 2 3\n"
    assert quiet.machine_busy_s(text) == pytest.approx(165 / os.sysconf("SC_CLK_TCK"))


def test_unknown_proc_stat_is_named() -> None:
    with pytest.raises(ValueError, match="it reads 'intr 1 2 3'"):
        quiet.machine_busy_s("intr 1 2 3\n")


def test_own_time_counts_each_process_once_and_survives_lost_ones() -> None:
    own_s = quiet.own_busy_s([os.getpid()])
    assert own_s > 0
    assert quiet.own_busy_s([os.getpid(), os.getpid(), 2**22 + 1]) == pytest.approx(own_s, abs=0.5)


@pytest.mark.parametrize(
    ("machine_s", "own_s", "expected"),
    [(2.0, 2.0, 0.0), (2.0, 1.5, 0.25), (2.0, 0.0, 1.0), (1.0, 1.2, 0.0)],
)
def test_foreign_share(monkeypatch: pytest.MonkeyPatch, machine_s: float, own_s: float, expected: float) -> None:
    """On two CPUs over one second; clock granularity may make our own time exceed the machine's: that is zero."""
    readings = iter([(10.0, 3.0, 50.0), (10.0 + machine_s, 3.0 + own_s, 51.0)])
    monkeypatch.setattr(CpuWatch, "_now", lambda self: next(readings))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert CpuWatch().foreign_share() == pytest.approx(expected)


def test_watch_of_the_real_machine_is_a_share() -> None:
    assert 0.0 <= CpuWatch().foreign_share() <= 1.0


def test_wait_for_quiet_returns_at_the_first_quiet_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.5, 0.2, 0.01, 0.9])
    monkeypatch.setattr(quiet, "foreign_share_during", lambda *_: next(shares))
    assert quiet.wait_for_quiet(timeout_s=60.0)
    assert next(shares) == 0.9


def test_wait_for_quiet_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "foreign_share_during", lambda *_: 0.5)
    assert not quiet.wait_for_quiet(timeout_s=0.0)


def test_counted_are_the_quiet_ones() -> None:
    shares = [0.5, 0.01, 0.02, 0.3, 0.07, 0.03]
    repetitions = Repetitions(tuple(Repetition(index, share) for index, share in enumerate(shares)))
    assert repetitions.is_quiet
    assert [repetition.value for repetition in repetitions.counted] == [1, 2, 5, 4]
    assert repetitions.foreign_share == 0.07
    assert repetitions.best(float) == 5
    assert repetitions.median(float) == 3.0


def test_least_disturbed_are_counted_when_too_few_were_quiet() -> None:
    shares = [0.5, 0.01, 0.2, 0.3]
    repetitions = Repetitions(tuple(Repetition(index, share) for index, share in enumerate(shares)))
    assert not repetitions.is_quiet
    assert repetitions.num_quiet == 1
    assert [repetition.value for repetition in repetitions.counted] == [1, 2, 3]
    assert repetitions.foreign_share == 0.3


@pytest.fixture
def scripted_shares(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[float]], None]:
    """Makes every `CpuWatch` report the next of these shares, and every wait succeed at once."""

    def install(shares: list[float]) -> None:
        remaining: Iterator[float] = iter(shares)
        monkeypatch.setattr(CpuWatch, "foreign_share", lambda self: next(remaining))
        monkeypatch.setattr(quiet, "wait_for_quiet", lambda *_args, **_kwargs: True)

    return install


def test_contestants_alternate_until_all_are_quiet(scripted_shares: Callable[[list[float]], None]) -> None:
    scripted_shares([0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0])
    order: list[str] = []
    results = quiet.repeat_until_quiet({"a": lambda: order.append("a"), "b": lambda: order.append("b")})
    # The third run ("b", for the order turns around every round) was disturbed: a fourth round makes up for it.
    assert "".join(order) == "abbaabba"
    assert results["a"].num_quiet == 4
    assert results["b"].num_quiet == 3
    assert results["b"].is_quiet


def test_rounds_are_bounded(scripted_shares: Callable[[list[float]], None]) -> None:
    scripted_shares([0.9] * 4)
    results = quiet.repeat_until_quiet({"a": lambda: 1.0}, max_rounds=4)
    assert len(results["a"].all) == 4
    assert not results["a"].is_quiet
    assert results["a"].foreign_share == 0.9


def test_what_is_measured_after_a_run_stands_before_the_next() -> None:
    readings = iter("abc")
    around = MeasuredAround(lambda: next(readings))
    assert around.before() == around.before() == "a"
    assert [around.after(), around.after()] == [("a", "b"), ("b", "c")]
    always = MeasuredAround(lambda: readings)
    assert always.after() == (readings,)
