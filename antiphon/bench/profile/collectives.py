"""Collectives of `torch.distributed` on gloo over loopback: what a layout with collectives would cost on this machine.

Sizes are of the full tensor a rank holds before the collective (after it, for an all-gather), as in `cost.network`.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from antiphon.bench.profile.orders import TimeCollectives

NAMES = ("all_reduce", "all_gather", "all_to_all")
_TIMEOUT = timedelta(seconds=60)
_NUM_ROUNDS = 5


def time_collectives(order: TimeCollectives) -> dict[str, list[float]]:
    """Median seconds by collective, for each size. Every rank calls it; rank 0 keeps the store, a file."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may lead anywhere
    store = dist.FileStore(order.store, order.world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=order.rank, world_size=order.world_size, timeout=_TIMEOUT)
    try:
        return {name: [_time(name, size, order) for size in order.sizes_bytes] for name in NAMES}
    finally:
        dist.destroy_process_group()


def _time(name: str, size_bytes: int, order: TimeCollectives) -> float:
    action = _action(name, size_bytes, order.world_size)
    action()
    # All ranks must agree on the number of rounds, so rank 0's first measurement decides.
    dist.barrier()
    begin = time.perf_counter()
    action()
    estimate = torch.tensor([time.perf_counter() - begin])
    dist.broadcast(estimate, 0)
    num_rounds = max(_NUM_ROUNDS, min(200, int(order.seconds / max(1e-6, float(estimate)))))
    times_s = []
    for _ in range(num_rounds):
        dist.barrier()
        begin = time.perf_counter()
        action()
        times_s.append(time.perf_counter() - begin)
    return median(times_s)


def _action(name: str, size_bytes: int, world_size: int) -> Callable[[], object]:
    per_rank = max(1, size_bytes // 4 // world_size)
    whole = torch.ones(per_rank * world_size)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX)
    if name == "all_gather":
        own = torch.ones(per_rank)
        parts = list(whole.chunk(world_size))
        return lambda: dist.all_gather(parts, own)
    received = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(received, whole)
