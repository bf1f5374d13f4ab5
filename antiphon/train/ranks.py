"""This process among the ranks of its run, as `torchrun` started them: they begin together, and end together.

1. All ranks say that they are there before any process group is made, so that those that are missing can be named.
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
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from antiphon.base.errors import ResourceError, UserError
from antiphon.base.logging import get_logger
from antiphon.comm.collectives import AllGather, AllReduce, gather_bytes, run
from antiphon.comm.mesh import Group, Mesh, RollCall, Sizes, connect
from antiphon.comm.replicas import has_levels
from antiphon.specs.model import ModelSpec
from antiphon.train.config import TrainConfig
from antiphon.train.config_tables import CommunicationConfig
from antiphon.train.device import HOST, backends_of
from antiphon.train.pipeline import PipelineSchedule

_SAME_S = 1.0
MAX_HOURS = "--max-hours"
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
_REASONS = (*_SIGNALS, MAX_HOURS)
_log = get_logger("train")


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this process."""
    return int(os.environ["RANK"]) if world_size() > 1 else 0


def local_rank() -> int:
    """The number of this process among those of this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_ranks() -> int:
    """Ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


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
    rank, timeout_s, roll = int(os.environ["RANK"]), communication.timeout_s, None
    if not dist.is_initialized():
        store, _, _ = next(rendezvous("env://", rank, sizes.world_size, timeout=timedelta(seconds=timeout_s)))
        store = PrefixStore(f"antiphon/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        _await_all(store, rank, sizes.world_size, timeout_s)
        roll = RollCall(store, rank, sizes.world_size, timeout_s)
        timeout, backends = timedelta(seconds=timeout_s), backends_of(device)
        dist.init_process_group(backends, store=store, rank=rank, world_size=sizes.world_size, timeout=timeout)
    return connect(sizes, rank, timeout_s, communication.launcher(), roll, first=communication.orders_exchanges)


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


def _await_all(store: Store, rank: int, ranks: int, timeout_s: float) -> None:
    store.set(f"here/{rank}", socket.gethostname())
    deadline, missing = time.monotonic() + timeout_s, set(range(ranks))
    while missing:
        missing = {each for each in missing if not store.check([f"here/{each}"])}
        if missing and time.monotonic() > deadline:
            names = ", ".join(str(each) for each in sorted(missing))
            raise ResourceError(f"ranks {names} of {ranks} did not start within {timeout_s:.0f} s: see their machines")
        if missing:
            time.sleep(0.05)  # the store has no wait that names who is missing


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
