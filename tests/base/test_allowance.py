"""Cores and bytes that a process may use, from made-up trees of `/proc` and `/sys`, and from one real nested group."""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from antiphon import _native
from antiphon.base import allowance as module
from antiphon.base.allowance import allowance, share_of_threads
from antiphon.base.errors import UserError
from antiphon.serve.worker import build
from tests.serve.fork_server import PROGRAMS

GIB = 2**30
V2 = "30 23 0:26 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "\n".join(
    f"3{number} 23 0:2{number} {{top}} /sys/fs/cgroup/{place} rw shared:9 - cgroup cgroup rw,{options}"
    for number, (place, options) in enumerate(
        [("cpu,cpuacct", "cpu,cpuacct"), ("cpuset", "cpuset"), ("memory", "memory"), ("systemd", "xattr,name=systemd")]
    )
)
HYBRID = V1 + "\n42 23 0:30 {top} /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
ALL_V1 = "5:memory:{path}\n4:cpuset:{path}\n3:cpu,cpuacct:{path}\n1:name=systemd:{path}\n"
NO_LIMIT_V1 = 9223372036854771712


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)


def tree(root: Path, group: str, mounts: str, files: dict[str, object], top: str = "/") -> Path:
    """A machine of 64 GiB, 32 of them available; `files` of the control groups by their places."""
    texts = {
        "proc/self/cgroup": group,
        "proc/self/mountinfo": f"23 1 8:1 / / rw - ext4 /dev/sda rw\n{mounts.format(top=top)}",
        "proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {32 * 2**20} kB\n",
        "proc/self/status": f"Name: python\nVmSize: {3 * 2**20} kB\nVmData: {2**20} kB\n",
        **{f"sys/fs/cgroup/{place}": value for place, value in files.items()},
    }
    for place, text in texts.items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return root


CORES = {
    "none": ("0::/\n", V2, {"cgroup.procs": ""}, "/", (8, None)),
    "v2, its own": ("0::/a\n", V2, {"a/cpu.max": "200000 100000"}, "/", (2, 2.0)),
    "v2, no limit": ("0::/a\n", V2, {"a/cpu.max": "max 100000"}, "/", (8, None)),
    "v2, at the top of a namespace": ("0::/\n", V2, {"cpu.max": "300000 100000"}, "/", (3, 3.0)),
    "v2, the one around is tighter": (
        *("0::/a/b/c\n", V2),
        *({"a/b/c/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000", "a/cpu.max": "50000 25000"}, "/", (2, 2.0)),
    ),
    "v2, not whole": ("0::/a\n", V2, {"a/cpu.max": "150000 100000"}, "/", (1, 1.5)),
    "v2, less than one": ("0::/a\n", V2, {"a/cpu.max": "5000 10000"}, "/", (1, 0.5)),
    "v2, more than there is": ("0::/a\n", V2, {"a/cpu.max": "6400000 100000"}, "/", (8, None)),
    "v2, as many as there are": ("0::/a\n", V2, {"a/cpu.max": "800000 100000"}, "/", (8, None)),
    "v2, mounted from outside": ("0::/pod/x\n", V2, {"cpu.max": "200000 100000"}, "/pod/x", (2, 2.0)),
    "v2, below what is mounted": ("0::/pod/x/y\n", V2, {"y/cpu.max": "200000 100000"}, "/pod/x", (2, 2.0)),
    "v2, beside the namespace": ("0::/../other\n", V2, {"cpu.max": "200000 100000"}, "/", (2, 2.0)),
    "v2, above the namespace": ("0::/../..\n", V2, {"cpu.max": "200000 100000"}, "/", (2, 2.0)),
    "v2, a mount of the namespace above": ("0::/../a\n", V2, {"a/cpu.max": "200000 100000"}, "/..", (2, 2.0)),
    "v2, the group is gone": ("0::/a/gone\n", V2, {"a/cpu.max": "200000 100000"}, "/", (2, 2.0)),
    "v2, a blank in its name": ("0::/my group\n", V2, {"cpu.max": "200000 100000"}, "/my\\040group", (2, 2.0)),
    "v2, a colon in its name": ("0::/a:b\n", V2, {"a:b/cpu.max": "200000 100000"}, "/", (2, 2.0)),
    "v2, words": ("0::/a\n", V2, {"a/cpu.max": "soon", "cpu.max": ""}, "/", (8, None)),
    "v2, no period": ("0::/a\n", V2, {"a/cpu.max": "1000 0"}, "/", (8, None)),
    "v1": (
        *(ALL_V1.format(path="/a/b"), V1),
        *({"cpu,cpuacct/a/b/cpu.cfs_quota_us": 300000, "cpu,cpuacct/a/b/cpu.cfs_period_us": 100000}, "/", (3, 3.0)),
    ),
    "v1, no limit": (
        *(ALL_V1.format(path="/a"), V1),
        *({"cpu,cpuacct/a/cpu.cfs_quota_us": -1, "cpu,cpuacct/a/cpu.cfs_period_us": 100000}, "/", (8, None)),
    ),
    "v1, the one around": (
        *(ALL_V1.format(path="/a/b"), V1),
        *({"cpu,cpuacct/a/cpu.cfs_quota_us": 2500, "cpu,cpuacct/a/cpu.cfs_period_us": 1000}, "/", (2, 2.5)),
    ),
    "v1, a container's own mount": (
        *(ALL_V1.format(path="/docker/f00"), V1),
        *({"cpu,cpuacct/cpu.cfs_quota_us": 200, "cpu,cpuacct/cpu.cfs_period_us": 100}, "/docker/f00", (2, 2.0)),
    ),
    "both, v1 has the quota": (
        *(ALL_V1.format(path="/a") + "0::/user\n", HYBRID),
        *({"cpu,cpuacct/a/cpu.cfs_quota_us": 200, "cpu,cpuacct/a/cpu.cfs_period_us": 100}, "/", (2, 2.0)),
    ),
    "both, v2 has the quota": (
        *("5:memory:/\n0::/user\n", HYBRID),
        *({"unified/user/cpu.max": "200000 100000"}, "/", (2, 2.0)),
    ),
    "mounts that cannot be read": ("0::/a\n", "", {"a/cpu.max": "200000 100000"}, "/", (2, 2.0)),
}


@pytest.mark.parametrize("layout", CORES)
def test_cores(tmp_path: Path, layout: str) -> None:
    group, mounts, files, top, expected = CORES[layout]
    root = tree(tmp_path, group, mounts, files, top)
    if not mounts:
        (tmp_path / "proc/self/mountinfo").unlink()
    found = allowance(root)
    assert (found.num_cores, found.quota) == expected
    assert len(found.cores) == found.num_cores
    assert ("quota" in found.cores_from) == (found.quota is not None)


def refuse(_: int) -> set[int]:
    raise PermissionError(1, "Operation not permitted")


def test_the_least_of_quota_and_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path, "0::/a\n", V2, {"a/cpu.max": "300000 100000"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    found = allowance(root)
    assert (found.cpus, found.quota, found.cores_from) == ((3, 5), None, "affinity or cpuset")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 5, 6})
    assert (allowance(root).cpus, allowance(root).cores) == ((3, 4, 5, 6), [3, 4, 5])


@pytest.mark.parametrize(
    ("group", "mounts", "files", "cpus"),
    [
        (ALL_V1.format(path="/a"), V1, {"cpuset/a/cpuset.effective_cpus": "1-2,7"}, (1, 2, 7)),
        ("0::/a\n", V2, {"a/cpuset.cpus.effective": "0,4-5\n", "cpuset.cpus": "0-7"}, (0, 4, 5)),
        ("0::/a\n", V2, {"a/cpuset.cpus.effective": "x-\n"}, tuple(range(8))),
        ("0::/a\n", V2, {}, tuple(range(8))),
    ],
)
def test_a_refused_affinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, mounts: str, files: dict[str, object], cpus: object
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    assert allowance(tree(tmp_path, group, mounts, files)).cpus == cpus


def test_no_files_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    found = allowance(tmp_path)
    assert (found.num_cores, found.quota, found.cores_from) == (8, None, "the machine")
    assert 0 < found.memory.left_bytes <= found.memory.most_bytes


def test_threads_spin_only_where_a_quota_has_a_core_for_each(tmp_path: Path) -> None:
    free = allowance(tree(tmp_path / "free", "0::/\n", V2, {}))
    tight = allowance(tree(tmp_path / "tight", "0::/\n", V2, {"cpu.max": "250000 100000"}))
    assert [free.may_spin(threads) for threads in (1, 8, 16)] == [True] * 3  # those without a core yield theirs
    assert [tight.may_spin(threads) for threads in (1, 2, 3)] == [True, True, False]


BYTES = {
    "none": ("0::/\n", V2, {}, (64, 32, "the machine")),
    "v2": ("0::/a\n", V2, {"a/memory.max": 8 * GIB, "a/memory.current": 3 * GIB}, (8, 5, "/a")),
    "v2, no limit": ("0::/a\n", V2, {"a/memory.max": "max", "a/memory.current": GIB}, (64, 32, "the machine")),
    "v2, high is lower": (
        *("0::/a\n", V2),
        *({"a/memory.max": 8 * GIB, "a/memory.high": 6 * GIB, "a/memory.current": GIB}, (6, 5, "/a")),
    ),
    "v2, the one around": ("0::/a/b\n", V2, {"a/memory.max": 4 * GIB, "a/memory.current": GIB}, (4, 3, "/a")),
    "v2, the tighter has more left": (
        *("0::/a/b\n", V2),
        *({"a/b/memory.max": 4 * GIB, "a/memory.max": 8 * GIB, "a/memory.current": 7 * GIB}, (4, 1, "/a/b")),
    ),
    "v2, files that can go": (
        *("0::/a\n", V2),
        {
            "a/memory.max": 8 * GIB,
            "a/memory.current": 7 * GIB,
            "a/memory.stat": f"anon 5\ninactive_file {2 * GIB}\nslab x\n",
        },
        (8, 3, "/a"),
    ),
    "v2, over its limit": ("0::/a\n", V2, {"a/memory.high": GIB, "a/memory.current": 2 * GIB}, (1, 0, "/a")),
    "v1": (
        *(ALL_V1.format(path="/a/b"), V1),
        {
            "memory/a/b/memory.limit_in_bytes": NO_LIMIT_V1,
            "memory/a/memory.limit_in_bytes": 2 * GIB,
            "memory/a/memory.usage_in_bytes": 2 * GIB,
            "memory/a/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
            "memory/a/memory.use_hierarchy": 1,
        },
        (2, 1, "memory/a"),
    ),
    "v1, the one around does not count it": (
        *(ALL_V1.format(path="/a/b"), V1),
        {
            "memory/a/memory.limit_in_bytes": 2 * GIB,
            "memory/a/memory.use_hierarchy": 0,
            "memory/memory.limit_in_bytes": GIB,
        },
        (64, 32, "the machine"),
    ),
    "both": (
        *("5:memory:/a\n0::/user\n", HYBRID),
        *({"memory/a/memory.limit_in_bytes": 2 * GIB, "memory/a/memory.usage_in_bytes": GIB}, (2, 1, "memory/a")),
    ),
}


@pytest.mark.parametrize("layout", BYTES)
def test_bytes(tmp_path: Path, layout: str) -> None:
    group, mounts, files, (most, left, name) = BYTES[layout]
    found = allowance(tree(tmp_path, group, mounts, files)).memory
    assert (found.most_bytes, found.left_bytes) == (most * GIB, left * GIB)
    assert found.name.endswith(name)


@pytest.mark.parametrize(("limit", "left", "name"), [("RLIMIT_AS", 2, "ulimit -v"), ("RLIMIT_DATA", 4, "ulimit -d")])
def test_limits_of_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, left: int, name: str) -> None:
    unlimited = (resource.RLIM_INFINITY,) * 2
    number = getattr(resource, limit)
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (5 * GIB, 9 * GIB) if asked == number else unlimited)
    found = allowance(tree(tmp_path, "0::/\n", V2, {})).memory
    assert (found.name, found.most_bytes, found.left_bytes) == (name, 5 * GIB, left * GIB)


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "processes", "threads"),
    [(None, 1, 8), (None, 3, 2), (None, 99, 1), ("", 2, 4), ("3", 2, 3), (" 5 ", 1, 5), ("4,2", 1, 4)],
)
def test_threads_are_what_a_user_says_or_an_even_share(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, processes: int, threads: int
) -> None:
    monkeypatch.setattr(module, "_groups_once", lambda _: (None, "", frozenset(), ()))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert share_of_threads(processes) == threads


@pytest.mark.parametrize("asked", ["0", "-1", "two", "1.5", "99999", "٣"])
def test_a_variable_that_is_no_number_of_threads(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    with pytest.raises(UserError, match=f"OMP_NUM_THREADS is '{asked}': it must be a number of threads, 1 to 9999"):
        share_of_threads()


# --- a real group -----------------------------------------------------------------------------------------------------

SEEN = """
from antiphon.base.allowance import allowance
from antiphon.serve.config import ServeConfig
from pathlib import Path
from antiphon import _m2n
allowed = allowance()
config = ServeConfig(model=Path("none"), layout="disaggregated")
print(allowed.quota, allowed.num_cores, config.own("experts").num_threads, config.waiting, config.spins,
      _m2n.Endpoint("x", "loopback", local_processes=2).waiting)
"""


@pytest.fixture
def half_a_core(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A group below one with half a core; skips where none can be made."""
    group = Path("/sys/fs/cgroup/cpu") / f"antiphon-test-{os.getpid()}"
    is_v1 = (group.parent / "cpu.cfs_quota_us").exists() or (group.parent / "cpu.shares").exists()
    group = group if is_v1 else Path("/sys/fs/cgroup") / group.name
    try:
        group.mkdir()
        (group / ("cpu.cfs_quota_us" if is_v1 else "cpu.max")).write_text("50000" if is_v1 else "50000 100000")
        (group / "inner").mkdir()
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group with a quota can be made here: {error}")
    yield group / "inner"
    (group / "inner").rmdir()
    group.rmdir()


def test_a_process_in_a_group_below_one_with_a_quota(half_a_core: Path) -> None:
    enter = f"import os; open('{half_a_core}/cgroup.procs', 'w').write(str(os.getpid()))"
    command = [sys.executable, "-c", f"{enter}\n{SEEN}"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    ended = PROGRAMS.run(command, env=environment, text=True, timeout=120)
    assert ended.stdout.split() == ["0.5", "1", "1", "block", "False", "block"], ended.stderr


def test_a_worker_that_may_not_be_pinned_computes_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse_pinning(pid: int, cores: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse_pinning)
    before = _native.num_threads()
    configure = SimpleNamespace(cores=[0], role="experts", index=1, num_threads=1, spins=True)
    build._claim_cores(cast(Any, configure), cast(Any, SimpleNamespace(name="cpu")))
    _native.set_num_threads(before)
    assert "experts[1] is not pinned to its cores: Operation not permitted" in caplog.text
