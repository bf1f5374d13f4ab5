"""Whose bytes the event loop looks at next, and how many before everything else has its turn.

asyncio calls every connection that has bytes in each turn of its loop. A turn would be as long as what all clients sent
together, and one request takes a dozen turns. So bytes that do not fit into the turn wait here, one small piece of each
connection, and meanwhile that connection is not read. A turn takes a few pieces, starts at most two requests and ends
after two milliseconds.

There are two lines, each in the order of arrival. Connections that begin a request come first. Those behind them go on
with a long body, or sent further requests before the answer to the first. They have every fourth place, so that they
move on in any crowd.

Rejected: an order by each connection's cost so far, which lets a crowd of new connections overtake one that is in use;
one line for all, in which a short request waits for a piece of each long body.
"""

import asyncio
import time
from collections import OrderedDict
from typing import Protocol

_PIECES_PER_TURN = 8
_STARTS_PER_TURN = 2
_TURN_S = 0.002
_LATER_SHARE = 4  # of so many places one is for those that go on


class Reader(Protocol):
    """A connection with bytes that were not looked at yet."""

    def take_piece(self) -> bool:
        """Handle what waits; whether a request has started. Raises nothing."""


class ReadingLine:
    """See the module's docstring. Used from the event loop's thread only."""

    def __init__(self) -> None:
        self.num_turns = 0  # that took anything
        self._first: OrderedDict[Reader, None] = OrderedDict()
        self._later: OrderedDict[Reader, None] = OrderedDict()
        self._num_pieces = self._num_starts = self._num_places = 0
        self._spent_s = 0.0
        self._is_scheduled = False

    def __len__(self) -> int:
        return len(self._first) + len(self._later)

    def __contains__(self, reader: object) -> bool:
        return reader in self._first or reader in self._later

    @property
    def is_free(self) -> bool:
        """Whether a piece may be taken at once: there is time in this turn, and no other waits."""
        return not self and self._has_time

    @property
    def _has_time(self) -> bool:
        return self._num_pieces < _PIECES_PER_TURN and self._num_starts < _STARTS_PER_TURN and self._spent_s < _TURN_S

    def add(self, reader: Reader, *, is_first: bool) -> None:
        """`take_piece` is called in one of the next turns."""
        (self._first if is_first else self._later)[reader] = None
        self._schedule()

    def discard(self, reader: Reader) -> None:
        """It waits no more."""
        self._first.pop(reader, None)
        self._later.pop(reader, None)

    def take(self, reader: Reader) -> None:
        """Have `reader` take its piece now, on this turn's account."""
        self._schedule()
        begin_s = time.perf_counter()
        self._num_starts += reader.take_piece()
        self._spent_s += time.perf_counter() - begin_s
        self._num_pieces += 1

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._is_scheduled = False
        self.num_turns += 1
        self._num_pieces = self._num_starts = 0
        self._spent_s = 0.0
        while self and self._has_time:
            self._num_places += 1
            is_for_later = self._later and self._num_places % _LATER_SHARE == 0
            line = self._later if is_for_later or not self._first else self._first
            self.take(line.popitem(last=False)[0])
        if self:
            self._schedule()
