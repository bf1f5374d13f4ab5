"""How much a sum of gradients slows an all-to-all on the same slow wire: launched as it comes, or by priority
(Lina, sections 2 and 4; docs/training.md, "The order on the wire").

    python benchmarks/rows_beside_sums.py --nodes 2 --mbit 200

Each rank of a cluster in a box (docs/box.md) sends rows, waits for those of the others and computes for a while, again
and again, while a large sum is under way in another group. Variants take turns.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from antiphon.base.errors import UserError
from antiphon.bench.box import Box
from antiphon.bench.box.ranks import plan_ranks
from antiphon.comm.collectives import AllReduce, AllToAll, barrier, run, start
from antiphon.comm.launcher import CollectiveLauncher
from antiphon.comm.mesh import Group, Mesh, Sizes, beside, connect
from antiphon.comm.micro_ops import MicroOpScheduler

TIMEOUT_S = 120.0
WIDTH = 1024
ALONE, UNSCHEDULED = "alone", "beside a sum, unscheduled"
PRIORITY, PARTITION = "priority, whole sums", "priority, sums in chunks"
HELD_BACK = "+ none begins when rows are about to go"
VARIANTS = (ALONE, UNSCHEDULED, PRIORITY, PARTITION, HELD_BACK)


def time_variant(asked: dict[str, Any], variant: str, mesh: Mesh, sums: Group) -> tuple[list[float], float]:
    """Seconds of each all-to-all, and of everything."""
    group = mesh.group("expert")
    rows, grads = torch.ones(asked["row_kib"] // 4 * group.size, WIDTH), torch.ones(asked["sum_kib"] << 8)
    even = (len(rows) // group.size,) * group.size
    exchange = AllToAll(group, "rows", even, even)
    wire = None
    if variant not in (ALONE, UNSCHEDULED):
        wire = CollectiveLauncher(MicroOpScheduler(None if variant == PRIORITY else asked["chunk_kib"] << 10))
    barrier(mesh.world)
    began_s = time.perf_counter()
    work = None
    if wire is not None:

        def sum_piece(number: int, num_pieces: int) -> None:
            run(AllReduce(sums, "gradients"), grads.chunk(num_pieces)[number])

        work = wire.all_reduce("gradients", grads.nbytes, sum_piece)
    elif variant == UNSCHEDULED:
        work = start(AllReduce(sums, "gradients"), grads)
    seconds = []
    for number in range(asked["exchanges"]):
        sent_s = time.perf_counter()
        if wire is None:
            run(exchange, rows)
        else:
            submission = wire.all_to_all("rows", rows.nbytes, lambda: exchange.launch(rows))
            submission.wait()
        seconds.append(time.perf_counter() - sent_s)
        time.sleep(asked["compute_ms"] / 2e3)
        if wire is not None and variant == HELD_BACK and number < asked["exchanges"] - 1:
            wire.combine_begins()  # as backward does when it begins to split a layer's results
        time.sleep(asked["compute_ms"] / 2e3)
    if work is not None:
        work.wait()
    total_s = time.perf_counter() - began_s
    if wire is not None:
        wire.close()
    return seconds, total_s


def rank_of(asked: dict[str, Any]) -> None:
    """What each rank runs; the first one prints the slowest rank's seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    mesh = connect(Sizes(world_size=size, expert=size), dist.get_rank(), TIMEOUT_S)
    sums = beside(mesh.group("expert"), TIMEOUT_S)
    found: dict[str, dict[str, list[float]]] = {name: {"exchange_s": [], "total_s": []} for name in VARIANTS}
    for number in range(asked["rounds"] + 1):
        for variant in VARIANTS:
            seconds, total_s = time_variant(asked, variant, mesh, sums)
            slowest = torch.tensor([*seconds, total_s])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if number:  # the first round warms up
                found[variant]["exchange_s"] += slowest[:-1].tolist()
                found[variant]["total_s"] += slowest[-1:].tolist()
    if mesh.rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description="An all-to-all beside a sum of gradients, on a slow wire.")
    parser.add_argument("--nodes", type=int, default=2, help="each has one rank")
    parser.add_argument("--mbit", type=float, default=200.0, help="of each node's link")
    parser.add_argument("--row-kib", type=int, default=1024, help="to each other rank in one all-to-all")
    parser.add_argument("--sum-kib", type=int, default=16384, help="of gradients")
    parser.add_argument("--chunk-kib", type=int, default=512, help="of a part of the sum")
    parser.add_argument("--exchanges", type=int, default=8)
    parser.add_argument("--compute-ms", type=float, default=40.0, help="between two all-to-alls")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        rank_of(vars(arguments))
        return 0
    with Box(num_nodes=arguments.nodes, mbit=arguments.mbit) as box:
        command = [sys.executable, *sys.argv]
        plans = plan_ranks(num_nodes=arguments.nodes, num_local_ranks=1, command=command)
        ranks = [box.start(plan.node, plan.args, env=plan.env, stdout=subprocess.PIPE) for plan in plans]
        assert ranks[0].stdout is not None
        text = ranks[0].stdout.read()
        if any(each.wait(TIMEOUT_S) for each in ranks):
            raise UserError("a rank failed: see what it said above")
    found = json.loads(text)
    alone_s = median(found[ALONE]["exchange_s"])
    print("| variant | all-to-all ms | to alone | all ms |\n|---|---|---|---|")
    for variant, row in found.items():
        seconds = median(row["exchange_s"])
        print(f"| {variant} | {seconds * 1e3:.0f} | {seconds / alone_s:.2f} | {median(row['total_s']) * 1e3:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
