"""Ping-pong, measured and predicted: constant micro-batch size, m = 1 to 4 (MegaScale-Infer, Figure 12 and eq. 1-5).

For each m: m * b requests decode on one attention worker and its expert workers with spans recorded. From the spans:
T_a (attention, gate and dispatch of one micro-batch and layer), T_e (gather, experts and reply), the time of a layer.
T_c is what is left of the layer at m = 1: (layer - T_a - T_e) / 2. Predicted layer time for m: max(m * T_f, T_a + T_e +
2 T_c) with T_f = max(T_a, T_e), from the T's of the m = 1 run and from those of the same run (on one machine the two
sides share memory bandwidth, so working together slows both).

With shares, attention is on one node of a cluster in a box, expert workers on others (joined with `antiphon worker`),
and the links between them are so slow that T_c is the given share of T_f. First a run over fast links gives T_a, T_e
and so T_f; the rate for a share follows from the bytes of one message. Links, not memory, are shared then, so one
machine shows what several would.

Rejected: m micro-batches of one batch. Cutting a batch changes T_a and T_e too, so the gain would be of two causes.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from antiphon.base.errors import ResourceError, UserError
from antiphon.base.progress import Report
from antiphon.base.system import python_module
from antiphon.bench.box import Box
from antiphon.bench.harness.columns import ContestColumns, UpTo, ratio, seconds, shown
from antiphon.bench.harness.processes import ANTIPHON, SECRET, require_box
from antiphon.bench.profile.measure import per_micro_batch, steps_with
from antiphon.bench.serve import AntiphonEngine, WorkloadSize, check_context, make_workload
from antiphon.cost.ping_pong import layer_time
from antiphon.models.config import load_model_spec
from antiphon.serve.timeline import write_trace
from antiphon.serve.worker.spans import ATTENTION, COMBINE, DISPATCH, EXPERTS, REPLY, Spans
from antiphon.serve.worker_handle import WorkerName
from antiphon.specs.plan import MAX_MICRO_BATCHES

PORT = 7700
FAST_MBIT = 20_000.0
TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class PingPongCase:
    """What `antiphon bench ping-pong` may be asked for. `micro_batch`: requests of one micro-batch, constant over m."""

    micro_batch: Annotated[int, Option(metavar="N", help="Requests of a micro-batch."), UpTo(65_536)] = 128
    num_experts: Annotated[int, Option("--experts", metavar="N", help="Expert workers."), UpTo(64)] = 1
    input_tokens: Annotated[int, Option(metavar="N", help="Prompt length."), UpTo(1_000_000)] = 128
    output_tokens: Annotated[int, Option(metavar="N", help="Tokens of a request."), UpTo(65_536)] = 32

    def one_way_bytes(self, model: Path) -> float:
        """Mean of a dispatch and a combine message on the attention node's link, in bytes."""
        spec = load_model_spec(model)
        return self.micro_batch * self.num_experts * (spec.hidden_size * 2 + 4.0 * spec.router.top_k)

    def check(self, model: Path, micro_batches: Sequence[int]) -> None:
        """`UserError` for what the model or the measurement does not allow."""
        for m in micro_batches:
            if not 1 <= m <= MAX_MICRO_BATCHES:
                raise UserError(f"--m has {m}: a batch has 1 to {MAX_MICRO_BATCHES} micro-batches")
        if micro_batches[0] != 1:
            raise UserError(f"--m begins with {micro_batches[0]}: begin with 1, T_c comes from it")
        check_context(model, self.input_tokens, self.output_tokens)
        spec = load_model_spec(model)
        if self.num_experts > spec.router.num_experts:
            raise UserError(f"--experts is {self.num_experts}: the model has {spec.router.num_experts} experts")


@dataclass(frozen=True)
class MeasuredLayer:
    """Medians over the decode steps of one run, in seconds. `layer_s`: all m micro-batches through one layer."""

    micro_batches: int
    attention_s: float
    experts_s: float
    layer_s: float
    tokens_per_s: float


def layer_times(spans: Mapping[WorkerName, Spans], micro_batches: int, rows: int, num_layers: int) -> MeasuredLayer:
    """Reduce a run's spans to the T's of the equations. `ResourceError` if no step had all requests."""
    attention = next(s for name, s in spans.items() if name.role == "attention")
    experts = [s for name, s in spans.items() if name.role == "experts"]
    steps = steps_with(attention, [rows])
    if not steps:
        raise ResourceError(
            f"never did all {rows} requests decode in one step: raise --output-tokens, or measure with the machine idle"
        )
    attention_s = statistics.median(per_micro_batch(attention, (ATTENTION, DISPATCH), steps))
    experts_s = statistics.median(t for each in experts for t in per_micro_batch(each, (EXPERTS, REPLY), steps))
    layer_s = statistics.median(_layer_durations(attention, steps, num_layers))
    return MeasuredLayer(micro_batches, attention_s, experts_s, layer_s, rows / (layer_s * num_layers))


def _layer_durations(spans: Spans, steps: set[int], num_layers: int) -> list[float]:
    """By step: from the first attention to the last combine, divided by the number of layers."""
    begin: dict[int, int] = {}
    end: dict[int, int] = {}
    for i, kind in enumerate(spans.name_index):
        step = spans.steps[i]
        if step in steps and kind in (ATTENTION, COMBINE):
            begin[step] = min(begin.get(step, spans.starts_ns[i]), spans.starts_ns[i])
            end[step] = max(end.get(step, 0), spans.ends_ns[i])
    return [(end[step] - begin[step]) * 1e-9 / num_layers for step in steps]


def measure_ping_pong(
    model: Path,
    case: PingPongCase,
    micro_batches: int,
    *,
    trace: Path | None = None,
    changes: Mapping[str, Any] | None = None,
) -> MeasuredLayer:
    """One engine with m micro-batches, its spans recorded; writes its trace if asked to. `changes`: to its
    configuration."""
    spec, rows = load_model_spec(model), micro_batches * case.micro_batch
    engine = AntiphonEngine(
        f"1+{case.num_experts}/m{micro_batches}",
        model,
        max_concurrency=rows,
        max_tokens=case.input_tokens + case.output_tokens,
        trace=True,
        changes=changes,
    )
    with engine:
        workload = make_workload(WorkloadSize(rows, case.input_tokens, case.output_tokens), spec.vocab_size)
        engine.fill_prefix_cache(workload)
        engine.running.take_spans()
        engine.steady_decode_tokens_per_s(workload)
        spans = engine.running.take_spans()
    if trace is not None:
        write_trace(trace, spans)
    return layer_times(spans, micro_batches, rows, spec.num_layers)


def bench_ping_pong(
    model: Path, case: PingPongCase, micro_batches: Sequence[int], traces: Path | None, report: Report
) -> list[dict[str, Any]]:
    """On this machine: a row for each m. `traces`: a folder for one Perfetto trace each."""
    case.check(model, micro_batches)
    if traces is not None:
        traces.mkdir(parents=True, exist_ok=True)
    results = []
    for number, m in enumerate(micro_batches):
        report(number, len(micro_batches))
        trace = None if traces is None else traces / f"m{m}.json"
        results.append(measure_ping_pong(model, case, m, trace=trace))
    return ping_pong_rows(results)


def ping_pong_rows(results: Sequence[MeasuredLayer], **about: float) -> list[dict[str, Any]]:
    """Measured beside predicted. The first result must be of m = 1. `predicted_gain` uses its T's, `own_gain` those of
    the same run."""
    first = results[0]
    assert first.micro_batches == 1, "T_c comes from m = 1"
    exchange_s = max(0.0, (first.layer_s - first.attention_s - first.experts_s) / 2)

    def predicted_s(times: MeasuredLayer, micro_batches: int) -> float:
        return float(layer_time(micro_batches, times.attention_s, times.experts_s, exchange_s))

    rows = []
    for times in results:
        m = times.micro_batches
        rows.append(
            asdict(times)
            | about
            | {
                "exchange_s": exchange_s,
                "predicted_layer_s": predicted_s(times, m),
                "gain": times.tokens_per_s / first.tokens_per_s,
                "predicted_gain": m * first.layer_s / predicted_s(first, m),
                "own_gain": m * first.layer_s / predicted_s(times, m),
            }
        )
    return rows


COLUMNS = ContestColumns(
    (
        ("T_c / T_f", shown("share", lambda value: f"{value:g}")),
        ("Mbit/s", shown("mbit", lambda value: f"{value:.0f}")),
        ("m", "micro_batches"),
        ("T_a", seconds("attention_s")),
        ("T_e", seconds("experts_s")),
        ("T_c", seconds("exchange_s")),
        ("layer", seconds("layer_s")),
        ("predicted", seconds("predicted_layer_s")),
        ("tok/s", lambda row: f"{row['tokens_per_s']:,.0f}"),
        ("gain", ratio("gain")),
        ("from T(m=1)", ratio("predicted_gain")),
        ("from own T", ratio("own_gain")),
    ),
    title="ping-pong: medians over decode steps; gain over m = 1",
)


# --- over slow links


def bench_over_links(
    model: Path, case: PingPongCase, shares: Sequence[float], micro_batches: Sequence[int], report: Report
) -> list[dict[str, Any]]:
    """On nodes of a box: rows by share of T_c in T_f and by m. `ResourceError` where no box can be made."""
    case.check(model, micro_batches)
    require_box("--shares")
    rows: list[dict[str, Any]] = []
    total = 1 + len(shares) * len(micro_batches)
    report(0, total)
    fast = measure_over_links(model, case, FAST_MBIT, 1)
    slower_s = max(fast.attention_s, fast.experts_s)
    for share in shares:
        mbit = case.one_way_bytes(model) * 8e-6 / (share * slower_s)
        results: list[MeasuredLayer] = []
        for m in micro_batches:
            report(1 + len(rows) + len(results), total)
            results.append(measure_over_links(model, case, mbit, m))
        rows += ping_pong_rows(results, share=share, mbit=mbit)
    return rows


def measure_over_links(model: Path, case: PingPongCase, mbit: float, micro_batches: int) -> MeasuredLayer:
    """One engine on node 0, expert workers on the others; the box is made anew: nothing is left of an earlier run."""
    cores = sorted(os.sched_getaffinity(0))
    with Box(num_nodes=1 + case.num_experts, mbit=mbit) as box:
        join = f"{box.address(0)}:{PORT}"
        env = {"ANTIPHON_JOIN_SECRET": SECRET}
        for node in range(1, 1 + case.num_experts):
            core = str(cores[node % len(cores)])
            worker = [*ANTIPHON, "worker", "--role", "experts", "--join", join]
            box.start(
                node, ["taskset", "-c", core, *worker], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        inside = {"model": str(model.resolve()), "case": asdict(case), "join": join, "micro_batches": micro_batches}
        engine = ["taskset", "-c", str(cores[0]), *python_module(__spec__.name, json.dumps(inside))]
        done = box.run(0, engine, timeout_s=TIMEOUT_S, env=env)
    if done.returncode != 0:
        raise ResourceError(f"the engine in the box failed: {done.stderr.strip()[-500:]}")
    return MeasuredLayer(**json.loads(done.stdout.splitlines()[-1]))


def run_inside(inside: dict[str, Any]) -> None:
    """What runs on node 0: the engine; prints its `MeasuredLayer`."""
    case = PingPongCase(**inside["case"])
    changes = {
        "join_address": inside["join"],
        "join_secret": SECRET.encode(),
        "joined_experts": case.num_experts,
    }
    print(json.dumps(asdict(measure_ping_pong(Path(inside["model"]), case, inside["micro_batches"], changes=changes))))


if __name__ == "__main__":
    run_inside(json.loads(sys.argv[1]))
