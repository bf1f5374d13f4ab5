"""Runs a function on several gloo ranks, each a process of its own."""

import multiprocessing
import queue
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 240  # a busy machine is slow


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
        found = _collect(results, world_size)
    finally:
        for process in processes:
            process.kill()
            process.join()
    failures = [f"rank {rank}:\n{failure}" for rank, (_, failure) in sorted(found.items()) if failure]
    assert not failures, "\n".join(failures)
    return [found[rank][0] for rank in range(world_size)]


def _collect(results: Any, world_size: int) -> dict[int, tuple[Any, str]]:
    """(result, failure) of each rank; once one has failed the others, which may wait for it, have a second left."""
    found: dict[int, tuple[Any, str]] = {}
    while len(found) < world_size:
        failed = any(failure for _, failure in found.values())
        try:
            rank, result = results.get(timeout=1 if failed else TIMEOUT_S)
        except queue.Empty:
            assert found, f"no rank ended within {TIMEOUT_S} s"
            break
        found[rank] = result
    return found


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
