"""What taking attention and experts apart brings, and what the M2N library does (MegaScale-Infer 7.4).

Three measurements, all with the engine that serves:

- The ablation: replicas with everything, then the same processes apart over gloo, then over the M2N library, then with
  steps that begin each for itself. What differs from one to the next is one option of the engine; `tcp` stands beside
  `shm`, because gloo has only sockets.
- The sweep (Figure 13): A attention workers for one set of experts, each with a fixed slice of a core. So adding one
  adds hardware, although they share a machine. Throughput over the slices says which number pays most.
- With `--slow`, what a slow attention worker costs the others, for both ways to step: the rate of their requests alone,
  with all workers equal and with the first one at a part of its slice, in turns.

Rejected: the sweep with whole cores. With more workers than cores it would measure how they share them.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, get_args

from typer import Option

from antiphon.base.errors import ResourceError, UserError
from antiphon.base.progress import Report
from antiphon.bench.harness.columns import ContestColumns, UpTo, milliseconds, ratio, share
from antiphon.bench.harness.processes import limited, quota_unavailable
from antiphon.bench.serve import (
    AntiphonEngine,
    Say,
    WorkloadSize,
    bench_serve,
    check_context,
    make_workload,
    parse_contestant,
)
from antiphon.bench.serving_peers import Workload
from antiphon.models.config import load_model_spec
from antiphon.serve.config import Stepping
from antiphon.serve.worker_handle import WorkerName
from antiphon.specs.plan import MAX_ATTENTION_WORKERS

_LEAST_SLICE = 0.02
STEPS: dict[str, dict[str, str]] = {  # what of `ServeConfig` makes it; the first one has another layout
    "together": {},
    "apart, gloo": {"exchange_library": "gloo"},
    "apart, M2N over tcp": {"exchange": "tcp"},
    "apart, M2N over shm": {},
    "apart, each for itself": {"stepping": "free"},
}


@dataclass(frozen=True, kw_only=True)
class ApartCase:
    """What `antiphon bench apart` may be asked for. `slice_cores`, `expert_cores`, `slow`: of the sweep."""

    layout: Annotated[str, Option(metavar="L", help="Attention and experts apart, as bench serve has it.")] = "1+1/m2"
    together: Annotated[
        str | None, Option(metavar="L", show_default="as many replicas", help="What they are compared with.")
    ] = None
    requests: Annotated[int, Option(metavar="N", help="At once; sweep: for each attention worker."), UpTo(65_536)] = 64
    input_tokens: Annotated[int, Option(metavar="N", help="Prompt length."), UpTo(1_000_000)] = 128
    output_tokens: Annotated[int, Option(metavar="N", help="Tokens of a request."), UpTo(65_536)] = 64
    rounds: Annotated[int, Option(metavar="N", help="Repetitions of each."), UpTo(1000)] = 3
    slice_cores: Annotated[float, Option("--slice", metavar="X", help="Sweep: cores of an attention worker.")] = 0.1
    expert_cores: Annotated[float, Option("--expert-slice", metavar="X", help="Sweep: cores of the experts.")] = 0.5
    slow: Annotated[
        float | None, Option(metavar="X", show_default="none", help="Sweep: the first one has X of its slice.")
    ] = None

    def check_slices(self) -> None:
        """`UserError` for parts of a core that are none; `ResourceError` where none can be set aside."""
        for option, cores in (("--slice", self.slice_cores), ("--expert-slice", self.expert_cores)):
            if not _LEAST_SLICE <= cores <= 1:
                raise UserError(f"{option} is {cores:g}: it must be {_LEAST_SLICE} to 1 of a core")
        if self.slow is not None and not _LEAST_SLICE / self.slice_cores <= self.slow <= 1:
            least = _LEAST_SLICE / self.slice_cores
            raise UserError(f"--slow is {self.slow:g}: it must be {least:.2g} to 1 of --slice {self.slice_cores:g}")
        if reason := quota_unavailable():
            raise ResourceError(f"--attention sets slices of cores aside: {reason}")

    def engine(self, model: Path, layout: str, requests: int, **changes: Any) -> AntiphonEngine:
        """An engine with room for all requests at once; a thread for each worker."""
        tokens = self.input_tokens + self.output_tokens
        return AntiphonEngine(
            layout, model, max_concurrency=requests, max_tokens=tokens, threads=1, changes=changes or None
        )


def bench_ablation(model: Path, case: ApartCase, say: Say) -> list[dict[str, Any]]:
    """A row for each of `STEPS` whose engine did not fail, with its rate over that of the step before."""
    check_context(model, case.input_tokens, case.output_tokens)
    apart = parse_contestant(case.layout, "--layout")
    if apart.layout != "disaggregated":
        raise UserError(f"--layout {case.layout} has attention and experts together: write for example 1+1/m2")
    count = apart.num_attention + apart.num_experts
    together = (f"colocated*{count}" if count > 1 else "colocated") if case.together is None else case.together
    parse_contestant(together, "--together")
    engines = {
        name: case.engine(model, case.layout if number else together, case.requests, **changes)
        for number, (name, changes) in enumerate(STEPS.items())
    }
    if engines["together"].choice.layout == "disaggregated":
        raise UserError(f"--together {together} has attention and experts apart: write for example colocated*2 or 2*1")
    for name, engine in engines.items():
        engine.name = name
    size = WorkloadSize(case.requests, case.input_tokens, case.output_tokens)
    rows, _ = bench_serve(model, list(engines.values()), [size], max_rounds=case.rounds, say=say)
    compare_steps(rows)
    for row in rows:
        row["layout_text"] = together if row["engine"] == "together" else case.layout
    return rows


def compare_steps(rows: list[dict[str, Any]]) -> None:
    """Each row's rate over that of the step before; None for the first, and where the step before failed."""
    rates = {row["engine"]: row["output_tokens_per_s"] for row in rows}
    before = dict(pairwise(reversed(list(STEPS))))
    for row in rows:
        rate = rates.get(before.get(row["engine"], ""))
        row["over_the_row_before"] = row["output_tokens_per_s"] / rate if rate else None


def check_steps(rows: list[dict[str, Any]]) -> None:
    """`ResourceError` if a step has no row: its engine said why when it failed."""
    there = {row["engine"] for row in rows}
    if missing := [name for name in STEPS if name not in there]:
        raise ResourceError(f"no figure of {' and '.join(missing)}: what failed is said above")


ABLATION = ContestColumns(
    (
        ("", "engine"),
        ("layout", "layout_text"),
        ("out tok/s", lambda row: f"{row['output_tokens_per_s']:,.0f}"),
        ("over the row before", ratio("over_the_row_before")),
        ("between tokens, ms", milliseconds("itl_s_median")),
        ("p99", milliseconds("itl_s_p99")),
        ("foreign", share("foreign_cpu_share")),
    ),
    title="the same requests together, apart over gloo, apart over M2N",
)


def bench_sweep(model: Path, case: ApartCase, counts: Sequence[int], report: Report) -> list[dict[str, Any]]:
    """A row for each number of attention workers. `ResourceError` where no part of a core can be set aside."""
    check_context(model, case.input_tokens, case.output_tokens)
    for count in counts:
        if not 1 <= count <= MAX_ATTENTION_WORKERS:
            raise UserError(f"--attention has {count}: it must be 1 to {MAX_ATTENTION_WORKERS}")
    case.check_slices()
    rows = []
    for number, count in enumerate(counts):
        report(number, len(counts))
        rows.append(_swept(model, case, count))
    first = rows[0]
    for row in rows:
        row["gain"] = row["output_tokens_per_s"] / first["output_tokens_per_s"]
        row["gain_per_core"] = row["output_tokens_per_s_per_core"] / first["output_tokens_per_s_per_core"]
    return rows


@contextmanager
def _in_slices(
    model: Path, case: ApartCase, count: int, *, first_sliced: int = 0, **changes: Any
) -> Iterator[tuple[AntiphonEngine, Workload]]:
    """An engine with `count` attention workers whose caches have the prompts; each process is in its slice, but for the
    attention workers before `first_sliced`."""
    requests, micro_batches = count * case.requests, parse_contestant(case.layout, "--layout").num_micro_batches
    size = WorkloadSize(requests, case.input_tokens, case.output_tokens)
    workload = make_workload(size, load_model_spec(model).vocab_size)
    with (
        case.engine(model, f"{count}+1/m{micro_batches}", requests, **changes) as engine,
        ExitStack() as stack,
    ):
        for index in range(first_sliced, count):
            pid = engine.running.worker_pid(WorkerName("attention", index))
            stack.enter_context(limited(pid, case.slice_cores))
        stack.enter_context(limited(engine.running.worker_pid(WorkerName("experts", 0)), case.expert_cores))
        engine.fill_prefix_cache(workload)
        yield engine, workload


def _swept(model: Path, case: ApartCase, count: int) -> dict[str, Any]:
    """One engine with `count` attention workers, each process in its slice."""
    requests = count * case.requests
    with _in_slices(model, case, count) as (engine, workload):
        rates = [engine.steady_decode_tokens_per_s(workload) for _ in range(case.rounds)]
        stats = engine.running.stats()
    cores = count * case.slice_cores + case.expert_cores
    rate = median(rates)
    return {
        "attention": count,
        "requests": requests,
        "output_tokens_per_s": rate,
        "tpot_s": requests / rate,
        "cores": cores,
        "output_tokens_per_s_per_core": rate / cores,
        "attention_idle_ratio": stats.attention_idle_ratio,
        "expert_idle_ratio": stats.expert_idle_ratio,
    }


SWEEP = ContestColumns(
    (
        ("attention workers", "attention"),
        ("requests", "requests"),
        ("tok/s", lambda row: f"{row['output_tokens_per_s']:,.0f}"),
        ("gain", ratio("gain")),
        ("per token, ms", milliseconds("tpot_s")),
        ("cores", lambda row: f"{row['cores']:.2g}"),
        ("gain per core", ratio("gain_per_core")),
        ("attention waits", share("attention_idle_ratio")),
        ("experts idle", share("expert_idle_ratio")),
    ),
    title="attention workers for one set of experts, each in a slice of a core",
)


def bench_slow_worker(model: Path, case: ApartCase, count: int, report: Report) -> list[dict[str, Any]]:
    """A row for each way to step: the rate of all but the first of `count` attention workers, while that one has all
    of its slice, and while it has `case.slow` of it."""
    assert case.slow is not None, "the other measurement is the sweep"
    check_context(model, case.input_tokens, case.output_tokens)
    if not 2 <= count <= MAX_ATTENTION_WORKERS:
        raise UserError(f"--attention is {count} with --slow: one is slow and others are not, so 2 or more")
    case.check_slices()
    ways, rows = get_args(Stepping), []
    for number, stepping in enumerate(ways):
        report(number, len(ways))
        rows.append(_with_slow_worker(model, case, count, stepping))
    return rows


def _with_slow_worker(model: Path, case: ApartCase, count: int, stepping: Stepping) -> dict[str, Any]:
    requests = count * case.requests
    first, *others = (WorkerName("attention", index) for index in range(count))
    rates: dict[float, list[float]] = {1.0: [], case.slow or 1.0: []}
    with _in_slices(model, case, count, first_sliced=1, stepping=stepping) as (engine, workload):
        pid = engine.running.worker_pid(first)
        for _ in range(case.rounds):
            for part, measured in rates.items():
                with limited(pid, part * case.slice_cores):
                    measured.append(engine.steady_decode_tokens_per_s(workload, workers=others))
    equal, slowed = (median(rates[part]) for part in (1.0, case.slow or 1.0))
    return {
        "stepping": stepping,
        "attention": count,
        "requests": requests,
        "slow": case.slow,
        "others_tokens_per_s": equal,
        "others_tokens_per_s_beside_slow": slowed,
        "others_keep": slowed / equal,
    }


SLOW_WORKER = ContestColumns(
    (
        ("--stepping", "stepping"),
        ("attention workers", "attention"),
        ("requests", "requests"),
        ("others, tok/s", lambda row: f"{row['others_tokens_per_s']:,.0f}"),
        ("beside a slow one", lambda row: f"{row['others_tokens_per_s_beside_slow']:,.0f}"),
        ("they keep", share("others_keep")),
    ),
    title="requests of the other attention workers, each in a slice of a core, with the first one in part of its slice",
)
