"""Who is to blame when ranks wait for each other: those that do not wait.

A collective that ends late says nothing about whom it waited for; on most ranks it is a neighbour that waits as well.
So a rank that has waited for half of the timeout writes down for what, in the store that started the ranks. When the
timeout is over, the ranks that wrote nothing are named. All that wait began nearly together, since every step brings
all ranks together; one that hangs writes nothing.

Rejected: a beat of the heart from a thread of its own. It goes on while the thread that matters hangs.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed.distributed_c10d import Store

from antiphon.base.errors import ResourceError


class RollCall:
    """Of `rank` among `ranks`; `timeout_s` of their collectives."""

    def __init__(self, store: Store, rank: int, ranks: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._timeout_s = timeout_s

    def wait(self, what: str, done: Callable[[float | None], bool]) -> None:
        """Until `done(seconds)` says that it is over, which waits at most so long; `done(None)` waits to the end, which
        is an error after the timeout. `ResourceError` naming the ranks that hang; an error that comes earlier, such as
        a peer's death, is raised as it is."""
        began_s, half_s = time.monotonic(), self._timeout_s / 2
        if done(half_s):
            return
        self._store.set(self._key(self._rank), what)
        try:
            done(None)
        except RuntimeError as error:
            raise ResourceError(self._words(what, time.monotonic() - began_s)) from error
        self._store.delete_key(self._key(self._rank))

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """For a wait that has its own timeout and cannot be asked in between: this rank waits for `what` inside."""
        told: list[bool] = []

        def tell() -> None:
            told.append(True)
            self._store.set(self._key(self._rank), what)

        timer = threading.Timer(self._timeout_s / 2, tell)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        timer.join()  # it may be writing just now
        if told:
            self._store.delete_key(self._key(self._rank))  # after an error it stays: others are about to read it

    def _words(self, what: str, waited_s: float) -> str:
        silent = [each for each in range(self._ranks) if not self._store.check([self._key(each)])]
        names = ", ".join(map(str, silent))
        who = f"ranks {names} do not wait for anybody, so they hang" if silent else "all ranks wait, each for another"
        return f"rank {self._rank} waited {waited_s:.0f} s for {what}: {who}: see their machines, then start again"

    @staticmethod
    def _key(rank: int) -> str:
        return f"antiphon/waits/{rank}"
