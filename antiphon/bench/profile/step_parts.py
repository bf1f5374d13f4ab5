"""Where the steps of a running engine spend their time, from its workers' spans, named as in `benchmarks/predict.py`.

Only steps count in which all requests decode: those with a worker's even share of them as rows.

A profile takes from a real engine over the model what the engine itself takes between two steps, and a worker beside
its kernels. The gap between the end of one step and the begin of the next is the engine's turn: the result on its way,
tokens committed and handed out, the next step planned, cut and sent. Nothing else is taken from this run: what the
kernels take is measured alone. Rejected: the same over a model too small to matter. Its steps leave the caches and the
cores to the engine, whose turn then takes half of what it takes between real steps.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median

from antiphon.base.errors import ResourceError, UserError
from antiphon.bench.serve import AntiphonEngine, WorkloadSize, make_workload, parse_contestant
from antiphon.models.config import load_model_spec
from antiphon.serve.worker.spans import ATTENTION, COMBINE, DISPATCH, EXPERTS, REPLY, SAMPLE, STEP, Spans
from antiphon.serve.worker_process import WorkerName

_PARTS = {"attention": (ATTENTION,), "experts": (DISPATCH,), "wait": (COMBINE,), "head": (SAMPLE,)}


def step_parts(spans: Mapping[WorkerName, Spans], concurrency: int) -> dict[str, float]:
    """Seconds of one step: medians over steps, means over workers.

    `layers` is attention, experts (apart: the dispatch to them) and waiting for them together; `t_a_s` and `t_e_s` are
    of one layer and micro-batch at an attention and an expert worker; not all calls of the exchange are in them."""
    attention = [each for name, each in spans.items() if name.role != "experts"]
    experts = [each for name, each in spans.items() if name.role == "experts"]
    share, odd = divmod(concurrency, max(1, len(attention)))
    parts: dict[str, list[float]] = {}
    t_a, t_e = [], []
    for each in attention:
        steps = steps_with(each, {share, share + bool(odd)})
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
    bounds: dict[int, list[tuple[int, int, int]]] = {}
    for spans in workers:
        for index, kind in enumerate(spans.name_index):
            if kind == STEP:
                step = (spans.rows[index], spans.starts_ns[index], spans.ends_ns[index])
                bounds.setdefault(spans.steps[index], []).append(step)
    whole = {step: times for step, times in bounds.items() if sum(count for count, _, _ in times) == rows}
    return [
        (min(begin for _, begin, _ in whole[step + 1]) - max(end for _, _, end in whole[step])) * 1e-9
        for step in sorted(whole)
        if step + 1 in whole
    ]


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
    for steps in attempts:
        engine.running.take_spans()
        size = WorkloadSize(concurrency, min(_PROMPT_TOKENS, vocab_size), steps)
        with suppress(UserError):  # never did all requests decode at once
            engine.steady_decode_tokens_per_s(make_workload(size, vocab_size))
        parts = step_parts(engine.running.take_spans(), concurrency)
        if parts.get("engine"):
            return parts
    raise ResourceError(
        f"{concurrency} requests never decoded together within {attempts[-1]} steps: other programs keep this machine "
        f"too busy to be measured, try again later"
    )
