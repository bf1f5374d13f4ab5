"""A part of a core for a process; refused where the kernel does not let us."""

import subprocess
import sys
import time

import psutil
import pytest

from antiphon.base.errors import ResourceError
from antiphon.bench.harness import processes as quotas
from antiphon.bench.harness.processes import limited, quota_unavailable


@pytest.mark.skipif(quota_unavailable() is not None, reason=f"no quota: {quota_unavailable()}")
def test_a_process_gets_its_part_and_then_all_again() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            for cores in (0.3, 0.1):
                with limited(process.pid, cores):
                    assert cpu_s_in(process.pid, 1.0) <= 1.5 * cores + 0.05
            group = quotas._group_parent()
            assert group is not None
            assert not (group / f"antiphon-{process.pid}").exists()
        finally:
            process.kill()


def cpu_s_in(pid: int, wall_s: float) -> float:
    before = psutil.Process(pid).cpu_times().user
    begin = time.monotonic()
    time.sleep(wall_s)
    return (psutil.Process(pid).cpu_times().user - before) * wall_s / (time.monotonic() - begin)


def test_what_the_machine_does_not_have_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "_group_parent", lambda: None)
    with pytest.raises(ResourceError, match="no part of a core can be set aside: /sys/fs/cgroup has no cpu controller"):
        limited(1, 0.5).__enter__()
