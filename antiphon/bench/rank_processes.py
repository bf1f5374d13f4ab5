"""The ranks of a benchmark, each a process that obeys orders over a pipe.

A rank's member is made in its process; its `introduction` goes to all others through `connect`, and from then on an
order is the name of one of its methods. Between orders a rank is blocked in a read. At the end of its orders it ends.

Ranks are forked from a process that has imported what they run: to import torch takes a rank seconds. Rejected: forking
this process, which may have threads.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.distributed as dist

from antiphon.base.errors import PeerLost, PeerTimeout, ResourceError

_START_S = 300.0  # some processes on few cores import torch
_RUN_S = 600.0
_NUM_WARM = 2


class RankMember(Protocol):
    """One rank's part, called from one thread of its process."""

    @property
    def introduction(self) -> Any:
        """What the other ranks need to reach this one."""

    def connect(self, introductions: list[Any]) -> None:
        """Reach the others; theirs by rank."""


class RankProcesses:
    """For use in a `with`, which ends the processes. `make_member(rank)` is called in each; it can be pickled."""

    def __init__(self, num_ranks: int, make_member: Callable[[int], RankMember]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(rank, make_member, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        try:
            self.ask("connect", self._collect(_START_S))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, order: str, *arguments: Any) -> list[Any]:
        """Every rank's answer to one order. `ResourceError`, `PeerLost` or `PeerTimeout` names the rank that fails."""
        for rank, connection in enumerate(self._connections):
            try:
                connection.send((order, arguments))
            except OSError as error:
                raise PeerLost(f"rank[{rank}]", str(error)) from error
        return self._collect(_RUN_S)

    def slowest_median_s(self, order: str, *arguments: Any) -> float:
        """The median of calls, each as long as its slowest rank; the order is answered with seconds of each call."""
        return float(np.median(np.asarray(self.ask(order, *arguments)).max(axis=0)))

    def close(self) -> None:
        """End all processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()

    def _collect(self, timeout_s: float) -> list[Any]:
        """Answers from those who have one first, so that the rank that fails is named and not one that waits for it."""
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        answers: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), timeout_s)
            if not ready:
                raise PeerTimeout("an order", [f"rank[{rank}]" for rank in waiting.values()], timeout_s)
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    failure, answers[rank] = connection.recv()
                except EOFError as error:
                    raise PeerLost(
                        f"rank[{rank}]", "its process ended: perhaps there is not enough memory for these sizes"
                    ) from error
                if failure:
                    raise ResourceError(f"rank[{rank}]: {failure}")
        return [answers[rank] for rank in range(len(self._connections))]


def join_gloo(store: str, rank: int, num_ranks: int, timeout_s: float) -> None:
    """Make this process one of a gloo group over loopback, whose ranks meet in the file `store`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may lead anywhere
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timeout)


def seconds_of_calls(call: Callable[[], object], num_calls: int, barrier: Callable[[], object]) -> list[float]:
    """Seconds of each call after a barrier, without the first two."""
    times = []
    for _ in range(num_calls + _NUM_WARM):
        barrier()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times[_NUM_WARM:]


def _rank_main(rank: int, make_member: Callable[[int], RankMember], connection: Connection) -> None:
    torch.set_num_threads(1)
    try:
        member = make_member(rank)
        connection.send((None, member.introduction))
        while True:
            order, arguments = connection.recv()
            connection.send((None, getattr(member, order)(*arguments)))
    except EOFError:
        pass
    except BaseException as error:
        traceback.print_exc()
        connection.send((f"{type(error).__name__}: {error}", None))
