"""A report as data (sentences, tables, charts and notes, in the order in which they are read), and what shows it.

Three producers make it: a plan (`serving`), a training plan (`training`), a training run (`run`). Two renderers show
it, and neither knows what a plan is, so a new report needs no new renderer:

- a terminal: tables that fit 80 columns, everything else in lines. Rejected: one wide table of all candidates. It is
  too long to read.
- a page: one HTML file that opens anywhere. A template has a form for each kind of piece; drawings are SVG, made here;
  a short script shows what is under the pointer and saves the plan; a content security policy forbids every load from
  elsewhere, so that the page cannot depend on a network. Rejected: figures that a library draws in the browser. It
  would be nine tenths of the file.

Rejected: the same pieces on both. A terminal has 80 columns and no drawings; a page has room for a layout's sizes, for
figures and for what starts the plan. Producers share sentences and rows instead.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from jinja2 import Environment, FunctionLoader, StrictUndefined
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from antiphon import __version__
from antiphon.report.charts import Drawing

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
    return render("page.html.jinja", document=document, data=inside_script(document.data))


def render(template: str, **contents: Any) -> str:
    """A template of this package."""
    folder = files("antiphon.report")
    loader = FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8"))
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["kind"] = lambda piece: type(piece).__name__
    return environment.get_template(template).render(**contents, version=__version__)


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
