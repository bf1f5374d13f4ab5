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
    """A line of text. "soft": what is read last; "strong": what is read first."""

    text: str
    style: Literal["plain", "soft", "strong"] = "plain"


@dataclass(frozen=True)
class Heading:
    """Stands over what follows it, up to the next one."""

    text: str


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
class Reasons:
    """(what, why), a line each."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Notes:
    """What a reader must know of the numbers."""

    items: Sequence[str]


@dataclass(frozen=True)
class Answer:
    """The first sentence of a page, and a soft one below it."""

    text: str
    below: str = ""


@dataclass(frozen=True)
class Cards:
    """A few (name, number) in large letters."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Commands:
    """(what starts the plan, its commands); the first is open. A button beside them saves the plan."""

    ways: Sequence[tuple[str, str]]


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


Piece = Sentence | Heading | Grid | Reasons | Notes | Answer | Cards | Commands | Columns | PageSection | Drawing


@dataclass(frozen=True, kw_only=True)
class ReportDocument:
    """A page. `data`: JSON kept in its source, in the element `data_name`. In `footer` the names of elements and files
    stand between backquotes."""

    title: str
    pieces: Sequence[Piece]
    footer: str
    data_name: str
    data: object
