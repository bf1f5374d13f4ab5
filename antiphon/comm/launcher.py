"""Launches one rank's collectives beside the computation, in the order that the policy of `micro_ops` chooses.

    pending = launcher.all_to_all("dispatch", size_bytes, launch)    # the thread that computes
    ...
    pending.wait()                                               # then the buffer is pending.result
    pending = launcher.all_reduce("layer 3", size_bytes, sum_piece)  # no rank waits for it before the step's end

An all-to-all is launched at once where the policy allows it, else as soon as the one before has ended: a thread waits
for the handle of the one in flight. Sums run piece by piece in a thread of their own, because on two levels, or in a
narrow format, a sum is several collectives one after the other. Both threads sleep until something happens.

All-to-alls use the groups of the mesh, sums groups of their own, and inside each class the order is that of submission,
which is the same on every rank. All-to-alls never wait for sums, so no rank waits for another in a circle.

Rejected: a launch from the callback of the work before. It would run in the collective library's threads, where an
error reaches no caller.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from antiphon.comm.ledger import Ledger
from antiphon.comm.micro_ops import MicroOp, MicroOpScheduler

Launch = Callable[[], tuple[Tensor, Any]]
SumPiece = Callable[[int, int], None]  # of piece number i, of how many


class Submission:
    """Something that was submitted."""

    def __init__(self, launcher: "CollectiveLauncher", name: str) -> None:
        self.name = name
        self.result: Tensor | None = None
        self.is_done = False
        self._launcher = launcher

    def wait(self) -> None:
        """Blocks until it is done. The first error of the launcher, such as a peer's death or a timeout of its group,
        is raised."""
        self._launcher.await_done(self)


class CollectiveLauncher:
    """One rank's launcher; `policy` is its own. `ledger`: bytes of sums, which no computation waits for."""

    def __init__(self, policy: MicroOpScheduler) -> None:
        self.ledger = Ledger()
        self._policy = policy
        self._changed = threading.Condition()
        self._launches: deque[tuple[Submission, Launch]] = deque()
        self._sums: deque[tuple[Submission, SumPiece]] = deque()
        self._in_flight: dict[str, MicroOp] = {}
        self._works: deque[tuple[Submission, Tensor, Any, float]] = deque()
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._closed = False
        self._all_to_all_s: dict[str, list[float]] = defaultdict(list)

    def all_to_all(
        self, name: str, size_bytes: int, launch: Launch, *, number: int = 0, num_pieces: int = 1
    ) -> Submission:
        """Submit part `number` of what computation will wait for. `launch` begins it and gives the buffer that fills,
        and a handle; it is called in this thread or in one of the launcher's."""
        submission = Submission(self, name)
        with self._changed:
            self._begin()
            self._launches.append((submission, launch))
            self._policy.submit_all_to_all(name, size_bytes, number=number, num_pieces=num_pieces)
            self._advance()
        return submission

    def all_reduce(self, name: str, size_bytes: int, sum_piece: SumPiece) -> Submission:
        """Submit a sum of `size_bytes`. `sum_piece(number, num_pieces)` makes one piece of it and blocks until it is
        there; it is called once for each piece, in order, in a thread of the launcher."""
        submission = Submission(self, name)
        with self._changed:
            self._begin()
            if self._policy.submit_all_reduce(name, size_bytes):
                self._sums.append((submission, sum_piece))
                self._advance()
            else:
                submission.is_done = True
        return submission

    def combine_begins(self) -> None:
        """Computation has begun that leads to an all-to-all: until that is submitted, no sum is launched."""
        with self._changed:
            self._policy.combine_begins()

    def take_all_to_all_s(self) -> dict[str, list[float]]:
        """By name: how long each all-to-all was in flight since this was asked last."""
        with self._changed:
            taken, self._all_to_all_s = dict(self._all_to_all_s), defaultdict(list)
        return taken

    def await_done(self, submission: Submission) -> None:
        """For `Submission.wait`. It ends: each collective in flight fails after its group's timeout."""
        with self._changed:
            self._changed.wait_for(lambda: submission.is_done or self._error is not None)
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the threads, once nothing is in flight any more or something has failed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads if self._error is None else ():
            thread.join()

    def _begin(self) -> None:
        """Start the threads before the first submission; refuse one behind an error."""
        self._check()
        assert not self._closed, "this launcher is closed"
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, args=(work,), name=f"launcher {name}", daemon=True)
                for name, work in (("all-to-all", self._await_all_to_all), ("sums", self._make_sum))
            ]
            for thread in self._threads:
                thread.start()

    def _advance(self) -> None:
        """Launch what the policy allows now. The lock is held, so launches have the policy's order."""
        while (chosen := self._policy.next()) is not None:
            self._in_flight[chosen.traffic] = chosen
            if chosen.traffic == "all_to_all":
                self._launch(*self._launches.popleft())
        self._changed.notify_all()

    def _launch(self, submission: Submission, launch: Launch) -> None:
        try:
            with torch.no_grad():
                self._works.append((submission, *launch(), time.perf_counter()))
        except BaseException as error:
            self._fail(error)
            raise

    def _run(self, work: Callable[[], None]) -> None:
        """What each thread runs."""
        try:
            while not self._closed:
                work()
        except BaseException as error:
            self._fail(error)

    def _await_all_to_all(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._works or self._closed)
            if not self._works:
                return
            submission, buffer, handle, launched_s = self._works.popleft()
        handle.wait()
        with self._changed:
            self._all_to_all_s[submission.name].append(time.perf_counter() - launched_s)
            submission.result, submission.is_done = buffer, True
            self._finished("all_to_all")

    def _make_sum(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: "all_reduce" in self._in_flight or self._closed)
            if "all_reduce" not in self._in_flight:
                return
            piece, (submission, sum_piece) = self._in_flight["all_reduce"], self._sums[0]
        with torch.no_grad():
            sum_piece(piece.number, piece.num_pieces)
        with self._changed:
            if piece.is_last:
                self._sums.popleft()
                submission.is_done = True
            self._finished("all_reduce")

    def _finished(self, traffic: str) -> None:
        self._policy.finished(self._in_flight.pop(traffic))
        self._advance()

    def _fail(self, error: BaseException) -> None:
        """All that wait learn of it, and nothing more is launched."""
        with self._changed:
            self._error = self._error or error
            self._closed = True
            self._changed.notify_all()
