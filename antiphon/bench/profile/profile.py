"""`antiphon profile` without the command line: everything measured of this machine with one model, in three shapes.

- `LocalTimes`: the engine's own tables, which predict what it does here (`benchmarks/predict.py`)
- `Profile`: what the planner's cost model reads in place of its roofline (`cost.profile`)
- `ClusterSpec`: this machine as a cluster of one node, a device for each core (`this_machine`)
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from antiphon.base.processor import cpu_name
from antiphon.base.progress import Report
from antiphon.bench.profile.beside import NO_SLOWDOWNS, slowdowns
from antiphon.bench.profile.crew import Crew
from antiphon.bench.profile.effort import Effort
from antiphon.bench.profile.engine_turn import engine_turns
from antiphon.bench.profile.measure import (
    Bench,
    curve,
    exchange_times,
    limits_of,
    open_rigs,
    thread_times,
)
from antiphon.bench.quiet import FOREIGN_SHARE_LIMIT, CpuWatch
from antiphon.cost.local_times import EngineTimes, LocalTimes, ThreadTimes, flat
from antiphon.kernels.select import check_backend, resolve_device, resolve_dtype
from antiphon.models.config import load_model_spec, read_config
from antiphon.models.load import open_checkpoint

ALONE, APART, TOGETHER = "colocated", "1+1/m1", "2+1/m1"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to measure. `threads`: numbers of threads of a worker; empty: all cores, and half of them."""

    model: Path
    effort: Effort
    threads: tuple[int, ...] = ()
    max_rows: int = 256
    dtype: str = "auto"
    kernels: str = "auto"


def default_threads(num_cores: int) -> tuple[int, ...]:
    """A worker alone has all cores, one of two has half of them."""
    return tuple(sorted({num_cores, max(1, num_cores // 2)}, reverse=True))


def measure(wanted: Wanted, report: Report) -> LocalTimes:
    """Blocks for a minute or so. `UserError` if the model or the machine is at fault."""
    spec = load_model_spec(wanted.model)
    dtype = spec.dtype if wanted.dtype == "auto" else wanted.dtype
    check_backend(wanted.kernels, resolve_device("cpu", 0), resolve_dtype(dtype))
    checkpoint = open_checkpoint(wanted.model, spec)
    weight_bytes = sum(checkpoint.stored_bytes(name) for name in checkpoint.names)
    effort = wanted.effort.bounded(wanted.max_rows, spec.max_position)
    counter = _Counter(report)
    bench = Bench(wanted.model, spec, dtype, wanted.kernels, effort, counter.advance)
    threads = wanted.threads or default_threads(len(bench.cores))
    counter.total = _num_points(bench, len(threads))
    watch = CpuWatch()
    notes = []
    with Crew() as crew:
        first, second, opened = open_rigs(bench, crew, weight_bytes)
        by_threads = tuple(thread_times(bench, first, count) for count in threads)
        half = max(1, len(bench.cores) // 2)
        if second is None:
            notes.append("one worker only: no memory or no core for a second one, so nothing was timed beside another")
            second = crew.start("worker 1")
            beside = NO_SLOWDOWNS
        else:
            beside = slowdowns(bench, first, second, half)
        exchange = exchange_times(bench, first, second)
    engine = _engine_times(bench, min(by_threads, key=lambda each: each.num_threads))
    limits = limits_of(bench)
    foreign = watch.foreign_share()
    if foreign > FOREIGN_SHARE_LIMIT:
        notes.append(f"other programs used {foreign:.0%} of the CPU meanwhile: the times are too long by about as much")
    return LocalTimes(
        model=wanted.model.resolve().name,
        model_config=read_config(wanted.model),
        dtype=dtype,
        kernels=opened.kernels,
        cpu=cpu_name(),
        num_cores=len(bench.cores),
        threads=by_threads,
        slowdowns=beside,
        exchange=exchange,
        engine=engine,
        read_bytes_per_s={each.num_threads: each.read_bytes_per_s for each in limits.per_threads} if limits else {},
        gemm_flops_per_s={each.num_threads: each.gemm_flops_per_s for each in limits.per_threads} if limits else {},
        foreign_share=foreign,
        spread=median(bench.spreads) if bench.spreads else 0.0,
        notes=tuple(notes),
    )


class _Counter:
    """Counts measured points for the progress bar."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._done = 0
        self.total: int | None = None

    def advance(self) -> None:
        self._done += 1
        self._report(self._done, max(self._done, self.total or 0) or None)


def _num_points(bench: Bench, num_threads: int) -> int:
    effort = bench.effort
    return (
        1
        + num_threads * (len(bench.rows) + len(effort.prompts))
        + len(bench.beside_rows)
        + len(effort.exchange_rows)
        + (1 + 2 * effort.together) * len(effort.engine_rows)
    )


def _engine_times(bench: Bench, worker: ThreadTimes) -> EngineTimes:
    """`worker`: the times alone of one worker of two."""
    rows, steps = bench.effort.engine_rows, bench.effort.engine_steps
    model = Path(bench.model)
    alone = engine_turns(ALONE, model, rows, steps, bench.advance)
    apart, further, head_ratio = alone, flat(0.0), flat(1.0)
    if bench.effort.together:
        apart = engine_turns(APART, model, rows, steps, bench.advance)
        together = engine_turns(TOGETHER, model, rows, steps, bench.advance)
        further = curve({count: max(0.0, together[count].engine_s - apart[count].engine_s) for count in rows})
        head_ratio = curve(
            {count: max(1.0, apart[count].head_s / worker.head_s.value(count)) for count in rows}, may_fall=True
        )
    return EngineTimes(
        alone_s=curve({count: turn.engine_s for count, turn in alone.items()}),
        bookkeeping_s=curve({count: max(0.0, turn.bookkeeping_s) for count, turn in alone.items()}),
        apart_s=curve({count: turn.engine_s for count, turn in apart.items()}),
        apart_bookkeeping_s=curve({count: max(0.0, turn.bookkeeping_s) for count, turn in apart.items()}),
        apart_head_ratio=head_ratio,
        per_further_worker_s=further,
    )
