"""A report as data: sentences, tables, charts and notes, in the order in which they are read.

Three producers make it: a plan (`serving`), a training plan (`training`), a training run (`run`). Two renderers show
it: `terminal` and `page`. Neither knows what a plan is, so a new report needs no new renderer.

Rejected: the same pieces on both. A terminal has 80 columns and no drawings; a page has room for a layout's sizes, for
figures and for what starts the plan. Producers share sentences and rows instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from antiphon.report.charts import Drawing

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
