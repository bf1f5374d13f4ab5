"""Serve with two checkouts of this project in turns, to see what a change to the exchange is worth.

    python benchmarks/two_checkouts.py MODEL --other DIR --other-python PYTHON --m 1,2 --micro-batch 8,64

DIR is another checkout (`git worktree add DIR COMMIT`, native modules built or copied into DIR/antiphon), PYTHON an
interpreter that finds the packages but not this checkout: an environment into which nothing of this project is
installed, because an editable installation wins over PYTHONPATH. The script says which folder the other side was loaded
from, and stops if both are the same. It imports nothing else from this folder: the other side runs this script too.

Both engines (one attention, one expert worker) stay loaded; they decode in turns of a few seconds, so that a machine
that drifts drifts for both. From the spans of each turn, medians over (step, layer, micro-batch), in microseconds:

exposed   of the wait for the experts' answer, the part in which they did not compute
exchange  from the dispatch's begin to the combine's end, without the experts' computing (m = 1: all of it is exposed)
pause     of the expert worker, from the end of one batch to the begin of the next within a step
experts   their computing, as a check that both had the same machine
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from antiphon.bench.antiphon_engine import AntiphonEngine
from antiphon.bench.peers.api import Workload
from antiphon.bench.serve import WorkloadSize, make_workload
from antiphon.models.config import load_model_spec
from antiphon.serve.worker.spans import COMBINE, DISPATCH, EXPERTS, STEP, Spans

_PROMPT_TOKENS = 128
Key = tuple[int, int, int]  # step, layer, micro-batch
Interval = tuple[int, int]  # ns


def measure(engine: AntiphonEngine, workload: Workload, rows: int) -> dict[str, float]:
    """One turn: tokens per second while all requests decode, and the medians."""
    rate = engine.steady_decode_tokens_per_s(workload)
    spans = engine.take_spans()
    attention = next(each for name, each in spans.items() if name.role == "attention")
    experts = next(each for name, each in spans.items() if name.role == "experts")
    kinds = enumerate(attention.name_index)
    steps = {attention.steps[i] for i, kind in kinds if kind == STEP and attention.rows[i] == rows}  # all decode
    dispatch, combine = _intervals(attention, DISPATCH, steps), _intervals(attention, COMBINE, steps)
    computing = {key: at for key, at in _intervals(experts, EXPERTS, steps).items() if key in combine}
    in_order = sorted((begin, end, key[0]) for key, (begin, end) in computing.items())
    pauses = [after[0] - before[1] for before, after in itertools.pairwise(in_order) if after[2] == before[2]]
    return {
        "tok/s": rate,
        "exposed": _median_us([_length(combine[key]) - _overlap(combine[key], at) for key, at in computing.items()]),
        "exchange": _median_us([combine[key][1] - dispatch[key][0] - _length(at) for key, at in computing.items()]),
        "pause": _median_us(pauses),
        "experts": _median_us([_length(at) for at in computing.values()]),
    }


def _intervals(spans: Spans, kind: int, steps: set[int]) -> dict[Key, Interval]:
    return {
        (spans.steps[i], spans.layers[i], spans.micro_batches[i]): (spans.starts_ns[i], spans.ends_ns[i])
        for i, each in enumerate(spans.name_index)
        if each == kind and spans.steps[i] in steps and spans.layers[i] >= 0
    }


def _length(interval: Interval) -> int:
    return interval[1] - interval[0]


def _overlap(one: Interval, other: Interval) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def _median_us(times_ns: list[int]) -> float:
    return statistics.median(times_ns) / 1e3


def serve_turns(model: Path, m: int, micro_batch: int, output_tokens: int) -> None:
    """A side's process: says where it was loaded from, then one turn for each line of its input."""
    import antiphon

    rows = m * micro_batch
    engine = AntiphonEngine(
        f"1+1/m{m}", model, max_concurrency=rows, max_tokens=_PROMPT_TOKENS + output_tokens, trace=True
    )
    engine.start()
    try:
        workload = make_workload(WorkloadSize(rows, _PROMPT_TOKENS, output_tokens), load_model_spec(model).vocab_size)
        engine.fill_prefix_cache(workload)
        engine.take_spans()
        print(json.dumps(list(antiphon.__path__)), flush=True)
        for _ in sys.stdin:
            print(json.dumps(measure(engine, workload, rows)), flush=True)
    finally:
        engine.close()


class Side:
    """One checkout's process."""

    def __init__(self, python: str, checkout: Path, arguments: list[str]) -> None:
        command = [python, str(Path(__file__).resolve()), *arguments, "--turns"]
        self._process = subprocess.Popen(
            command,
            cwd=checkout,  # where `python -m`, which starts workers, looks first
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.loaded_from = self._read()

    def turn(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        answer: dict[str, float] = self._read()
        return answer

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with exit code {self._process.wait()}: what it said stands above")
        return json.loads(line)


def compare(sides: dict[str, Side], num_turns: int) -> None:
    """Take turns, the order turned around every time, and print medians and how often this checkout was better."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(num_turns):
        for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            turns[name].append(sides[name].turn())
    for key in turns["this"][0]:
        this, other = ([turn[key] for turn in turns[name]] for name in ("this", "other"))
        pairs = list(zip(this, other, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        better = sum(a > b if key == "tok/s" else a < b for a, b in pairs)
        print(
            f"  {key:9} other {statistics.median(other):8.1f}  this {statistics.median(this):8.1f}  "
            f"ratio {ratio:5.3f}  better in {better} of {num_turns}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--other", type=Path, help="another checkout")
    parser.add_argument("--other-python", default=sys.executable, help="an interpreter that does not find this one")
    parser.add_argument("--m", default="1,2", help="micro-batches")
    parser.add_argument("--micro-batch", default="8,64", help="requests per micro-batch")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each side")
    parser.add_argument("--turns", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.turns:
        serve_turns(arguments.model, int(arguments.m), int(arguments.micro_batch), arguments.output_tokens)
        return
    if arguments.other is None:
        parser.error("--other: which checkout?")
    this_checkout = Path(__file__).resolve().parents[1]
    for m in arguments.m.split(","):
        for micro_batch in arguments.micro_batch.split(","):
            options = ["--m", m, "--micro-batch", micro_batch, "--output-tokens", str(arguments.output_tokens)]
            common = [str(arguments.model.resolve()), *options]
            sides = {
                "other": Side(arguments.other_python, arguments.other.resolve(), common),
                "this": Side(sys.executable, this_checkout, common),
            }
            if sides["other"].loaded_from == sides["this"].loaded_from:
                raise SystemExit(f"both sides were loaded from {sides['this'].loaded_from}: see --other-python")
            print(f"m = {m}, {micro_batch} requests per micro-batch; other: {', '.join(sides['other'].loaded_from)}")
            compare(sides, arguments.rounds)
            for side in sides.values():
                side.close()


if __name__ == "__main__":
    main()
