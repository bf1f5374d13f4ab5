"""Bars of a Gantt chart: what every simulation hands to reports and trace files.

A simulation says what happened as a list of `Bar`; who draws or writes it needs to know nothing else. Rejected: each
simulation drawing its own chart.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from antiphon.base.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Something that occupied `track` from `start_s` to `end_s`.

    `kind` groups bars of one colour, such as ``attention`` or ``all_to_all``. `layer`, `micro_batch`: where they mean
    something, else -1.
    """

    track: str
    label: str
    start_s: float
    end_s: float
    kind: str = ""
    layer: int = -1
    micro_batch: int = -1

    def __post_init__(self) -> None:
        if not self.end_s >= self.start_s:
            raise UserError(f"bar {self.label!r} on {self.track!r} ends at {self.end_s} s, before {self.start_s} s")

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def tracks(bars: Iterable[Bar]) -> list[str]:
    """The tracks in order of first appearance."""
    return list(dict.fromkeys(bar.track for bar in bars))


def covered_s(bars: Sequence[Bar], start_s: float = float("-inf"), end_s: float = float("inf")) -> float:
    """Length of the union of the bars inside [start_s, end_s]."""
    covered, reached = 0.0, start_s
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        begin, end = max(bar.start_s, reached), min(bar.end_s, end_s)
        if end > begin:
            covered += end - begin
            reached = end
    return covered


def span_s(bars: Iterable[Bar]) -> tuple[float, float]:
    """Start of the first bar and end of the last; (0, 0) without bars."""
    listed = list(bars)
    if not listed:
        return 0.0, 0.0
    return min(bar.start_s for bar in listed), max(bar.end_s for bar in listed)
