"""Processes beside a benchmark: `antiphon serve`, here or on a node of a box, and a part of a core for one of them.

A server says that it is ready, and where, in the file of its `--json`. What it prints goes to a log, whose end is part
of the error if it does not start. This file imports no torch, so that a client's process may import it.
"""

import contextlib
import ctypes
import json
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from antiphon.base.errors import ResourceError, UserError
from antiphon.base.system import python_module
from antiphon.bench.box import Box, NodeProcess, box_unavailable
from antiphon.bench.box.namespaces import CLONE_NEWNET, enter
from antiphon.bench.box.topology import MAX_MBIT, MIN_MBIT
from antiphon.bench.harness.child import ending_with_us

ANTIPHON = python_module("antiphon.cli.main")
SECRET = "only for a benchmark, on a private network"
START_S, _END_S = 300.0, 60.0
PATIENCE_S = 120  # of a server and of workers that join it
_Result = TypeVar("_Result")
Process = subprocess.Popen[bytes] | NodeProcess
"""A process here or on a node of a box."""


def start_here(arguments: Sequence[str], log: Path) -> Process:
    """A server on this machine, which ends when this process does, even by SIGKILL; what it prints goes to `log`."""
    with log.open("wb") as output:
        command = ending_with_us(arguments)
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)


@contextmanager
def serving_here(model: Path, folder: Path, *options: str) -> Iterator[dict[str, Any]]:
    """`antiphon serve` on this machine: what it says of itself once it is ready. Its log is in `folder`."""
    ready, log = folder / "ready.json", folder / "server.log"
    server = start_here([*ANTIPHON, "serve", str(model), "--port", "0", "--json", str(ready), *options], log)
    try:
        yield ready_facts(ready, server, log)
    finally:
        end_process(server)


def ready_facts(ready: Path, server: Process, log: Path) -> dict[str, Any]:
    """What the server writes to `ready` when it is. `UserError` with the end of the log if it does not start."""
    deadline = time.monotonic() + START_S
    while not (ready.exists() and ready.stat().st_size > 0):
        if server.poll() is not None or time.monotonic() > deadline:
            what = "ended" if server.poll() is not None else f"was not done within {START_S:.0f} s"
            raise UserError(f"the server {what}: {end_of(log)}")
        time.sleep(0.1)  # nothing but the file tells that the server is ready
    facts: dict[str, Any] = json.loads(ready.read_text(encoding="utf-8"))
    return facts


def end_of(log: Path, num_characters: int = 1000) -> str:
    """What stands last in a log, for an error."""
    return log.read_text(encoding="utf-8", errors="replace")[-num_characters:]


def end_process(process: Process) -> None:
    """SIGTERM, and SIGKILL for what does not end."""
    process.terminate()
    try:
        process.wait(_END_S)
    except (TimeoutError, subprocess.TimeoutExpired):
        process.kill()
        process.wait()


# --- on the nodes of a cluster in a box


def require_box(option: str) -> None:
    """`ResourceError` where there can be no box, which `option` asks for."""
    if reason := box_unavailable():
        raise ResourceError(f"{option} makes a cluster in a box (docs/box.md): {reason}")


def check_mbit(option: str, mbit: float) -> None:
    """`UserError` for a rate that a box's links cannot have."""
    if not MIN_MBIT <= mbit <= MAX_MBIT:
        raise UserError(f"{option} is {mbit:g}: it must be {MIN_MBIT:g} to {MAX_MBIT:.0f}")


def box_of_ranks(num_nodes: int, ranks_per_node: int, mbit: float, inner_mbit: float | None) -> Box:
    """Nodes, behind links of `mbit`. With `inner_mbit` each rank is one, with such a link to those beside it."""
    if not inner_mbit:
        return Box(num_nodes=num_nodes, mbit=mbit)
    num_ranks = num_nodes * ranks_per_node
    return Box(num_nodes=num_ranks, mbit=mbit, near_mbit=inner_mbit, num_near=ranks_per_node)


def start_on(box: Box, node: int, command: Sequence[str], log: Path) -> NodeProcess:
    """A server or a worker on a node; what it prints goes to `log`."""
    with log.open("wb") as output:
        environment = {"ANTIPHON_JOIN_SECRET": SECRET}
        return box.start(node, command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def worker_command(role: str, join: str, threads: int = 1) -> list[str]:
    """A worker that joins a server, which may begin to listen later."""
    options = ["--role", role, "--join", join, "--threads", str(threads), "--patience", str(PATIENCE_S)]
    return [*ANTIPHON, "worker", *options]


def start_workers(
    box: Box, node: int, roles: Sequence[str], join: str, log: Path, stack: ExitStack, threads: int = 1
) -> None:
    """A worker of each role on a node, to its end with `stack`; their logs are numbered."""
    for number, role in enumerate(roles):
        worker = start_on(box, node, worker_command(role, join, threads), log.with_suffix(f".{node}.{number}.log"))
        stack.callback(end_process, worker)


def enter_network(file: str) -> None:
    """Move this thread, or a process that has no other, into the network of a node: `Box.network`."""
    descriptor = os.open(file, os.O_RDONLY)
    enter(descriptor, CLONE_NEWNET)
    os.close(descriptor)


def run_beside(box: Box | None, work: Callable[[], _Result]) -> _Result:
    """`work`, which talks to the servers: here, or in a thread that lives in the network of node 0. What interrupts us
    is raised in that thread too, which would send all its requests first; the caller then ends the servers."""
    if box is None:
        return work()
    found: Future[_Result] = Future()

    def run() -> None:
        try:
            enter_network(box.network(0))
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    thread = threading.Thread(target=run)
    try:
        thread.start()
        return found.result()
    except (KeyboardInterrupt, SystemExit):
        if thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        raise


# --- a fixed part of a core, as if a process had a slow machine of its own: Linux's control groups
#
# Several workers on few cores otherwise share what there is, and then no worker waits for the slowest. Needs root.


_PERIOD_US = 5000  # short, so that a step spans many
_LEAST_US = 1000  # of a period and of a quota, for the kernel
_GROUPS = Path("/sys/fs/cgroup")


def quota_unavailable() -> str | None:
    """Why no quota can be set here, in one line, or None."""
    if _group_parent() is None:
        return f"{_GROUPS} has no cpu controller"
    return None if os.access(str(_group_parent()), os.W_OK) else f"{_group_parent()} cannot be written: it needs root"


def _group_parent() -> Path | None:
    if (_GROUPS / "cpu/cpu.cfs_quota_us").exists() or (_GROUPS / "cpu/cgroup.procs").exists():
        return _GROUPS / "cpu"
    controllers = _GROUPS / "cgroup.subtree_control"
    return _GROUPS if controllers.exists() and "cpu" in controllers.read_text().split() else None


@contextmanager
def limited(pid: int, cores: float) -> Iterator[None]:
    """While inside, the process gets this many cores at most. `ResourceError` where that cannot be."""
    if reason := quota_unavailable():
        raise ResourceError(f"no part of a core can be set aside: {reason}")
    parent = _group_parent()
    assert parent is not None, "it is available"
    group = parent / f"antiphon-{pid}"
    group.mkdir(exist_ok=True)
    try:
        period_us = max(_PERIOD_US, math.ceil(_LEAST_US / cores))
        quota_us = round(cores * period_us)
        if parent == _GROUPS:
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
