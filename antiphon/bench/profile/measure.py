"""Measures one machine with one model: the order of things, and what becomes of the times.

1. one process, for each number of threads: decode steps over rows at two contexts, experts by how many a worker holds,
   prompts
2. two processes on different cores: the exchange between them; each beside the other is in `profile`
3. the machine's read bandwidth and products
4. an engine over the model: its own turn between two steps, and a worker's bookkeeping

Every figure is a median; `spread` says how far the middle half of its repetitions lie apart.
"""

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Literal, Self

from antiphon.base.allowance import allowance
from antiphon.base.errors import ResourceError, UserError
from antiphon.base.units import format_bytes
from antiphon.bench.harness.children import Child, Children, programs
from antiphon.bench.harness.limits import MachineLimits, measure_machine_limits
from antiphon.bench.profile.exchange import NUM_WARM, Rounds, Served, exchange_medians
from antiphon.bench.profile.rig import PartSeconds, RigProcess, RigWork
from antiphon.bench.serve import AntiphonEngine, WorkloadSize, make_workload, parse_contestant
from antiphon.cost.curves import Curve
from antiphon.cost.profile import ExchangeTimes, ThreadTimes
from antiphon.models.config import load_model_spec
from antiphon.serve.worker.spans import ATTENTION, COMBINE, DISPATCH, EXPERTS, REPLY, SAMPLE, STEP, Spans
from antiphon.serve.worker_handle import WorkerName
from antiphon.specs.model import ModelSpec

PROCESSES = "the profiler's process"  # begins their names
_CACHE_SHARE = 0.1  # of free memory, for the KV cache of a measuring process
_CACHE_MOST_BYTES = 1 << 30
Advance = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """`rows`: requests of a micro-batch; `prompts`: tokens of a prompt; `later_piece`: tokens of a piece of a prompt,
    and those before it; `contexts`: a short and a long one, in tokens; `beside_rows`: sizes at which two workers run
    beside each other, maybe none. Of training: `sequences` of a micro-batch, `training_steps` of each, `sum_bytes` that
    are summed over ranks. `point_s`: time for one figure. `together`: whether an engine of several workers is started,
    to see what each further one adds to the engine's turn. `apart`: whether attention and experts of a worker that
    has not all cores are timed apart, too. `host_requests` over HTTP at each of `host_streams` at once."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    prompts: tuple[int, ...] = (32, 128, 512, 2048)
    later_piece: tuple[int, int] = (2048, 2048)
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
    apart: bool = True

    def bounded(self, max_rows: int, max_context: int) -> Self:
        """The same within what is wanted and what the model's context allows. `UserError` where nothing is left."""
        if max_rows < 1:
            raise UserError(f"--max-rows is {max_rows}: it must be at least 1")
        if max_context < 2:
            raise UserError(f"the model's context is {max_context}: at least 2 tokens are needed to measure")
        short = min(self.contexts[0], max_context // 2)
        prompts = _up_to(self.prompts, max_context)
        piece = max((each for each in prompts if each <= min(self.later_piece[0], max_context // 2)), default=0)
        return replace(
            self,
            rows=_up_to(self.rows, max_rows),
            prompts=prompts,
            later_piece=(piece, min(self.later_piece[1], max_context - piece)),
            contexts=(short, max(short + 1, min(self.contexts[1], max_context))),
            beside_rows=_up_to(self.beside_rows, max_rows),
            engine_rows=_up_to(self.engine_rows, max_rows),
        )


def _up_to(sizes: tuple[int, ...], largest: int) -> tuple[int, ...]:
    """The sizes up to `largest`, and `largest` itself if any was above."""
    return sizes if max(sizes, default=0) <= largest else (*(size for size in sizes if size < largest), largest)


NORMAL = Effort()
QUICK = Effort(
    rows=(1, 4, 16),
    prompts=(16, 64),
    later_piece=(64, 448),
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
        sees_all = spec.attention.windowed_share == 0 and spec.attention.sparse is None
        fits = effort.later_piece[0] > 0 and sum(effort.later_piece) <= self.max_tokens
        self.later_piece = effort.later_piece if sees_all and fits else (0, 0)

    def open(self, handle: Child) -> None:
        """Order the model loaded; `Child.answer` waits for it."""
        longest = max(*self.effort.prompts, sum(self.later_piece))
        max_tokens = max(longest, *(self.long_context(rows) * rows for rows in self.rows))
        max_context = max(longest, *self.effort.contexts)
        handle.begin("open", self.model, self.dtype, self.kernels, max(self.rows), max_tokens, max_context)

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

    def held_counts(self, *, both_sides: bool) -> list[int]:
        """All experts on one worker, a half, a quarter. A worker that has attention, too, holds all, except on a
        machine of one core, whose workers all take turns in its caches."""
        num_experts = self.spec.router.num_experts
        if both_sides and (len(self.cores) > 1 or not self.effort.apart):
            return [num_experts]
        return sorted({num_experts, -(-num_experts // 2), -(-num_experts // 4)})


def start_rigs(crew: Children, names: Sequence[str]) -> list[Child]:
    """Processes that do the profiler's work."""
    return crew.start(names, [RigProcess] * len(names), programs())


def thread_times(bench: Bench, handle: Child, num_threads: int, *, both_sides: bool) -> ThreadTimes:
    """One worker with this many threads and no other worker beside it; `both_sides` as in `ThreadTimes`."""
    handle.ask("settle", num_threads, bench.cores[:num_threads])
    effort, spec = bench.effort, bench.spec
    short = effort.contexts[0]
    all_held = spec.router.num_experts
    kind: Literal["colocated", "attention"] = "colocated" if both_sides else "attention"
    attention, per_context, head, step = {}, {}, {}, {}
    experts: dict[int, dict[int, float]] = {held: {} for held in bench.held_counts(both_sides=both_sides)}
    for rows in bench.rows:
        near = bench.time(handle, RigWork(kind=kind, rows=rows, context=short))
        long = bench.long_context(rows)
        far = bench.time(handle, RigWork(kind="attention", rows=rows, context=long))
        alone = near if not both_sides else bench.time(handle, RigWork(kind="attention", rows=rows, context=short))
        attention[rows] = median(near.attention)
        per_context[rows] = max(0.0, median(far.attention) - median(alone.attention)) / (rows * (long - short))
        head[rows], step[rows] = median(near.head), median(near.step)
        for held, by_rows in experts.items():
            both = both_sides and held == all_held
            by_rows[rows] = median(near.experts) if both else bench.experts_s(handle, rows, held)
        bench.advance()
    prompt = {}
    for tokens in effort.prompts:
        first = bench.time(handle, RigWork(kind=kind, rows=1, prompt_tokens=tokens))
        prompt[tokens] = median(first.attention)
        for held, by_rows in experts.items() if tokens > max(bench.rows) else ():
            work = RigWork(kind="experts", rows=1, num_held=held, prompt_tokens=tokens)
            both = both_sides and held == all_held
            by_rows[tokens] = median((first if both else bench.time(handle, work)).experts)
        bench.advance()
    per_cached_s = None
    if (piece := bench.later_piece)[0]:
        work = RigWork(kind=kind, rows=1, prompt_tokens=piece[0], cached_tokens=piece[1])
        later_s = median(bench.time(handle, work).attention)
        per_cached_s = max(0.0, later_s - prompt[piece[0]]) / (piece[0] * piece[1])
    return ThreadTimes(
        num_threads=num_threads,
        base_context=short,
        attention_s=curve(attention),
        per_context_s=curve(per_context, may_fall=True),
        experts_s={held: curve(values) for held, values in experts.items()},
        head_s=curve(head),
        step_s=curve(step),
        prompt_attention_s=curve(prompt),
        per_cached_s=per_cached_s,
        both_sides=both_sides,
    )


def exchange_times(bench: Bench, attention: Child, experts: Child) -> ExchangeTimes:
    """Between two processes over shared memory, each on its core as in a disaggregated engine of two workers."""
    waiting = "spin" if len(bench.cores) >= 2 else "block"
    for handle, core in ((attention, bench.cores[0]), (experts, bench.cores[-1])):
        handle.ask("settle", 1, [core])
    secret = secrets.token_bytes(32)
    max_rows = max(bench.effort.exchange_rows)
    shared = (bench.model, bench.dtype, waiting, max_rows, secret)
    ticket = experts.ask("open_exchange", "experts", *shared)
    attention.ask("open_exchange", "attention", *shared)
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


def open_rigs(bench: Bench, crew: Children, weight_bytes: int) -> tuple[Child, Child, bool, str]:
    """Two processes, of which one has the model, and the other if it is wanted and memory and cores allow; whether it
    has; the name of their kernels."""
    needed = 1.2 * weight_bytes + _CACHE_MOST_BYTES
    free = allowance().memory.left_bytes
    if free < needed:
        raise ResourceError(
            f"{format_bytes(free)} of memory are free, measuring this model needs {format_bytes(needed)}: free some"
        )
    first, second = start_rigs(crew, ["worker 0", "worker 1"])
    bench.open(first)
    has_both = bool(bench.beside_rows) and len(bench.cores) > 1 and free > 2 * needed
    if has_both:
        bench.open(second)
    kernels: str = first.answer()
    if has_both:
        second.answer()
    bench.advance()
    return first, second, has_both, kernels


# --- where the steps of a running engine spend their time, from its workers' spans, named as in `benchmarks/predict.py`
#
# Only steps count in which all requests decode: those with all of them as rows, however workers share them, and where
# workers step each by itself those with a worker's even share.
#
# A profile takes from a real engine over the model what the engine itself takes between two steps, and a worker beside
# its kernels. The gap between the end of one step and the begin of the next is the engine's turn: the result on its
# way, tokens committed and handed out, the next step planned, cut and sent. Nothing else is taken from this run: what
# the kernels take is measured alone. Rejected: the same over a model too small to matter. Its steps leave the caches
# and the cores to the engine, whose turn then takes half of what it takes between real steps.


_PARTS = {"attention": (ATTENTION,), "experts": (DISPATCH,), "wait": (COMBINE,), "head": (SAMPLE,)}


def step_parts(spans: Mapping[WorkerName, Spans], concurrency: int) -> dict[str, float]:
    """Seconds of one step: medians over steps, means over workers.

    `layers` is attention, experts (apart: the dispatch to them) and waiting for them together; `t_a_s` and `t_e_s` are
    of one layer and micro-batch at an attention and an expert worker; not all calls of the exchange are in them."""
    attention = [each for name, each in spans.items() if name.role != "experts"]
    experts = [each for name, each in spans.items() if name.role == "experts"]
    share, odd = divmod(concurrency, max(1, len(attention)))
    of_all = set(sorted(_steps_of_all(attention, concurrency))[1:-1]) if experts else set()
    parts: dict[str, list[float]] = {}
    t_a, t_e = [], []
    for each in attention:
        steps = of_all if experts else steps_with(each, {share, share + bool(odd)})
        if not steps:
            continue
        own = {name: _per_step(each, kinds, steps) for name, kinds in _PARTS.items()}
        own["bookkeeping"] = _per_step(each, (STEP,), steps) - sum(own.values())
        for name, seconds in own.items():
            parts.setdefault(name, []).append(seconds)
        t_a += per_micro_batch(each, (ATTENTION, DISPATCH), steps)
        for worker in experts:
            t_e += per_micro_batch(worker, (EXPERTS, REPLY), steps)
    found = {name: fmean(values) for name, values in parts.items()}
    if not found:
        return {}
    found["layers"] = found["attention"] + found["experts"] + found["wait"]
    gaps = gaps_between_steps(attention, concurrency) if experts else gaps_between_steps(attention[:1], share)
    found["engine"] = median(gaps) if gaps else 0.0
    if experts:
        found |= {"t_a_s": median(t_a), "t_e_s": median(t_e) if t_e else 0.0}
    return found


def steps_with(spans: Spans, rows: Collection[int]) -> set[int]:
    """The steps of this many rows, the first and the last of them left out."""
    steps = [
        step
        for step, kind, count in zip(spans.steps, spans.name_index, spans.rows, strict=True)
        if kind == STEP and count in rows
    ]
    return set(steps[1:-1])


def seconds_by(spans: Spans, kinds: Collection[int], *columns: Sequence[int]) -> dict[tuple[int, ...], float]:
    """Seconds spent in `kinds`, by the values of these columns of the spans."""
    totals: dict[tuple[int, ...], float] = {}
    for kind, start, end, *key in zip(spans.name_index, spans.starts_ns, spans.ends_ns, *columns, strict=True):
        if kind in kinds:
            totals[tuple(key)] = totals.get(tuple(key), 0.0) + (end - start) * 1e-9
    return totals


def _per_step(spans: Spans, kinds: Collection[int], steps: Collection[int]) -> float:
    totals = seconds_by(spans, kinds, spans.steps)
    return median(totals.get((step,), 0.0) for step in steps)


def per_micro_batch(spans: Spans, kinds: Collection[int], steps: Collection[int]) -> list[float]:
    """Seconds spent in `kinds`, for each step, layer and micro-batch."""
    totals = seconds_by(spans, kinds, spans.steps, spans.layers, spans.micro_batches)
    return [seconds for (step, layer, _), seconds in totals.items() if step in steps and layer >= 0]


def gaps_between_steps(workers: Sequence[Spans], rows: int) -> list[float]:
    """From the last worker's end of a step to the first one's begin of the next, seconds, where both steps have `rows`
    rows over all workers (however they are shared out)."""
    whole = _steps_of_all(workers, rows)
    return [
        (min(begin for _, begin, _ in whole[step + 1]) - max(end for _, _, end in whole[step])) * 1e-9
        for step in sorted(whole)
        if step + 1 in whole
    ]


def _steps_of_all(workers: Sequence[Spans], rows: int) -> dict[int, list[tuple[int, int, int]]]:
    """The steps in which these workers together have `rows` rows: the rows, begin and end at each."""
    bounds: dict[int, list[tuple[int, int, int]]] = {}
    for spans in workers:
        for index, kind in enumerate(spans.name_index):
            if kind == STEP:
                step = (spans.rows[index], spans.starts_ns[index], spans.ends_ns[index])
                bounds.setdefault(spans.steps[index], []).append(step)
    return {step: times for step, times in bounds.items() if sum(count for count, _, _ in times) == rows}


_PROMPT_TOKENS = 4
_MORE = 4


def engine_turns(
    contestant: str, model: Path, rows: Sequence[int], num_steps: int, advance: Callable[[], None]
) -> dict[int, dict[str, float]]:
    """By requests running on one attention worker: parts of a step outside the layers, `engine` between the workers'
    steps, `bookkeeping` within them, and `head`, logits and sampling as they are within the engine. `advance` after
    each size."""
    spec = load_model_spec(model)
    workers = parse_contestant(contestant).num_attention
    tokens = min(spec.max_position, _PROMPT_TOKENS + _MORE * num_steps)
    engine = AntiphonEngine(contestant, model, max_concurrency=max(rows) * workers, max_tokens=tokens, trace=True)
    with engine:
        turns = {}
        for count in rows:
            turns[count] = _turn(engine, count * workers, (num_steps, tokens - _PROMPT_TOKENS), spec.vocab_size)
            advance()
        return turns


def _turn(engine: AntiphonEngine, concurrency: int, attempts: Sequence[int], vocab_size: int) -> dict[str, float]:
    """On a machine where others are busy, requests may arrive so slowly that more steps are needed."""
    reason = ""
    for steps in attempts:
        engine.running.take_spans()
        size = WorkloadSize(concurrency, min(_PROMPT_TOKENS, vocab_size), steps)
        try:
            engine.steady_decode_tokens_per_s(make_workload(size, vocab_size))
        except UserError as error:  # never did all requests decode at once, or the engine failed
            reason = f": {error}"
        parts = step_parts(engine.running.take_spans(), concurrency)
        if parts.get("engine"):
            return parts
    raise ResourceError(
        f"{concurrency} requests never decoded together within {attempts[-1]} steps{reason}; if other programs keep "
        f"this machine busy, try again later"
    )
