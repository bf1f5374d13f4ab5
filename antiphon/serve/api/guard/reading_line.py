"""Whose bytes the event loop looks at next, and how many before everything else has its turn.

asyncio calls every connection that has bytes in each turn of its loop. A turn would be as long as what all clients sent
together, and one request takes a dozen turns. So bytes that do not fit into the turn wait here, one small piece of each
connection, and meanwhile that connection is not read. A turn takes a few pieces, starts at most two requests and ends
after two milliseconds.

There are two lines. Connections that begin a request come first, in the order of arrival. When a crowd came at once,
the newest comes first instead: it need not be one of the crowd. Those in the other line go on with a long body, or sent
further requests before the answer to the first. Every fourth place belongs to those that waited longest, of the two
lines by turns, so that all move on.

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
_OLDEST_SHARE = 4  # of this many places one is for those that waited longest
_CROWD = 16


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
            self.take(self._next())
        if self:
            self._schedule()

    def _next(self) -> Reader:
        self._num_places += 1
        share, rest = divmod(self._num_places, _OLDEST_SHARE)
        is_for_oldest = rest == 0
        if self._later and (not self._first or (is_for_oldest and share % 2)):
            return self._later.popitem(last=False)[0]
        return self._first.popitem(last=len(self._first) > _CROWD and not is_for_oldest)[0]
