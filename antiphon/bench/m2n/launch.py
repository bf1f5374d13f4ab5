"""Starting the processes of a contestant, each with a channel to the benchmark: one by one, or as ranks of `mpiexec`.

If the benchmark itself is killed, the kernel ends them all.
"""

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from antiphon.base.errors import PeerLost, PeerTimeout, UserError
from antiphon.base.system import python_module
from antiphon.bench.m2n.api import Seat
from antiphon.bench.m2n.messages import FromMember
from antiphon.bench.obeying import Handle, start_logged, start_obeying
from antiphon.serve.worker.channel import Channel

_MODULE = "antiphon.bench.m2n.process"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_LOOK_S = 0.1
_RANK_BYTES = 8  # as `mpi.RANK`, which only a rank may import


@dataclass
class LaunchedProcess:
    """One process and the channel to it. `name`: of what ends with it, in errors."""

    seat: Seat
    name: str
    channel: Channel
    handle: Handle


def start_each(seats: Sequence[Seat], log: IO[bytes]) -> list[LaunchedProcess]:
    """A process for each seat, by rank."""
    launched: list[LaunchedProcess] = []
    try:
        for seat in seats:
            channel, popen = start_obeying(_MODULE, str(seat), FromMember, log, _ONE_THREAD)
            launched.append(LaunchedProcess(seat, str(seat), channel, popen))
    except BaseException:
        end_all(launched, 0.0)
        raise
    return launched


def end_all(launched: Sequence[LaunchedProcess], patience_s: float) -> None:
    """Wait for all to end, kill who does not in time, close the channels."""
    deadline = time.monotonic() + patience_s
    for process in launched:
        try:
            process.handle.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.handle.kill()
            process.handle.wait()
        process.channel.close()


# --- ranks of MPI


class _Rank:
    """A process that `mpiexec` started. When one ends early, `mpiexec` ends the others, and then itself."""

    def __init__(self, pid: int, mpiexec: "subprocess.Popen[bytes]") -> None:
        self.pid = pid
        self._mpiexec = mpiexec
        self._shared_files = _shared_files(pid)  # MPI takes them away itself, unless it is killed

    def poll(self) -> int | None:
        return self._mpiexec.poll()

    def wait(self, timeout: float | None = None) -> int:
        code = self._mpiexec.wait(timeout)
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
        self._mpiexec.kill()


def _shared_files(pid: int) -> set[Path]:
    """Shared memory with a name that the process has mapped."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
        return {Path(line.split()[-1]) for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}
    return set()


def find_mpiexec() -> str:
    """The `mpiexec` of this Python's environment, or of the system. `UserError`: there is none, or no mpi4py."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None or importlib.util.find_spec("mpi4py") is None:
        lacking = "mpiexec" if found is None else "mpi4py"
        raise UserError(f"--against mpi: there is no {lacking} here: pip install 'antiphon[mpi]'")
    return found


def start_ranks(seats: Sequence[Seat], log: IO[bytes], timeout_s: float) -> list[LaunchedProcess]:
    """A rank for each seat, under one `mpiexec`. Blocks until all have called; `PeerLost`, `PeerTimeout`."""
    mpiexec = find_mpiexec()
    with tempfile.TemporaryDirectory(prefix="antiphon-mpi-") as folder:
        path = f"{folder}/ranks"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(len(seats))
            command = [mpiexec, *_oversubscribing(mpiexec), "-n", str(len(seats))]
            popen = start_logged([*command, *python_module(_MODULE, "--mpi", path)], log, _ONE_THREAD)
            try:
                callers = _await_ranks(listener, popen, len(seats), timeout_s)
            except BaseException:
                popen.kill()
                popen.wait()
                raise
    return [
        LaunchedProcess(seat, "mpiexec", Channel(callers[seat.rank][0], str(seat), FromMember), _Rank(pid, popen))
        for seat in seats
        for pid in [callers[seat.rank][1]]
    ]


def _oversubscribing(mpiexec: str) -> list[str]:
    """Open MPI refuses more ranks than cores, and root, without these options; others know no such options."""
    version = subprocess.run([mpiexec, "--version"], capture_output=True, check=False, timeout=30).stdout
    return ["--oversubscribe", "--allow-run-as-root"] if b"Open MPI" in version or b"prte" in version else []


def _await_ranks(
    listener: socket.socket, mpiexec: "subprocess.Popen[bytes]", num_ranks: int, timeout_s: float
) -> dict[int, tuple[socket.socket, int]]:
    """(its stream, its process) by rank."""
    callers: dict[int, tuple[socket.socket, int]] = {}
    deadline = time.monotonic() + timeout_s
    listener.settimeout(_LOOK_S)
    while len(callers) < num_ranks:
        if mpiexec.poll() is not None:
            raise PeerLost("mpiexec", f"exited with {mpiexec.returncode} before its ranks called")
        if time.monotonic() > deadline:
            missing = [f"rank {rank}" for rank in range(num_ranks) if rank not in callers]
            raise PeerTimeout("a call from MPI's ranks", missing, timeout_s)
        try:
            stream = listener.accept()[0]
        except TimeoutError:
            continue
        stream.settimeout(timeout_s)
        hello = stream.recv(_RANK_BYTES, socket.MSG_WAITALL)
        callers[int.from_bytes(hello[:4])] = (stream, int.from_bytes(hello[4:]))
    return callers
