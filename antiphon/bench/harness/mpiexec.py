"""Children that are the ranks of one `mpiexec`."""

import contextlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from antiphon.base.errors import UserError
from antiphon.base.system import python_module
from antiphon.bench.harness import child
from antiphon.bench.harness.children import Handle, Starter, start_logged

NAME = "mpiexec"


def find_mpiexec() -> str:
    """The `mpiexec` of this Python's environment, or of the system. `UserError`: there is none, or no mpi4py."""
    beside = Path(sys.executable).parent / NAME
    found = str(beside) if beside.exists() else shutil.which(NAME)
    if found is None or importlib.util.find_spec("mpi4py") is None:
        lacking = NAME if found is None else "mpi4py"
        raise UserError(f"--against mpi: there is no {lacking} here: pip install 'antiphon[mpi]'")
    return found


def under_mpiexec(environment: Mapping[str, str]) -> Starter:
    """All children under one `mpiexec`. `environment` is added to ours."""

    def start(path: str, count: int, log: IO[bytes]) -> Sequence[Handle]:
        mpiexec = find_mpiexec()
        command = [mpiexec, *_oversubscribing(mpiexec), "-n", str(count)]
        command += python_module(child.__name__, path, child.UNDER_MPIEXEC)
        launcher = _Mpiexec(start_logged(command, log, environment))
        return [launcher] * count

    return start


def _oversubscribing(mpiexec: str) -> list[str]:
    """Open MPI refuses more ranks than cores, and root, without these options; others know no such options."""
    version = subprocess.run([mpiexec, "--version"], capture_output=True, check=False, timeout=30).stdout
    return ["--oversubscribe", "--allow-run-as-root"] if b"Open MPI" in version or b"prte" in version else []


class _Mpiexec:
    """The `mpiexec` of all ranks. When one ends early, it ends the others, and then itself."""

    ends_with = NAME

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.pid = process.pid

    def of(self, pid: int) -> "_Rank":
        return _Rank(pid, self._process)

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self._process.wait(timeout)

    def kill(self) -> None:
        self._process.kill()


class _Rank(_Mpiexec):
    """One rank, whose end is that of all."""

    def __init__(self, pid: int, process: "subprocess.Popen[bytes]") -> None:
        super().__init__(process)
        self.pid = pid
        self._shared_files = _shared_files(pid)  # MPI takes them away itself, unless it is killed

    def wait(self, timeout: float | None = None) -> int:
        code = super().wait(timeout)
        try:
            psutil.Process(self.pid).wait(timeout)
        except psutil.NoSuchProcess:
            pass
        except psutil.TimeoutExpired:
            raise subprocess.TimeoutExpired("a rank of mpiexec", timeout or 0.0) from None
        for file in self._shared_files:
            file.unlink(missing_ok=True)
        return code

    def kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(self.pid).kill()
        super().kill()


def _shared_files(pid: int) -> set[Path]:
    """Shared memory with a name that the process has mapped."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
        return {Path(line.split()[-1]) for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}
    return set()
