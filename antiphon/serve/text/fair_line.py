"""A line in which clients take turns, so that the many requests of one do not hold up the single one of another.

Each client has a line of its own, and the next item comes from the client that has waited longest for its turn. Within
a client's line small work goes before large work, but only so far: an item is due at the time it came plus a time that
grows with its size. So one address behind which many people sit is served by size, and nothing waits for ever.

Rejected: one line by size for all, which a client that cuts its work into small requests would own.
"""

import heapq
import itertools
import threading
import time
from collections import Counter, OrderedDict
from typing import Generic, TypeVar

from antiphon.base.units import format_bytes
from antiphon.serve.engine_api import QueueFull

_Item = TypeVar("_Item")
_BYTES_PER_S_OF_PATIENCE = 16 * 1024
_MAX_PATIENCE_S = 10.0
_FULL_CLIENTS = 4  # all clients together may have waiting what so many may at their limits


class FairLine(Generic[_Item]):
    """See the module's docstring. For any thread; nothing but `take` waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._of_clients: OrderedDict[str, list[tuple[float, int, _Item]]] = OrderedDict()
        self._numbers = itertools.count()
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return sum(map(len, self._of_clients.values()))

    def put(self, item: _Item, client: str, came_s: float, num_bytes: int) -> None:
        """Add an item that `client` brought at `came_s` (of `time.monotonic`). What has been taken and is not done yet
        comes back with the same figures."""
        due_s = came_s + min(_MAX_PATIENCE_S, num_bytes / _BYTES_PER_S_OF_PATIENCE)
        with self._changed:
            heapq.heappush(self._of_clients.setdefault(client, []), (due_s, next(self._numbers), item))
            self._changed.notify()

    def take(self, timeout_s: float) -> _Item | None:
        """The next item; None when none came in time or the line is closed, which `is_closed` tells apart."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._of_clients and not self._closed:
                if (remaining_s := deadline - time.monotonic()) <= 0:
                    return None
                self._changed.wait(remaining_s)
            if not self._of_clients:
                return None
            client, items = self._of_clients.popitem(last=False)
            _, _, item = heapq.heappop(items)
            if items:
                self._of_clients[client] = items  # at the end: the others come first
            return item

    def close(self) -> None:
        """Wake who waits in `take`. Items that are left can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        return self._closed


class WaitingCount:
    """How many requests of each client wait, and of how many bytes. For any thread."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        """The limits of one client; all together may have some times as much."""
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, client: str, num_bytes: int, what: str) -> None:
        """One more request of `client` waits for `what`; `QueueFull` when that is one too many, by number or by size.
        A request alone is never too large."""
        with self._lock:
            own = ("of this client", self._requests[client], self._bytes[client], 1)
            total = ("of all clients", self._requests.total(), self._bytes.total(), _FULL_CLIENTS)
            for whose, waiting, waiting_bytes, times in (own, total):
                if waiting >= times * self._max_requests:
                    limit = times * self._max_requests
                    raise _full(f"{waiting} requests {whose} wait for {what}, the limit is {limit}")
                if waiting and waiting_bytes + num_bytes > times * self._max_bytes:
                    size, limit_size = format_bytes(waiting_bytes), format_bytes(times * self._max_bytes)
                    raise _full(f"requests {whose} of {size} wait for {what}, the limit is {limit_size}")
            self._requests[client] += 1
            self._bytes[client] += num_bytes

    def remove(self, client: str, num_bytes: int) -> None:
        """The counterpart of `add`. What is zero is forgotten: clients are many."""
        with self._lock:
            self._requests[client] -= 1
            self._bytes[client] -= num_bytes
            if self._requests[client] <= 0:
                del self._requests[client], self._bytes[client]


def _full(reason: str) -> QueueFull:
    return QueueFull(f"{reason}: try again later", 1.0)
