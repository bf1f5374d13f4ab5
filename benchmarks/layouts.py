"""Decode throughput of layouts on the same cores, interleaved: one process, replicas, attention and experts apart.

    python benchmarks/layouts.py MODEL --concurrency 64,256,1024 --layouts colocated,colocated*2,1+1/m1,1+1/m2

Only the time in which all requests decode counts (`AntiphonEngine.steady_decode_tokens_per_s`). The first pass fills
the prefix cache and is not counted.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from antiphon.bench.antiphon_engine import AntiphonEngine
from antiphon.bench.peers.api import Workload
from antiphon.bench.quiet import repeat_until_quiet
from antiphon.bench.serve import WorkloadSize, make_workload
from antiphon.models.config import load_model_spec


def steady_alone(engine: AntiphonEngine, workload: Workload) -> float:
    """One measurement with all other engines stopped."""
    engine.resume()
    try:
        return engine.steady_decode_tokens_per_s(workload)
    finally:
        engine.pause()


def measure(
    model: Path, layouts: list[str], size: WorkloadSize, rounds: int, num_required: int
) -> list[dict[str, Any]]:
    """Rows for one concurrency; the first layout is what the others are compared with."""
    workload = make_workload(size, load_model_spec(model).vocab_size)
    tokens = size.input_tokens + size.output_tokens
    engines = [AntiphonEngine(name, model, max_concurrency=size.concurrency, max_tokens=tokens) for name in layouts]
    try:
        for engine in engines:
            engine.start()
            engine.fill_prefix_cache(workload)
            engine.pause()
        contestants = {engine.name: partial(steady_alone, engine, workload) for engine in engines}
        pids = [engine.pid for engine in engines if engine.pid is not None]
        results = repeat_until_quiet(contestants, max_rounds=rounds, num_required=num_required, extra_root_pids=pids)
    finally:
        for engine in engines:
            engine.close()
    baseline = results[engines[0].name].median(float)
    rows = []
    for engine in engines:
        repetitions = results[engine.name]
        rate = repetitions.median(float)
        rows.append(
            engine.sizes()
            | {
                "engine": engine.name,
                "concurrency": size.concurrency,
                "input_tokens": size.input_tokens,
                "decode_tokens_per_s": rate,
                "decode_tokens_per_s_best": repetitions.best(float),
                "ratio_to_first": rate / baseline,
                "foreign_cpu_share": repetitions.foreign_share,
            }
        )
        print(
            f"{size.concurrency:5d}  {engine.name:24s} {rate:7.0f} tok/s (best {repetitions.best(float):.0f})  "
            f"{rate / baseline:.2f} of {engines[0].name}  foreign {repetitions.foreign_share:.0%}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--concurrency", default="64,256,1024")
    parser.add_argument("--layouts", default="colocated,colocated*2,1+1/m1,1+1/m2")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for concurrency in (int(part) for part in arguments.concurrency.split(",")):
        size = WorkloadSize(concurrency, arguments.input_tokens, arguments.output_tokens)
        rows += measure(arguments.model, arguments.layouts.split(","), size, arguments.rounds, arguments.repetitions)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"bench": "layouts", "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
