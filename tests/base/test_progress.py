"""Progress stays silent for short operations and plain where no terminal is."""

import io

import pytest

from antiphon.base.progress import progress
from antiphon.base.units import format_bytes


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_short_operations_leave_no_trace(stream: io.StringIO) -> None:
    clock = Clock()
    with progress("loading", stream=stream, clock=clock) as report:
        report(1, 2)
        clock.now_s += 0.9
        report(2, 2)
    assert stream.getvalue() == ""


def test_lines_come_now_and_then_and_at_the_end() -> None:
    clock, stream = Clock(), io.StringIO()
    with progress("loading", stream=stream, clock=clock) as report:
        for step in range(13):
            report(step * 1000, 12000)
            clock.now_s += 1.0
    assert stream.getvalue().splitlines() == [
        "loading: 1,000 of 12,000 (8%)",
        "loading: 6,000 of 12,000 (50%)",
        "loading: 11,000 of 12,000 (92%)",
        "loading: done in 13.0 s",
    ]


def test_an_error_passes_through_and_is_told_apart_from_the_end() -> None:
    clock, stream = Clock(), io.StringIO()

    def fail() -> None:
        with progress("loading", stream=stream, clock=clock) as report:
            clock.now_s += 2.0
            report(1, None)
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        fail()
    assert stream.getvalue().splitlines() == ["loading: 1", "loading: stopped after 2.0 s"]


def test_amounts_are_printed_in_the_callers_units() -> None:
    clock, stream = Clock(), io.StringIO()
    with progress("loading", format_amount=format_bytes, stream=stream, clock=clock) as report:
        clock.now_s += 1.0
        report(2**20, 2**21)
        clock.now_s += 5.0
        report(0, 0)
    assert stream.getvalue().splitlines()[:2] == ["loading: 1.0 MiB of 2.0 MiB (50%)", "loading: 0 B of 0 B"]


def test_a_terminal_gets_a_bar() -> None:
    clock, stream = Clock(), Terminal()
    with progress("loading [x]", stream=stream, clock=clock) as report:
        clock.now_s += 1.5
        report(1, 4)
        report(4, 4)
    assert "loading [x]" in stream.getvalue()
    assert "4 of 4 (100%)" in stream.getvalue()
