"""Predicted against measured: a token's time and the decode rate over layouts, workers, micro-batches and requests:

    python benchmarks/predict.py MODEL --json out.json
    python benchmarks/predict.py MODEL --grid colocated:1,8,32 --grid 1+1/m2:32,64 --rounds 3
    python benchmarks/predict.py MODEL --plans 16                  # nine plans, served, 16 requests at once
    python benchmarks/predict.py MODEL --plans 16 --mbit 200       # the same on two nodes of a cluster in a box
    python benchmarks/predict.py MODEL --rates 4,8,16,24,32,48     # plans of both phases, one for each rate

1. The machine is profiled (`antiphon profile`), and profiled again after the grid: it drifts. A point's prediction is
   the mean of both; what they differ by stands beside it. `--profile FILE` takes one made before.
2. Points with the same engine run one after the other, and engines take turns, for `--rounds` rounds.
3. Only steps count in which all requests decode. Each miss above 30% is listed with the part that misses most, found by
   comparing what the workers' spans say with the prediction's parts.
4. With `--plans` the points are layouts of `antiphon plan --pin`, and each is served as users serve a plan, over HTTP,
   on this machine or on nodes that the others join from (`bench/served_plans`).
5. With `--rates` each rate has a plan of prefill and decode (`antiphon plan --phase both`), which is served while
   `--requests` requests come at that rate. The machine is profiled again after each rate; what `antiphon simulate
   --client-here` says of the plan, as the mean of the profiles before and after, stands beside what was measured:
   medians of the time to the first token and per token, and tokens a second. The profile has what HTTP and the client
   take, so the client of this benchmark is in both.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.base.system import sigterm_exits
from antiphon.bench import served_plans
from antiphon.bench.harness.quiet import CpuWatch, MeasuredAround, rounds_of, wait_for_quiet
from antiphon.bench.load import LoadCase, LoadRun, run_load
from antiphon.bench.openai_peer import OpenAIPeer
from antiphon.bench.profile.local_times import Wanted, measure
from antiphon.bench.profile.measure import NORMAL, QUICK, step_parts
from antiphon.bench.serve import AntiphonEngine, WorkloadSize, make_workload, parse_contestant
from antiphon.bench.serving_peers import Workload
from antiphon.cli.plan_inputs import CLUSTER_FILE
from antiphon.cost.profile import LocalTimes, read_profile
from antiphon.models.config import load_model_spec
from antiphon.planner.local_prediction import LocalPrediction, predict_decode
from antiphon.serve.served_plan import ServedPlan
from antiphon.specs.workload import load_workload

DEFAULT_GRID = (
    "colocated:1,4,16,64,128", "colocated*2:2,16,64,128", "colocated/t2:1,16,64", "colocated/p2:2,16,64",
    "1+1/m1:1,16,64,128", "1+1/m2:16,64,128", "1+1/m3:64,128", "1+2/m2:32,128", "2+1/m2:32,128",
)  # fmt: skip
MISS = 0.3
GOAL = 0.1
PLANS_GOAL = 0.15


@dataclass(frozen=True)
class Point:
    """One engine at one number of requests."""

    contestant: str
    concurrency: int


@dataclass
class MeasuredRound:
    """One round of one point. `parts_s`: of one step, from the spans, under the prediction's names."""

    tpot_s: float
    tokens_per_s: float
    parts_s: dict[str, float]
    foreign_share: float


def parse_grid(texts: Sequence[str]) -> list[Point]:
    """``colocated:1,8`` -> two points; `UserError` names what is wrong."""
    points = []
    for text in texts:
        contestant, _, counts = text.partition(":")
        parse_contestant(contestant)
        try:
            points += [Point(contestant, int(count)) for count in counts.split(",")]
        except ValueError as error:
            raise UserError(f"--grid {text!r} is no grid: write for example 1+1/m2:16,64") from error
    if wrong := [point for point in points if point.concurrency < 1]:
        raise UserError(f"--grid {wrong[0].contestant}: {wrong[0].concurrency} requests: it must be at least 1")
    return points


def measure_point(engine: AntiphonEngine, workload: Workload, patience_s: float) -> MeasuredRound:
    """One run of an engine whose prefix cache has the prompts."""
    wait_for_quiet(timeout_s=patience_s)
    engine.running.take_spans()
    watch = CpuWatch()
    tokens_per_s = engine.steady_decode_tokens_per_s(workload)
    share, concurrency = watch.foreign_share(), len(workload.prompts)
    return MeasuredRound(
        concurrency / tokens_per_s, tokens_per_s, step_parts(engine.running.take_spans(), concurrency), share
    )


def run_grid(arguments: argparse.Namespace, points: Sequence[Point]) -> dict[Point, list[MeasuredRound]]:
    """All points in turn, `--rounds` times; every other round in the opposite order."""
    model, sizes = arguments.model, (arguments.input_tokens, arguments.output_tokens)
    vocab_size = load_model_spec(model).vocab_size
    results: dict[Point, list[MeasuredRound]] = {point: [] for point in points}
    with progress("running the engines") as report:
        for names in rounds_of(list(dict.fromkeys(point.contestant for point in points)), arguments.rounds):
            for name in names:
                counts = [point.concurrency for point in points if point.contestant == name]
                workloads = [make_workload(WorkloadSize(count, *sizes), vocab_size) for count in counts]
                engine = AntiphonEngine(name, model, max_concurrency=max(counts), max_tokens=sum(sizes), trace=True)
                with engine:
                    for workload in workloads:
                        engine.fill_prefix_cache(workload)
                    for count, workload in zip(counts, workloads, strict=True):
                        results[Point(name, count)].append(measure_point(engine, workload, arguments.patience))
                report(sum(map(len, results.values())), arguments.rounds * len(points))
    return results


def drift(predicted: Sequence[float]) -> float:
    """By how much predictions of one figure from several measurements differ, as a fraction."""
    return max(predicted) / min(predicted) - 1


def row_of(point: Point, predicted: Sequence[float], measured: Sequence[MeasuredRound]) -> dict[str, Any]:
    """What the table and the JSON say of a point; `predicted`: seconds of a token, by each profile."""
    tpot_s = median(each.tpot_s for each in measured)
    predicted_s = fmean(predicted)
    return {
        "contestant": point.contestant,
        "concurrency": point.concurrency,
        "predicted_tpot_s": predicted_s,
        "measured_tpot_s": tpot_s,
        "predicted_tokens_per_s": point.concurrency / predicted_s,
        "measured_tokens_per_s": median(each.tokens_per_s for each in measured),
        "error": predicted_s / tpot_s - 1,
        "drift": drift(predicted),
        "foreign_cpu_share": max(each.foreign_share for each in measured),
    }


def parts_of(predictions: Sequence[LocalPrediction], measured: Sequence[MeasuredRound]) -> dict[str, Any]:
    """The parts of a step, for the row of an engine with spans."""
    names = {name for each in measured for name in each.parts_s}
    return {
        "predicted_parts_s": dict(predictions[0].parts_s),
        "predicted_t_s": {name: getattr(predictions[0], name) for name in ("t_a_s", "t_e_s", "t_c_s")},
        "measured_parts_s": {name: median(each.parts_s.get(name, 0.0) for each in measured) for name in sorted(names)},
    }


def blame(row: dict[str, Any]) -> str:
    """The part of a step whose prediction misses by the most time."""
    ours, theirs = row["predicted_parts_s"], row["measured_parts_s"]
    misses = {name: ours[name] - theirs.get(name, 0.0) for name in ours}
    worst = max(misses, key=lambda name: abs(misses[name]))
    text = f"{worst} {ours[worst] * 1e3:.2f} ms predicted, {theirs.get(worst, 0.0) * 1e3:.2f} ms in the spans"
    for name in ("t_a_s", "t_e_s"):
        if (mine := row["predicted_t_s"][name]) is not None:
            text += f"; {name.removesuffix('_s').upper()} {mine * 1e6:.0f} µs, {theirs.get(name, 0.0) * 1e6:.0f} µs"
    return text


def conclude(
    arguments: argparse.Namespace, rows: Sequence[dict[str, Any]], goal: float, more: Mapping[str, Any]
) -> None:
    """Print the table and the verdict; write them and `more` as JSON."""
    print("engine           requests  predicted  measured   error  predicted  measured  drift  foreign")
    for row in rows:
        print(
            f"{row['contestant']:16s} {row['concurrency']:8d}  {row['predicted_tpot_s'] * 1e3:6.2f} ms  "
            f"{row['measured_tpot_s'] * 1e3:6.2f} ms  {row['error']:+5.0%}  {row['predicted_tokens_per_s']:5.0f} t/s  "
            f"{row['measured_tokens_per_s']:5.0f} t/s  {row['drift']:4.0%}  {row['foreign_cpu_share']:6.0%}"
        )
    middle = float(median(abs(row["error"]) for row in rows))
    print(verdict(middle, f"{len(rows)} points", goal))
    for row in rows:
        if abs(row["error"]) > MISS and "measured_parts_s" in row:
            print(f"  {row['contestant']} at {row['concurrency']}: {row['error']:+.0%}; most of it: {blame(row)}")
    write(arguments, {"median_error": middle, "rows": rows, **more})


def verdict(error: float, over: str, goal: float) -> str:
    outcome = "reached" if error <= goal else "missed"
    return f"median error {error:.1%} over {over}, goal at most {goal:.0%}: {outcome}"


def write(arguments: argparse.Namespace, found: Mapping[str, Any]) -> None:
    if arguments.json is not None:
        written = {"bench": "predict", "command": " ".join(sys.argv), **found}
        arguments.json.write_text(json.dumps(written, indent=1))


def _engine_of(file: Path) -> LocalTimes:
    found = read_profile(file).engine
    if found is None:
        raise UserError(f"{file} holds nothing of the engine: run antiphon profile MODEL --folder DIR")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--grid", action="append", help="ENGINE:N,N, may be given several times")
    parser.add_argument("--profile", type=Path, help="profile.json of antiphon profile --folder, instead of measuring")
    parser.add_argument("--quick", action="store_true", help="profile briefly")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--patience", type=float, default=30.0, help="seconds to wait for other programs, each point")
    parser.add_argument("--plans", type=int, metavar="N", help="serve plans for N requests instead of the grid")
    parser.add_argument("--mbit", type=float, help="with --plans: on nodes in a box, links of this many 10^6 bits/s")
    parser.add_argument("--nodes", type=int, default=2, help="with --mbit: nodes that share out the cores")
    parser.add_argument("--rates", help="plans of both phases, for requests a second: R,R")
    parser.add_argument("--requests", type=int, default=200, help="with --rates: of a rate and round")
    parser.add_argument("--only", help="with --plans: layouts whose names contain this")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        with sigterm_exits():  # servers that were started are ended
            if arguments.rates is not None:
                run_rates(arguments, parse_rates(arguments.rates))
            elif arguments.plans is not None:
                run_plans(arguments)
            else:
                run(arguments, parse_grid(arguments.grid or DEFAULT_GRID))
    except UserError as error:
        sys.exit(f"error: {error}")


def run(arguments: argparse.Namespace, points: Sequence[Point]) -> None:
    """Profile, grid, profile; table and JSON."""
    spec = load_model_spec(arguments.model)
    wanted = Wanted(model=arguments.model, effort=QUICK if arguments.quick else NORMAL)
    given = _engine_of(arguments.profile) if arguments.profile else None

    def measure_now() -> LocalTimes:
        with progress("measuring this machine") as report:
            return given or measure(wanted, report)

    around = MeasuredAround(measure_now)
    around.before()
    measured = run_grid(arguments, points)
    profiles = around.after()
    context = arguments.input_tokens + arguments.output_tokens / 2
    rows = []
    for point in points:
        choice = parse_contestant(point.contestant)
        found = [
            predict_decode(times, spec, choice, concurrency=point.concurrency, context=context) for times in profiles
        ]
        times_s = [each.tpot_s for each in found]
        rows.append(row_of(point, times_s, measured[point]) | parts_of(found, measured[point]))
    rounds = {f"{point.contestant}:{point.concurrency}": [asdict(each) for each in measured[point]] for point in points}
    conclude(arguments, rows, GOAL, {"rounds": rounds, "profiles": [asdict(times) for times in profiles]})


def run_plans(arguments: argparse.Namespace) -> None:
    """Profile, plan and serve each layout in turn, profile and plan again; table and JSON."""
    size = WorkloadSize(arguments.plans, arguments.input_tokens, arguments.output_tokens)
    with TemporaryDirectory(prefix="plans-") as name, ExitStack() as stack:
        folder = Path(name)
        around = profiles_in(folder, arguments)
        cluster = json.loads((around.before().parent / CLUSTER_FILE).read_text())
        machines = served_plans.this_machine(cluster)
        if arguments.mbit is not None:
            box = served_plans.nodes_in_a_box(cluster, arguments.nodes, arguments.mbit, folder)
            machines = stack.enter_context(box)
        only = arguments.only or ""
        every = served_plans.layouts_of(machines.num_devices)
        if not (layouts := [each for each in every if only in each.name]):
            raise UserError(f"--only {only}: give a part of one of {', '.join(each.name for each in every)}")

        def plans_from(profile: Path) -> dict[served_plans.PinnedLayout, ServedPlan]:
            plan = partial(served_plans.make_plan, machines, arguments.model, profile)
            return {layout: plan(layout, size, folder) for layout in layouts}

        served = plans_from(around.before())
        measured: dict[served_plans.PinnedLayout, list[MeasuredRound]] = {layout: [] for layout in layouts}
        for number, in_turn in enumerate(rounds_of(layouts, arguments.rounds), start=1):
            for layout in in_turn:
                wait_for_quiet(timeout_s=arguments.patience)
                watch = CpuWatch()
                rate = served_plans.serve_and_measure(machines, arguments.model, served[layout], size, folder)
                measured[layout].append(MeasuredRound(size.concurrency / rate, rate, {}, watch.foreign_share()))
                print(f"round {number}, {layout.name}: {rate:.1f} tokens/s", flush=True)
        predicted = [served, *map(plans_from, around.after()[1:])]
    rows = []
    for layout in layouts:
        times = [found[layout].predicted.tpot_s or math.nan for found in predicted]
        rows.append(row_of(Point(layout.name, size.concurrency), times, measured[layout]))
    conclude(arguments, rows, PLANS_GOAL, {})


def profiles_in(folder: Path, arguments: argparse.Namespace) -> MeasuredAround[Path]:
    """The one of `--profile`, or new ones, in folders of their own."""
    numbers = count(1)

    def profile() -> Path:
        given: Path | None = arguments.profile
        where = folder / f"profile {next(numbers)}"
        return given or served_plans.profile_here(arguments.model, where, quick=arguments.quick)

    return MeasuredAround(profile)


def parse_rates(text: str) -> list[float]:
    """``4,8`` -> two rates; `UserError` for what is none."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise UserError(f"--rates {text!r}: write requests a second, for example 4,8,16")
    return rates


def run_rates(arguments: argparse.Namespace, rates: Sequence[float]) -> None:
    """Profile; for each rate, plan both phases, serve the plan under its load, and profile again; table and JSON."""
    model, size = arguments.model, WorkloadSize(arguments.requests, arguments.input_tokens, arguments.output_tokens)
    vocab_size = load_model_spec(model).vocab_size
    rows = []
    with TemporaryDirectory(prefix="plans-") as name:
        folder = Path(name)
        around = profiles_in(folder, arguments)
        cluster = json.loads((around.before().parent / CLUSTER_FILE).read_text())
        workload = load_workload(str(served_plans.write_workload(size, folder)))
        case = LoadCase(workload=workload, rates=tuple(rates), num_requests=size.concurrency)
        machines = served_plans.this_machine(cluster)
        for rate in rates:
            served = served_plans.make_two_phase_plan(model, around.before(), rate, size, folder)
            with served_plans.serving(machines, model, served, size, folder) as url:
                peer = OpenAIPeer(url)
                peer.start()
                run_load(peer, case.demand(rate, 1), vocab_size, 1)  # to warm up: other prompts
                runs: list[LoadRun] = []
                shares: list[float] = []
                for _ in range(arguments.rounds):
                    wait_for_quiet(timeout_s=arguments.patience)
                    watch = CpuWatch()
                    runs.append(run_load(peer, case.demand(rate, 0), vocab_size, 2 + len(runs)))
                    shares.append(watch.foreign_share())
            requests = arguments.requests
            promised = [served_plans.promise_of(served, each, rate, requests, folder) for each in around.after()]
            rows.append(rate_row(rate, served, promised, runs) | {"foreign_cpu_share": median(shares)})
            print(rate_line(rows[-1]), flush=True)
    conclude_rates(arguments, rows)


def rate_row(
    rate: float, served: ServedPlan, promised: Sequence[Mapping[str, Any]], runs: Sequence[LoadRun]
) -> dict[str, Any]:
    """What was promised for a rate, by each profile, beside the medians of what was measured, and by how much the mean
    of the promises misses.

    `UserError` if a request failed: the others would look fast."""
    if failed := [each.error for run in runs for each in run.requests if each.error]:
        raise UserError(f"{rate:g} requests/s: {len(failed)} requests failed, the first: {failed[0]}")
    promises = {
        "ttft_s": [each["ttft_s"]["p50"] for each in promised],
        "tpot_s": [each["tpot_s"]["p50"] for each in promised],
        "tokens_per_s": [each["output_tokens_per_s"] for each in promised],
    }
    measured = {
        "ttft_s": median(median(run.values("ttft_s")) for run in runs),
        "tpot_s": median(median(run.values("tpot_s")) for run in runs),
        "tokens_per_s": median(sum(len(each.token_s) for each in run.answered) / run.took_s for run in runs),
    }
    predicted = {name: fmean(values) for name, values in promises.items()}
    pools = {"prefill": served.prefill, "decode": served}
    return {
        "rate": rate,
        "layout": ", ".join(f"{name} {layout_of(pool)}" for name, pool in pools.items() if pool is not None),
        "predicted": predicted,
        "measured": measured,
        "error": {name: predicted[name] / measured[name] - 1 for name in predicted},
        "drift": {name: drift(values) for name, values in promises.items()},
    }


def layout_of(pool: ServedPlan) -> str:
    """As `--prefill` and `--decode` write it, shortened."""
    apart = f"+{pool.num_experts}/m{pool.num_micro_batches}" if pool.layout == "disaggregated" else ""
    return f"{pool.num_attention}{apart}"


def rate_line(row: Mapping[str, Any]) -> str:
    """A row as a person reads it: predicted, measured, error, by how much the predictions of both profiles differ."""
    parts = [f"{row['rate']:g} requests/s, {row['layout']}:"]
    for name, unit, factor in (("ttft_s", "ms", 1e3), ("tpot_s", "ms", 1e3), ("tokens_per_s", "t/s", 1.0)):
        ours, theirs = row["predicted"][name] * factor, row["measured"][name] * factor
        misses = f"{row['error'][name]:+.0%}, drift {row['drift'][name]:.0%}"
        parts.append(f"{name.partition('_')[0]} {ours:.2f} {unit}, {theirs:.2f} {unit} ({misses});")
    return " ".join(parts) + f" foreign {row['foreign_cpu_share']:.0%}"


def conclude_rates(arguments: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """Print by how much each figure misses at the median, and the verdict over all; write them as JSON."""
    misses = {name: float(median(abs(row["error"][name]) for row in rows)) for name in rows[0]["error"]}
    for name, miss in misses.items():
        print(f"{name}: {verdict(miss, f'{len(rows)} rates', PLANS_GOAL)}")
    write(arguments, {"median_errors": misses, "rows": rows})


if __name__ == "__main__":
    main()
