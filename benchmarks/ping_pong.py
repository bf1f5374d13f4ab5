"""Ping-pong, measured and predicted: constant micro-batch size, m = 1, 2, 3 (MegaScale-Infer, Figure 12 and eq. 1-5).

    python benchmarks/ping_pong.py MODEL --micro-batch 128 --json out.json --traces out
    python benchmarks/ping_pong.py MODEL --micro-batch 64 --m 1,2,3,4 --shares 0.25,0.5,1 --json out.json

For each m: m * b requests decode on one attention and one expert worker with spans recorded. From the spans: T_a
(attention, gate and dispatch of one micro-batch and layer), T_e (gather, experts and reply), the time of a layer. T_c
is what is left of the layer at m = 1: (layer - T_a - T_e) / 2. Predicted layer time for m: max(m * T_f, T_a + T_e +
2 T_c) with T_f = max(T_a, T_e), both from the T's of the m = 1 run and from those of the same run (on one machine the
two sides share memory bandwidth, so working together slows both).

With `--shares`, attention is on one node of a cluster in a box, expert workers on others (joined with `antiphon
worker`), and the links between them are so slow that T_c is the given share of T_f. First a run over fast links gives
T_a, T_e and so T_f; the rate for a share follows from the bytes of one message. Links, not memory, are shared then, so
one machine shows what several would.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from antiphon.base.progress import progress
from antiphon.bench.box import Box, box_unavailable
from antiphon.bench.profile.step_parts import per_micro_batch, steps_with
from antiphon.bench.serve import AntiphonEngine, WorkloadSize, make_workload
from antiphon.models.config import load_model_spec
from antiphon.serve.timeline import write_trace
from antiphon.serve.worker.spans import ATTENTION, COMBINE, DISPATCH, EXPERTS, REPLY, Spans
from antiphon.serve.worker_process import WorkerName

SECRET = "only for this benchmark, on a private network"
PORT = 7700
FAST_MBIT = 20_000.0
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class MeasuredLayer:
    """Medians over the decode steps of one run, in seconds. `layer_s`: all m micro-batches through one layer."""

    micro_batches: int
    attention_s: float
    experts_s: float
    layer_s: float
    tokens_per_s: float


def layer_times(spans: Mapping[WorkerName, Spans], micro_batches: int, rows: int, num_layers: int) -> MeasuredLayer:
    """Reduce a run's spans to the T's of the equations."""
    attention = next(s for name, s in spans.items() if name.role == "attention")
    experts = next(s for name, s in spans.items() if name.role == "experts")
    steps = steps_with(attention, [rows])
    if not steps:
        raise SystemExit(f"no decode step with {rows} rows was recorded")
    attention_s = statistics.median(per_micro_batch(attention, (ATTENTION, DISPATCH), steps))
    experts_s = statistics.median(per_micro_batch(experts, (EXPERTS, REPLY), steps))
    layer_s = statistics.median(_layer_durations(attention, steps, num_layers))
    return MeasuredLayer(micro_batches, attention_s, experts_s, layer_s, rows / (layer_s * num_layers))


def _layer_durations(spans: Spans, steps: set[int], num_layers: int) -> list[float]:
    """Per step: from the first attention to the last combine, divided by the number of layers."""
    begin: dict[int, int] = {}
    end: dict[int, int] = {}
    for i, kind in enumerate(spans.name_index):
        step = spans.steps[i]
        if step in steps and kind in (ATTENTION, COMBINE):
            begin[step] = min(begin.get(step, spans.starts_ns[i]), spans.starts_ns[i])
            end[step] = max(end.get(step, 0), spans.ends_ns[i])
    return [(end[step] - begin[step]) * 1e-9 / num_layers for step in steps]


def predicted_layer_s(times: MeasuredLayer, exchange_s: float, micro_batches: int) -> float:
    """max(m T_f, T_a + T_e + 2 T_c), MegaScale-Infer section 4.1."""
    slower_s = max(times.attention_s, times.experts_s)
    return max(micro_batches * slower_s, times.attention_s + times.experts_s + 2 * exchange_s)


def run(
    model: Path,
    micro_batches: int,
    micro_batch_size: int,
    input_tokens: int,
    output_tokens: int,
    trace: Path | None,
    *,
    num_experts: int = 1,
    changes: Mapping[str, Any] | None = None,
) -> MeasuredLayer:
    """One run with spans; writes its trace if asked to. `changes`: to the engine's configuration."""
    spec = load_model_spec(model)
    rows = micro_batches * micro_batch_size
    engine = AntiphonEngine(
        f"1+{num_experts}/m{micro_batches}",
        model,
        max_concurrency=rows,
        max_tokens=input_tokens + output_tokens,
        trace=True,
        changes=changes,
    )
    engine.start()
    try:
        workload = make_workload(WorkloadSize(rows, input_tokens, output_tokens), spec.vocab_size)
        engine.fill_prefix_cache(workload)
        engine.take_spans()
        engine.steady_decode_tokens_per_s(workload)
        spans = engine.take_spans()
    finally:
        engine.close()
    if trace is not None:
        write_trace(trace, spans)
    return layer_times(spans, micro_batches, rows, spec.num_layers)


def report(results: list[MeasuredLayer]) -> list[dict[str, Any]]:
    """Print and return measured and predicted gains over the first result, which must be m = 1."""
    first = results[0]
    if first.micro_batches != 1:
        raise SystemExit("the first m must be 1: T_c comes from it")
    exchange_s = max(0.0, (first.layer_s - first.attention_s - first.experts_s) / 2)
    rows = []
    print(f"T_c {exchange_s * 1e6:.0f} µs")
    print("m   T_a µs   T_e µs  layer µs  tok/s  gain  from T(m=1)  from own T")
    for times in results:
        m = times.micro_batches
        gain = times.tokens_per_s / first.tokens_per_s
        predicted = m * first.layer_s / predicted_layer_s(first, exchange_s, m)
        own = m * first.layer_s / predicted_layer_s(times, exchange_s, m)
        print(
            f"{m}  {times.attention_s * 1e6:7.0f}  {times.experts_s * 1e6:7.0f}  {times.layer_s * 1e6:8.0f}"
            f"  {times.tokens_per_s:5.0f}  {gain:.2f}  {predicted:11.2f}  {own:10.2f}"
        )
        rows.append(
            asdict(times) | {"exchange_s": exchange_s, "gain": gain, "predicted_gain": predicted, "own_gain": own}
        )
    return rows


# --- over slow links


@dataclass(frozen=True, kw_only=True)
class BoxCase:
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


def measure(case: BoxCase, mbit: float, micro_batches: int) -> MeasuredLayer:
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
    return MeasuredLayer(**json.loads(done.stdout.splitlines()[-1]))


def run_inside(inside: dict[str, Any]) -> None:
    """What runs on node 0: the engine; prints its `MeasuredLayer`."""
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


def sweep(case: BoxCase, shares: list[float], micro_batches: list[int]) -> list[dict[str, Any]]:
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


def rows_of(share: float, mbit: float, results: list[MeasuredLayer]) -> list[dict[str, Any]]:
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
    parser.add_argument("--micro-batch", type=int, default=128, help="requests per micro-batch")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--m", default="1,2,3")
    parser.add_argument("--traces", type=Path, help="folder for one Perfetto trace per m; not with --shares")
    parser.add_argument("--shares", help="on nodes in a box: T_c as shares of T_f, for example 0.25,0.5,1")
    parser.add_argument("--experts", type=int, default=1, help="with --shares: expert workers, each on a node")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        run_inside(json.loads(arguments.inside))
        return
    if arguments.model is None:
        parser.error("MODEL: which folder? `make yardstick` writes a small one to out/yardstick-tiny")
    micro_batches = [int(part) for part in arguments.m.split(",")]
    bench = "ping_pong" if arguments.shares is None else "wire_ping_pong"
    rows = on_this_machine(arguments, micro_batches) if arguments.shares is None else in_a_box(arguments, micro_batches)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"bench": bench, "rows": rows}, indent=2))


def on_this_machine(arguments: argparse.Namespace, micro_batches: list[int]) -> list[dict[str, Any]]:
    if arguments.traces is not None:
        arguments.traces.mkdir(parents=True, exist_ok=True)
    sizes = arguments.micro_batch, arguments.input_tokens, arguments.output_tokens
    traces = {m: arguments.traces / f"m{m}.json" if arguments.traces is not None else None for m in micro_batches}
    return report([run(arguments.model, m, *sizes, traces[m]) for m in micro_batches])


def in_a_box(arguments: argparse.Namespace, micro_batches: list[int]) -> list[dict[str, Any]]:
    if reason := box_unavailable():
        raise SystemExit(reason)
    case = BoxCase(
        model=arguments.model.resolve(),
        micro_batch=arguments.micro_batch,
        num_experts=arguments.experts,
        input_tokens=arguments.input_tokens,
        output_tokens=arguments.output_tokens,
    )
    rows = sweep(case, [float(part) for part in arguments.shares.split(",")], micro_batches)
    show(rows)
    return rows


if __name__ == "__main__":
    main()
