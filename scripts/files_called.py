"""How many files of `antiphon/` a command calls, and how many pairs of a file that calls and the file that it calls.

    .venv/bin/python scripts/files_called.py plan mixtral-8x22b --cluster msi-hetero

The command's own output goes to standard error. What runs while a module is imported does not count, nor do `base` and
`specs` (docs/request.md). Calls within this process only: a server's workers have others.
"""

import contextlib
import sys
from pathlib import Path
from types import FrameType

from antiphon.cli.main import main

PACKAGE = Path(__file__).resolve().parents[1] / "antiphon"


def file_of(frame: FrameType | None) -> str:
    """The frame's file below the package; empty for what does not count."""
    path = Path(frame.f_code.co_filename) if frame is not None else Path()
    if frame is None or frame.f_code.co_name == "<module>" or not path.is_relative_to(PACKAGE):
        return ""
    name = str(path.relative_to(PACKAGE))
    return "" if name.startswith(("base/", "specs/")) else name


def is_imported(frame: FrameType | None) -> bool:
    """Whether an import in the package has led here."""
    while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "<module>"


def called(arguments: list[str]) -> tuple[set[str], set[tuple[str, str]]]:
    """The files and the pairs of `antiphon ARGUMENTS`."""
    files: set[str] = set()
    pairs: set[tuple[str, str]] = set()

    def record(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not (name := file_of(frame)) or is_imported(frame.f_back):
            return
        files.add(name)
        if (caller := file_of(frame.f_back)) not in ("", name):
            pairs.add((caller, name))

    sys.argv = ["antiphon", *arguments]
    sys.setprofile(record)
    try:
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):
            main()
    finally:
        sys.setprofile(None)
    return files, pairs


if __name__ == "__main__":
    found, between = called(sys.argv[1:])
    print(*sorted(found), f"{len(found)} files, {len(between)} pairs", sep="\n")
