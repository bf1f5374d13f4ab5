"""Published measurements of kernels and exchanges: files with their sources, which the cost model is held against.

    name = "deepep-normal"
    kind = "rows sent once per node"      # which function of the cost model answers for it
    device = "H800"
    source = "title, address, on what"
    columns = ["way", "ranks", "gb_per_s"]
    rows = [["dispatch", 8, 153]]

Numbers stand as they are printed, in the printed unit. Rejected: tables that the cost model reads instead of a formula.
They know some twenty shapes of two devices; a formula with a few constants that meets them within their spread also
answers for the others.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

from antiphon.specs.catalog import DATA
from antiphon.specs.strict_table import read_table

MeasuredKind = Literal[
    "rows sent direct",
    "rows sent once per node",
    "all-to-all of blocks",
    "products",
    "absorbed attention",
    "whole attention",
]
Cell = str | int | float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One published table. `device`: name of the shipped device it was measured on."""

    name: str
    summary: str
    kind: MeasuredKind
    device: str
    source: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def each(self) -> list[dict[str, Cell]]:
        """Its rows, by column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


@cache
def measured() -> tuple[Measured, ...]:
    """All shipped tables, by name."""
    return tuple(read_table(path).read(Measured) for path in sorted((DATA / "measured").glob("*.toml")))
