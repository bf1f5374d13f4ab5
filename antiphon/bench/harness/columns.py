"""What people see of a benchmark's rows, and how large its options may be.

A benchmark makes one row, a dictionary, for each contestant and case. The JSON has the rows as they are.
`ContestColumns` says once which parts people see, under which heading and in which form.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from antiphon.base.units import format_bytes, format_seconds

Row = Mapping[str, Any]
Cell = Callable[[Row], object]


@dataclass(frozen=True)
class ContestColumns:
    """Headings with what stands under each: a key of the row, or what a function makes of the row."""

    shown: tuple[tuple[str, str | Cell], ...]
    title: str | None = None

    @property
    def headings(self) -> list[str]:
        return [heading for heading, _ in self.shown]

    def cells(self, rows: Sequence[Row]) -> list[tuple[object, ...]]:
        """By row, under `headings`."""
        return [
            tuple(row[source] if isinstance(source, str) else source(row) for _, source in self.shown) for row in rows
        ]


def shown(key: str, form: Callable[[Any], str]) -> Cell:
    """A key's value in a form for people; what is None, or not there, stays empty."""
    return lambda row: None if row.get(key) is None else form(row[key])


def seconds(key: str) -> Cell:
    return shown(key, format_seconds)


def milliseconds(key: str) -> Cell:
    return shown(key, lambda value: f"{value * 1e3:.2f}")


def num_bytes(key: str) -> Cell:
    return shown(key, format_bytes)


def share(key: str) -> Cell:
    return shown(key, lambda value: f"{value:.0%}")


def times(key: str) -> Cell:
    return shown(key, lambda value: f"{value:.3g}x")


def ratio(key: str) -> Cell:
    return shown(key, lambda value: f"{value:.2f}")


def foreign_words(row: Row) -> str:
    """For a table: the foreign share of a row, and whether that was too much."""
    return f"{row['foreign_cpu_share']:.0%}" + ("" if row["quiet"] else " (not quiet)")


# --- limits of options, in the annotation of a field beside `typer.Option`, which the command checks; a tuple: names


@dataclass(frozen=True)
class UpTo:
    """A count from 1 on. More than `most` is a slip of the finger."""

    most: int


PATIENCE = object()  # seconds of a wait
