"""What all benchmarks of several contestants share: how long they take turns, and what a table shows of their rows.

A benchmark makes one row, a dictionary, for each contestant and case. The JSON has the rows as they are.
`ContestColumns` says once which parts people see, under which heading and in which form.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from antiphon.base.units import format_bytes, format_seconds
from antiphon.bench.harness.quiet import Repetitions, repeat_until_quiet

Value = TypeVar("Value")
Row = Mapping[str, Any]
Cell = Callable[[Row], object]


@dataclass(frozen=True, kw_only=True)
class ContestTurns:
    """How often contestants take turns: until each has `num_repetitions` that other programs did not disturb, at most
    twice as often. `quiet_timeout_s` bounds each wait for other programs to rest."""

    num_repetitions: int = 5
    quiet_timeout_s: float = 5.0

    @property
    def max_rounds(self) -> int:
        """Disturbed turns are repeated."""
        return 2 * self.num_repetitions

    def take(self, contestants: Mapping[str, Callable[[], Value]]) -> dict[str, Repetitions[Value]]:
        """All turns, by contestant."""
        return repeat_until_quiet(
            contestants,
            num_required=self.num_repetitions,
            max_rounds=self.max_rounds,
            quiet_timeout_s=self.quiet_timeout_s,
        )


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


# --- limits of options, in the annotation of a field beside `typer.Option`; the command checks them


@dataclass(frozen=True)
class UpTo:
    """A count from 1 on. More than `most` is a slip of the finger."""

    most: int


@dataclass(frozen=True)
class OneOf:
    """One of these names."""

    names: Sequence[str]


@dataclass(frozen=True)
class Patience:
    """Seconds of a wait."""
