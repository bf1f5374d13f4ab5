"""Collectives in tiles: which ranges of rows travel, in which order, and one of them under way (`TileFlight`, in place
of `collectives.Flight`), sent piece by piece and received as pieces come.

A tile is a range of the rows that one rank sends another. Rows in order of expert, and within an expert in order of
source rank and token, depend on one tile each, so a product can begin with the rows that are here (MegaScale-MoE,
section 4.2):

    as rows come     own tiles first, then whichever arrives; where tiles of all ranks are added, in turns
    as rows go       tiles for others first, in turns, each rank beginning with the one behind it; own tiles last

Turns, and beginning with the next rank, keep all ranks from sending to the same one at a time.

`TileLinks` carries tiles, through the M2N library (`comm/m2n/tile_links`): one-sided writes and counted arrivals, no
collective for each tile.

    flight.send(tile, rows)            # as soon as these rows are made
    for tile in flight.arrivals():     # own tiles first, then as they come; rows lie in `received_from`
        ...
    flight.land()                      # all of it: as the collective's result

What comes is added in order of rank, so sums have the same bits however tiles arrive. Bytes are counted as those of the
collective. Rejected: tiles of bytes (ranges of rows are what products and scales by groups of rows want); tiles over
the process group, each of which would be a call that all ranks make in one order.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.comm.collectives import AllGather, Collective, ReduceScatter, moving, sum_in_order
from antiphon.comm.float8 import (
    SCALE_BYTES,
    Float8Rows,
    count_lost,
    decode_by_channel,
    decode_by_token,
    encode_by_channel,
    encode_by_token,
    rows_by_channel,
)
from antiphon.comm.m2n.tile_links import Tile, TileLinks

UNIT_ROWS = 128  # E4M3 rows have scales for groups of this many (`comm/float8`), and a group travels whole


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


def rows_of(tile: Tile, rows: Sequence[int]) -> slice:
    """Where its rows lie among `rows[rank]` of each rank, which lie in order of rank."""
    begin = sum(rows[: tile.rank])
    return slice(begin + tile.first, begin + tile.last)


@dataclass(frozen=True)
class Routes:
    """`send[i]` rows go to rank i, `receive[i]` come from it. `same`: all ranks get the same rows. `adds`: each rank's
    rows are added. Rows travel as they are, or as E4M3 with `scales`; they come out in `out`."""

    send: tuple[int, ...]
    receive: tuple[int, ...]
    same: bool
    adds: bool
    scales: Literal["none", "token", "channel"]
    out: torch.dtype

    @staticmethod
    def of(collective: Collective, dtype: torch.dtype) -> "Routes":
        """The routes of rows in `dtype`."""
        plain, out = moving(collective), dtype
        scales: Literal["none", "token", "channel"] = "none"
        if isinstance(collective, Float8Rows):
            plain, out = collective.plain, collective.out
            scales = "channel" if collective.by_channel else "token"
        same = isinstance(plain, AllGather)
        send = plain.sent * plain.group.size if same else plain.sent
        return Routes(send, plain.received, same, isinstance(plain, ReduceScatter), scales, out)

    def encode(self, x_TH: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """What travels of these rows, and how many of their numbers were clipped and flushed."""
        match self.scales:
            case "token":
                return encode_by_token(x_TH)
            case "channel":
                return encode_by_channel(x_TH, (x_TH.shape[0],))
        return x_TH.contiguous(), (0, 0)

    def decode(self, encoded: Tensor, rows: int, width: int) -> Tensor:
        """[rows, width] from bytes."""
        match self.scales:
            case "token":
                return decode_by_token(encoded.view(rows, width + SCALE_BYTES), self.out)
            case "channel":
                return decode_by_channel(encoded.view(rows_by_channel(rows), width), (rows,), self.out)
        return encoded.view(self.out).view(rows, width)


class TileFlight:
    """`collective` on rows in `dtype`, which all its ranks begin in one order. `widths`: of all rows that come, or of
    those of each rank. `received_from`: by rank, [rows, width]; what has not come yet is not set. `own`: this rank's
    place."""

    def __init__(
        self, collective: Collective, links: TileLinks, widths: int | Sequence[int], dtype: torch.dtype
    ) -> None:
        self.routes = Routes.of(collective, dtype)
        self._collective = collective
        self._links = links
        self.own = collective.group.index
        self._number = links.begin()
        self._tiles = [tiles_of(rank, rows, links.tile_rows) for rank, rows in enumerate(self.routes.receive)]
        self._to_come = {rank: len(tiles) for rank, tiles in enumerate(self._tiles) if tiles and rank != self.own}
        rows = self.routes.receive
        widths = [widths] * len(rows) if isinstance(widths, int) else widths
        sizes = [count * width for count, width in zip(rows, widths, strict=True)]
        self._numbers = torch.empty(sum(sizes), dtype=self.routes.out)
        parts = zip(torch.split(self._numbers, sizes), rows, widths, strict=True)
        self.received_from = [part.view(count, width) for part, count, width in parts]

    @property
    def tile_rows(self) -> int:
        return self._links.tile_rows

    @property
    def to_send(self) -> list[Tile]:
        """In the order in which they should go."""
        return outgoing(self.routes.send, self.own, self.tile_rows)

    @property
    def received(self) -> Tensor:
        """All rows, in order of rank, where they have one width."""
        return self._numbers.view(-1, self.received_from[0].shape[1])

    def send(self, tile: Tile, rows_TH: Tensor) -> None:
        """These rows are made, so they go."""
        self._send(tile, self._encoded(rows_TH))

    def send_all(self, x_TH: Tensor) -> None:
        """Send rows that are all there: for each rank in order, or for all."""
        assert x_TH.shape[0] == (self.routes.send[0] if self.routes.same else sum(self.routes.send))
        for_all: dict[int, Tensor] = {}
        for tile in self.to_send:
            encoded = for_all.get(tile.number)
            if encoded is None:
                rows = slice(tile.first, tile.last) if self.routes.same else rows_of(tile, self.routes.send)
                encoded = self._encoded(x_TH[rows])
            if self.routes.same:
                for_all[tile.number] = encoded
            self._send(tile, encoded)

    def arrivals(self) -> Iterator[Tile]:
        """Each tile once its rows are there: own ones, which have to be sent by now, then as they come."""
        yield from self._tiles[self.own]
        while self._to_come:
            begin_s = time.perf_counter()
            rank, number, encoded = self._links.next(self._number, self._collective.name, list(self._to_come))
            self._collective.group.ledger.waited(self._collective.name, time.perf_counter() - begin_s)
            tile = self._tiles[rank][number]
            self._put(tile, encoded)
            self._links.release(self._number, rank, number)
            self._to_come[rank] -= 1
            if not self._to_come[rank]:
                del self._to_come[rank]
            yield tile
        self._links.finish(self._number, self._collective.name)

    def arrivals_in_turns(self) -> Iterator[Tile]:
        """As `arrivals`, but tiles of the same rows in one order, so that sums of them have the same bits."""
        return in_turns(self.arrivals(), self.own, len(self.routes.receive))

    def land(self) -> Tensor:
        """The collective's result."""
        for _ in self.arrivals():
            pass
        if not self.routes.adds:
            return self.received
        ranks = len(self.routes.receive)
        return sum_in_order(self.received.chunk(ranks) if self.received.shape[0] else [self.received])

    def _encoded(self, rows_TH: Tensor) -> Tensor:
        encoded, lost = self.routes.encode(rows_TH)
        if self.routes.scales != "none":
            count_lost(self._collective, lost)
        return encoded

    def _send(self, tile: Tile, encoded: Tensor) -> None:
        if tile.rank == self.own:
            self._put(tile, encoded.view(torch.uint8))
            return
        self._collective.group.ledger.sent(self._collective.name, encoded.numel() * encoded.element_size())
        self._links.post(self._number, tile, encoded)

    def _put(self, tile: Tile, encoded: Tensor) -> None:
        rows_TH = self.received_from[tile.rank][tile.first : tile.last]
        rows_TH.copy_(self.routes.decode(encoded.flatten(), *rows_TH.shape))


def launch_in_tiles(
    collective: Collective, links: TileLinks, x_TH: Tensor, widths: Sequence[int] | None = None
) -> TileFlight:
    """Begin it on rows that are all there. `widths`: by rank, of the rows that come; None: as those that go."""
    flight = TileFlight(collective, links, x_TH.shape[1] if widths is None else widths, x_TH.dtype)
    flight.send_all(x_TH)
    return flight
