"""An exchange of rows in tiles: which ranges of rows travel, in which order. Plain Python.

A tile is a range of the rows that one rank sends another. Rows in order of expert, and within an expert in order of
source rank and token, depend on one tile each, so a product can begin with the rows that are here (MegaScale-MoE,
section 4.2):

    as rows come     own tiles first, then whichever arrives; where tiles of all ranks are added, in turns
    as rows go       tiles for others first, in turns, each rank beginning with the one behind it; own tiles last

Turns, and beginning with the next rank, keep all ranks from sending to the same one at a time. Rejected: tiles of
bytes. Ranges of rows are what products and scales by groups of rows want.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from antiphon.base.errors import UserError

UNIT_ROWS = 128  # E4M3 rows have scales for groups of this many (`comm/float8`), and a group travels whole


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows [first, last) of those that go to, or come from, the rank at place `rank`; the `number`th of them."""

    rank: int
    number: int
    first: int
    last: int


def check_tile_rows(tile_rows: int) -> None:
    if tile_rows < UNIT_ROWS or tile_rows % UNIT_ROWS:
        raise UserError(f"tile_rows is {tile_rows}: it must be a multiple of {UNIT_ROWS}, and at least {UNIT_ROWS}")


def tiles_of(rank: int, rows: int, tile_rows: int) -> list[Tile]:
    """The tiles of one rank's rows, in order; none where there are no rows."""
    return [
        Tile(rank, number, first, min(first + tile_rows, rows))
        for number, first in enumerate(range(0, rows, tile_rows))
    ]


def outgoing(rows: Sequence[int], own: int, tile_rows: int) -> list[Tile]:
    """All tiles of a rank at place `own` that has `rows[i]` for rank i, in the order in which they go."""
    size = len(rows)
    others = [tile for place in range(size) if place != own for tile in tiles_of(place, rows[place], tile_rows)]
    others.sort(key=lambda tile: (tile.number, (tile.rank - own) % size))
    return others + tiles_of(own, rows[own], tile_rows)


def in_turns(arrivals: Iterable[Tile], own: int, size: int) -> Iterator[Tile]:
    """Tiles as they come, but those with one number in turns: that of the rank at place `own`, then that of the rank
    before it, which sends here first. So what is added to the same rows is added in one order."""
    early, turns = dict[tuple[int, int], Tile](), Counter[int]()
    for arrived in arrivals:
        number = arrived.number
        early[arrived.rank, number] = arrived
        while (tile := early.pop(((own - turns[number]) % size, number), None)) is not None:
            turns[number] += 1
            yield tile


def boundaries(rows: Sequence[int], tile_rows: int) -> list[int]:
    """Where tiles begin, of rows that lie in order of rank, and where the last one ends."""
    begins, before = list[int](), 0
    for count in rows:
        begins += range(before, before + count, tile_rows)
        before += count
    return [*begins, before]
