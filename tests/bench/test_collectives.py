"""`antiphon bench collectives`: a small run, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

from antiphon.base.errors import ResourceError, UserError
from antiphon.bench.collectives import CollectiveCase, check_result, expected_result
from antiphon.cli.bench import app
from tests.comm.ranks import start_fork_server
from tests.serve.fork_server import HEARS_INTERRUPTS
from tests.waiting import wait_until


def test_a_small_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    start_fork_server()
    only = "all-reduce,reduce-scatter"
    options = ["--ranks", "2", "--repetitions", "1", "--bytes", "1000", "--only", only, "--quiet-timeout", "0"]
    CliRunner().invoke(app, ["collectives", *options, "--json", str(file)], catch_exceptions=False)
    rows = json.loads(file.read_text())["rows"]
    assert [row["collective"] for row in rows] == ["all-reduce", "reduce-scatter"]
    assert all(row["bytes"] == 1024 and row["speedup_over_gloo"] > 0 for row in rows)


def test_what_ranks_must_have() -> None:
    case = {"num_ranks": 2, "num_bytes": 128}
    given = [(torch.arange(32) + rank) % 17 for rank in range(2)]
    expected = {
        "all-reduce": given[0] + given[1],
        "reduce-scatter": (given[0] + given[1])[16:],
        "all-gather": torch.cat([given[0][:16], given[1][:16]]),
        "all-to-all": torch.cat([given[0][16:], given[1][16:]]),
    }
    for collective, result in expected.items():
        assert torch.equal(expected_result(CollectiveCase(collective=collective, **case), 1), result.float())


def test_wrong_results_are_not_timed() -> None:
    case = CollectiveCase(collective="all-gather", num_ranks=2, num_bytes=1)
    with pytest.raises(ResourceError, match="gloo: all-gather of 128 bytes gives a wrong result"):
        check_result("gloo", case, torch.ones(32), expected_result(case, 0))


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(UserError, match="--ranks has 1: a group to measure has 2 to 64 ranks"):
        CliRunner().invoke(app, ["collectives", "--ranks", "1"], catch_exceptions=False)
    with pytest.raises(UserError, match="--only sum does not exist"):
        CliRunner().invoke(app, ["collectives", "--only", "sum"], catch_exceptions=False)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_while_ranks_start_leaves_nothing(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """The root of all benchmarks hears it, whatever they have begun. Ctrl-C goes to all processes of a terminal, also
    while the one that ranks are forked from imports."""
    options = ["--ranks", "2", "--repetitions", "1000", "--bytes", "64MiB", "--only", "all-reduce"]
    options += ["--quiet-timeout", "0"]
    command = [sys.executable, "-m", "antiphon.cli.main", "bench", "collectives", *options]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a fork would have looked for its folder before
    command = [sys.executable, "-c", HEARS_INTERRUPTS, *command]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, start_new_session=True) as bench:
        wait_until(lambda: _imports(bench.pid), "a process that ranks are forked from")
        if number == signal.SIGINT:
            os.killpg(bench.pid, number)
        else:
            bench.send_signal(number)
        assert bench.stderr is not None
        assert b"Traceback" not in bench.stderr.read(), "all processes hold it, so all have ended"
        assert bench.wait(60) == code
    assert not list(tmp_path.iterdir())


def _imports(pid: int) -> bool:
    """Whether a fork server of that process has begun to import torch."""
    with suppress(psutil.Error, OSError):
        for each in psutil.Process(pid).children():
            if "forkserver" in " ".join(each.cmdline()):
                return "libtorch" in Path(f"/proc/{each.pid}/maps").read_text()
    return False
