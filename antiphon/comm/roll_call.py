"""Who is to blame when ranks wait for each other: those that do not wait.

A collective that ends late says nothing about whom it waited for; on most ranks it is a neighbour that waits as well.
So a rank that has waited for half of the timeout writes down for what, in the store that started the ranks. When the
timeout is over, the ranks that wrote nothing are named. All that wait began nearly together, since every step brings
all ranks together; one that hangs writes nothing.

A thread writes, because a wait for gloo cannot be interrupted and asked again. It knows only waits that a rank is in,
so it writes nothing for one that hangs elsewhere. Rejected: a beat of the heart. It goes on while the thread that
matters hangs.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

from antiphon.base.errors import ResourceError


@dataclass(eq=False)
class _OpenWait:
    """`due_s`: when it is to be reported."""

    what: str
    due_s: float
    is_reported: bool = False


class RollCall:
    """The roll call of `rank` among `ranks`; `timeout_s` is that of their collectives."""

    def __init__(self, store: Store, rank: int, ranks: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._waits: list[_OpenWait] = []
        self._reporter: threading.Thread | None = None
        self._is_idle = False  # the reporter sleeps until it is woken

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """This rank waits for `what` inside, in a call that ends with a `RuntimeError` after the timeout. That becomes
        a `ResourceError` that names the ranks that hang; one that comes earlier, such as a peer's death, is raised as
        it is."""
        began_s = time.monotonic()
        wait = _OpenWait(what, began_s + self._timeout_s / 2)
        with self._changed:
            self._waits.append(wait)
            if self._reporter is None:
                self._reporter = threading.Thread(target=self._report, name="roll call", daemon=True)
                self._reporter.start()
            elif self._is_idle:
                self._changed.notify()
        try:
            yield
        except RuntimeError as error:
            if wait.is_reported:  # and what was written stays: others are about to read it
                raise ResourceError(self._words(what, time.monotonic() - began_s)) from error
            self._over(wait)
            raise
        self._over(wait)

    def _over(self, wait: _OpenWait) -> None:
        with self._changed:
            self._waits.remove(wait)
            if wait.is_reported and not any(each.is_reported for each in self._waits):
                self._store.delete_key(self._key(self._rank))

    def _report(self) -> None:
        """What the thread runs. It wakes when the oldest wait that it saw is due, so most waits begin and end
        unnoticed."""
        with self._changed:
            while True:
                for wait in self._waits:
                    if not wait.is_reported and wait.due_s <= time.monotonic():
                        self._store.set(self._key(self._rank), wait.what)
                        wait.is_reported = True
                due_s = min((wait.due_s for wait in self._waits if not wait.is_reported), default=None)
                self._is_idle = due_s is None
                self._changed.wait(None if due_s is None else due_s - time.monotonic())

    def _words(self, what: str, waited_s: float) -> str:
        silent = [each for each in range(self._ranks) if not self._store.check([self._key(each)])]
        names = ", ".join(map(str, silent))
        who = f"ranks {names} do not wait for anybody, so they hang" if silent else "all ranks wait, each for another"
        return f"rank {self._rank} waited {waited_s:.0f} s for {what}: {who}: see their machines, then start again"

    @staticmethod
    def _key(rank: int) -> str:
        return f"antiphon/waits/{rank}"
