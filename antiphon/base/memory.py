"""Giving freed memory back to the system: at once, or after large requests."""

import asyncio
import ctypes
from contextlib import suppress

import psutil

_PAUSE_S = 2.0


def give_memory_back() -> None:
    """Return freed memory to the system (glibc; others do so by themselves or have no way).

    Takes milliseconds, without the interpreter's lock."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class MemoryTrimmer:
    """Trims in a thread, at most every few seconds, and only after large requests.

    glibc keeps what is freed, and the largest request a server ever saw then decides how much it holds. Rejected:
    trimming after every large request, which takes milliseconds and locks, with the next one right behind it; and
    `MALLOC_TRIM_THRESHOLD_`, which must be set before the process starts and slows every large allocation.
    """

    def __init__(self) -> None:
        self._planned = False

    def note_large_input(self) -> None:
        """Something large is being worked on: trim in some seconds. Called from the event loop."""
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_later(_PAUSE_S, self._trim)

    def _trim(self) -> None:
        self._planned = False
        asyncio.get_running_loop().run_in_executor(None, give_memory_back)


def address_space_bytes() -> int:
    """What the addresses of this process take now; 16 GiB where `/proc` does not say."""
    try:
        return int(psutil.Process().memory_info().vms)
    except (psutil.Error, OSError):
        return 16 * 1024**3


def resident_bytes() -> int:
    """What this process has in memory now; 0 where the system does not say."""
    try:
        return int(psutil.Process().memory_info().rss)
    except (psutil.Error, OSError):
        return 0
