"""Runs a function on several gloo ranks, each a process of its own."""

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120


def on_ranks(world_size: int, folder: Path, work: Callable[[int], Any]) -> list[Any]:
    """`work(rank)` of each rank; `work` is a function of a module. An error on a rank fails the test with its text."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_rank, args=(world_size, rank, str(folder / "store"), work, results), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=TIMEOUT_S) for _ in processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    for rank, (result, failure) in sorted(found.items()):
        assert not failure, f"rank {rank}:\n{failure}\n{result}"
    return [found[rank][0] for rank in range(world_size)]


def _rank(world_size: int, rank: int, store: str, work: Callable[[int], Any], results: Any) -> None:
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        results.put((rank, (work(rank), "")))
        dist.barrier()
    except Exception:
        results.put((rank, (None, traceback.format_exc())))
