"""Serving over slow wires between nodes: hybrid TP-EP beside expert parallelism alone and tensor parallelism over all
nodes, in time to first token and between tokens.

    python benchmarks/hybrid_box.py MODEL --nodes 2 --mbit 200

Each node of a cluster in a box (docs/box.md) has two ranks; the engine and the first node's ranks are on node 0, all
others join (docs/workers.md, docs/ranks.md). Layouts take turns, each with processes of its own. Greedy texts are
compared in float32.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from antiphon.base.errors import UserError
from antiphon.bench.antiphon_engine import timed_answers
from antiphon.bench.box import Box
from antiphon.serve.config import ServeConfig
from antiphon.serve.launch import start_engine

PORT = 7700
SECRET = "only for a benchmark, on a private network"
RANKS = 2  # of a node
# By name: replicas and ranks of each on one node, ranks that share an expert.
SHARED = {
    "hybrid": (1, 2, 2),
    "expert parallel, attention TP 2": (1, 2, 1),
    "expert parallel, attention DP": (2, 1, 1),
}
TENSOR_PARALLEL = "tensor parallel over all nodes"
LAYOUTS = (*SHARED, TENSOR_PARALLEL)


def sizes_of(layout: str, nodes: int) -> dict[str, Any]:
    """The fields of `ServeConfig` that make it this layout."""
    if layout == TENSOR_PARALLEL:
        one = {"num_attention": 1, "joined_attention": 1, "ranks_here": RANKS}
        return {"layout": "colocated", "attention_tp": nodes * RANKS, **one}
    replicas, tp, expert_tp = SHARED[layout]
    workers = {"num_attention": nodes * replicas, "joined_attention": (nodes - 1) * replicas}
    return {"layout": "hybrid", "attention_tp": tp, "expert_tp": expert_tp, **workers}


def serve(asked: dict[str, Any]) -> dict[str, Any]:
    """What node 0 runs: one layout, two passes, the second of which counts."""
    config = ServeConfig(
        model=Path(asked["model"]),
        num_micro_batches=asked["micro_batches"],
        dtype="float32",
        max_model_len=asked["prompt"] + asked["output"],
        num_threads=1,
        timeout_s=120.0,
        join_address=asked["join"],
        join_secret=SECRET.encode(),
        **sizes_of(asked["layout"], asked["nodes"]),
    )
    engine = start_engine(config)
    try:
        for number in range(2):
            chance = np.random.default_rng(number)  # the second pass finds nothing in the prefix cache
            prompts = chance.integers(3, engine.info.vocab_size, (asked["requests"], asked["prompt"])).tolist()
            answers = timed_answers(engine, prompts, asked["output"], asked["layout"])
        return {
            "ttft_s": median(answers.ttft_s),
            "itl_s": median(answers.itl_s),
            "token_ids": answers.token_ids,
        }
    finally:
        engine.stop()


def run(arguments: argparse.Namespace, layout: str) -> dict[str, Any]:
    """One layout on a box of its own."""
    environment = {"ANTIPHON_JOIN_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
    with Box(num_nodes=arguments.nodes, mbit=arguments.mbit) as box:
        join = f"{box.address(0)}:{PORT}"
        worker = [sys.executable, "-m", "antiphon.cli.main", "worker", "--role", "replica", "--threads", "1"]
        for node in range(1, arguments.nodes):
            for _ in range(RANKS):
                box.start(node, [*worker, "--join", join], env=environment, stdout=subprocess.DEVNULL)
        asked = {name: getattr(arguments, name) for name in ("nodes", "prompt", "output", "requests", "micro_batches")}
        asked |= {"model": str(arguments.model.resolve()), "layout": layout, "join": join}
        found = box.run(0, [sys.executable, __file__, "--engine", json.dumps(asked)], timeout_s=900, env=environment)
    if found.returncode:
        raise UserError(f"{layout}: {found.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="Hybrid TP-EP beside expert parallelism over slow wires.")
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=24)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.engine:
        print(json.dumps(serve(json.loads(arguments.engine))))
        return 0
    found: dict[str, list[dict[str, Any]]] = {layout: [] for layout in LAYOUTS}
    for number in range(arguments.rounds):
        for layout, rows in found.items():
            rows.append(run(arguments, layout))
            print(
                f"round {number + 1}, {layout}: {rows[-1]['ttft_s']:.3f} s, {rows[-1]['itl_s'] * 1e3:.1f} ms",
                flush=True,
            )
    if len({str(row["token_ids"]) for rows in found.values() for row in rows}) > 1:
        raise UserError("the layouts give different texts: no time is worth anything")
    first = {name: median(row[name] for row in found["hybrid"]) for name in ("ttft_s", "itl_s")}
    print("| layout | to first token s | to hybrid | between tokens ms | to hybrid |\n|---|---|---|---|---|")
    for layout, rows in found.items():
        ttft_s, itl_s = (median(row[name] for row in rows) for name in ("ttft_s", "itl_s"))
        ratios = ttft_s / first["ttft_s"], itl_s / first["itl_s"]
        print(f"| {layout} | {ttft_s:.3f} | {ratios[0]:.2f} | {itl_s * 1e3:.1f} | {ratios[1]:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
