"""Which grammar is tried when (`grammar_trial`), so that a schema in good order does not wait for bad ones.

Only a trial shows whether a schema takes a millisecond or never ends. So there are lanes, each with one trial at
a time and a limit of processor time; a trial that reaches the limit is ended and begins anew in the next lane, which
allows five times as much. What it lost is at most a quarter of what it takes. In each lane clients take turns, so that
sixteen bad schemas hold up a small one of the same client for a third of a second, and that of another client for one
turn. All but the first lane step back behind the workers, which share the cores.

Rejected: one lane (each bad schema takes its 2 s while all others wait); stopping a trial and letting it go on later
(stopped ones keep their memory).
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Hashable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import IO, Any

import msgspec

from antiphon.base.errors import UserError, with_fix
from antiphon.base.fair_line import FairLine
from antiphon.base.logging import get_logger
from antiphon.base.system import python_module
from antiphon.serve.engine_api import SHUTTING_DOWN, QueueFull, ShuttingDown
from antiphon.serve.text.grammar_trial import MEMORY_LIMIT_BYTES, TrialEnd, TrialVerdict

_log = get_logger("serve.text")
_CPU_LIMITS_S = (0.02, 0.1, 0.5, 2.0)
_NICENESS = (0, 5, 5, 5)  # the workers share the cores
_MAX_WAITING = 256
_MAX_WAITING_OF_CLIENT = 64
_MAX_STARTS = 2  # of the process, for one trial: another client's trial may have ended it
_RETRY_AFTER_S = 5.0


@dataclass(eq=False)
class _Trial:
    client: Hashable
    grammar: str
    lane: int = 0
    num_starts: int = 0
    verdict: "Future[TrialVerdict]" = field(default_factory=Future)


_Settled = list[tuple[_Trial, TrialVerdict | UserError]]


class GrammarTrials:
    """The process for trials, started when needed, and the lanes. Any thread."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._tokenizer = [tokenizer_json, vocab_size, eos_token_ids]
        self._lines: list[FairLine[_Trial]] = [FairLine() for _ in _CPU_LIMITS_S]
        self._running: dict[int, _Trial] = {}
        self._num_orders = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)

    def submit(self, client: Hashable, grammar: str) -> "Future[TrialVerdict]":
        """Try a grammar for `client`; cancel the answer once it is not wanted. The future's error is a `UserError` when
        it cannot be tried at all. `QueueFull` when too many wait, `RuntimeError` when no thread can be started. Blocks
        while the process reads, which takes it milliseconds."""
        trial = _Trial(client, grammar)
        with self._lock:
            if self._closing:
                raise ShuttingDown(SHUTTING_DOWN)
            num_waiting, num_own = sum(map(len, self._lines)), sum(line.num_of(client) for line in self._lines)
            if num_own >= _MAX_WAITING_OF_CLIENT or num_waiting >= _MAX_WAITING:
                raise QueueFull(
                    f"{num_own} JSON schemas of this client wait to be compiled, and {num_waiting} of all clients: the"
                    f" limits are {_MAX_WAITING_OF_CLIENT} and {_MAX_WAITING}; try again later",
                    _RETRY_AFTER_S,
                )
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name="grammar trials", daemon=True)
                thread.start()
                self._thread = thread
            self._lines[0].put(client, trial)
            self._has_work.notify()
            self._begin_trials()
        return trial.verdict

    def close(self) -> None:
        """End the process and fail the trials that still wait. Waits for the end, seconds at most."""
        with self._lock:
            self._closing = True
            self._has_work.notify()
            if self._process is not None:
                _kill(self._process)
            settled: _Settled = [(trial, ShuttingDown(SHUTTING_DOWN)) for trial in self._take_all()]
        _settle_all(settled)
        if self._thread is not None:
            self._thread.join(10.0)

    # --- with the lock -----------------------------------------------------------------------------------------------

    def _take_all(self) -> list[_Trial]:
        """Those that run and those that wait."""
        trials = [*self._running.values(), *(line.take() for line in self._lines for _ in range(len(line)))]
        self._running.clear()
        return trials

    def _begin_trials(self) -> None:
        """One for each lane that is free, if the process is up."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        busy = {trial.lane for trial in self._running.values()}
        for lane, line in enumerate(self._lines):
            while line and lane not in busy:
                trial = line.take()
                if trial.verdict.cancelled():
                    continue
                busy.add(lane)
                self._num_orders += 1
                self._running[self._num_orders] = trial
                limits = {"cpu_limit_s": _CPU_LIMITS_S[lane], "niceness": _NICENESS[lane]}
                with contextlib.suppress(OSError):  # the process has ended, and `_serve` is about to notice
                    _write(self._process.stdin, {"number": self._num_orders, "grammar": trial.grammar, **limits})

    def _on_end(self, end: TrialEnd) -> _Settled:
        trial = self._running.pop(end.number, None)
        if trial is None:
            return []
        if end.verdict is not None:
            return [(trial, end.verdict)]
        if not end.signal:
            return [(trial, QueueFull("the JSON schema cannot be tried out now: try again later", _RETRY_AFTER_S))]
        if end.signal == signal.SIGPROF and trial.lane + 1 < len(_CPU_LIMITS_S):
            trial.lane += 1
            self._lines[trial.lane].put(trial.client, trial)
            return []
        return [(trial, TrialVerdict(reason=_why_ended(end.signal)))]

    def _on_loss(self, *, was_of_use: bool) -> _Settled:
        """The process is gone. What it tried may be why, and is tried once more."""
        running = list(self._running.values())
        self._running.clear()
        for trial in running:
            trial.num_starts += 1
            if trial.num_starts < _MAX_STARTS:
                self._lines[trial.lane].put(trial.client, trial)
        lost = [trial for trial in running if trial.num_starts >= _MAX_STARTS]
        if not was_of_use:
            lost += self._take_all()
        _log.warning("the process for JSON schemas has ended")
        return [
            (trial, QueueFull("the JSON schema cannot be tried out: try again later", _RETRY_AFTER_S)) for trial in lost
        ]

    # --- the thread --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Keep the process up while there is work, and read what it says."""
        while True:
            with self._lock:
                while not (self._closing or any(self._lines)):
                    self._has_work.wait()
                if self._closing:
                    return
            was_of_use = False
            try:
                was_of_use = self._run_process()
            except OSError as error:
                words = with_fix(error.strerror or str(error))
                _log.warning("the process for JSON schemas does not start: %s", words)
            with self._lock:
                settled = self._on_loss(was_of_use=was_of_use) if not self._closing else []
            _settle_all(settled)

    def _run_process(self) -> bool:
        """From its start to its end. Whether it has answered anything."""
        process = subprocess.Popen(
            python_module("antiphon.serve.text.grammar_trial"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        was_of_use = False
        with process, contextlib.suppress(OSError):  # it has ended before it had read all
            try:
                _write(process.stdin, self._tokenizer)
                with self._lock:
                    self._process = process
                    if self._closing:
                        return False
                    self._begin_trials()
                for line in process.stdout:
                    with self._lock:
                        settled = self._on_end(msgspec.json.decode(line, type=TrialEnd))
                        self._begin_trials()
                    _settle_all(settled)
                    was_of_use = True
            finally:
                with self._lock:
                    self._process = None
                    _kill(process)
        return was_of_use


def _why_ended(by_signal: int) -> str:
    """Why a trial was ended by this signal, in words."""
    if by_signal == signal.SIGPROF:
        return f"building it takes more than {_CPU_LIMITS_S[-1]:.0f} s"
    if by_signal == signal.SIGSEGV:
        return "it nests too deeply; is there a long chain of $ref?"
    return f"building it takes too much time or more than {MEMORY_LIMIT_BYTES >> 20} MiB of memory"


def _write(pipe: IO[bytes], value: object) -> None:
    pipe.write(json.dumps(value).encode() + b"\n")
    pipe.flush()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """And its trials, which are of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def settle(answer: "Future[Any]", outcome: object) -> None:
    """Give `answer` its result or its error, unless it was cancelled. To be called once for each: who settles it has
    taken it out of a collection with a lock, or has not put it into one."""
    try:
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
    except InvalidStateError:
        assert answer.cancelled(), "an answer is settled twice"


def _settle_all(settled: _Settled) -> None:
    for trial, outcome in settled:
        settle(trial.verdict, outcome)
