"""The clock that hanging workers are judged by."""

import pytest

from antiphon.serve.fleet import AwakeClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The machine's clock, as the only entry of a list."""
    times = [1000.0]
    monkeypatch.setattr("antiphon.serve.fleet.time.monotonic", lambda: times[0])
    return times


def test_it_goes_with_the_machines_clock_but_sleeps_with_the_process(now: list[float]) -> None:
    clock = AwakeClock()
    for tick_s in (0.25, 0.5, 0.25):
        now[0] += tick_s
        clock.tick()
    assert clock.now_s == 1.0
    now[0] += 3600.0
    clock.tick()
    assert clock.now_s == 2.0, "an hour in which the process did not run"


def test_it_stands_still_while_the_workers_are_paused(now: list[float]) -> None:
    clock = AwakeClock()
    clock.paused = True
    now[0] += 0.5
    clock.tick()
    clock.paused = False
    clock.tick()
    now[0] += 0.25
    clock.tick()
    assert clock.now_s == 0.25
