"""The CPU core of stream-ordered sends and receives: one thread that speaks to peers for any number of streams.

The thread owns an endpoint with its outboxes and inboxes. It looks at the first transfer of each lane
(`lanes.py`): has the stream come there, is a credit or a message there? What can be done is done; when nothing
can, it sleeps inside the library, where an arrival or a credit wakes it, with short naps while it also has to look at
events of a stream, which cannot wake it. A failed transfer raises its flag like any other, so that no stream is left
waiting; the caller hears of it at the lane's next call. Nothing here needs the caller's thread or the device to go on,
so a caller may block on the device while streams wait.

    with HostStream("compute") as stream, StreamCore(endpoint) as core:
        sender = core.sender(outbox, stream, num_stages=2, timeout_s=1)
        receiver = core.receiver(inbox, stream, num_stages=2, timeout_s=1)
        sender.send(step, rows)                      # returns at once; later work on `stream` may overwrite `rows`
        receiver.receive(step, [0, 1], partial_sums) # returns at once; later work on `stream` sees `partial_sums`
        core.wait_idle(timeout_s=1)

The engine on a CPU does not use this: its tensors are ready when a call returns, and `native.py` scatters rows
straight into the slots. On CUDA the attention worker will put, per micro-batch, the gate's scatter kernel, a `send` for
each expert worker and, before the next layer, one `receive` of all partial sums on its stream; an expert worker a
`receive`, the grouped feed-forward and a `send` for each source; numbers of rows, which only the device knows, travel
in the payload. That path is not wired up yet, and the CUDA form of the streams has not run on a GPU yet.

Rejected: one thread for each lane (they would fight for the interpreter's lock and for the endpoint, which belongs to
one thread), and waiting for credits or arrivals in the caller (the caller runs ahead of the device by whole layers).
"""

import atexit
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self, TypeVar

from antiphon import _m2n
from antiphon.base.errors import Interrupted, PeerLost, PeerTimeout, UserError
from antiphon.base.logging import get_logger
from antiphon.comm.m2n.streams.lanes import Lane, StreamReceiver, StreamSender, Transfer
from antiphon.comm.m2n.streams.stream import Stream

_log = get_logger("m2n")
_Result = TypeVar("_Result")
_Lane = TypeVar("_Lane", bound=Lane)
_FIRST_NAP_S = 20e-6
_LONGEST_NAP_S = {"poll": 20e-6, "spin": 100e-6, "block": 500e-6}  # while events of a stream are outstanding
_ALONE_S = 0.2  # one thing is outstanding, and it wakes us
_IDLE_S = 0.05  # nothing is outstanding but what transports finish by themselves


class _Order:
    """Something to be done on the core's thread, and what came of it."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._over = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def carry_out(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # the caller's to judge
            self._error = error
        self._over.set()

    def refuse(self, error: BaseException) -> None:
        self._error = error
        self._over.set()

    def result(self, timeout_s: float, what: str) -> Any:
        if not self._over.wait(timeout_s):
            raise TimeoutError(f"{what} did not get to it within {timeout_s:.1f} s")
        if self._error is not None:
            raise self._error
        return self._result


class StreamCore:
    """The thread; a context manager. While it runs the endpoint, its outboxes and its inboxes are its own.

    `stream_timeout_s`: how long a stream may take to come to a transfer once nothing of its lane is ahead of it."""

    def __init__(self, endpoint: _m2n.Endpoint, *, stream_timeout_s: float = 60.0) -> None:
        self._endpoint = endpoint
        self._stream_timeout_s = stream_timeout_s
        self._name = f"{endpoint.name} stream core"
        self._longest_nap_s = _LONGEST_NAP_S[endpoint.waiting]
        self._lanes: list[Lane] = []
        self._orders: deque[_Order] = deque()
        self._lock = threading.Lock()  # guards `_running`, `_napping`, numbering, and the wake-up's two halves
        self._wake = threading.Event()
        self._napping = False  # inside the library: only an interrupt wakes it
        self._running = False
        self._error: BaseException = UserError(f"{self._name} does not run: use it inside `with`")
        self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)

    def __enter__(self) -> Self:
        self._running = True
        atexit.register(self.close)  # a stream that waits without end would hang the process's end
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sender(self, outbox: _m2n.Outbox, stream: Stream, *, num_stages: int, timeout_s: float) -> StreamSender:
        """A lane for sends; allocates its stages. `num_stages` 0: tensors in memory of the host, sent from where they
        lie. When the peer is lost and connects again, close the lane and make one with the new outbox."""
        _check_lane(num_stages, timeout_s)
        return self._add(StreamSender(self, outbox, stream, num_stages, timeout_s))

    def receiver(
        self, inbox: _m2n.Inbox, stream: Stream, *, num_stages: int, timeout_s: float, stage_bytes: int = 0
    ) -> StreamReceiver:
        """A lane for receives; allocates its stages of `stage_bytes` (0: a slot from each source)."""
        _check_lane(num_stages, timeout_s)
        stage_bytes = stage_bytes or inbox.sources * inbox.slot_bytes
        return self._add(StreamReceiver(self, inbox, stream, num_stages, stage_bytes, timeout_s))

    def run(self, work: Callable[[], _Result], timeout_s: float) -> _Result:
        """`work()` on the core's thread, for what else the endpoint is needed for (connect, tickets, counters,
        `discard_below`). Transfers rest meanwhile. Raises what it raised, or `TimeoutError` (it may still run then)."""
        order = _Order(work)
        with self._lock:
            self._check_running()
            self._orders.append(order)
            self._rouse()
        result: _Result = order.result(timeout_s, self._name)
        return result

    def abort(self, reason: str) -> None:
        """Any thread: all transfers submitted so far that are not over fail with `Interrupted`. Returns at once."""
        with self._lock:
            if not self._running:
                return
            marks = [(lane, lane.submitted) for lane in self._lanes]
            self._orders.append(_Order(lambda: self._give_up(marks, Interrupted(reason))))
            self._rouse()

    def wait_idle(self, timeout_s: float) -> None:
        """Until all transfers of all lanes are over; raises the first error that was not reported yet."""
        deadline = time.monotonic() + timeout_s
        for lane in list(self._lanes):
            lane.wait_idle(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Give up what is not over, let all streams go, end the thread. The endpoint is the caller's again."""
        with self._lock:
            if self._running:
                self._running = False
                self._error = Interrupted(f"{self._name} was closed")
            self._rouse()
        if self._thread.ident is not None:
            self._thread.join()
        atexit.unregister(self.close)

    # --- for the lanes, any thread

    def submit(self, transfer: Transfer) -> None:
        """See `Core.submit`."""
        with self._lock:
            self._check_running()
            transfer.lane.put(transfer)
            self._rouse()

    def remove(self, lane: Lane) -> None:
        """See `Core.remove`. Blocks until the thread has let go of the lane."""

        def forget() -> None:
            lane.give_up(Interrupted(f"{lane.name} was closed"), lane.submitted)
            with self._lock:
                self._lanes.remove(lane)

        with self._lock:
            if not self._running or lane.closed:
                return
            lane.closed = True  # before the order: what is submitted from now on would be forgotten
        self.run(forget, self._stream_timeout_s)

    def _add(self, lane: "_Lane") -> "_Lane":
        with self._lock:
            self._check_running()
            self._lanes.append(lane)
        return lane

    def _check_running(self) -> None:
        if not self._running:
            raise self._error

    def _rouse(self) -> None:
        """Called under the lock. The interrupt cannot get lost: the library keeps it for the next wait."""
        self._wake.set()
        if self._napping:
            self._endpoint.interrupt()

    # --- the thread

    def _serve(self) -> None:
        try:
            place = self._endpoint.inbox(1, 1, 64)  # no peer knows it: a place to sleep, and to progress transports
            nap_s = _FIRST_NAP_S
            while self._running:
                self._wake.clear()
                self._obey(place)
                moved = [lane.advance(self._stream_timeout_s) for lane in list(self._lanes)]
                if any(moved):
                    nap_s = _FIRST_NAP_S
                elif not self._wake.is_set():
                    self._nap(place, nap_s)
                    nap_s = min(2 * nap_s, self._longest_nap_s)
        except BaseException as error:  # a bug; callers hear of it, and no stream waits for a dead thread
            _log.exception("%s stopped", self._name)
            self._error = error
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._running = False
        reason = self._error if isinstance(self._error, Exception) else Interrupted(f"{self._name}: {self._error!r}")
        self._give_up([(lane, lane.submitted) for lane in self._lanes], reason)
        while self._orders:
            self._orders.popleft().refuse(reason)

    def _give_up(self, marks: list[tuple[Lane, int]], reason: Exception) -> None:
        for lane, up_to in marks:
            lane.give_up(reason, up_to)

    def _obey(self, place: _m2n.Inbox) -> None:
        if not self._orders:
            return
        _look(place)  # an interrupt that came when a nap was over must not meet an order that waits
        while self._orders:
            self._orders.popleft().carry_out()

    def _nap(self, place: _m2n.Inbox, nap_s: float) -> None:
        busy = [lane for lane in self._lanes if lane.busy]
        sleepers = [lane for lane in busy if lane.waits_for_peer] or [lane for lane in self._lanes if lane.unsettled]
        if not sleepers:
            self._wake.wait(nap_s if busy else _IDLE_S)
            _look(place)
            return
        with self._lock:
            if self._wake.is_set():
                return
            self._napping = True
        try:
            # Only one of them can wake us; arrivals are what streams wait for longest.
            sleeper = next((lane for lane in sleepers if lane.waits_for_arrival), sleepers[0])
            others = [lane for lane in busy if lane is not sleeper]
            sleeper.nap(nap_s if others or (busy and not sleeper.waits_for_peer) else _ALONE_S)
        except (Interrupted, PeerTimeout, PeerLost):
            pass  # the next look finds out
        finally:
            with self._lock:
                self._napping = False


def _check_lane(num_stages: int, timeout_s: float) -> None:
    if num_stages < 0:
        raise UserError(f"num_stages is {num_stages}: 0 for tensors in memory of the host, else 2 or so")
    if not 0.0 < timeout_s < 1e9:
        raise UserError(f"timeout_s is {timeout_s}: it must be more than 0 and less than 1e9")


def _look(place: _m2n.Inbox) -> None:
    """Let the transports move what they have, and use up an interrupt that no wait uses."""
    with contextlib.suppress(Interrupted):
        place.wait_complete(0.0)
