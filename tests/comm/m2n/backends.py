"""Back-ends of the M2N library as tests go through them, and small helpers that every test of the library needs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from antiphon import _m2n

PATIENCE_S = 20.0  # for what comes at once, on a machine that is busy with other things
SECRET = b"tests only"


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One back-end under test. `scale`: the share of the usual number of messages that it is given. `streams`:
    exchanges go in stream order, over the CPU's form ("cpu"), a GPU's ("cuda"), or on the CPU over this driver of
    CUDA. `library`: of libfabric. `provider`: of libfabric; the default is the one that every machine has."""

    name: str
    transport: str
    shuffle_seed: int = 0
    scale: float = 1.0
    streams: str = ""
    library: str = ""
    provider: str = "tcp"

    def options(self) -> _m2n.TransportOptions:
        """What makes a transport one of this kind."""
        options = _m2n.TransportOptions()
        options.shuffle_seed = self.shuffle_seed
        if self.transport == "libfabric":
            options.provider = self.provider
            options.library = self.library
        return options

    def endpoint(self, name: str, **arguments: Any) -> _m2n.Endpoint:
        """An endpoint of this kind that knows the tests' secret."""
        return _m2n.Endpoint(name, self.transport, **{"secret": SECRET, "options": self.options(), **arguments})

    @property
    def holds_back(self) -> bool:
        """What was sent may still be on its way when the news that its sender has gone is here."""
        return self.shuffle_seed != 0 or self.transport == "libfabric"


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
