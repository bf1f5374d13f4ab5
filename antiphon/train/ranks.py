"""This process among the ranks of its run, as `torchrun` started them: they begin together, and end together.

1. All ranks say that they are there before any process group is made, so that those that are missing can be named. A
   first rank that cannot listen says at once what does, and others soon say for what they wait. One that refuses to
   begin tells the others why, where no launcher ends them.
2. A run ends at the end of a step: at SIGTERM, at Ctrl-C, when its terminal is closed (SIGHUP, unless `nohup` has it
   ignored), or when its time is up. All ranks agree behind each step, so that they save the same one. A second signal
   ends the process at once. Launchers pass on what the terminal sent to the ranks as well, so with several ranks the
   same signal within a second is one.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from antiphon.base.errors import ResourceError, UserError, with_fix
from antiphon.base.logging import get_logger
from antiphon.base.system import raise_limit
from antiphon.comm.collectives import AllGather, AllReduce, gather_bytes, run
from antiphon.comm.mesh import Group, Mesh, Sizes, connect
from antiphon.comm.replicas import has_levels
from antiphon.comm.roll_call import SOON_S, RollCall
from antiphon.specs.model import ModelSpec
from antiphon.train.config import TrainConfig
from antiphon.train.config_tables import CommunicationConfig
from antiphon.train.device import HOST, backends_of
from antiphon.train.pipeline import PipelineSchedule

_SAME_S = 1.0
_MOST_RANKS, _MOST_PORT = 1_000_000, 65_535
_LAUNCHERS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
MAX_HOURS = "--max-hours"
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
_REASONS = (*_SIGNALS, MAX_HOURS)
_log = get_logger("train")


def world_size() -> int:
    return _variable("WORLD_SIZE", 1, default="1")


def rank() -> int:
    """The number of this process."""
    return _variable("RANK", 0, world_size() - 1) if world_size() > 1 else 0


def local_rank() -> int:
    """The number of this process among those of this machine."""
    return _variable("LOCAL_RANK", 0, default="0")


def local_ranks() -> int:
    """Ranks on this machine."""
    return _variable("LOCAL_WORLD_SIZE", 1, default="1")


def _variable(name: str, least: int, most: int = _MOST_RANKS, default: str = "") -> int:
    """A number that whatever starts ranks sets for each; `UserError` where it is none, or is missing."""
    value = os.environ.get(name, default)
    if not (value.isascii() and value.isdigit() and least <= int(value) <= most):
        given = f"is {value!r}" if value else "is not set"
        raise UserError(
            f"{name} {given}: it must be a number from {least} to {most}: start ranks with --nproc or torchrun, or set "
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each; without WORLD_SIZE a run is one process"
        )
    return int(value)


def sizes_of(config: TrainConfig, spec: ModelSpec, ranks: int) -> Sizes:
    """How `ranks` ranks share the work; `UserError` where that does not fit the model or the batch."""
    parallel = config.parallel
    sizes = Sizes(
        world_size=ranks,
        pipeline=parallel.pipeline,
        sequence=parallel.sequence,
        tensor=parallel.tensor,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
    )
    if parallel.dispatch == "two_level" and not expert_levels(sizes, config.communication):
        raise UserError(
            f"parallel.dispatch is 'two_level' and the {sizes.expert} ranks that share experts are not equally many, "
            f"more than one, on each of several nodes of {config.communication.node_ranks} ranks: set "
            "communication.node_size or parallel.expert, or use dispatch all_to_all"
        )
    size = config.batch // config.micro_batches
    if size % sizes.data:
        raise UserError(
            f"{size} sequences of a pass cannot be shared by {sizes.data} data-parallel ranks: make micro_batch (or "
            "batch) a multiple of them"
        )
    schedule = PipelineSchedule(pipeline=parallel.pipeline, virtual_stages=parallel.virtual_stages)
    schedule.check(config.micro_batches)
    for name, shared, what, count in (
        ("pipeline * virtual_stages", schedule.num_stages, "layers", spec.num_layers),
        ("sequence * tensor", sizes.sequence * sizes.tensor, "positions of sequence_length", config.sequence_length),
        ("sequence * tensor", sizes.sequence * sizes.tensor, "attention heads", spec.attention.num_heads),
        ("expert", sizes.expert, "experts", spec.router.num_experts),
        ("expert_tensor", sizes.expert_tensor, "columns of an expert", spec.feed_forward.intermediate),
    ):
        if shared > count:
            raise UserError(f"parallel: {name} is {shared}, more than the {count} {what}: use at most {count}")
    return sizes


def expert_levels(sizes: Sizes, communication: CommunicationConfig) -> bool:
    """Whether the ranks that share experts span nodes, each with equally many of them."""
    return sizes.expert > 1 and has_levels(sizes.groups(("expert",)), communication.node_ranks)


def join(sizes: Sizes, communication: CommunicationConfig = CommunicationConfig(), device: torch.device = HOST) -> Mesh:
    """The mesh of this process, whose tensors lie on `device`. Waits for the other ranks; `ResourceError` names those
    that do not come in time."""
    if sizes.world_size == 1:
        return connect(sizes, 0)
    raise_limit()  # each group of ranks has a connection to each of them
    own, timeout_s, roll = rank(), communication.timeout_s, None
    if not dist.is_initialized():
        host, port = os.environ.get("MASTER_ADDR", ""), _variable("MASTER_PORT", 1, _MOST_PORT)
        if not host:
            raise UserError(f"MASTER_ADDR is not set: rank {own} of {sizes.world_size} needs the address of rank 0")
        is_launchers = os.environ.get(_LAUNCHERS_STORE) == str(True)
        if own == 0 and not is_launchers:
            _refuse_taken(port)
        with _naming_store(own, host, port):
            store = _store(own, sizes.world_size, host, port, timeout_s)
            roll = RollCall(store, own, sizes.world_size, timeout_s)
            roll.await_all("" if is_launchers else f"{host}:{port}")
        timeout, backends = timedelta(seconds=timeout_s), backends_of(device)
        with roll.waiting("connections of other ranks"):
            dist.init_process_group(backends, store=store, rank=own, world_size=sizes.world_size, timeout=timeout)
    return connect(sizes, own, timeout_s, communication.launcher(), roll, first=communication.orders_exchanges)


@contextmanager
def refusal_shared() -> Iterator[None]:
    """Within it, before `join`, what this rank refuses is said to the others, which wait for it."""
    try:
        yield
    except UserError as error:
        host, ranks = os.environ.get("MASTER_ADDR", ""), world_size()
        if ranks > 1 and host and os.environ.get(_LAUNCHERS_STORE) != str(True):
            own, port = rank(), _variable("MASTER_PORT", 1, _MOST_PORT)
            _log.error("rank %d does not begin: it says so to the other ranks, for %.0f s at most", own, SOON_S)
            with suppress(RuntimeError, UserError):  # they are not there, or end for the same reason
                if own == 0:
                    _refuse_taken(port)
                RollCall(_store(own, ranks, host, port, SOON_S), own, ranks, SOON_S).refuse(str(error))
        raise


def _refuse_taken(port: int) -> None:
    """`UserError` if another process listens at the `port` of the first rank."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError as error:
            holder = _listener(port)
            if holder != os.getpid():  # a former run of this process may still listen
                by = f" by process {holder}" if holder else ""
                raise UserError(
                    f"MASTER_PORT {port}: rank 0 cannot listen there ({error.strerror}{by}): give this run another port"
                ) from error


def _listener(port: int) -> int | None:
    """The process that listens at a port of this machine, if that can be seen."""
    with suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and getattr(each.laddr, "port", None) == port:
                return each.pid
    return None


def _store(rank: int, ranks: int, host: str, port: int, timeout_s: float) -> Store:
    """Where the ranks meet. Waits for the first one, and soon says so. PyTorch waits in a thread: it cannot be
    interrupted, and without end where something listens that never answers."""
    found: list[Store | RuntimeError] = []

    def meet() -> None:
        try:
            found.append(next(rendezvous("env://", rank, ranks, timeout=timedelta(seconds=timeout_s)))[0])
        except RuntimeError as error:
            found.append(error)

    thread, soon_s = threading.Thread(target=meet, name="rendezvous", daemon=True), min(SOON_S, timeout_s / 2)
    try:
        thread.start()
    except RuntimeError as error:
        raise ResourceError(f"rank {rank} cannot wait for the store of rank 0: {with_fix(str(error))}") from error
    thread.join(soon_s)
    if thread.is_alive():
        _say_waiting(rank, host, port, timeout_s - soon_s)
        thread.join(timeout_s)
    store = found[0] if found else RuntimeError(f"no answer within {timeout_s:.0f} s")
    if isinstance(store, RuntimeError):
        raise store
    return PrefixStore(f"antiphon/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _say_waiting(rank: int, host: str, port: int, timeout_s: float) -> None:
    _log.warning("rank %d waits for rank 0 at %s:%d, where %s: %.0f s", rank, host, port, _found(host, port), timeout_s)


def _found(host: str, port: int) -> str:
    """What a rank finds at the address of the first one."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return "something listens that does not answer as rank 0 would"
    except ConnectionRefusedError:
        return "nothing listens"
    except OSError as error:
        return f"nothing can be reached ({error.strerror or error})"


@contextmanager
def _naming_store(rank: int, host: str, port: int) -> Iterator[None]:
    """Within it an error of the store is a `ResourceError` with its address."""
    try:
        yield
    except RuntimeError as error:
        why = f" ({str(error).splitlines()[0]})" if rank == 0 else ""
        raise ResourceError(
            f"rank {rank} cannot use the store of rank 0 at {host}:{port}{why}, where {_found(host, port)}: see what "
            "rank 0 says, and MASTER_ADDR and MASTER_PORT"
        ) from error


def leave() -> None:
    """End what `join` began. A process that ends without it may abort: threads of its process groups still run."""
    if dist.is_initialized():
        dist.destroy_process_group()


def sums(ranks: Group, purpose: str, *own: float, dtype: torch.dtype = torch.float32) -> list[float]:
    """The sums over all `ranks` of a few numbers, which travel as `dtype`. All call it together."""
    found: list[float] = run(AllReduce(ranks, purpose), torch.tensor(own, dtype=dtype, device=HOST)).tolist()
    return found


def largest(ranks: Group, purpose: str, own: Tensor) -> Tensor:
    """The largest that any of `ranks` has in each place of `own`, such as the slowest rank's times. All call it
    together."""
    found = run(AllGather(ranks, purpose, (own.shape[0],) * ranks.size), own.double())
    return found.view(ranks.size, *own.shape).amax(0)


def gathered(ranks: Group, purpose: str, own: Any) -> list[Any]:
    """What each of `ranks` has, by rank: anything that JSON can say. All call it together."""
    return [json.loads(each) for each in gather_bytes(ranks, purpose, json.dumps(own).encode())]


def outlives_terminal() -> bool:
    """The run was started by `nohup`, or in another way that has the end of its terminal ignored."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


class StopRequest:
    """Listens between `__enter__` and `__exit__`. `max_hours`: from now on; None: no limit."""

    def __init__(self, ranks: Group, max_hours: float | None = None) -> None:
        self._ranks = ranks
        self._deadline_s = None if max_hours is None else time.monotonic() + 3600 * max_hours
        self._received: dict[str, float] = {}
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            for number in (getattr(signal, name) for name in _SIGNALS):
                if number != signal.SIGHUP or not outlives_terminal():
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        name, now_s = signal.Signals(number).name, time.monotonic()
        if self._ranks.size > 1 and now_s - self._received.get(name, -_SAME_S) < _SAME_S:
            return
        if self._received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._received[name] = now_s
        if self._ranks.index == 0:
            _log.warning("%s: the run saves and ends behind this step; once more ends it at once", name)

    def reason(self) -> str:
        """Why to end now; empty: go on. All ranks call it together and get the same."""
        is_late = self._deadline_s is not None and time.monotonic() > self._deadline_s
        own = [name in self._received or (name == MAX_HOURS and is_late) for name in _REASONS]
        flags = sums(self._ranks, "barrier", *own)
        return next((name for name, is_set in zip(_REASONS, flags, strict=True) if is_set), "")
