"""All TCP connections of one server: how they are accepted, how many there may be, and which makes room for a new one.

asyncio accepts as many connections as wait in one go, two thousand here, before any of them can be looked at, and each
takes a descriptor: a crowd that connects and waits would leave none for workers, logs and processes. Here a few are
accepted at a time, and none at all while there is no room. The rest waits in the operating system's queue. When a
descriptor is missing all the same, the connection that has waited longest makes room. While connections wait for the
event loop to look at their bytes, one at a time is accepted: a crowd of new ones gets in no one's way.

At the cap, in this order: the connection that has waited longest for a request is closed; then the body that has been
on its way longest, if it is late, is refused with 429; when all have a request in progress, the new connection gets
503. An address may have a few late bodies only, so that no client holds all connections by half a request on each.
Connections that linger to have their answer read are counted apart.

asyncio calls every connection that has bytes in each turn of its loop. A turn would be as long as what all clients sent
together, and one request takes a dozen turns. So bytes that do not fit into the turn wait here, one small piece of each
connection, and meanwhile that connection is not read (`ReadingLine`).

Rejected: asyncio's own server with a small `backlog`, which is the length of the operating system's queue as well;
uvicorn's `limit_concurrency`, which lets idle connections keep busy clients out and answers in plain text; a cap on
connections per address, which would count a proxy's clients as one.
"""

import asyncio
import errno
import resource
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from uvicorn.server import ServerState

from antiphon.base.errors import with_fix
from antiphon.base.logging import Occasional, get_logger
from antiphon.serve.api.errors import too_busy
from antiphon.serve.api.metrics import ServerMetrics
from antiphon.serve.api.settings import ServerSettings

if TYPE_CHECKING:
    from antiphon.serve.api.guard.connection import ApiConnection

_log = get_logger("serve.api")
_PIECES_PER_TURN = 8
_STARTS_PER_TURN = 2
_TURN_S = 0.002
_OLDEST_SHARE = 4  # of this many places one is for those that waited longest
_CROWD = 16
_ACCEPTED_AT_ONCE = 16
_RETRY_S = 0.25
_SECONDS_BETWEEN_WARNINGS = 60.0
_NO_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SPARE_FILES = 256  # for the workers' sockets, the log, libraries
_MAX_LINGERING = 256
_PIECE_BYTES = 16 * 1024  # what is read of a connection before others have their turn
_CROWD_PIECE_BYTES = 4 * 1024  # the same while others wait
_MANY = 200
_READING_S = 0.25  # by then an answer has been read, if the client reads at all
_SLOW_BODY_S = 0.25
_CALLS_A_ROUND = 10
_LATE_BODY_S = 2.0  # bodies come right behind their heads, or as fast as the network is


class ReadingLine:
    """Whose bytes the event loop looks at next, and how many before everything else has its turn. Used from the event
    loop's thread only.

    A turn takes a few pieces, starts at most two requests and ends after two milliseconds. There are two lines.
    Connections that begin a request come first, in the order of arrival. When a crowd came at once, the newest comes
    first instead: it need not be one of the crowd. Those in the other line go on with a long body, or sent further
    requests before the answer to the first. Every fourth place belongs to those that waited longest, of the two lines
    by turns, so that all move on.

    Rejected: an order by each connection's cost so far, which lets a crowd of new connections overtake one that is in
    use; one line for all, in which a short request waits for a piece of each long body."""

    def __init__(self) -> None:
        self.num_turns = 0  # that took anything
        self._first: OrderedDict[ApiConnection, None] = OrderedDict()
        self._later: OrderedDict[ApiConnection, None] = OrderedDict()
        self._num_pieces = self._num_starts = self._num_places = 0
        self._spent_s = 0.0
        self._is_scheduled = False

    def __len__(self) -> int:
        return len(self._first) + len(self._later)

    def __contains__(self, connection: object) -> bool:
        return connection in self._first or connection in self._later

    @property
    def is_free(self) -> bool:
        """Whether a piece may be taken at once: there is time in this turn, and no other waits."""
        return not self and self._has_time

    @property
    def _has_time(self) -> bool:
        return self._num_pieces < _PIECES_PER_TURN and self._num_starts < _STARTS_PER_TURN and self._spent_s < _TURN_S

    def add(self, connection: "ApiConnection", *, is_first: bool) -> None:
        """`take_piece` is called in one of the next turns."""
        (self._first if is_first else self._later)[connection] = None
        self._schedule()

    def discard(self, connection: "ApiConnection") -> None:
        """It waits no more."""
        self._first.pop(connection, None)
        self._later.pop(connection, None)

    def take(self, connection: "ApiConnection") -> None:
        """Have `connection` take its piece now, on this turn's account."""
        self._schedule()
        begin_s = time.perf_counter()
        self._num_starts += connection.take_piece()
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

    def _next(self) -> "ApiConnection":
        self._num_places += 1
        share, rest = divmod(self._num_places, _OLDEST_SHARE)
        is_for_oldest = rest == 0
        if self._later and (not self._first or (is_for_oldest and share % 2)):
            return self._later.popitem(last=False)[0]
        return self._first.popitem(last=len(self._first) > _CROWD and not is_for_oldest)[0]


class Connections(ServerState):
    """All connections of one server. Used from the event loop's thread only."""

    def __init__(self, settings: ServerSettings, metrics: ServerMetrics) -> None:
        super().__init__()
        self.settings = settings
        self.limit, self.max_lingering = affordable_connections(settings.max_connections)
        self.waiting: dict[ApiConnection, None] = {}  # for a request, longest first
        self.lingering: dict[ApiConnection, float] = {}  # and since when, longest first
        self.on_room: Callable[[], None] = lambda: None
        self.line = ReadingLine()
        self._buffer = memoryview(bytearray(_PIECE_BYTES))
        self.num_open = 0  # sockets; those that close with bytes unsent are in none of the collections
        self._most = 0
        self._now_s = 0.0
        self._unchecked: list[ApiConnection] = []  # in this round
        self._num_at_once = 0
        self._has_refused = False
        self._ended = metrics.connections_ended
        metrics.connections.set_function(lambda: len(self.connections))

    @property
    def receive_buffer(self) -> memoryview:
        """Where a connection's next bytes go. They must be copied before another connection reads."""
        return self._buffer[:_CROWD_PIECE_BYTES] if self.line else self._buffer

    # --- sockets ---------------------------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """Whether one more socket may be open."""
        return self.num_open < self.limit + self.max_lingering

    def note_opened(self) -> None:
        """A socket is accepted."""
        self.num_open += 1

    def note_closed(self) -> None:
        """A socket is closed: another one may be accepted."""
        self.num_open -= 1
        self.on_room()

    def free_a_socket(self) -> None:
        """Close the connection that is needed least, if there is one: a client that had time to read its answer, or
        one that asks nothing."""
        connection, began_s = next(iter(self.lingering.items()), (None, 0.0))
        if connection is not None and began_s < time.monotonic() - _READING_S:
            connection.reset()
        else:
            self._close_longest_waiting()

    # --- places ----------------------------------------------------------------------------------------------------

    def make_room(self) -> bool:
        """Whether the newest connection may stay; at the cap another one ends for it."""
        return len(self.connections) <= self.limit or self._close_longest_waiting() or self._refuse_most_overdue_body()

    def _close_longest_waiting(self) -> bool:
        oldest = next((connection for connection in self.waiting if connection.is_idle), None)
        if oldest is None:
            return False
        self.count_end("made room")
        self.forget(oldest)
        oldest.transport.abort()  # what the client sends now it can send again
        return True

    def _refuse_most_overdue_body(self) -> bool:
        overdue = next(self._overdue_bodies(time.monotonic() - _SLOW_BODY_S), None)
        if overdue is None:
            return False
        self.count_end("slow body")
        overdue.refuse(too_busy("all connections of this server are in use, and the body is late", 1.0))
        return True

    def forget(self, connection: "ApiConnection") -> None:
        """This connection counts no more."""
        self.connections.discard(connection)
        self.waiting.pop(connection, None)
        self.lingering.pop(connection, None)

    def linger(self, connection: "ApiConnection") -> None:
        """This connection has its answer and stays only for the client to read it."""
        self.forget(connection)
        self.lingering[connection] = time.monotonic()

    # --- ten times a second ----------------------------------------------------------------------------------------

    def check(self, now_s: float) -> None:
        """End connections that are past a deadline: in each call a tenth of those there are, because two thousand at
        once take as long as a step. `now_s` is on the monotonic clock."""
        if not self._unchecked:
            self._check_bodies(now_s)
            self._unchecked = [*self._all(), *self.lingering]
            self._num_at_once = -(-len(self._unchecked) // _CALLS_A_ROUND)
        for connection in self._unchecked[: self._num_at_once]:
            if connection in self.connections or connection in self.lingering:
                connection.check(now_s)
        del self._unchecked[: self._num_at_once]

    def _check_bodies(self, now_s: float) -> None:
        """Refuse late bodies of addresses that have too many."""
        was_stalled = now_s - self._now_s > _LATE_BODY_S  # then it may be us who are late
        self._now_s = now_s
        if was_stalled:
            return
        num_late: Counter[str] = Counter()
        limit = self.settings.max_slow_bodies
        for connection in self._overdue_bodies(now_s - _LATE_BODY_S):
            num_late[connection.address] += 1
            if num_late[connection.address] > limit:
                self.count_end("slow body")
                reason = f"{limit} requests of this address have sent a part of their bodies only: finish those first"
                connection.refuse_in_turn(too_busy(reason, 1.0))

    def have_left(self) -> bool:
        """Whether many connections have ended since the last time this was so: they leave freed memory behind."""
        self._most = max(self._most, self.num_open)
        if self._most - self.num_open < _MANY:
            return False
        self._most = self.num_open
        return True

    def _all(self) -> Iterator["ApiConnection"]:
        yield from list(self.connections)  # type: ignore[misc]  # all are `ApiConnection`

    def _overdue_bodies(self, latest_s: float) -> Iterator["ApiConnection"]:
        """Connections whose body began to arrive before `latest_s` and is not complete, the first first."""
        began = [(connection.body_began_s, connection) for connection in self._all()]
        late = [
            (began_s, connection)
            for began_s, connection in began
            if began_s is not None and began_s < latest_s and connection not in self.line  # else we are late
        ]
        yield from (connection for _, connection in sorted(late, key=lambda entry: entry[0]))

    # --- counters and warnings -------------------------------------------------------------------------------------

    def note_refusal(self) -> None:
        """A connection was turned away; said once, counted always."""
        if not self._has_refused:
            self._has_refused = True
            _log.warning("all %d connections are in use, more are refused: see --max-connections", self.limit)
        self.count_end("refused")

    def count_end(self, reason: str) -> None:
        self._ended.labels(reason).inc()


def affordable_connections(asked: int) -> tuple[int, int]:
    """How many connections the limit on open files allows: (in use, at most `asked`; lingering). Raises the soft limit
    to the hard one."""
    lingering = min(_MAX_LINGERING, asked)
    descriptors = Path("/proc/self/fd")
    open_now = len(list(descriptors.iterdir())) if descriptors.is_dir() else 0
    needed = asked + lingering + open_now + _SPARE_FILES
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for wanted in (needed, hard):
        with suppress(OSError, ValueError):  # some systems allow less than the limit they name
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return asked, lingering
    affordable = max(2, soft - open_now - _SPARE_FILES)
    lingering = min(lingering, max(1, affordable // 8))
    _log.warning(
        "at most %d connections instead of %d: this process may open %d files; raise that (ulimit -n), or lower "
        "--max-connections",
        affordable - lingering, asked, soft,
    )  # fmt: skip
    return affordable - lingering, lingering


class Acceptor:
    """Accepts on one listening socket, from `open` to `close`. Used from the event loop's thread only."""

    def __init__(
        self,
        listener: socket.socket,
        room: Connections,
        new_protocol: Callable[[], asyncio.BaseProtocol],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._listener = listener
        self._room = room
        self._new_protocol = new_protocol
        self._loop = loop
        self._greetings: set[asyncio.Task[None]] = set()
        self._is_open = self._is_reading = False
        self._warnings = Occasional(_SECONDS_BETWEEN_WARNINGS)

    def open(self) -> None:
        """Begin to accept."""
        self._listener.setblocking(False)
        self._is_open = True
        self.resume()

    def close(self) -> None:
        """Accept no more; the socket stays the caller's."""
        self._pause()
        self._is_open = False

    def resume(self) -> None:
        """Go on accepting: there is room again, or time has passed."""
        if self._is_open and not self._is_reading:
            self._is_reading = True
            self._loop.add_reader(self._listener, self._accept_some)

    def _pause(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._listener)

    def _accept_some(self) -> None:
        for _ in range(1 if self._room.line else _ACCEPTED_AT_ONCE):
            if not self._room.has_room():
                self._wait_for_room()
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _NO_RESOURCES:
                    if self._warnings.count() is not None:
                        words = with_fix(error.strerror or str(error))
                        _log.warning("cannot accept a connection: %s; idle ones are closed", words)
                    self._wait_for_room()
                    return
                continue  # this client is gone already
            connection.setblocking(False)
            self._room.note_opened()
            greeting = self._loop.create_task(self._greet(connection))
            self._greetings.add(greeting)
            greeting.add_done_callback(self._greetings.discard)

    def _wait_for_room(self) -> None:
        self._pause()
        self._loop.call_later(_RETRY_S, self.resume)
        self._room.free_a_socket()

    async def _greet(self, connection: socket.socket) -> None:
        """Give the connection its protocol, which says so when it is lost."""
        protocol = None
        try:
            protocol = self._new_protocol()
            await self._loop.connect_accepted_socket(lambda: protocol, connection)
        except (OSError, ValueError) as error:  # gone, or no descriptor for the event loop's set
            _log.debug("a connection was lost while it was accepted: %s", error)
            connection.close()
            self._room.note_closed()
