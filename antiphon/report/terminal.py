"""Pieces of a report on a terminal: tables that fit 80 columns, everything else in lines.

Rejected: one wide table of all candidates. It is too long to read.
"""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from antiphon.report.document import Grid, Notes, Pairs, Piece, Sentence

BAR_WIDTH = 20
BAR_SIGNS = "█▓▒"


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
    """Without lines."""
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
