"""Threads that compute which tokens grammars allow next, so that the engine's thread never does.

A mask takes microseconds, or a tenth of a second where a client's schema asks for much. As soon as a token is out the
next mask is asked for here; batching leaves its request out until the mask is there (`Request.awaits_mask`).

Two lanes: grammars known to be slow have one thread, all others have two, and in each lane grammars take turns. So slow
grammars delay each other and no others, and occupy one core at most. The library computes without the interpreter's
lock. Rejected: one lane (three slow grammars hold three threads); a process (tens of microseconds more for every token
of every grammar, and memory that two processes must bound).
"""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from antiphon.base.fair_line import FairLine
from antiphon.base.logging import get_logger
from antiphon.base.system import give_memory_back

if TYPE_CHECKING:
    from antiphon.serve.text.structured import GrammarMatcher

_log = get_logger("engine")
MakeMatcher = Callable[[str], "GrammarMatcher"]  # the place of a new sequence in the grammar of that text
_NUM_QUICK_THREADS = 2
_IDLE_S = 2.0  # after so long without work, memory that masks took goes back to the system


class MaskJob:
    """The next mask of one sequence, after `token_id` (None: the first). Once `done`, there is a `mask` or an
    `error`. `is_slow`: not worth waiting for."""

    __slots__ = ("asked_s", "cancelled", "done", "error", "is_slow", "mask", "matcher", "token_id")

    def __init__(self, matcher: "GrammarMatcher", token_id: int | None = None) -> None:
        self.matcher = matcher
        self.token_id = token_id
        self.is_slow = matcher.is_slow
        self.asked_s = time.monotonic()
        self.mask: bytes | None = None
        self.error: str | None = None
        self.done = False
        self.cancelled = False

    def compute(self) -> None:
        """Any failure, panics of the library included, is this sequence's error only."""
        try:
            if self.token_id is not None:
                self.matcher.accept(self.token_id)
            if self.matcher.error is None:
                self.mask = self.matcher.fill_bitmask().tobytes()
            self.error = self.matcher.error
        except BaseException as error:  # a panic is no Exception
            _log.warning("a grammar failed: %r", error)
            self.error = f"the grammar failed ({type(error).__name__})"
        self.done = True


class _MaskLane:
    def __init__(self, num_threads: int) -> None:
        self.line: FairLine[MaskJob] = FairLine()
        self.num_busy = 0
        self.num_missing = num_threads
        self.num_threads = 0
        self.work = threading.Condition()


class MaskPool:
    """See the module's docstring. `on_done` is called in a thread of the pool: when a slow mask is there, and when no
    quick one is waited for any more. The threads start with the first job and end with `close`."""

    def __init__(self, on_done: Callable[[], None]) -> None:
        self._on_done = on_done
        self._quick, self._slow = _MaskLane(_NUM_QUICK_THREADS), _MaskLane(1)
        self._closing = False

    def ask(self, jobs: list[MaskJob]) -> None:
        """Have these masks computed. Called by one thread. Takes microseconds; the first call starts threads."""
        for lane, is_slow in ((self._quick, False), (self._slow, True)):
            mine = [job for job in jobs if job.is_slow is is_slow]
            if mine and not self._start(lane):
                for job in mine:
                    job.error, job.done = "the server cannot start a thread for it now: try again later", True
                self._on_done()
            elif mine:
                with lane.work:
                    for job in mine:
                        lane.line.put(job.matcher.grammar_id, job)
                    lane.work.notify(len(mine))

    def _start(self, lane: _MaskLane) -> bool:
        """The lane's threads, unless they run. Whether at least one does: the system may refuse to start another."""
        while lane.num_missing and not self._closing:
            # A daemon: one mask is no reason to delay the end of the program.
            thread = threading.Thread(target=self._work, args=(lane,), name="masks", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break
            lane.num_missing -= 1
            lane.num_threads += 1
        return lane.num_threads > 0 or self._closing

    def close(self) -> None:
        """End the threads, each after the mask it computes now. What was asked for is not computed any more."""
        self._closing = True
        for lane in (self._quick, self._slow):
            with lane.work:
                lane.work.notify_all()

    def _work(self, lane: _MaskLane) -> None:
        has_rested = True  # quick grammars take too little memory to look after
        while True:
            with lane.work:
                while not lane.line and not self._closing:
                    if not lane.work.wait(None if has_rested else _IDLE_S):
                        break
                if self._closing:
                    return
                job = lane.line.take() if lane.line else None
                lane.num_busy += job is not None
            if job is None:
                has_rested = True
                give_memory_back()
                continue
            has_rested = lane is self._quick
            if not job.cancelled:
                job.compute()
            with lane.work:
                lane.num_busy -= 1
                finished = lane is self._slow or not (lane.line or lane.num_busy)
            del job  # its matcher may be large, and the next job may be long in coming
            if finished:
                self._on_done()
