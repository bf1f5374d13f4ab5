"""What this process may use, in cores and bytes: a container, a batch system or a user may allow less than there is.

1. Cores: those of the process's affinity (or its control group's `cpuset`), and of their time what a quota allows.
2. Bytes: main memory, or the tightest limit of a control group or of `ulimit -v` and `-d`; and what is left of all.
3. Control groups nest, and a limit at any level counts: from the group in `/proc/self/cgroup` up to the top of what is
   mounted, in both versions of control groups and where both are mounted.
4. A quota is looked up once in the life of a process: one that changes counts after a restart. Free memory is read each
   time.

What cannot be read limits nothing. Rejected: `os.process_cpu_count` and `psutil`, which know neither quotas nor groups;
and to look at `/sys/fs/cgroup` alone, where a group's limit stands only inside a container with a namespace of its own.
"""

import functools
import math
import os
import re
import resource
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import psutil

from antiphon.base.errors import UserError

_ROOT = Path("/")
_UNIFIED = ""  # how version 2 is listed in `/proc/self/cgroup`: without a controller's name
_CONTROLLERS = (_UNIFIED, "cpu", "cpuset", "memory")
_USUAL_PLACES = {_UNIFIED: "", "cpu": "cpu", "cpuset": "cpuset", "memory": "memory"}  # below /sys/fs/cgroup


@dataclass(frozen=True)
class MemoryAllowance:
    """`name` limits a process, and others with it, to `most_bytes`; `left_bytes` can be taken now without swapping."""

    name: str
    most_bytes: int
    left_bytes: int


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """`cpus`: the cores that this process may run on. `quota`: how much of their time it may take, in cores; None where
    that is all of it. `cores_from`: what sets the limit, for people."""

    cpus: tuple[int, ...]
    quota: float | None
    cores_from: str
    _root: Path
    _memory_groups: tuple[Path, ...]

    @property
    def num_cores(self) -> int:
        """Threads that can compute all the time. A quota of 1.5 cores counts as one, and 0.5 too: a thread that has no
        time left makes all others wait for the rest of the period, 100 ms as a rule."""
        return len(self.cpus) if self.quota is None else max(1, math.floor(self.quota))

    @property
    def cores(self) -> list[int]:
        """As many cores as `num_cores`, to pin threads to."""
        return list(self.cpus[: self.num_cores])

    def may_spin(self, num_threads: int) -> bool:
        """Whether waiting threads may look again and again. Without a quota that costs idle time; with one it costs
        time of those that compute, unless it has a core for each of `num_threads`."""
        return self.quota is None or num_threads <= self.quota

    @functools.cached_property
    def memory(self) -> MemoryAllowance:
        """The tightest limit, with what is left of them all. Read when it is first asked for."""
        limits = [_machine(self._root), *_of_groups(self._memory_groups), *_resource_limits(self._root)]
        tightest = min(limits, key=lambda limit: limit.most_bytes)
        return replace(tightest, left_bytes=max(0, min(limit.left_bytes for limit in limits)))


def allowance(root: Path = _ROOT) -> Allowance:
    """What this process may use, from `/proc` and `/sys` below `root`; raises nothing."""
    quota, quota_of, cpuset, memory_groups = _groups_once(root) if root == _ROOT else _groups(root)
    cpus, cores_from = _cpus(cpuset)
    quota = quota if quota is not None and quota < len(cpus) else None
    if quota is not None:
        cores_from = f"a quota of {quota:.4g} cores in {quota_of}"
    return Allowance(cpus=cpus, quota=quota, cores_from=cores_from, _root=root, _memory_groups=memory_groups)


def share_of_threads(num_processes: int = 1) -> int:
    """Threads of each of `num_processes` processes that compute side by side here: `OMP_NUM_THREADS`, or an even share
    of the cores. `UserError` where the variable is no number of threads."""
    asked = os.environ.get("OMP_NUM_THREADS", "").strip()
    if not asked:
        return max(1, allowance().num_cores // max(1, num_processes))
    first = asked.partition(",")[0].strip()  # the others are of nested regions
    if not re.fullmatch(r"[0-9]{1,4}", first) or int(first) == 0:
        raise UserError(f"OMP_NUM_THREADS is {asked!r}: it must be a number of threads, 1 to 9999; or unset it")
    return int(first)


def _groups(root: Path) -> tuple[float | None, str, frozenset[int], tuple[Path, ...]]:
    """(quota, the group that sets it, cores of its `cpuset`, folders of the groups that may limit memory, its own
    first) of this process."""
    levels = {controller: list(_levels(root, controller)) for controller in _CONTROLLERS}
    quotas = [(_quota(folder), folder) for name in (_UNIFIED, "cpu") for folder in levels[name]]
    found = [(quota, f"control group {folder}") for quota, folder in quotas if quota is not None]
    quota, quota_of = min(found, default=(None, ""))
    sets = [_cpuset(folder) for name in (_UNIFIED, "cpuset") for folder in levels[name]]
    cpuset = frozenset.intersection(*filter(None, sets)) if any(sets) else frozenset[int]()
    return quota, quota_of, cpuset, (*levels[_UNIFIED], *_accounted(levels["memory"]))


_groups_once = functools.cache(_groups)


# --- where the groups are ---------------------------------------------------------------------------------------------


def _levels(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those around it, as far up as they are mounted."""
    path = _own_path(root, controller)
    mounts = sorted(_mounts(root, controller), key=lambda mount: len(mount[0].parts))
    for top, folder in mounts:
        if path.is_relative_to(top) and ".." not in (below := path.relative_to(top)).parts:
            own = folder / below
            yield own
            yield from (parent for parent in own.parents if parent.is_relative_to(folder))
            return
    # A group outside of this namespace cannot be named here: the top of what is mounted is the nearest.
    yield from (folder for _, folder in mounts[:1])


def _own_path(root: Path, controller: str) -> PurePosixPath:
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return PurePosixPath(path)
    return PurePosixPath("/")


def _mounts(root: Path, controller: str) -> list[tuple[PurePosixPath, Path]]:
    """(the group that is mounted, where)."""
    found, lines = [], _lines(root / "proc/self/mountinfo")
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, (kind, _, *options) = before.split(" "), [*after.split(" "), "", ""][:3]
        of_both = kind == "cgroup" and controller in options[0].split(",")
        is_it = kind == "cgroup2" if controller == _UNIFIED else of_both
        if is_it and len(fields) > 4:
            top, point = map(_unescaped, fields[3:5])
            found.append((PurePosixPath(top), root / point.lstrip("/")))
    usual = root / "sys/fs/cgroup" / _USUAL_PLACES[controller]
    return found if lines else [(PurePosixPath("/"), usual)]


def _unescaped(field: str) -> str:
    """Blanks in names of folders are written as ``\\040``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), field)


# --- cores ------------------------------------------------------------------------------------------------------------


def _cpus(cpuset: frozenset[int]) -> tuple[tuple[int, ...], str]:
    """The cores that this process may run on, and what says so. Its affinity holds those of its `cpuset` alone."""
    machine = os.cpu_count() or 1
    try:
        cpus, where = os.sched_getaffinity(0), "affinity or cpuset"
    except (AttributeError, OSError):  # not Linux, or refused
        cpus, where = set(cpuset) or set(range(machine)), "cpuset"
    return tuple(sorted(cpus)), where if len(cpus) < machine else "the machine"


def _quota(folder: Path) -> float | None:
    """Cores' worth of time; None where there is no limit."""
    with suppress(ValueError, ZeroDivisionError):
        for line in _lines(folder / "cpu.max"):  # "150000 100000", or "max 100000"
            quota, period = line.split()
            return int(quota) / int(period)
        quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota_us is not None and period_us is not None and quota_us > 0:  # -1: none
            return quota_us / period_us
    return None


def _cpuset(folder: Path) -> frozenset[int]:
    """The cores of ``0-3,8``; empty where it says nothing."""
    for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
        with suppress(ValueError):
            for line in _lines(folder / name)[:1]:
                ranges = [part.partition("-") for part in line.split(",") if part]
                return frozenset(cpu for low, _, high in ranges for cpu in range(int(low), int(high or low) + 1))
    return frozenset()


# --- bytes ------------------------------------------------------------------------------------------------------------


def _machine(root: Path) -> MemoryAllowance:
    facts = _table(root / "proc/meminfo", ":")
    available = facts.get("MemAvailable", facts.get("MemFree", 0) + facts.get("Cached", 0))
    if "MemTotal" in facts:
        return MemoryAllowance("the machine", 1024 * facts["MemTotal"], 1024 * available)
    with suppress(Exception):  # another system; psutil raises what it likes where `/proc` is missing
        memory = psutil.virtual_memory()
        return MemoryAllowance("the machine", int(memory.total), int(memory.available))
    page = os.sysconf("SC_PAGE_SIZE")
    return MemoryAllowance("the machine", page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES"))


def _of_groups(folders: Iterable[Path]) -> Iterator[MemoryAllowance]:
    """Groups' limits. Above `memory.high` the kernel slows a group down until it has given memory back."""
    for folder in folders:
        names = ("memory.max", "memory.high", "memory.limit_in_bytes")
        limits = [limit for name in names if (limit := _number(folder / name)) is not None]
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        facts = _table(folder / "memory.stat", " ")
        cached = facts.get("total_inactive_file", facts.get("inactive_file", 0))  # version 1: its own, and of all below
        if limits:
            yield MemoryAllowance(f"control group {folder}", min(limits), min(limits) - used + cached)


def _accounted(levels: list[Path]) -> list[Path]:
    """Groups of version 1 that this process's memory counts in: not those around one without `use_hierarchy`."""
    for index, folder in enumerate(levels[1:], 1):
        if _number(folder / "memory.use_hierarchy") == 0:
            return levels[:index]
    return levels


def _resource_limits(root: Path) -> Iterator[MemoryAllowance]:
    held = _table(root / "proc/self/status", ":")
    kinds = ("ulimit -v", resource.RLIMIT_AS, "VmSize"), ("ulimit -d", resource.RLIMIT_DATA, "VmData")
    for name, limit, key in kinds:
        with suppress(OSError, ValueError):
            most, _ = resource.getrlimit(limit)
            if most != resource.RLIM_INFINITY:
                yield MemoryAllowance(name, most, most - 1024 * held.get(key, 0))


# --- reading ----------------------------------------------------------------------------------------------------------


def _lines(path: Path) -> list[str]:
    """Without empty ones; none where the file cannot be read."""
    with suppress(OSError, ValueError):
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return []


def _number(path: Path) -> int | None:
    with suppress(ValueError):
        return int(_lines(path)[0]) if _lines(path) else None
    return None


def _table(path: Path, between: str) -> dict[str, int]:
    """Name and first number of each line that has one."""
    found = {}
    for line in _lines(path):
        name, _, value = line.partition(between)
        with suppress(ValueError, IndexError):
            found[name] = int(value.split()[0])
    return found
