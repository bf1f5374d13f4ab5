"""Measures one machine with one model: the order of things, and what becomes of the times.

1. one process, for each number of threads: decode steps over rows at two contexts, experts by how many a worker holds,
   prompts
2. two processes on different cores: the exchange between them; each beside the other is in `profile`
3. the machine's read bandwidth and products; the engine's own turn is in `step_parts`

Every figure is a median; `spread` says how far the middle half of its repetitions lie apart.
"""

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Literal, Self

from antiphon.base.allowance import allowance
from antiphon.base.errors import ResourceError, UserError
from antiphon.base.units import format_bytes
from antiphon.bench.harness.children import Child, Children, programs
from antiphon.bench.harness.limits import MachineLimits, measure_machine_limits
from antiphon.bench.profile.exchange import NUM_WARM, ExchangeOrder, Rounds, Served, exchange_medians
from antiphon.bench.profile.rig import PartSeconds, RigOrder, RigProcess, RigWork
from antiphon.cost.curves import Curve
from antiphon.cost.profile import ExchangeTimes, ThreadTimes
from antiphon.specs.model import ModelSpec

PROCESSES = "the profiler's process"  # begins their names
_CACHE_SHARE = 0.1  # of free memory, for the KV cache of a measuring process
_CACHE_MOST_BYTES = 1 << 30
Advance = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """`rows`: requests of a micro-batch; `prompts`: tokens of a prompt; `contexts`: a short and a long one, in tokens;
    `beside_rows`: sizes at which two workers run beside each other. Of training: `sequences` of a micro-batch,
    `training_steps` of each, `sum_bytes` that are summed over ranks. `point_s`: time for one figure. `together`:
    whether an engine of several workers is started, to see what each further one adds to the engine's turn.
    `host_requests` over HTTP at each of `host_streams` at once."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    prompts: tuple[int, ...] = (32, 128, 512, 2048)
    contexts: tuple[int, int] = (64, 512)
    beside_rows: tuple[int, ...] = (1, 8, 32, 128)
    exchange_rows: tuple[int, ...] = (1, 8, 32, 128, 512)
    engine_rows: tuple[int, ...] = (1, 8, 32, 128)
    sequences: tuple[int, ...] = (1, 4, 8)
    sum_bytes: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24)
    training_steps: int = 4
    point_s: float = 0.25
    min_repetitions: int = 3
    exchange_rounds: int = 20
    engine_steps: int = 24
    host_requests: int = 96
    host_streams: tuple[int, ...] = (1, 8, 32)
    limit_passes: int = 3
    together: bool = True

    def bounded(self, max_rows: int, max_context: int) -> Self:
        """The same within what is wanted and what the model's context allows. `UserError` where nothing is left."""
        if max_rows < 1:
            raise UserError(f"--max-rows is {max_rows}: it must be at least 1")
        if max_context < 2:
            raise UserError(f"the model's context is {max_context}: at least 2 tokens are needed to measure")
        short = min(self.contexts[0], max_context // 2)
        return replace(
            self,
            rows=_up_to(self.rows, max_rows),
            prompts=_up_to(self.prompts, max_context),
            contexts=(short, max(short + 1, min(self.contexts[1], max_context))),
            beside_rows=_up_to(self.beside_rows, max_rows),
            engine_rows=_up_to(self.engine_rows, max_rows),
        )


def _up_to(sizes: tuple[int, ...], largest: int) -> tuple[int, ...]:
    """The sizes up to `largest`, and `largest` itself if any was above."""
    return sizes if sizes[-1] <= largest else (*(size for size in sizes if size < largest), largest)


NORMAL = Effort()
QUICK = Effort(
    rows=(1, 4, 16),
    prompts=(16, 64),
    contexts=(16, 64),
    beside_rows=(1, 16),
    exchange_rows=(1, 32),
    engine_rows=(1, 8),
    sequences=(1, 2),
    sum_bytes=(1 << 10, 1 << 18, 1 << 22),
    training_steps=2,
    point_s=0.02,
    min_repetitions=3,
    exchange_rounds=5,
    engine_steps=12,
    host_requests=48,
    host_streams=(1, 8),
    limit_passes=1,
    together=False,
)


def curve(values: dict[int, float], *, may_fall: bool = False) -> Curve:
    """From values by size."""
    sizes = sorted(values)
    return Curve(tuple(map(float, sizes)), tuple(values[size] for size in sizes), may_fall)


class Bench:
    """What all measurements of one model share: sizes, processes, and the spread of everything measured so far."""

    def __init__(
        self, model: Path, spec: ModelSpec, dtype: str, kernels: str, effort: Effort, advance: Advance
    ) -> None:
        self.model = str(model)
        self.spec = spec
        self.dtype = dtype
        self.kernels = kernels
        self.effort = effort
        self.advance = advance
        self.cores = allowance().cores
        self.spreads: list[float] = []
        itemsize = 4 if dtype == "float32" else 2
        budget = min(_CACHE_MOST_BYTES, int(allowance().memory.left_bytes * _CACHE_SHARE))
        self.max_tokens = budget // spec.kv_bytes_per_token(itemsize)
        short = effort.contexts[0]
        largest = max((rows for rows in effort.rows if rows * short <= self.max_tokens), default=0)
        if not largest:
            raise ResourceError(
                f"{format_bytes(budget)} of memory hold {self.max_tokens} cached tokens of this model, "
                f"{short} are needed: free some memory"
            )
        self.rows = [rows for rows in effort.rows if rows <= largest]
        self.beside_rows = [rows for rows in effort.beside_rows if rows <= largest]

    def open(self, handle: Child) -> None:
        """Order the model loaded; `Child.answer` waits for it."""
        largest = max(self.long_context(rows) * rows for rows in self.rows)
        handle.begin(
            "open",
            RigOrder(
                model=self.model,
                dtype=self.dtype,
                kernels=self.kernels,
                max_rows=max(self.rows),
                max_tokens=max(largest, *self.effort.prompts),
                max_context=max(*self.effort.contexts, *self.effort.prompts),
            ),
        )

    def long_context(self, rows: int) -> int:
        """The longer of the two contexts at which this many rows are measured: what the cache holds of what is
        wanted."""
        return max(self.effort.contexts[0] + 1, min(self.effort.contexts[1], self.max_tokens // rows))

    def time(self, handle: Child, work: RigWork) -> PartSeconds:
        times: PartSeconds = handle.ask("time", work, self.effort.point_s, self.effort.min_repetitions)
        for part in (times.attention, times.experts):
            if len(part) > 3:
                low, _, high = quantiles(part, n=4)
                self.spreads.append((high - low) / median(part))
        return times

    def experts_s(self, handle: Child, rows: int, num_held: int) -> float:
        work = RigWork(kind="experts", rows=rows, context=self.effort.contexts[0], num_held=num_held)
        return median(self.time(handle, work).experts)

    def held_counts(self, num_threads: int) -> list[int]:
        """All experts on one worker, a half, a quarter. A worker with all of several cores is alone and holds all."""
        num_experts = self.spec.router.num_experts
        if num_threads == len(self.cores) > 1:
            return [num_experts]
        return sorted({num_experts, -(-num_experts // 2), -(-num_experts // 4)})


def start_rigs(crew: Children, names: Sequence[str]) -> list[Child]:
    """Processes that do the profiler's work."""
    return crew.start(names, [RigProcess] * len(names), programs())


def thread_times(bench: Bench, handle: Child, num_threads: int) -> ThreadTimes:
    """One worker with this many threads and no other worker beside it. With all cores it is the colocated worker, whose
    attention and experts take turns in the caches; with fewer, each is timed alone, as when the other is somewhere
    else."""
    everything = num_threads == len(bench.cores)
    handle.ask("settle", num_threads, bench.cores[:num_threads])
    effort, spec = bench.effort, bench.spec
    short = effort.contexts[0]
    all_held = spec.router.num_experts
    attention, per_context, head, step = {}, {}, {}, {}
    experts: dict[int, dict[int, float]] = {held: {} for held in bench.held_counts(num_threads)}
    for rows in bench.rows:
        near = bench.time(handle, RigWork(kind="colocated" if everything else "attention", rows=rows, context=short))
        long = bench.long_context(rows)
        far = bench.time(handle, RigWork(kind="attention", rows=rows, context=long))
        alone = near if not everything else bench.time(handle, RigWork(kind="attention", rows=rows, context=short))
        attention[rows] = median(near.attention)
        per_context[rows] = max(0.0, median(far.attention) - median(alone.attention)) / (rows * (long - short))
        head[rows], step[rows] = median(near.head), median(near.step)
        for held, by_rows in experts.items():
            in_turn = everything and held == all_held
            by_rows[rows] = median(near.experts) if in_turn else bench.experts_s(handle, rows, held)
        bench.advance()
    prompt = {}
    for tokens in effort.prompts:
        work = RigWork(kind="attention", rows=1, prompt_tokens=tokens)
        prompt[tokens] = median(bench.time(handle, work).attention)
        for held, by_rows in experts.items() if tokens > max(bench.rows) else ():
            work = RigWork(kind="experts", rows=1, num_held=held, prompt_tokens=tokens)
            by_rows[tokens] = median(bench.time(handle, work).experts)
        bench.advance()
    return ThreadTimes(
        num_threads=num_threads,
        base_context=short,
        attention_s=curve(attention),
        per_context_s=curve(per_context, may_fall=True),
        experts_s={held: curve(values) for held, values in experts.items()},
        head_s=curve(head),
        step_s=curve(step),
        prompt_attention_s=curve(prompt),
    )


def exchange_times(bench: Bench, attention: Child, experts: Child) -> ExchangeTimes:
    """Between two processes over shared memory, each on its core as in a disaggregated engine of two workers."""
    waiting = "spin" if len(bench.cores) >= 2 else "block"
    for handle, core in ((attention, bench.cores[0]), (experts, bench.cores[-1])):
        handle.ask("settle", 1, [core])
    secret = secrets.token_bytes(32)
    max_rows = max(bench.effort.exchange_rows)

    def opening(role: Literal["attention", "experts"]) -> ExchangeOrder:
        return ExchangeOrder(
            role=role, model=bench.model, dtype=bench.dtype, waiting=waiting, max_rows=max_rows, secret=secret
        )

    ticket = experts.ask("open_exchange", opening("experts"))
    attention.ask("open_exchange", opening("attention"))
    experts.ask("join_exchange", ticket)
    attention.ask("join_exchange", ticket)
    rounds: dict[int, Rounds] = {}
    for rows in bench.effort.exchange_rows:
        rounds[rows] = attention.ask("time_exchange", rows, bench.effort.exchange_rounds)
        bench.advance()
    served: Served = experts.ask("stop_exchange")
    attention.ask("stop_exchange")
    medians, first = {}, 0
    for rows, sent in rounds.items():
        message = {"message_bytes": float(sent.message_bytes)}
        medians[rows] = exchange_medians(sent, served, first + NUM_WARM) | message
        first += NUM_WARM + len(sent.dispatch_ns)
    names = [each.name for each in fields(ExchangeTimes)]
    return ExchangeTimes(**{name: curve({rows: each[name] for rows, each in medians.items()}) for name in names})


def limits_of(bench: Bench) -> MachineLimits | None:
    """Read bandwidth and products by threads; None where there is no memory for its buffer."""
    with suppress(RuntimeError, MemoryError):
        return measure_machine_limits(len(bench.cores), num_passes=bench.effort.limit_passes)
    return None


def open_rigs(bench: Bench, crew: Children, weight_bytes: int) -> tuple[Child, Child | None, str]:
    """One process with the model, and a second one if memory and cores allow; both load at the same time; the
    name of their kernels."""
    needed = 1.2 * weight_bytes + _CACHE_MOST_BYTES
    free = allowance().memory.left_bytes
    if free < needed:
        raise ResourceError(
            f"{format_bytes(free)} of memory are free, measuring this model needs {format_bytes(needed)}: free some"
        )
    first = start_rigs(crew, ["worker 0"])[0]
    bench.open(first)
    second = None
    if len(bench.cores) > 1 and free > 2 * needed:
        second = start_rigs(crew, ["worker 1"])[0]
        bench.open(second)
    kernels: str = first.answer()
    if second is not None:
        second.answer()
    bench.advance()
    return first, second, kernels
