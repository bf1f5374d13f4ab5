"""Work beside servers, the end of a process, and a part of a core for one, refused where the kernel cannot give it."""

import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil
import pytest

from antiphon.base.errors import ResourceError, UserError
from antiphon.bench.box import Box, box_unavailable
from antiphon.bench.harness import processes as quotas
from antiphon.bench.harness.processes import check_mbit, end_process, limited, quota_unavailable, run_beside


@pytest.mark.skipif(box_unavailable() is not None, reason=str(box_unavailable()))
def test_work_in_the_network_of_a_node_leaves_no_process() -> None:
    with Box(num_nodes=2, mbit=400) as box:
        for _ in range(2):
            with socket.create_server(("127.0.0.1", 0)) as ours, pytest.raises(ConnectionRefusedError):
                run_beside(box, lambda ours=ours: socket.create_connection(ours.getsockname(), 10.0))  # type: ignore[misc]
        pid = box._keeper.pid
        assert pid is not None
        assert len(psutil.Process(pid).children()) == 2, "the first process of each node, no more"


def test_an_interrupt_does_not_wait_for_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "enter_network", lambda file: None)
    go_on, begun, ended, main = (*(threading.Event() for _ in range(3)), threading.main_thread())
    assert threading.current_thread() is main
    assert main.ident is not None

    def work() -> None:
        begun.set()
        signal.pthread_kill(main.ident, signal.SIGINT)  # type: ignore[arg-type]
        with suppress(SystemExit):
            while not go_on.wait(0.05):
                pass
        ended.set()

    class AnyBox:
        def network(self, node: int) -> str:
            return f"network of {node}"

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_beside(AnyBox(), work)  # type: ignore[arg-type]
        assert begun.is_set()
        assert ended.wait(60.0), "the work is interrupted, too"
    finally:
        go_on.set()
        signal.signal(signal.SIGINT, before)


def test_a_process_that_ignores_the_first_signal_ends_by_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "_END_S", 0.1)
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        end_process(process)
        assert process.returncode == -signal.SIGKILL


def test_a_rate_that_no_link_has_is_refused() -> None:
    check_mbit("--mbit", 0.1)
    with pytest.raises(UserError, match=r"--mbit is 50000: it must be 0\.1 to 40000$"):
        check_mbit("--mbit", 5e4)


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
