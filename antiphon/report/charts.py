"""What a chart shows, as plain data, and the colours of all drawings. `draw.py` draws the three kinds of chart.

A test compares a chart's numbers with the report's, without a browser. Colours are Okabe and Ito's, which colour-blind
readers can tell apart, on white and on dark grey. Rejected: plotly. Its bundle made a page of 5 MB of which the figures
were a tenth, and its editing is of no use in a report.
"""

from dataclasses import dataclass, field
from typing import Literal

from antiphon.specs.plan import Layout

LAYOUT_COLOURS: dict[Layout, str] = {
    "disaggregated": "#0088cc",
    "hybrid": "#e69f00",
    "tp_pp": "#009e73",
    "dp_ep": "#cc79a7",
}
PART_COLOURS = {
    "compute": "#0088cc",
    "memory bandwidth": "#e69f00",
    "scale-up network": "#009e73",
    "scale-out network": "#d55e00",
    "fixed cost": "#999999",
}
FREE = "rgba(150,150,150,0.25)"
MEMORY_COLOURS = {"weights": "#0088cc", "KV cache": "#e69f00", "reserve": "#999999", "free": FREE}
BATCH_COLOURS = ("#0088cc", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#b8a800", "#999999")
ROLE_COLOURS = {"attention": "#0088cc", "experts": "#e69f00", "both": "#009e73"}
MARK = "#d62728"
# From even use to a collapsed router: a value between two of them takes the nearer one's colour.
HEAT_COLOURS = ("#2c7bb6", "#6baed6", "#abd9e9", "#d5ecd4", "#ffffbf", "#fed98e", "#fdae61", "#ea633e", "#d7191c")


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
class ChartLine:
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
    lines: tuple[ChartLine, ...]
    spots: tuple[Spot, ...] = ()
    mark: tuple[float, str] | None = None
    height: int = 300


@dataclass(frozen=True, kw_only=True)
class ChartBlock:
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
    blocks: tuple[ChartBlock, ...]
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


def stacked(rows: dict[str, dict[str, float]], unit: str, between: str = "\n") -> tuple[ChartBlock, ...]:
    """Bars laid end to end: row -> group -> length. `between`: row and group in a tip."""
    blocks = []
    for row, lengths in rows.items():
        start = 0.0
        for group, length in lengths.items():
            tip = f"{row}{between if row else ''}{group}: {length:.4g} {unit}"
            blocks.append(ChartBlock(row=row, start=start, length=length, group=group, tip=tip))
            start += length
    return tuple(blocks)
