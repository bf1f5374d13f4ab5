"""Makes standard output and standard error fit for commands that run for long: closed, full or not of Unicode.

Rejected: catching errors wherever something is printed, because libraries print as well.
"""

import io
import os
import sys
from contextlib import suppress
from typing import Any


def ready_standard_streams() -> None:
    """A terminal that is not one of Unicode shows ``?`` for what it does not have; that must not end a command. A
    standard stream that was closed takes everything and shows nothing, and so does a standard error that is full."""
    _open_closed_descriptors()
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if sys.stderr is None or (sys.stderr is sys.__stderr__ and not os.isatty(2)):  # not what a test put there
        writer = io.BufferedWriter(_LossyFile(2, "wb", closefd=False))
        sys.stderr = io.TextIOWrapper(writer, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _open_closed_descriptors() -> None:
    """Else the next file or socket would get the number of a standard stream, and what is written to that stream."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, number)
            if opened != number:
                os.close(opened)


class _LossyFile(io.FileIO):
    """Drops what cannot be written: a log on a full disk must not end what is being logged."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            return super().write(data) or 0
        return len(data)
