"""Streams of ordered work, and what a stream-ordered send or receive needs of them.

A stream runs what is put on it in order, on its own time: putting returns at once. Three means tie it to the CPU
thread that speaks to peers (`core.py`):

- an event (`record`): the CPU learns that the stream has done everything put on it so far;
- a flag (`wait_flag`): the stream stops until the CPU has raised a word of memory that both see;
- a copy between a tensor and host memory in stream order.

`HostStream` is the form for the CPU: a thread that works through a queue. The engine does not use it (tensors in host
memory are ready when the call returns); it is there so that order, blocking and failures can be tested without a GPU.
The CUDA form is `cuda.py`. Rejected: a callback of the stream (`cudaLaunchHostFunc`) in place of event and flag;
it runs on a thread of the driver that may not call the driver and would fight the interpreter for its lock.
"""

import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol, Self

import torch
from torch import Tensor

from antiphon import _native

_WORD_SPACING_BYTES = 64  # a cache line each: raising one flag does not disturb who waits for another
_LOOK_S = 0.1  # a waiting stream looks this often whether it is to end


class FlagWord:
    """32 bits that the CPU raises and a stream waits for. Values count upwards and wrap; comparisons are cyclic.

    `device_address`: where a device finds the word; 0 for streams of the CPU. Keeps its page alive.
    """

    def __init__(self, page: "FlagPage", address: int, device_address: int) -> None:
        self._page = page
        self._address = address
        self.device_address = device_address

    def raise_to(self, value: int) -> None:
        """A release store: what this thread wrote before is visible to each reader of the new value."""
        _native.store_wake_u32(self._address, value & 0xFFFFFFFF)

    def reached(self, value: int) -> bool:
        """Whether the word is at `value` or beyond: less than half the circle ahead of it."""
        return (_native.load_u32(self._address) - value) & 0xFFFFFFFF < 1 << 31

    def wait(self, value: int, timeout_s: float) -> bool:
        """Sleep until `reached(value)`; False if it was not within `timeout_s`."""
        deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        while True:
            seen = _native.load_u32(self._address)
            if (seen - value) & 0xFFFFFFFF < 1 << 31:
                return True
            left_ns = deadline_ns - time.monotonic_ns()
            if left_ns <= 0:
                return False
            _native.wait_u32(self._address, seen, left_ns, 0)


class FlagPage:
    """One page of host memory that holds flags, all zero at first. `device_address` 0: no device sees it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._anchor = ctypes.c_char.from_buffer(self._memory)
        self._num_used = 0
        self.address = ctypes.addressof(self._anchor)
        self.num_bytes = mmap.PAGESIZE
        self.device_address = 0

    @property
    def full(self) -> bool:
        """No further flag fits."""
        return (self._num_used + 1) * _WORD_SPACING_BYTES > self.num_bytes

    def new_flag(self) -> FlagWord:
        """The next unused word. It is never handed out again: work that waits for it may lie on a stream for long."""
        assert not self.full
        offset = self._num_used * _WORD_SPACING_BYTES
        self._num_used += 1
        return FlagWord(self, self.address + offset, self.device_address + offset if self.device_address else 0)


class Ready(Protocol):
    """An event on a stream."""

    def done(self) -> bool:
        """Whether the stream has come this far. Any thread; never blocks. Raises if the stream has failed."""


class Stream(Protocol):
    """Ordered work. All methods but `new_flag` and `new_stage` only put something on the stream and return."""

    @property
    def name(self) -> str:
        """For errors."""

    def record(self) -> Ready:
        """An event that is done once everything put on the stream before is done."""

    def wait_flag(self, flag: FlagWord, value: int) -> None:
        """What is put on the stream from now on begins once `flag` has reached `value`."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes in stream order, between tensors of one shape and type; neither is freed before it is done."""

    def new_flag(self) -> FlagWord:
        """A flag at 0 that this stream can wait for."""

    def new_stage(self, num_bytes: int) -> Tensor:
        """Host memory [num_bytes] of uint8 that the stream copies to and from without making the caller wait."""


class _HostReady:
    def __init__(self) -> None:
        self.reached = False  # written once, by the stream's thread

    def done(self) -> bool:
        return self.reached


class HostStream:
    """`Stream` for the CPU: one thread that works through a queue, to be used as a context manager.

    When a piece of work raises, the pieces after it are skipped, as on a device that has failed; events and flags still
    pass. `synchronize` raises what it raised.
    """

    def __init__(self, name: str = "stream") -> None:
        self._name = name
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._page = FlagPage()
        self._error: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        return self._name

    def enqueue(self, work: Callable[[], object]) -> None:
        """Put any work on the stream."""

        def guarded() -> None:
            if self._error is not None:
                return
            try:
                work()
            except BaseException as error:  # whatever it is, it is the one's who synchronizes
                self._error = error

        self._queue.put(guarded)

    def record(self) -> Ready:
        ready = _HostReady()

        def reach() -> None:
            ready.reached = True

        self._queue.put(reach)
        return ready

    def wait_flag(self, flag: FlagWord, value: int) -> None:
        def wait() -> None:
            while not self._closing and not flag.wait(value, _LOOK_S):
                pass

        self._queue.put(wait)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.enqueue(lambda: target.copy_(source))

    def new_flag(self) -> FlagWord:
        if self._page.full:
            self._page = FlagPage()
        return self._page.new_flag()

    def new_stage(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def synchronize(self, timeout_s: float) -> None:
        """Wait for everything put on the stream so far. `TimeoutError`, or what the work raised."""
        reached = threading.Event()
        self._queue.put(reached.set)
        if not reached.wait(timeout_s):
            raise TimeoutError(f"{self._name}: its work was not done within {timeout_s:.1f} s")
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Do what is on the stream, without waiting for flags any more, and end the thread."""
        self._closing = True
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
