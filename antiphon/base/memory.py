"""Giving freed memory back to the system."""

import ctypes
from contextlib import suppress


def give_memory_back() -> None:
    """Return freed memory to the system (glibc; others do so by themselves or have no way).

    Takes milliseconds, without the interpreter's lock."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
