"""Compiles C++ test programs against the native sources with a sanitizer, and runs them.

A sanitizer does not load into a plain Python, so what it shall watch is a program of its own. Programs of one build
share their objects: most of the time goes into compiling the same sources (`conftest.py` keeps one build per session).
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FLAGS = ("-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread")
SANITIZERS = {
    "plain": (),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}


@dataclass(frozen=True, kw_only=True)
class Build:
    """A compiler with one sanitizer, and a folder for what it makes."""

    compiler: Sequence[str]
    flags: Sequence[str]
    folder: Path
    launcher: Sequence[str]  # what programs must be started through on this machine
    _objects: dict[tuple[Path, tuple[str, ...]], Path] = field(default_factory=dict)

    def program(self, name: str, sources: Sequence[Path], flags: Sequence[str] = (), timeout_s: float = 300.0) -> Path:
        """Compiles the sources side by side and links them; fails with the compiler's words, also for a warning."""
        made = self.folder / name
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as workers:
            objects = list(workers.map(lambda source: self._object(source, tuple(flags), timeout_s), sources))
        self._compile([*map(str, objects), "-ldl", "-o", str(made)], timeout_s)
        return made

    def _object(self, source: Path, flags: tuple[str, ...], timeout_s: float) -> Path:
        key = (source, flags)
        if key not in self._objects:
            made = self.folder / f"{len(flags)}_{source.parent.name}_{source.stem}.o"
            self._compile(["-I", str(source.parent), *flags, "-c", str(source), "-o", str(made)], timeout_s)
            self._objects[key] = made
        return self._objects[key]

    def _compile(self, arguments: Sequence[str], timeout_s: float) -> None:
        command = [*self.compiler, *FLAGS, *self.flags, "-I", str(ROOT / "csrc"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
        assert done.returncode == 0, f"{' '.join(command)}:\n{done.stderr}"

    def run(
        self,
        program: Path,
        *arguments: str,
        timeout_s: float,
        stdin: str = "",
        environment: Mapping[str, str] | None = None,
        may_end_with: int = 0,
    ) -> subprocess.CompletedProcess[str]:
        """The program's end and what it printed; it must succeed, or end with `may_end_with`."""
        # ThreadSanitizer would let every dying process sleep for a second.
        variables = {**os.environ, "TSAN_OPTIONS": "atexit_sleep_ms=0", **(environment or {})}
        done = subprocess.run(
            [*self.launcher, str(program), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env=variables,
        )
        if done.returncode not in {0, may_end_with}:
            pytest.fail(f"{program.name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done


def usable_build(sanitizer: str, folder: Path) -> Build:
    """A build whose programs run here, or a skip that says what is missing."""
    compiler = os.environ.get("CXX", "c++").split()
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C++ compiler ({compiler[0]})")
    flags = SANITIZERS[sanitizer]
    source, program = folder / "empty.cpp", folder / "empty"
    source.write_text("int main() { return 0; }\n")
    if problem := _problem([*compiler, *flags, str(source), "-o", str(program)]):
        pytest.skip(f"the compiler has no {sanitizer} sanitizer: {problem}")
    launchers: list[list[str]] = [[]]
    if (setarch := shutil.which("setarch")) is not None:
        # Older sanitizers cannot place their shadow where the kernel scatters mappings widely.
        launchers.append([setarch, "-R"])
    for launcher in launchers:
        problem = _problem([*launcher, str(program)])
        if not problem:
            return Build(compiler=compiler, flags=flags, folder=folder, launcher=launcher)
    pytest.skip(f"programs with the {sanitizer} sanitizer do not run here: {problem}")


def _problem(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    return "" if done.returncode == 0 else f"{done.returncode} {done.stderr.strip()[-200:]}"
