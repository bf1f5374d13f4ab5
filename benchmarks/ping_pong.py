"""Ping-pong, measured and predicted: constant micro-batch size, m = 1, 2, 3 (MegaScale-Infer, Figure 12 and eq. 1-5).

    python benchmarks/ping_pong.py MODEL --micro-batch 128 --json out.json --traces out

For each m: m * b requests decode on one attention and one expert worker with spans recorded. From the spans: T_a
(attention, gate and dispatch of one micro-batch and layer), T_e (gather, experts and reply), the time of a layer. T_c
is what is left of the layer at m = 1: (layer - T_a - T_e) / 2. Predicted layer time for m: max(m * T_f, T_a + T_e +
2 T_c) with T_f = max(T_a, T_e), both from the T's of the m = 1 run and from those of the same run (on one machine the
two sides share memory bandwidth, so working together slows both).
"""

import argparse
import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from antiphon.bench.antiphon_engine import AntiphonEngine
from antiphon.bench.profile.step_parts import per_micro_batch, steps_with
from antiphon.bench.serve import WorkloadSize, make_workload
from antiphon.models.config import load_model_spec
from antiphon.serve.timeline import write_trace
from antiphon.serve.worker.spans import ATTENTION, COMBINE, DISPATCH, EXPERTS, REPLY, Spans
from antiphon.serve.worker_process import WorkerName


@dataclass(frozen=True)
class LayerTimes:
    """Medians over the decode steps of one run, in seconds. `layer_s`: all m micro-batches through one layer."""

    micro_batches: int
    attention_s: float
    experts_s: float
    layer_s: float
    tokens_per_s: float


def layer_times(spans: Mapping[WorkerName, Spans], micro_batches: int, rows: int, num_layers: int) -> LayerTimes:
    """Reduce a run's spans to the T's of the equations."""
    attention = next(s for name, s in spans.items() if name.role == "attention")
    experts = next(s for name, s in spans.items() if name.role == "experts")
    steps = steps_with(attention, [rows])
    if not steps:
        raise SystemExit(f"no decode step with {rows} rows was recorded")
    attention_s = statistics.median(per_micro_batch(attention, (ATTENTION, DISPATCH), steps))
    experts_s = statistics.median(per_micro_batch(experts, (EXPERTS, REPLY), steps))
    layer_s = statistics.median(_layer_durations(attention, steps, num_layers))
    return LayerTimes(micro_batches, attention_s, experts_s, layer_s, rows / (layer_s * num_layers))


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


def predicted_layer_s(times: LayerTimes, exchange_s: float, micro_batches: int) -> float:
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
) -> LayerTimes:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--micro-batch", type=int, default=128, help="requests per micro-batch")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--m", default="1,2,3")
    parser.add_argument("--traces", type=Path, help="folder for one Perfetto trace per m")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.traces is not None:
        arguments.traces.mkdir(parents=True, exist_ok=True)
    results = []
    for m in (int(part) for part in arguments.m.split(",")):
        trace = arguments.traces / f"m{m}.json" if arguments.traces is not None else None
        results.append(
            run(
                arguments.model,
                m,
                arguments.micro_batch,
                arguments.input_tokens,
                arguments.output_tokens,
                trace,
            )
        )
    rows = report(results)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"bench": "ping_pong", "rows": rows}, indent=2))


def report(results: list[LayerTimes]) -> list[dict[str, float]]:
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


if __name__ == "__main__":
    main()
