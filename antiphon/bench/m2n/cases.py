"""Which rounds to measure, from the command's options or those of the paper's figures; and whose.

The figures are MegaScale-Infer's (arXiv 2504.02263): 5, one sender to 8, 16 and 32 receivers, 128 KB; 10, sizes from
4 KB to 4 MB between 8 senders and 8 receivers; 11, as many senders as receivers, 256 KB.
"""

import contextlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import psutil

from antiphon.base.allowance import allowance
from antiphon.base.errors import ResourceError, UserError
from antiphon.base.system import python_module
from antiphon.base.units import format_bytes
from antiphon.bench.harness import child
from antiphon.bench.harness.children import Handle, Starter, start_logged
from antiphon.bench.m2n.rounds import MemberSeat, Role, RoundTraffic

MAX_PROCESSES_A_SIDE = 128
MAX_MESSAGE_BYTES = 1 << 30
DEFAULT_SENDERS, DEFAULT_RECEIVERS, DEFAULT_BYTES = 8, 8, 256 * 1024
# What a contestant keeps of a round's bytes: where they come from and where they go to, twice for kernel buffers.
_COPIES_HELD = 3
_PROCESS_BYTES = 120_000_000


def figure_cases(name: str, *, both_ways: bool = False) -> list[RoundTraffic]:
    """The cases of one of the paper's figures; `UserError` for an unknown one."""

    def case(num_senders: int, num_receivers: int, num_bytes: int) -> RoundTraffic:
        return RoundTraffic(num_senders=num_senders, receiver_bytes=(num_bytes,) * num_receivers, both_ways=both_ways)

    figures = {
        "one-to-n": [case(1, num_receivers, 128 * 1024) for num_receivers in (8, 16, 32)],
        "sizes": [case(8, 8, num_kib * 1024) for num_kib in (4, 16, 64, 128, 256, 512, 1024, 4096)],
        "m-equals-n": [case(number, number, 256 * 1024) for number in (1, 2, 4, 8, 16)],
    }
    if name not in figures:
        raise UserError(f"--figure {name} does not exist: use one of {', '.join(figures)}")
    return figures[name]


def make_cases(
    num_senders: int, num_receivers: int, sizes: Sequence[int], *, both_ways: bool, unbalanced: bool
) -> list[RoundTraffic]:
    """One case per size. `unbalanced`: one size is spread over the receivers, several are one for each receiver."""
    for option, number in (("--senders", num_senders), ("--receivers", num_receivers)):
        if not 1 <= number <= MAX_PROCESSES_A_SIDE:
            raise UserError(f"{option} is {number}: use 1 to {MAX_PROCESSES_A_SIDE}")
    for size in sizes:
        if not 1 <= size <= MAX_MESSAGE_BYTES:
            raise UserError(f"--bytes has {size}: a message has 1 to {MAX_MESSAGE_BYTES} bytes")
    if not sizes:
        raise UserError("--bytes is empty: write for example 4KiB,256KiB")
    if not unbalanced:
        spread = [(size,) * num_receivers for size in sizes]
    elif len(sizes) == 1:
        spread = [ramp(sizes[0], num_receivers)]
    elif len(sizes) == num_receivers:
        spread = [tuple(sizes)]
    else:
        raise UserError(
            f"--unbalanced with {len(sizes)} sizes for {num_receivers} receivers: give one size for each, or one in all"
        )
    return [RoundTraffic(num_senders=num_senders, receiver_bytes=sizes, both_ways=both_ways) for sizes in spread]


def ramp(mean_bytes: int, num_receivers: int) -> tuple[int, ...]:
    """Sizes that grow evenly from receiver to receiver and add up to those of the balanced case."""
    return tuple(max(1, round(2 * mean_bytes * (j + 1) / (num_receivers + 1))) for j in range(num_receivers))


def by_processes(cases: Sequence[RoundTraffic]) -> list[list[RoundTraffic]]:
    """Cases that the same processes can run, in order of first appearance."""
    groups: dict[tuple[int, int, bool], list[RoundTraffic]] = {}
    for case in cases:
        groups.setdefault((case.num_senders, case.num_receivers, case.both_ways), []).append(case)
    return list(groups.values())


def largest(cases: Sequence[RoundTraffic]) -> RoundTraffic:
    """One case whose every message is as large as the largest of `cases`, which must be of the same processes."""
    sizes = tuple(max(column) for column in zip(*(case.receiver_bytes for case in cases), strict=True))
    return replace(cases[0], receiver_bytes=sizes)


def check_memory(cases: Sequence[RoundTraffic], num_contestants: int, free_bytes: int | None = None) -> None:
    """`ResourceError` if the contestants of a case, all of them there at once, would not fit into free memory."""
    free_bytes = allowance().memory.left_bytes if free_bytes is None else free_bytes
    for group in by_processes(cases):
        case = largest(group)
        needed = num_contestants * (_COPIES_HELD * case.round_bytes + case.num_processes * _PROCESS_BYTES)
        if needed > free_bytes:
            raise ResourceError(
                f"{case}: {num_contestants} contestants need about {format_bytes(needed)}, {format_bytes(free_bytes)} "
                "of memory are free: use fewer --senders, --receivers, --bytes or contestants"
            )


# --- contestants
#
# | name | what it is |
# |---|---|
# | shm, tcp, libfabric | ours; "in place": the payload lies in the slot before the clock starts, nothing is copied |
# | gloo | `torch.distributed` isend and irecv, a four-byte message back as acknowledgement |
# | gloo-all-to-all | one `all_to_all_single` for the data and one for the acknowledgements |
# | mpi | persistent sends and receives between ranks of one `mpiexec`, the same acknowledgement |
# | ucx | tagged messages of UCX, the same acknowledgement |
# | memcpy | as many processes as cores copy the same bytes through shared memory, with a barrier: the bound |


TRANSPORTS = ("shm", "tcp", "libfabric")
BASELINES = ("gloo", "gloo-all-to-all", "memcpy", "mpi", "ucx")
WAITING = ("auto", "poll", "spin", "block")
MPIEXEC = "mpiexec"


@dataclass(frozen=True, kw_only=True)
class M2nContestant:
    """`kind` is the implementation (see `rounds.MEMBERS`), `options` are its own; reports show `transport`."""

    name: str
    transport: str
    kind: str
    options: Mapping[str, str] = field(default_factory=dict)
    in_place: bool = False

    def seats(self, traffic: RoundTraffic, timeout_s: float) -> list[MemberSeat]:
        """Its processes for rounds of `traffic`, by rank."""
        places: list[tuple[Role, int, bool]] = []
        if self.kind == "memcpy":
            num_copiers = min(allowance().num_cores, traffic.num_processes)
            places += [("copier", index, True) for index in range(num_copiers)]
        else:
            places += [("sender", index, True) for index in range(traffic.num_senders)]
            places += [("receiver", index, traffic.both_ways) for index in range(traffic.num_receivers)]
        return [
            MemberSeat(
                role=role,
                index=index,
                rank=rank,
                num_seats=len(places),
                timed=timed,
                traffic=traffic,
                timeout_s=timeout_s,
            )
            for rank, (role, index, timed) in enumerate(places)
        ]


def choose_contestants(
    transports: Sequence[str], baselines: Sequence[str], *, in_place: bool, waiting: str
) -> list[M2nContestant]:
    """Contestants by name, ours first; `in_place` adds a second form of each of ours. `UserError` for unknown names."""
    if waiting not in WAITING:
        raise UserError(f"--waiting {waiting} does not exist: use one of {', '.join(WAITING)}")
    chosen = []
    for name in transports:
        if name not in TRANSPORTS:
            why = " connects threads of one process only" if name == "loopback" else " does not exist"
            raise UserError(f"--transport {name}{why}: use some of {', '.join(TRANSPORTS)}")
        chosen += [_ours(name, False, waiting), *([_ours(name, True, waiting)] if in_place else [])]
    for name in baselines:
        if name not in BASELINES:
            raise UserError(f"--against {name} is not known: use some of {', '.join(BASELINES)}")
        if name == "mpi":
            find_mpiexec()  # or say what is missing before anything starts
        if name == "ucx" and importlib.util.find_spec("ucxx") is None:
            raise UserError("--against ucx: there is no ucxx here: pip install 'antiphon[ucx]'")
        chosen.append(M2nContestant(name=name, transport=name, kind=name))
    if not chosen:
        raise UserError("nothing to measure: give --transport or --against")
    if len({contestant.name for contestant in chosen}) < len(chosen):
        raise UserError("--transport and --against may name each only once")
    return chosen


def _ours(transport: str, in_place: bool, waiting: str) -> M2nContestant:
    return M2nContestant(
        name=f"{transport} in place" if in_place else transport,
        transport=transport,
        kind="antiphon",
        options={"transport": transport, "waiting": waiting, "in_place": "yes" if in_place else "no"},
        in_place=in_place,
    )


# --- processes that are the ranks of one `mpiexec`


def find_mpiexec() -> str:
    """The `mpiexec` of this Python's environment, or of the system. `UserError`: there is none, or no mpi4py."""
    beside = Path(sys.executable).parent / MPIEXEC
    found = str(beside) if beside.exists() else shutil.which(MPIEXEC)
    if found is None or importlib.util.find_spec("mpi4py") is None:
        lacking = MPIEXEC if found is None else "mpi4py"
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

    ends_with = MPIEXEC

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
