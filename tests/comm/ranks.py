"""Runs a function on several gloo ranks, each a process of its own.

Ranks are forked from one process of `multiprocessing`, the fork server, that has imported the trainer: to import it
takes a rank longer than most of what tests do there. A rank imports the module of its function besides, so functions
of ranks belong in modules that do not import transformers.
"""

import multiprocessing
import queue
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store as _default_store

Key = TypeVar("Key")
Made = TypeVar("Made")
TIMEOUT_S = 280
PRELOADED = ["tests.comm.preloaded"]


def start_fork_server() -> ForkServerContext:
    """One for all that starts ranks from this process; benchmarks, which would preload less, too."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ensure_running()
    return context


def on_ranks(world_size: int, folder: Path, work: Callable[[int], Any]) -> list[Any]:
    """`work(rank)` of each rank; `work` is a function of a module. An error on a rank fails the test with its text."""
    context = start_fork_server()
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


def begin_anew() -> None:
    """End all process groups, then connect the ranks of `on_ranks` again. Every rank calls it, with nothing under way.
    A function that makes many meshes calls it between them: groups that live on take processor time from all others."""
    store, world_size, rank = _default_store(), dist.get_world_size(), dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    _begin(PrefixStore("anew", store), world_size, rank)


def made_once(keys: Sequence[Key], make: Callable[[Key], Made]) -> dict[Key, Made]:
    """`make` of each key, on one rank, sent to all. Every rank calls it with the same keys."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found: list[dict[Key, Made]] = [{} for _ in range(world_size)]
    dist.all_gather_object(found, {key: make(key) for key in keys[rank::world_size]})
    return {key: made for of_rank in found for key, made in of_rank.items()}


def _begin(store: Any, world_size: int, rank: int) -> None:
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


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
        _begin(dist.FileStore(store, world_size), world_size, rank)
        results.put((rank, (work(rank), "")))
        dist.barrier()
    except Exception:
        results.put((rank, (None, traceback.format_exc())))
