"""Compiles C++ test programs against the native sources with a sanitizer, and runs them.

A sanitizer does not load into a plain Python, so what it shall watch is a program of its own.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FLAGS = ("-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread")
SANITIZERS = {
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

    def program(self, name: str, sources: Sequence[Path], timeout_s: float = 300.0) -> Path:
        """Compiles the sources side by side and links them; fails with the compiler's words, also for a warning."""
        made = self.folder / name

        def compile_one(source: Path) -> str:
            output = self.folder / f"{source.parent.name}_{source.stem}.o"
            self._compile(["-c", str(source), "-o", str(output)], timeout_s)
            return str(output)

        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as workers:
            objects = list(workers.map(compile_one, sources))
        self._compile([*objects, "-ldl", "-o", str(made)], timeout_s)
        return made

    def _compile(self, arguments: Sequence[str], timeout_s: float) -> None:
        command = [*self.compiler, *FLAGS, *self.flags, "-I", str(ROOT / "csrc"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
        assert done.returncode == 0, f"{' '.join(command)}:\n{done.stderr}"

    def run(self, program: Path, *arguments: str, timeout_s: float) -> str:
        """What the program printed; it must succeed."""
        command = [*self.launcher, str(program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
        assert done.returncode == 0, f"{program.name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout


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
