"""One line a record on standard error: time, level, component, message.

`ANTIPHON_LOG` sets the level (debug, info, warning, error; default info). Records go through the standard
library's loggers under the name "antiphon": an application that configured logging itself gets them in its own
way, and only once. Rejected: JSON lines (a person reads them first) and a set-up function that every process
must remember to call.
"""

import contextlib
import functools
import logging
import os
import sys
import time

from antiphon.base.errors import UserError

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def get_logger(name: str) -> logging.Logger:
    """The logger of a component: pass `__name__`, or a short name such as ``"serve.engine"``.

    Modules do so when they are imported, where an error would be a traceback. So a level in `ANTIPHON_LOG` that does
    not exist is a warning, and info is taken.
    """
    _configure()
    return logging.getLogger("antiphon." + name.removeprefix("antiphon."))


class Occasional:
    """Something that may happen thousands of times, and be said once in `every_s` seconds. Not thread-safe."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._said_s = -float("inf")
        self._num_unsaid = 0

    def count(self) -> int | None:
        """It happened. How often it did before without a word, if it is to be said now; None: keep quiet."""
        now_s = time.monotonic()
        if now_s - self._said_s < self._every_s:
            self._num_unsaid += 1
            return None
        self._said_s = now_s
        num_unsaid, self._num_unsaid = self._num_unsaid, 0
        return num_unsaid


@functools.cache
def _configure() -> None:
    root = logging.getLogger("antiphon")
    root.addHandler(_StderrHandler())
    try:
        root.setLevel(parse_level(os.environ.get("ANTIPHON_LOG", "")))
    except UserError as error:
        root.setLevel(logging.INFO)
        root.warning("%s; info is taken", error)


def adopt_logger(name: str, level: int) -> None:
    """Records of a library's logger, from `level` on, go out in our form instead of as bare lines."""
    logger = logging.getLogger(name)
    logger.setLevel(level)
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())


def parse_level(text: str) -> int:
    """``"debug"`` -> `logging.DEBUG`; empty means info."""
    level = LEVELS.get(text.strip().lower() or "info")
    if level is None:
        raise UserError(f"ANTIPHON_LOG is {text!r}: use one of {', '.join(LEVELS)}")
    return level


class _StderrHandler(logging.Handler):
    """Writes to whatever `sys.stderr` is at that moment, unless the application has handlers of its own."""

    def __init__(self) -> None:
        super().__init__()
        line = "%(asctime)s.%(msecs)03d %(levelname)-7s %(component)s: %(message)s"
        self.setFormatter(logging.Formatter(line, "%H:%M:%S"))

    def format(self, record: logging.LogRecord) -> str:
        """``14:03:07.512 INFO    serve.engine: message``"""
        record.component = record.name.removeprefix("antiphon.")
        return super().format(record)

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        try:
            line = self.format(record)
        except Exception:  # arguments that do not fit their text: a bug, which is worth a word
            self.handleError(record)
            return
        # Standard error is closed, or its disk is full: no reader is left, and the caller must go on.
        with contextlib.suppress(OSError, ValueError):
            if sys.stderr is not None:
                sys.stderr.write(line + "\n")
                sys.stderr.flush()
