"""A process with a fixed part of a core to itself, as if it had a slow machine of its own: Linux's control groups.

Several workers on few cores otherwise share what there is, and then no worker waits for the slowest. Needs root.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from antiphon.base.errors import ResourceError

_PERIOD_US = 5000  # short, so that a step spans many
_LEAST_US = 1000  # of a period and of a quota, for the kernel
_ROOT = Path("/sys/fs/cgroup")


def quota_unavailable() -> str | None:
    """Why no quota can be set here, in one line, or None."""
    if _parent() is None:
        return f"{_ROOT} has no cpu controller"
    return None if os.access(str(_parent()), os.W_OK) else f"{_parent()} cannot be written: it needs root"


def _parent() -> Path | None:
    if (_ROOT / "cpu/cpu.cfs_quota_us").exists() or (_ROOT / "cpu/cgroup.procs").exists():
        return _ROOT / "cpu"
    controllers = _ROOT / "cgroup.subtree_control"
    return _ROOT if controllers.exists() and "cpu" in controllers.read_text().split() else None


@contextmanager
def limited(pid: int, cores: float) -> Iterator[None]:
    """While inside, the process gets this many cores at most. `ResourceError` where that cannot be."""
    if reason := quota_unavailable():
        raise ResourceError(f"no part of a core can be set aside: {reason}")
    parent = _parent()
    assert parent is not None, "it is available"
    group = parent / f"antiphon-{pid}"
    group.mkdir(exist_ok=True)
    try:
        period_us = max(_PERIOD_US, math.ceil(_LEAST_US / cores))
        quota_us = round(cores * period_us)
        if parent == _ROOT:
            (group / "cpu.max").write_text(f"{quota_us} {period_us}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(OSError):  # it has ended
            (parent / "cgroup.procs").write_text(str(pid))
        with contextlib.suppress(OSError):
            group.rmdir()
