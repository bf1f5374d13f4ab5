"""What a chart shows, as plain data: the figures of all pages are made of these three kinds and drawn by `draw.py`.

A test compares a chart's numbers with the report's, without a browser. Rejected: plotly. Its bundle made a page of 5 MB
of which the figures were a tenth, and none of its editing is of use in a report.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A line of numbers. `title` ends with the unit. `low`, `high`: its ends; None: where the data end.
    `ticks`: where numbers stand; empty: at round ones."""

    title: str
    low: float | None = 0.0
    high: float | None = None
    is_logarithmic: bool = False
    ticks: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve. A `y` of None is a gap. ``steps``: a value holds until the next one. `tips`: words per point."""

    name: str
    colour: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    tips: tuple[str, ...] = ()
    style: Literal["line", "steps"] = "line"
    has_dots: bool = False


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A point with words beside it. `low`, `high`: where the measured value is expected to lie; None: not said."""

    x: float
    y: float
    words: str
    colour: str
    is_chosen: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """Curves, points with words, and a dashed vertical line at `mark` (x, words)."""

    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    spots: tuple[Spot, ...] = ()
    mark: tuple[float, str] | None = None
    height: int = 300


@dataclass(frozen=True, kw_only=True)
class Block:
    """A bar in `row` from `start` on. `group` gives its colour; `text` stands in it, `tip` beside the pointer."""

    row: str
    start: float
    length: float
    group: str
    text: str = ""
    tip: str = ""


@dataclass(frozen=True, kw_only=True)
class BlockChart:
    """Horizontal bars, rows from the top in order of first appearance. `colours`: group -> colour, in the legend's
    order."""

    x: Axis
    blocks: tuple[Block, ...]
    colours: dict[str, str]
    row_height: int = 34

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(block.row for block in self.blocks))


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """`values[row][column]` as colours from `low` to `high`. `columns`: numbers of what `column_name` names."""

    column_name: str
    columns: tuple[int, ...]
    rows: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    low: float
    high: float
    unit: str


Chart = LineChart | BlockChart | HeatMap


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """SVG of a chart with what stands around it. `legend`: (name, colour)."""

    name: str
    title: str
    caption: str
    svg: str
    legend: tuple[tuple[str, str], ...] = field(default=())


def stacked(rows: dict[str, dict[str, float]], unit: str) -> tuple[Block, ...]:
    """Bars laid end to end: row -> group -> length."""
    blocks = []
    for row, lengths in rows.items():
        start = 0.0
        for group, length in lengths.items():
            tip = f"{row}\n{group}: {length:.4g} {unit}" if row else f"{group}: {length:.4g} {unit}"
            blocks.append(Block(row=row, start=start, length=length, group=group, tip=tip))
            start += length
    return tuple(blocks)
