"""Processes that answer method calls, wherever they run: here, in a node of a box, under `mpiexec`, in another
interpreter.

    with Children("gloo") as ranks:
        ranks.start(["sender[0]", "receiver[0]"], [partial(Member, rank) for rank in range(2)], programs())
        times = ranks.ask("run", 100)

1. A *starter* starts the processes; each runs `child` and calls back at a Unix socket.
2. Each makes its object. From then on a call is the name of a method and its arguments; all children are asked at once.
3. Answers are collected in the order in which they come, so that the child that fails is named and not one that waits
   for it. A death is noticed at once.
4. A child ends when the parent hangs up, or is killed. All are gone when the `with` block is left; if the parent is
   killed, the kernel ends them.

Messages are pickled: both ends are ours. Rejected: orders as typed messages, one class for each call and one for each
answer; and a starter's own protocol in each benchmark.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import IO, Any, Protocol, Self

import numpy as np
import torch
import torch.distributed as dist

from antiphon.base.errors import PeerLost, PeerTimeout, UserError
from antiphon.base.system import python_module
from antiphon.bench.harness import child

START_S = 300.0  # dozens of processes on few cores import torch
ANSWER_S = 600.0
_STOP_S = 5.0
_NOTICE_S = 0.2  # a death may be seen by a fellow before it is by us
_LOOK_S = 0.1
_NUM_WARM = 2


class Handle(Protocol):
    """What is needed of `subprocess.Popen`. A program that starts children itself has `of`, too, the handle of a child
    by its process, and `ends_with`, the program's name in errors."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None, /) -> int: ...
    def kill(self) -> None: ...


Starter = Callable[[str, int, IO[bytes]], Sequence[Handle]]
"""(path of the socket, how many, the log of what they print) -> the processes, by number."""
Method = str | Callable[..., Any]
"""A method of the child's object by name, or a function that can be pickled and is given the object first."""


class ChildFailed(UserError):
    """A child could not do its part; the message names it and the reason."""

    exit_code = 1


class Child:
    """One process. `name`: in errors."""

    def __init__(self, family: "Children", name: str, handle: Handle, connection: Connection) -> None:
        self.name = name
        self.handle = handle
        self.connection = connection
        self._family = family

    @property
    def pid(self) -> int:
        return self.handle.pid

    def begin(self, method: Method, *arguments: Any) -> None:
        """Call a method whose answer will be taken later."""
        try:
            self.connection.send((method, arguments))
        except OSError:
            raise self._family.first_death([self]) from None

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """The answer to the last call; blocks."""
        return self._family.collect([self], timeout_s)[0]

    def ask(self, method: Method, *arguments: Any) -> Any:
        self.begin(method, *arguments)
        return self.answer()


class Children:
    """Some processes, for use in a `with`. After a failure they are good for nothing but their end.

    `owner` begins their names in errors. `ChildFailed`, `PeerLost` and `PeerTimeout` name the child that is at fault.
    """

    def __init__(self, owner: str = "") -> None:
        self._owner = owner
        self._children: list[Child] = []
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._broken = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [each.pid for each in self._children]

    def start(
        self, names: Sequence[str], made: Sequence[Any], starter: Starter, timeout_s: float = START_S
    ) -> list[Child]:
        """One child for each name, which makes its object with `made`: a callable that can be pickled, or the file that
        defines `load` and its arguments. Blocks until all are made."""
        with tempfile.TemporaryDirectory(prefix="antiphon-children-") as folder:
            path = f"{folder}/socket"
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(path)
                listener.listen(len(names))
                handles = starter(path, len(names), self._log)
                try:
                    called = self._await_calls(listener, names, handles, timeout_s)
                except BaseException:
                    end_all(handles, 0.0)
                    raise
        started = []
        for number, (name, handle) in enumerate(zip(names, handles, strict=True)):
            connection, pid = called[number]
            own = handle.of(pid) if hasattr(handle, "of") else handle
            started.append(Child(self, name, own, connection))
        self._children += started
        for each, make in zip(started, made, strict=True):
            each.connection.send((make, ()) if callable(make) else make)
        self.collect(started, timeout_s)
        return started

    def start_ranks(
        self, count: int, make: Callable[[int], Any] = int, environment: Mapping[str, str] | None = None
    ) -> list[Child]:
        """Forks, named by their ranks; each makes its object with `make`, which is given its rank. Without one the
        object is the rank itself, for calls of functions."""
        made = [partial(make, rank) for rank in range(count)]
        return self.start([f"rank[{rank}]" for rank in range(count)], made, forked(environment))

    def ask(self, method: Method, *arguments: Any, timeout_s: float = ANSWER_S) -> list[Any]:
        """All children's answers to one call."""
        for each in self._children:
            each.begin(method, *arguments)
        return self.collect(self._children, timeout_s)

    def introduce(self) -> None:
        """Call `introduction` of all, and `connect` of all with what was answered."""
        self.ask("connect", self.ask("introduction"))

    def slowest_median_s(self, method: str, *arguments: Any) -> float:
        """The median of repetitions, each as long as its slowest child; a child answers with seconds of each."""
        return float(np.median(np.asarray(self.ask(method, *arguments)).max(axis=0)))

    def collect(self, children: Sequence[Child], timeout_s: float) -> list[Any]:
        """Answers of these, in their order."""
        waiting = {each.connection: each for each in children}
        answers: dict[Child, Any] = {}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._broken = True
                raise PeerTimeout("an answer", [self._full(each.name) for each in waiting.values()], timeout_s)
            for connection in ready:
                assert isinstance(connection, Connection)
                each = waiting.pop(connection)
                answers[each] = self._received(each)
        return [answers[each] for each in children]

    def first_death(self, suspects: Sequence[Child] = ()) -> PeerLost:
        """The error for a child that is gone; if it ended by itself, with the last line of the common log."""
        self._broken = True
        time.sleep(_NOTICE_S)
        dead = [each for each in self._children if each.handle.poll() is not None]
        first = next(iter(dead or suspects or self._children))
        name = getattr(first.handle, "ends_with", first.name)
        return PeerLost(self._full(name), describe_exit(first.handle) + self._last_words(first.handle))

    def last_lines(self, count: int) -> list[str]:
        """What the children printed last, lines that are not empty."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").split("\n")]
        return [line for line in lines if line][-count:]

    def close(self) -> None:
        """Hang up on all and wait a little, kill those that stay; a second call does nothing."""
        for each in self._children:
            each.connection.close()
        end_all([each.handle for each in self._children], 0.0 if self._broken else _STOP_S)
        self._children = []
        self._log.close()

    def _await_calls(
        self, listener: socket.socket, names: Sequence[str], handles: Sequence[Handle], timeout_s: float
    ) -> dict[int, tuple[Connection, int]]:
        """(its connection, its process) by number."""
        called: dict[int, tuple[Connection, int]] = {}
        deadline = time.monotonic() + timeout_s
        listener.settimeout(_LOOK_S)
        while len(called) < len(names):
            for handle, name in zip(handles, names, strict=True):
                if handle.poll() is not None:
                    name = getattr(handle, "ends_with", name)
                    why = f"{describe_exit(handle)} before it called{self._last_words(handle)}"
                    raise PeerLost(self._full(name), why)
            if time.monotonic() > deadline:
                missing = [self._full(name) for number, name in enumerate(names) if number not in called]
                raise PeerTimeout("a call", missing, timeout_s)
            with contextlib.suppress(TimeoutError):
                connection = Connection(listener.accept()[0].detach())
                number, pid = connection.recv()
                called[number] = (connection, pid)
        return called

    def _received(self, each: Child) -> Any:
        try:
            failure, answer = each.connection.recv()
        except (EOFError, OSError):
            raise self.first_death([each]) from None
        if failure is None:
            return answer
        self._broken = True
        time.sleep(_NOTICE_S)
        if any(other.handle.poll() is not None for other in self._children):
            raise self.first_death()
        raise ChildFailed(f"{self._full(each.name)}: {failure}")

    def _full(self, name: str) -> str:
        return f"{self._owner} {name}".strip()

    def _last_words(self, handle: Handle) -> str:
        """Unless the child was killed: then it could say nothing."""
        lines = self.last_lines(1)
        return f"; its last words: {lines[0]}" if lines and (handle.poll() or 0) >= 0 else ""


def describe_exit(handle: Handle) -> str:
    """How the process ended, in words; one that only hung up is ended first."""
    if handle.poll() is None:
        handle.kill()
    code = handle.wait()
    if code >= 0:
        return f"exited with {code}"
    how = f"killed by {signal.Signals(-code).name}"
    return f"{how}: is there enough memory?" if -code == signal.SIGKILL else how


def end_all(handles: Sequence[Handle], patience_s: float) -> None:
    """Wait for all to end, kill those that do not in time."""
    deadline = time.monotonic() + patience_s
    for handle in handles:
        try:
            handle.wait(max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, TimeoutError):
            handle.kill()
            handle.wait()


# --- starters


def programs(
    environment: Mapping[str, str] | None = None, interpreter: str | None = None
) -> Callable[[str, int, IO[bytes]], "list[subprocess.Popen[bytes]]"]:
    """Fresh interpreters: what a child does not import, it does not carry. `environment` is added to ours; another
    `interpreter` need not have antiphon."""

    def start(path: str, count: int, log: IO[bytes]) -> "list[subprocess.Popen[bytes]]":
        started: list[subprocess.Popen[bytes]] = []
        try:
            for number in range(count):
                arguments = [path, str(number)]
                command = python_module(child.__name__, *arguments)
                if interpreter is not None:
                    command = [interpreter, "-P", child.__file__, *arguments]
                started.append(start_logged(command, log, environment))
        except BaseException:
            end_all(started, 0.0)
            raise
        return started

    return start


def start_logged(
    command: Sequence[str], log: IO[bytes], environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """A command that prints to `log`."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**os.environ, **(environment or {})},
        start_new_session=True,  # Ctrl-C is ours to handle
    )


def forked(environment: Mapping[str, str] | None = None) -> Starter:
    """Forks of a process that has imported torch: a rank takes seconds for that. They print where this process does.
    Rejected: forking this process, which may have threads."""

    def start(path: str, count: int, log: IO[bytes]) -> Sequence[Handle]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed"])
        resource_tracker.ensure_running()  # its start lets interrupts through
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()  # it inherits that, and so do its forks: Ctrl-C is ours to handle
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        started = []
        for number in range(count):
            process = context.Process(target=_run_fork, args=(path, number, dict(environment or {})), daemon=True)
            process.start()
            started.append(_Fork(process))
        return started

    return start


class _Fork:
    """A process of `multiprocessing` as a `Handle`."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise TimeoutError(f"process {self.pid} did not end within {timeout} s")
        return code

    def kill(self) -> None:
        self._process.kill()


def _run_fork(path: str, number: int, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    child.answer_calls(path, number)


# --- for children that are ranks


def join_gloo(store: str, rank: int, num_ranks: int, timeout_s: float) -> None:
    """Make this process one of a gloo group over loopback, whose ranks meet in the file `store`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may lead anywhere
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timeout)


def seconds_of_calls(call: Callable[[], object], num_calls: int, barrier: Callable[[], object]) -> list[float]:
    """Seconds of each call after a barrier, without the first two."""
    times = []
    for _ in range(num_calls + _NUM_WARM):
        barrier()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times[_NUM_WARM:]
