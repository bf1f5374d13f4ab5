"""The connection to a Ray cluster: its nodes, and actors on a node of our choice. The only file that imports Ray.

Ray is optional (`pip install 'antiphon[ray]'`). What it raises becomes one line with the address and the fix.

The actor of a worker starts it, passes on what it says, and tells how it ended. The worker is a process of its own,
tethered to the actor (`worker/joined`): when Ray kills the actor, or its node ends, the worker ends too. Rejected: the
worker inside the actor's process, where Ray's threads and signal handlers are, and where an exit code or a crash of
native code would be Ray's to explain. Importing this file loads neither Ray nor PyTorch.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import msgspec

from antiphon.base.errors import ResourceError, UserError
from antiphon.base.logging import get_logger
from antiphon.base.system import python_module
from antiphon.base.units import split_address

Side = str  # "attention" or "experts"; "replica", which counts as attention
_log = get_logger("ray")
_REACH_S = 5.0
_MAX_LAST_LINES = 5


@dataclass(frozen=True, kw_only=True)
class WorkerNeeds:
    """What one rank takes of its node, and how many ranks a worker of each side has."""

    num_cpus: int
    num_gpus: int = 0
    attention_ranks: int = 1
    expert_ranks: int = 1

    def ranks(self, side: Side) -> int:
        return self.expert_ranks if side == "experts" else self.attention_ranks

    def __post_init__(self) -> None:
        if self.num_cpus < 1 or self.num_gpus < 0:
            raise UserError(f"a worker needs {self.num_cpus} CPUs and {self.num_gpus} GPUs: at least 1 and 0")


@dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """A live node and what it has in all."""

    node: str
    num_cpus: float
    num_gpus: float = 0.0

    def num_workers(self, needs: WorkerNeeds, side: Side, num_ranks_there: int = 0) -> int:
        """How many workers of this side fit on the node beside that number of ranks."""
        ranks = int(self.num_cpus // needs.num_cpus)
        if needs.num_gpus:
            ranks = min(ranks, int(self.num_gpus // needs.num_gpus))
        return (ranks - num_ranks_there) // needs.ranks(side)


def _load_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that we start ourselves sends no reports
    try:
        import ray
        import ray.exceptions
        import ray.util
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise UserError(f"--ray needs the package ray ({error}): pip install 'antiphon[ray]'") from error
    return ray


# How a worker ended: its exit code, negative for a signal, and the last lines it wrote to standard error.
WorkerEnd = tuple[int, list[str]]


class WorkerActor:
    """The actor of one worker; it runs on a Ray node."""

    def hello(self) -> tuple[str, int]:
        """(host name, process id), once Ray has started the actor."""
        return socket.gethostname(), os.getpid()

    def run(self, job: bytes) -> bytes:
        """Run the worker to its end. `job` is a `TetheredJob` as JSON; the answer a `WorkerEnd` as JSON."""
        last_lines: deque[str] = deque(maxlen=_MAX_LAST_LINES)
        command = python_module("antiphon.serve.worker.joined")
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as worker:
            assert worker.stdin is not None, "standard input is a pipe"
            assert worker.stderr is not None, "standard error is a pipe"
            try:
                worker.stdin.write(job + b"\n")
                worker.stdin.flush()  # stays open: its end would be the worker's end
            except BrokenPipeError:
                pass  # it died at once; its last lines say of what
            for line in worker.stderr:
                sys.stderr.write(text := line.decode(errors="replace"))
                sys.stderr.flush()
                last_lines.append(text.rstrip())
            code = worker.wait()
        return msgspec.json.encode((code, list(last_lines)))


@dataclass(frozen=True, kw_only=True)
class RunningActor:
    """An actor; a reference that is answered when Ray has started it, and one when its worker has ended."""

    actor: Any
    started: Any
    ended: Any


class RayCluster:
    """`connect` first, `disconnect` at the end. Methods may be called from any thread."""

    def __init__(self, address: str) -> None:
        """`address`: auto (the cluster this machine is in), local (a new one of this machine alone) or HOST:PORT."""
        if "://" in address:
            raise UserError(
                f"--ray-address is {address}: the server must itself run on a node of the cluster; "
                "use auto, local or HOST:PORT"
            )
        self.address = address
        self._ray: Any = None
        self._actor_class: Any = None
        self._on_sigterm = signal.getsignal(signal.SIGTERM)

    def connect(self) -> str:
        """Connect; returns this machine's address in the cluster. `ResourceError` if there is no cluster."""
        ray = _load_ray()
        _set_sigterm(_exit_in_order)
        if self.address not in {"auto", "local"}:
            self._reach(*split_address(self.address))
        local: dict[str, object] = {"include_dashboard": False} if self.address == "local" else {}
        try:
            ray.init(address=self.address, log_to_driver=False, logging_level="error", namespace="antiphon", **local)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise self._unreachable(_first_line(error)) from error
        self._ray = ray
        self._actor_class = ray.remote(WorkerActor)
        _set_sigterm(_exit_in_order)
        return str(ray.util.get_node_ip_address())

    def _reach(self, host: str, port: int) -> None:
        """Ray itself tries for a minute and then ends the process."""
        try:
            socket.create_connection((host, port), timeout=_REACH_S).close()
        except OSError as error:
            raise self._unreachable(f"{error.strerror or error}, tried for {_REACH_S:.0f} s") from error

    def _unreachable(self, reason: str) -> ResourceError:
        return ResourceError(
            f"--ray-address {self.address}: no Ray cluster there ({reason}); start one with 'ray start --head' "
            "(other nodes: 'ray start --address HOST:PORT'), or use --ray-address local"
        )

    def disconnect(self) -> None:
        """Leave the cluster; actors of ours that still run end. Safe to call again."""
        if self._ray is not None:
            self._ray.shutdown()
            self._ray = None
            _set_sigterm(self._on_sigterm)

    def nodes(self) -> list[ClusterNode]:
        """The live nodes and what each has in all, used or not."""
        return [
            ClusterNode(
                node=str(node["NodeID"]),
                num_cpus=float(node["Resources"].get("CPU", 0.0)),
                num_gpus=float(node["Resources"].get("GPU", 0.0)),
            )
            for node in self._live_nodes()
        ]

    def addresses(self) -> dict[str, str]:
        """The address of each live node."""
        return {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in self._live_nodes()}

    def _live_nodes(self) -> list[dict[str, Any]]:
        with self._in_words():
            return [node for node in self._ray.nodes() if node["Alive"]]

    def num_free_cpus(self) -> float:
        """CPUs that are not reserved, over all nodes."""
        with self._in_words():
            return float(self._ray.available_resources().get("CPU", 0.0))

    def start_worker(self, node: str, needs: WorkerNeeds, job: bytes) -> RunningActor:
        """A worker in an actor on this node; the actor starts when the node has the CPUs for it."""
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        actor = self._actor_class.options(
            num_cpus=needs.num_cpus, num_gpus=needs.num_gpus, scheduling_strategy=strategy, max_restarts=0
        ).remote()
        return RunningActor(actor=actor, started=actor.hello.remote(), ended=actor.run.remote(job))

    def kill(self, actor: RunningActor) -> None:
        """End an actor and, with it, its worker."""
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):  # gone already
            self._ray.kill(actor.actor)

    def finished(self, references: list[Any], timeout_s: float) -> list[Any]:
        """Those of `references` that have an answer, or an error, within `timeout_s`; returns at the first."""
        return list(self._ray.wait(references, num_returns=1, timeout=timeout_s)[0]) if references else []

    def answer(self, reference: Any) -> Any:
        """The answer; `ResourceError` in Ray's words if the actor or its node is gone or could not start."""
        with self._in_words():
            return self._ray.get(reference)

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        """What Ray raises as a `ResourceError` of one line."""
        try:
            yield
        except (self._ray.exceptions.RayError, ConnectionError, TimeoutError) as error:
            raise ResourceError(_first_line(error)) from error


def _set_sigterm(handler: Any) -> None:
    """In place of Ray's, which it sets when imported and when connected, and which prints a native stack."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _exit_in_order(number: int, frame: FrameType | None) -> None:
    """While the server starts: end what was begun. Once it listens it has a handler of its own."""
    sys.exit(128 + number)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
