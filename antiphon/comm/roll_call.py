"""Who is to blame when ranks wait for each other: those that do not wait, and those that ended.

1. At the start every rank writes its process and machine into the store that started the ranks, and waits for the
   others, so those that are missing can be named before any process group is made.
2. A collective that ends late says nothing about whom it waited for; on most ranks it is a neighbour that waits as
   well. So a rank that has waited for half of the timeout writes down for what. When the timeout is over, the ranks
   that wrote nothing are named. All that wait began nearly together, since every step brings all ranks together; one
   that hangs writes nothing. A thread writes, because a wait for gloo cannot be interrupted and asked again. It knows
   only waits that a rank is in, so it writes nothing for one that hangs elsewhere.
3. The connections of a rank that ends are closed at once. The ranks of this machine whose process is no more are named.

Rejected: a beat of the heart. It goes on while the thread that matters hangs.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import Store

from antiphon.base.errors import ResourceError, UserError
from antiphon.base.logging import get_logger

SOON_S = 10.0  # a rank that has waited so long for the start of others says so
_REFUSED = "refused"
_ENDS_S = 2.0  # from a process's last connection to its end
_BOOT, _NUMBERS = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_log = get_logger("train")


@dataclass(frozen=True)
class RankProcess:
    """`machine`: the same for processes that know each other by their numbers."""

    number: int
    machine: str
    host: str

    @staticmethod
    def own() -> "RankProcess":
        boot = _BOOT.read_text(encoding="utf-8").strip() if _BOOT.exists() else socket.gethostname()
        numbers = _NUMBERS.stat().st_ino if _NUMBERS.exists() else 0  # a container counts processes anew
        return RankProcess(os.getpid(), f"{boot}/{numbers}", socket.gethostname())

    @staticmethod
    def read(text: str) -> "RankProcess":
        number, machine, host = text.split(" ", 2)
        return RankProcess(int(number), machine, host)

    def __str__(self) -> str:
        return f"{self.number} {self.machine} {self.host}"

    def lives(self) -> bool:
        """Whether it is still there; to be asked on its machine."""
        try:
            return psutil.Process(self.number).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        except psutil.NoSuchProcess:
            return False
        except psutil.Error:
            return True


@dataclass(eq=False)
class _OpenWait:
    """`due_s`: when it is to be reported."""

    what: str
    due_s: float
    is_reported: bool = False


class RollCall:
    """The roll call of `rank` among `ranks`; `timeout_s` is that of their collectives. `line`: its name, where several
    kinds of collectives run beside each other."""

    def __init__(self, store: Store, rank: int, ranks: int, timeout_s: float, line: str = "waits") -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._line = line
        self._processes: dict[int, RankProcess] = {}
        self._changed = threading.Condition()
        self._waits: list[_OpenWait] = []
        self._reporter: threading.Thread | None = None
        self._is_idle = False  # the reporter sleeps until it is woken

    def beside(self, timeout_s: float) -> "RollCall":
        """The same ranks' roll call for collectives that run beside theirs."""
        other = RollCall(self._store, self._rank, self._ranks, timeout_s, f"{self._line} beside")
        other._processes = self._processes
        return other

    def await_all(self, shared_store: str = "") -> None:
        """Say that this rank is there, and wait until all are; `ResourceError` names those that do not come in time,
        `UserError` one that refused, with its reason (`refuse`). `shared_store`: the address of a store that may be
        another run's, which is a `UserError` too."""
        own = RankProcess.own()
        if shared_store:
            self._refuse_other_run(own, shared_store)
        self._store.set(f"here/{self._rank}", str(own))
        began_s, missing, is_said = time.monotonic(), list(range(self._ranks)), False
        while missing := [each for each in missing if not self._store.check([f"here/{each}"])]:
            if self._store.check([_REFUSED]):
                why = self._store.get(_REFUSED).decode()
                self._store.set(f"heard/{self._rank}", "")
                raise UserError(why)
            names, waited_s = ", ".join(map(str, missing)), time.monotonic() - began_s
            if waited_s > self._timeout_s:
                raise ResourceError(
                    f"ranks {names} of {self._ranks} did not start within {self._timeout_s:.0f} s: see their machines"
                )
            if waited_s > SOON_S and not is_said:
                is_said = True
                if self._rank == min(set(range(self._ranks)) - set(missing)):
                    left_s = self._timeout_s - waited_s
                    _log.warning("ranks %s of %d have not started yet: waiting %.0f s more", names, self._ranks, left_s)
            time.sleep(0.05)  # the store has no wait that names who is missing
        texts = self._store.multi_get([f"here/{each}" for each in range(self._ranks)])
        self._processes |= {rank: RankProcess.read(text.decode()) for rank, text in enumerate(texts)}

    def refuse(self, why: str) -> None:
        """In the place of `await_all`: this rank does not begin, and says so to the others. Rank 0, whose store it is,
        waits a moment for them."""
        self._store.compare_set(_REFUSED, "", f"rank {self._rank} does not begin: {why}")
        self._store.set(f"heard/{self._rank}", "")
        if self._rank == 0:
            with suppress(RuntimeError):  # not all were waiting
                self._store.wait([f"heard/{each}" for each in range(self._ranks)], timedelta(seconds=SOON_S))

    def _refuse_other_run(self, own: RankProcess, address: str) -> None:
        ranks = self._store.compare_set("ranks", "", str(self._ranks)).decode()
        known = RankProcess.read(self._store.compare_set(f"here/{self._rank}", "", str(own)).decode())
        if ranks != str(self._ranks):
            why = f"a run of {ranks} ranks, and this one has {self._ranks}"
        elif known != own and known.machine == own.machine and known.lives():
            why = f"another run, whose rank {self._rank} is process {known.number}"
        else:
            return
        raise UserError(f"{address} is the store of {why}: give this run a port of its own (MASTER_PORT)")

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """This rank waits for `what` inside, in a call that ends with a `RuntimeError` after the timeout. That becomes
        a `ResourceError` that names the ranks that hang, and so does a peer's death, which comes earlier; another error
        is raised as it is."""
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
            waited_s = time.monotonic() - began_s
            if "by peer" in str(error) or isinstance(error, DistNetworkError):  # of gloo, or of the store that is gone
                raise ResourceError(
                    f"rank {self._rank} waited for {what}, and {self._who_ended()} ended: see what that one said, or "
                    "its machine, then start again"
                ) from error
            if wait.is_reported:  # and what was written stays: others are about to read it
                raise ResourceError(self._words(what, waited_s)) from error
            self._over(wait)
            if "Timed out" in str(error):  # gloo: of what began long before this wait
                raise ResourceError(
                    f"rank {self._rank} waited {waited_s:.0f} s for {what}, begun {self._timeout_s:.0f} s before: "
                    "another rank hangs or is slow: see what the others say, then start again"
                ) from error
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
                        with suppress(RuntimeError):  # the store is gone, which `_words` says
                            self._store.set(self._key(self._rank), wait.what)
                        wait.is_reported = True
                due_s = min((wait.due_s for wait in self._waits if not wait.is_reported), default=None)
                self._is_idle = due_s is None
                self._changed.wait(None if due_s is None else due_s - time.monotonic())

    def _words(self, what: str, waited_s: float) -> str:
        try:
            silent = [each for each in range(self._ranks) if not self._store.check([self._key(each)])]
            names = ", ".join(map(str, silent))
            who = (
                f"ranks {names} do not wait for anybody, so they hang" if silent else "all ranks wait, each for another"
            )
        except RuntimeError:
            who = "the store that says who hangs is gone, as rank 0 or the launcher is"
        return f"rank {self._rank} waited {waited_s:.0f} s for {what}: {who}: see their machines, then start again"

    def _who_ended(self) -> str:
        """The ranks of this machine whose process is no more. The first one is there within moments."""
        own, deadline_s = self._processes.get(self._rank), time.monotonic() + _ENDS_S
        near = {rank: each for rank, each in self._processes.items() if own and each.machine == own.machine}
        while near and time.monotonic() < deadline_s:
            if ended := [f"rank {rank} (process {each.number})" for rank, each in near.items() if not each.lives()]:
                return " and ".join(ended)
            time.sleep(0.02)
        return "another rank"

    def _key(self, rank: int) -> str:
        return f"antiphon/{self._line}/{rank}"
