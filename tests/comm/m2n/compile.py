"""Compiles C++ test programs against the native sources with a sanitizer, and runs them.

A sanitizer does not load into a plain Python, so what it watches is a program of its own. Compiling takes longer than
running. So objects and programs are kept in `build/native_tests`, where programs share objects and a later run finds
them again. Their names carry a hash of what they are made from: compiler, flags, the source and every header it may
include. ccache would do the same, but it is not on every machine.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
KEPT = ROOT / "build" / "native_tests"
DIGITS = 16  # of a hash, in a file's name
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

    def program(self, name: str, sources: Sequence[Path], flags: Sequence[str] = (), timeout_s: float = 300.0) -> Path:
        """Compiles the sources side by side and links them; fails with the compiler's words, also for a warning."""
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as workers:
            objects = list(workers.map(lambda source: self._object(source, flags, timeout_s), sources))
        made_from = [path.name.encode() for path in objects]
        return self._kept(name, "", made_from, [*map(str, objects), "-ldl"], timeout_s)

    def _object(self, source: Path, flags: Sequence[str], timeout_s: float) -> Path:
        name = f"{len(flags)}_{source.parent.name}_{source.stem}"
        made_from = [source.read_bytes(), _headers(ROOT / "csrc"), _headers(source.parent)]
        return self._kept(name, ".o", made_from, ["-I", str(source.parent), *flags, "-c", str(source)], timeout_s)

    def _kept(
        self, name: str, suffix: str, made_from: Iterable[bytes], arguments: Sequence[str], timeout_s: float
    ) -> Path:
        """What the compiler makes of the arguments: from an earlier run if it was the same, else in place of that."""
        command = [*self.compiler, *FLAGS, *self.flags, "-I", str(ROOT / "csrc"), *arguments]
        parts = [_version(tuple(self.compiler)), "\0".join(command).encode(), *made_from]
        made = self.folder / f"{name}.{_digest(parts)}{suffix}"
        with (self.folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another test process may be making it
            if not made.exists():
                unfinished = made.with_suffix(".unfinished")
                command += ["-o", str(unfinished)]
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
                assert done.returncode == 0, f"{' '.join(command)}:\n{done.stderr}"
                for earlier in self.folder.glob(f"{name}.{'?' * DIGITS}{suffix}"):
                    earlier.unlink()
                unfinished.rename(made)
        return made

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


def _digest(parts: Iterable[bytes]) -> str:
    each = (hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(b"".join(each)).hexdigest()[:DIGITS]


@cache
def _headers(folder: Path) -> bytes:
    return _digest(path.read_bytes() for path in sorted(folder.rglob("*.h"))).encode()


@cache
def _version(compiler: tuple[str, ...]) -> bytes:
    return subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=100).stdout


def usable_build(sanitizer: str, scratch: Path) -> Build:
    """A build whose programs run here, or a skip that says what is missing. `scratch` is a folder for the trial."""
    compiler = os.environ.get("CXX", "c++").split()
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C++ compiler ({compiler[0]})")
    flags = SANITIZERS[sanitizer]
    source, program = scratch / "empty.cpp", scratch / "empty"
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
            folder = KEPT / sanitizer
            folder.mkdir(parents=True, exist_ok=True)
            return Build(compiler=compiler, flags=flags, folder=folder, launcher=launcher)
    pytest.skip(f"programs with the {sanitizer} sanitizer do not run here: {problem}")


def _problem(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    return "" if done.returncode == 0 else f"{done.returncode} {done.stderr.strip()[-200:]}"
