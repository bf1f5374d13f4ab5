"""A report as data (sentences, tables, charts and notes, in the order in which they are read), and what shows it.

Three producers make it: a plan (`serving`), a training plan (`training_plan`), a training run (`training_run`). Two
renderers show it, and neither knows what a plan is, so a new report needs no new renderer:

- a terminal: tables that fit 80 columns, everything else in lines. Rejected: one wide table of all candidates. It is
  too long to read.
- a page: one HTML file that opens anywhere. A template has a form for each kind of piece; drawings are SVG, made here;
  a short script shows what is under the pointer and saves the plan; a content security policy forbids every load from
  elsewhere, so that the page cannot depend on a network. Rejected: figures that a library draws in the browser. It
  would be nine tenths of the file.

Rejected: the same pieces on both. A terminal has 80 columns and no drawings; a page has room for a layout's sizes, for
figures and for what starts the plan. Producers share sentences and rows instead.

What a chart shows is plain data, which `draw.py` draws; a test compares its numbers with the report's, without a
browser. Colours are Okabe and Ito's, which colour-blind readers can tell apart, on white and on dark grey. Rejected:
plotly. Its bundle made a page of 5 MB of which the figures were a tenth, and its editing is of no use in a report.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Literal

from jinja2 import Environment, StrictUndefined
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from antiphon import __version__
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


# --- the pieces of a report


BAR_WIDTH = 20
BAR_SIGNS = "█▓▒"
Row = Sequence[str]


@dataclass(frozen=True)
class Sentence:
    """A line of text. "heading": stands over what follows it. "answer": the first of a page, with `below` in soft
    letters under it. "soft": what is read last; "strong": what is read first."""

    text: str
    style: Literal["plain", "soft", "strong", "heading", "answer"] = "plain"
    below: str = ""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table. `right`: columns of numbers. `names_rows`: each row's first cell is its heading, as it is in any table
    without `columns`. `style` "losers": cells of a page do not break."""

    rows: Sequence[Row]
    columns: Sequence[str] = ()
    right: Sequence[int] = ()
    names_rows: bool = False
    style: Literal["", "losers"] = ""


@dataclass(frozen=True)
class Pairs:
    """Two texts a line. "reasons": (what, why). "cards": (name, number), in large letters. "commands": (what starts the
    plan, its commands), the first one open, beside a button that saves the plan."""

    items: Sequence[tuple[str, str]]
    style: Literal["reasons", "cards", "commands"] = "reasons"


@dataclass(frozen=True)
class Notes:
    """What a reader must know of the numbers."""

    items: Sequence[str]


@dataclass(frozen=True)
class Columns:
    """Two groups of pieces beside each other."""

    left: "Sequence[Piece]"
    right: "Sequence[Piece]"


@dataclass(frozen=True)
class PageSection:
    """A titled part of a page. `name`: its anchor."""

    name: str
    title: str
    pieces: "Sequence[Piece]"


Piece = Sentence | Grid | Pairs | Notes | Columns | PageSection | Drawing


@dataclass(frozen=True, kw_only=True)
class ReportDocument:
    """A page. `data`: JSON kept in its source, in the element `data_name`. In `footer` the names of elements and files
    stand between backquotes."""

    title: str
    pieces: Sequence[Piece]
    footer: str
    data_name: str
    data: object


def html(document: ReportDocument) -> str:
    """The whole file's text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["kind"] = lambda piece: type(piece).__name__
    page = environment.from_string(files("antiphon.report").joinpath("page.html.jinja").read_text(encoding="utf-8"))
    return page.render(document=document, data=inside_script(document.data), version=__version__)


def inside_script(value: object) -> str:
    """JSON that no HTML parser can take for the end of its element."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("</", "<\\/").replace("<!--", "<\\!--")


def rendered(pieces: Iterable[Piece]) -> Iterator[RenderableType]:
    """What to print, in order. Pieces that only a page has are a bug here."""
    for piece in pieces:
        match piece:
            case Sentence(text, "heading"):
                yield Text(f"\n{text}", style="bold")
            case Sentence(text, style):
                yield Text(text, style="bold" if style == "strong" else "")
            case Grid():
                yield _table(piece)
            case Pairs(pairs):
                yield from (Padding(Text(f"{what}: {why}"), (0, 0, 0, 2)) for what, why in pairs)
            case Notes(items):
                yield from (Text(f"note: {note}") for note in items)
            case _:
                raise AssertionError(f"a terminal does not show {type(piece).__name__}")


def _table(grid: Grid) -> Table:
    """A table without lines."""
    result = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(grid.columns):
        result.add_column(column, justify="right" if index in grid.right else "left", overflow="fold")
    for row in grid.rows:
        result.add_row(*(Text(cell) for cell in row))
    return result


def bar(parts: Sequence[float], whole: float = 1.0) -> str:
    """Up to three parts of a whole as blocks in proportion, the rest as dots; always `BAR_WIDTH` columns."""
    text, filled = "", 0.0
    for sign, part in zip(BAR_SIGNS, parts, strict=False):
        filled += part
        text += sign * (min(BAR_WIDTH, max(0, round(BAR_WIDTH * filled / whole))) - len(text))
    return text + "·" * (BAR_WIDTH - len(text))
