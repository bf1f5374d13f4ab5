"""Lines per package, and the files that grew beyond what one sitting can read.

Usage: `python scripts/line_counts.py`. A file beyond the limit (450 lines; 500 for native code) must say why in its
first line, with the words "long because"; otherwise the exit code is 1. Tests are counted but not limited.
"""

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

LIMITS = {".py": 450, ".sh": 300, ".cpp": 500, ".h": 500, ".hpp": 500, ".cu": 500}
FOLDERS = ("antiphon", "csrc", "benchmarks", "examples", "scripts", "tests")
REASON = "long because"


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file: where, how long, how long it may be, and whether its first line explains the excess."""

    path: Path
    package: str
    num_lines: int
    limit: int
    explained: bool

    @property
    def offends(self) -> bool:
        return self.num_lines > self.limit and not self.explained and self.path.parts[0] != "tests"


def measure(root: Path) -> list[SourceFile]:
    """Count every source file under `FOLDERS`, in path order."""
    paths = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*")) if path.suffix in LIMITS)
    return [_measure_file(path, path.relative_to(root)) for path in paths]


def _measure_file(path: Path, relative: Path) -> SourceFile:
    lines = path.read_text(encoding="utf-8").splitlines()
    parts = relative.parts[:-1]
    return SourceFile(
        path=relative,
        package="/".join(parts[:2] if parts[0] in {"antiphon", "csrc"} else parts[:1]),
        num_lines=len(lines),
        limit=LIMITS[path.suffix],
        explained=bool(lines) and REASON in lines[0].lower(),
    )


def report(files: list[SourceFile]) -> str:
    """The table and the list of long files, as text."""
    num_lines, num_files = Counter[str](), Counter[str]()
    for file in files:
        num_lines[file.package] += file.num_lines
        num_files[file.package] += 1
    rows = [f"{package:<20}{num_lines[package]:>8,}{num_files[package]:>6}" for package in sorted(num_lines)]
    total = f"{'total':<20}{num_lines.total():>8,}{num_files.total():>6}"
    long = [
        f"{'too long' if file.offends else 'long'}: {file.path} has {file.num_lines} lines, the limit is {file.limit}"
        + (f'; split it, or say why in its first line ("{REASON} ...")' if file.offends else "")
        for file in files
        if file.num_lines > file.limit
    ]
    return "\n".join([f"{'package':<20}{'lines':>8}{'files':>6}", *rows, total, *long])


def main() -> int:
    files = measure(Path(__file__).parents[1])
    print(report(files))
    return int(any(file.offends for file in files))


if __name__ == "__main__":
    sys.exit(main())
