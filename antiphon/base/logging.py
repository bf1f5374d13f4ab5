"""One line a record on standard error: time, level, component, message.

`ANTIPHON_LOG` sets the level (debug, info, warning, error; default info). Records go through the standard
library's loggers under the name "antiphon": an application that configured logging itself gets them in its own
way, and only once. Rejected: JSON lines (a person reads them first) and a set-up function that every process
must remember to call.
"""

import functools
import logging
import os
import sys
from contextlib import suppress

from antiphon.base.errors import UserError

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def get_logger(name: str) -> logging.Logger:
    """The logger of a component: pass `__name__`, or a short name such as ``"serve.engine"``.

    `UserError` if `ANTIPHON_LOG` is set to something that is not a level.
    """
    _configure()
    return logging.getLogger("antiphon." + name.removeprefix("antiphon."))


@functools.cache
def _configure() -> None:
    root = logging.getLogger("antiphon")
    root.setLevel(parse_level(os.environ.get("ANTIPHON_LOG", "")))
    root.addHandler(_StderrHandler())


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
        self.setFormatter(_LineFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        if sys.stderr is None:  # closed; `print` would take standard output instead
            return
        with suppress(OSError, ValueError):  # a full disk, or closed: no reason to fail at what is being logged
            print(self.format(record), file=sys.stderr, flush=True)


class _LineFormatter(logging.Formatter):
    """``14:03:07.512 INFO    serve.engine: message``"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)-7s %(component)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.component = record.name.removeprefix("antiphon.")
        return super().format(record)
