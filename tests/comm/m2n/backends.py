"""Back-ends of the M2N library as tests go through them, and small helpers that every test of the library needs."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from antiphon import _m2n

PATIENCE_S = 20.0  # for what comes at once, on a machine that is busy with other things
SECRET = b"tests only"


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One back-end under test. `scale`: the share of the usual number of messages that it is given."""

    name: str
    transport: str
    shuffle_seed: int = 0
    scale: float = 1.0

    def endpoint(self, name: str, **arguments: Any) -> _m2n.Endpoint:
        """An endpoint of this kind that knows the tests' secret."""
        options = _m2n.TransportOptions()
        options.shuffle_seed = self.shuffle_seed
        if self.transport == "libfabric":
            options.provider = "tcp"  # the one that every machine has
        return _m2n.Endpoint(name, self.transport, **{"secret": SECRET, "options": options, **arguments})

    @property
    def needs_both_ends_at_work(self) -> bool:
        """Nothing moves, not even a connection, unless sender and receiver are inside calls of the library."""
        return self.transport == "libfabric"

    @property
    def holds_back(self) -> bool:
        """Messages that are here may be reported later than they could be."""
        return self.shuffle_seed != 0


BACKENDS = (
    Backend(name="shm", transport="shm"),
    Backend(name="tcp", transport="tcp", scale=0.3),
    Backend(name="loopback", transport="loopback"),
    Backend(name="loopback-shuffled", transport="loopback", shuffle_seed=20, scale=0.3),
    Backend(name="libfabric", transport="libfabric", scale=0.2),
)


def by_name(*names: str) -> tuple[Backend, ...]:
    return tuple(backend for backend in BACKENDS if backend.name in names)


def need(backend: Backend) -> Backend:
    """The back-end, or a skip that says why it is not there."""
    if backend.transport not in _m2n.transports():
        pytest.skip(f"this build has no {backend.transport}: scripts/fetch_libfabric.sh brings its headers")
    if backend.transport == "libfabric":
        try:
            backend.endpoint("probe").close()
        except OSError as error:
            pytest.skip(f"libfabric: {error}")
    return backend


class Driver:
    """A thread that owns one endpoint and what it makes, and keeps them at work between the calls of a test.

    For tests in which one thread drives sender and receiver in turn, over back-ends that need both at work at once."""

    def __init__(self, endpoint: _m2n.Endpoint) -> None:
        self.endpoint: Any = Driven(self, endpoint)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._workers: dict[int, Callable[[], Any]] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=0.0005)
            except queue.Empty:
                for work in list(self._workers.values()):
                    work()
                    del work
                continue
            if call is None:
                return
            call()
            del call

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Run it on the thread; its result or exception."""
        if threading.current_thread() is self._thread:
            return function(*arguments, **options)
        done = threading.Event()
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append((True, self._wrap(function(*arguments, **options))))
            except BaseException as error:
                outcome.append((False, error))
            done.set()

        self._calls.put(run)
        done.wait()
        fine, result = outcome.pop()
        if fine:
            return result
        raise result.with_traceback(None)

    def _wrap(self, result: Any) -> Any:
        if isinstance(result, _m2n.Inbox):
            self._workers[id(result)] = lambda: result.messages(0)
        elif isinstance(result, _m2n.Outbox):
            self._workers[id(result)] = lambda: result.credits
        else:
            return result
        return Driven(self, result)

    def forget(self, target: Any) -> None:
        key = id(target)
        self._calls.put(lambda: self._workers.pop(key, None) and None)

    def stop(self) -> None:
        self._calls.put(None)
        self._thread.join()
        self._workers.clear()


class Driven:
    """An endpoint, inbox or outbox whose every call runs on its driver's thread."""

    def __init__(self, driver: Driver, target: Any) -> None:
        self._driver = driver
        self._target = target

    def __getattr__(self, name: str) -> Any:
        target, driver = self._target, self._driver
        if name == "interrupt":
            return target.interrupt  # any thread may, and the owner is busy
        if not callable(getattr(type(target), name)):
            return driver.call(getattr, target, name)
        return lambda *arguments, **options: driver.call(
            getattr(target, name), *map(bare, arguments), **{key: bare(value) for key, value in options.items()}
        )

    def __del__(self) -> None:
        self._driver.forget(self._target)


def bare(value: Any) -> Any:
    """The library's own object."""
    return value._target if isinstance(value, Driven) else value


def send_all(outboxes: Sequence[Any], *arguments: Any, **options: Any) -> None:
    """`_m2n.send_all`, also for driven outboxes."""
    _of_all(_m2n.send_all, outboxes, *arguments, **options)


def wait_all_credits(outboxes: Sequence[Any], timeout_s: float) -> None:
    """`_m2n.wait_all_credits`, also for driven outboxes."""
    _of_all(_m2n.wait_all_credits, outboxes, timeout_s)


def _of_all(function: Callable[..., None], outboxes: Sequence[Any], *arguments: Any, **options: Any) -> None:
    targets = [bare(outbox) for outbox in outboxes]
    if outboxes and isinstance(outboxes[0], Driven):
        outboxes[0]._driver.call(function, targets, *arguments, **options)
    else:
        function(targets, *arguments, **options)


class Crew:
    """Threads of one test. `join` waits for all and raises what one of them raised."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []

    def start(self, work: Callable[..., Any], *arguments: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                self._failures.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def join(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hung = [thread for thread in self._threads if thread.is_alive()]
        self._threads.clear()
        if self._failures:
            raise self._failures[0]
        assert not hung, f"{len(hung)} threads hang"


@contextmanager
def crew() -> Iterator[Crew]:
    """A crew that has ended when the block ends."""
    made = Crew()
    yield made
    made.join()


def until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Look again and again until `condition` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.001)
