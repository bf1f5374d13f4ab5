"""What HTTP takes, measured with a real server of a tiny model; servers end with the program that started them."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from antiphon.bench.harness import processes
from antiphon.bench.profile.host import host_times
from antiphon.bench.profile.measure import QUICK
from antiphon.cost.profile import flat
from antiphon.models.config import load_model_spec
from tests.planner.local_times_harness import local_times, thread_times
from tests.serve.fork_server import PROGRAMS
from tests.waiting import wait_until

STARTER = """
import os, signal, subprocess, sys
from antiphon.bench.harness.child import ending_with_us
command = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(ending_with_us(command)).pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_with_the_program_that_started_it(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        server = int(starter.stdout.readline())
        assert _is_alive(server)
        os.kill(starter.pid, number)
        starter.wait()
    wait_until(lambda: not _is_alive(server), "the server has ended")


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_parts_of_requests_and_tokens(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times depend on the machine: only what holds on any is looked at."""
    monkeypatch.setattr(processes, "subprocess", PROGRAMS)
    monkeypatch.setattr(processes, "ending_with_us", list)
    spec = load_model_spec(checkpoint)
    worker = replace(
        thread_times(1),
        experts_s={spec.router.num_experts: flat(1e-6)},
        **dict.fromkeys(("attention_s", "per_context_s", "head_s"), flat(1e-9)),
    )
    times = local_times(num_cores=2, dtype=spec.dtype, threads=(worker,))
    times = replace(times, engine=replace(times.engine, bookkeeping_s=flat(0.0)))
    effort = replace(QUICK, host_requests=8, host_streams=(1, 4))
    seen: list[tuple[float, float | None]] = []
    host = host_times(checkpoint, times, spec, effort, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert host.token_s.sizes == host.client_token_s.sizes == (1.0, 4.0)
    # processor seconds, so a loaded machine does not change them much
    assert 0.0 < host.request_s < 0.1
    assert 0.0 < host.client_request_s < 0.1
    assert 0.0 <= host.token_s.value(1) < 0.05
    assert 0.0 <= host.client_token_s.value(4) < 0.05
    assert host.step_ratio.sizes == (1.0, 4.0)  # steps of so many rows are in the server's timeline
    assert all(ratio > 1.0 for ratio in host.step_ratio.seconds), "a step takes longer than the tables' microseconds"
