"""Ping-pong over a slow wire: MegaScale-Infer's Figure 12 on nodes of a cluster in a box.

    python benchmarks/wire_ping_pong.py MODEL --micro-batch 64 --m 1,2,3,4 --shares 0.25,0.5,1 --json out.json

Attention on one node, expert workers on others (joined with `antiphon worker`), links between them so slow that T_c is
the given share of T_f. First a run over a fast wire gives T_a, T_e and so T_f; the rate for a share follows from the
bytes of one message. Then, for each rate, m * b requests decode with constant micro-batch size b: measured time of a
layer beside max(m T_f, T_a + T_e + 2 T_c), with T_a and T_e of the same run and T_c of the run with m = 1, as
(layer - T_a - T_e) / 2. The wire, not memory, is shared here, so one machine shows what several would.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from antiphon.base.progress import progress
from antiphon.bench.box import Box, box_unavailable
from antiphon.models.config import load_model_spec
from benchmarks.ping_pong import LayerTimes, predicted_layer_s, run

SECRET = "only for this benchmark, on a private network"
PORT = 7700
FAST_MBIT = 20_000.0
TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model under one workload; what is varied is the rate and the number of micro-batches."""

    model: Path
    micro_batch: int
    num_experts: int
    input_tokens: int
    output_tokens: int

    def one_way_bytes(self) -> float:
        """Mean of a dispatch and a combine message on the attention node's link, in bytes."""
        spec = load_model_spec(self.model)
        row_bytes = spec.hidden_size * 2
        return self.micro_batch * self.num_experts * (row_bytes + 4.0 * spec.router.top_k)


def measure(case: Case, mbit: float, micro_batches: int) -> LayerTimes:
    """One engine on node 0, expert workers on the others; the box is made anew: nothing is left of an earlier run."""
    cores = sorted(os.sched_getaffinity(0))
    with Box(num_nodes=1 + case.num_experts, mbit=mbit) as box:
        join = f"{box.address(0)}:{PORT}"
        env = {"ANTIPHON_JOIN_SECRET": SECRET, "PYTHONPATH": str(Path.cwd())}
        for node in range(1, 1 + case.num_experts):
            core = str(cores[node % len(cores)])
            worker = [sys.executable, "-m", "antiphon.cli.main", "worker", "--role", "experts", "--join", join]
            box.start(
                node, ["taskset", "-c", core, *worker], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        inside = asdict(case) | {"model": str(case.model), "join": join, "micro_batches": micro_batches}
        engine = ["taskset", "-c", str(cores[0]), sys.executable, __file__, "--inside", json.dumps(inside)]
        done = box.run(0, engine, timeout_s=TIMEOUT_S, env=env)
    if done.returncode != 0:
        raise SystemExit(f"the engine in the box failed:\n{done.stderr[-3000:]}")
    return LayerTimes(**json.loads(done.stdout.splitlines()[-1]))


def run_inside(inside: dict[str, Any]) -> None:
    """What runs on node 0: the engine; prints its `LayerTimes`."""
    changes = {
        "join_address": inside["join"],
        "join_secret": SECRET.encode(),
        "joined_experts": inside["num_experts"],
    }
    times = run(
        Path(inside["model"]),
        inside["micro_batches"],
        inside["micro_batch"],
        inside["input_tokens"],
        inside["output_tokens"],
        None,
        num_experts=inside["num_experts"],
        changes=changes,
    )
    print(json.dumps(asdict(times)))


def sweep(case: Case, shares: list[float], micro_batches: list[int]) -> list[dict[str, Any]]:
    """Rows for the report."""
    rows = []
    with progress("runs") as report:
        total = 1 + len(shares) * len(micro_batches)
        report(0, total)
        fast = measure(case, FAST_MBIT, 1)
        slower_s = max(fast.attention_s, fast.experts_s)
        for share in shares:
            mbit = case.one_way_bytes() * 8e-6 / (share * slower_s)
            results = []
            for m in micro_batches:
                results.append(measure(case, mbit, m))
                report(1 + len(rows) + len(results), total)
            rows += rows_of(share, mbit, results)
    return rows


def rows_of(share: float, mbit: float, results: list[LayerTimes]) -> list[dict[str, Any]]:
    """Measured beside predicted, for one rate. The first result must be of m = 1."""
    first = results[0]
    exchange_s = max(0.0, (first.layer_s - first.attention_s - first.experts_s) / 2)
    return [
        asdict(times)
        | {
            "share": share,
            "mbit": mbit,
            "exchange_s": exchange_s,
            "predicted_layer_s": predicted_layer_s(times, exchange_s, times.micro_batches),
            "gain": times.tokens_per_s / first.tokens_per_s,
            "predicted_gain": times.micro_batches
            * first.layer_s
            / predicted_layer_s(times, exchange_s, times.micro_batches),
        }
        for times in results
    ]


def show(rows: list[dict[str, Any]]) -> None:
    print("share  Mbit/s  m   T_a µs   T_e µs   T_c µs  layer µs  predicted  tok/s  gain  predicted")
    for row in rows:
        times = (row[key] * 1e6 for key in ("attention_s", "experts_s", "exchange_s", "layer_s", "predicted_layer_s"))
        words = "  ".join(f"{value:7.0f}" for value in times)
        print(
            f"{row['share']:5.2f}  {row['mbit']:6.0f}  {row['micro_batches']}  {words}"
            f"  {row['tokens_per_s']:5.0f}  {row['gain']:.2f}  {row['predicted_gain']:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--micro-batch", type=int, default=64, help="requests per micro-batch")
    parser.add_argument("--experts", type=int, default=1, help="expert workers, each on a node of its own")
    parser.add_argument("--m", default="1,2,3,4")
    parser.add_argument("--shares", default="0.25,0.5,1", help="T_c as shares of T_f")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        run_inside(json.loads(arguments.inside))
        return
    if arguments.model is None:
        parser.error("MODEL: which folder? `make yardstick` writes a small one to out/yardstick-tiny")
    if reason := box_unavailable():
        raise SystemExit(reason)
    case = Case(
        model=arguments.model.resolve(),
        micro_batch=arguments.micro_batch,
        num_experts=arguments.experts,
        input_tokens=arguments.input_tokens,
        output_tokens=arguments.output_tokens,
    )
    shares = [float(part) for part in arguments.shares.split(",")]
    rows = sweep(case, shares, [int(part) for part in arguments.m.split(",")])
    show(rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"bench": "wire_ping_pong", "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
