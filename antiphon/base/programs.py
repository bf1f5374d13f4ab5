"""How Antiphon starts its own programs: with this interpreter, and no module from the folder that one works in.

`python -m` looks for modules in the working folder first. A `json.py` there, of a user or of somebody who shares the
folder, would be run by every worker in the place of Python's own. `-P` leaves that folder out, unless it is where this
program came from. Rejected: `-I`, which drops `PYTHONPATH` and what users have installed for themselves.
"""

import sys
from contextlib import suppress
from pathlib import Path

_SOURCES = Path(__file__).resolve().parents[2]


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs `module`."""
    runs_from_sources = False
    with suppress(OSError):  # a working folder that was deleted
        runs_from_sources = Path.cwd() == _SOURCES
    return [sys.executable, *([] if runs_from_sources else ["-P"]), "-m", module, *arguments]
