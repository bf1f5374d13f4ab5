"""Signals to a whole process group, as a terminal's Ctrl-C or a service manager sends them: the server decides alone.

A child starts with them blocked (`blocked`), because it needs a moment until it can ignore them (`ignore`).
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def blocked() -> Iterator[None]:
    """Within it, this thread starts children that are not ended by these signals before they call `ignore`."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def name_of(number: int) -> str:
    """``SIGKILL``; the real-time ones have only numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ignore() -> None:
    """In the child's main thread: ignore them from now on, those that came meanwhile too."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


@contextmanager
def interruptible() -> Iterator[None]:
    """Within it, Ctrl-C ends the process at once, without a word: for the main thread, in a long call of a library,
    with nothing to close. Python would run its own handler only after the call."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield  # handlers belong to the main thread, and one that was set by others stays
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Within it, SIGTERM ends the program as `sys.exit` does, so that what has to be closed is closed; a second one
    meanwhile is ignored. For the main thread of a command that has no other way to end."""
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)
