"""Where the steps of a running engine spend their time, from its workers' spans, named as in `benchmarks/predict.py`.

Only steps count in which all requests decode: those with a worker's even share of them as rows.
"""

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, median

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
        steps = _steps_with(each, {share, share + bool(odd)})
        if not steps:
            continue
        own = {name: _per_step(each, kinds, steps) for name, kinds in _PARTS.items()}
        own["bookkeeping"] = _per_step(each, (STEP,), steps) - sum(own.values())
        for name, seconds in own.items():
            parts.setdefault(name, []).append(seconds)
        t_a += _per_micro_batch(each, (ATTENTION, DISPATCH), steps)
        for worker in experts:
            t_e += _per_micro_batch(worker, (EXPERTS, REPLY), steps)
    found = {name: fmean(values) for name, values in parts.items()}
    if not found:
        return {}
    found["layers"] = found["attention"] + found["experts"] + found["wait"]
    gaps = gaps_between_steps(attention, concurrency) if experts else gaps_between_steps(attention[:1], share)
    found["engine"] = median(gaps) if gaps else 0.0
    if experts:
        found |= {"t_a_s": median(t_a), "t_e_s": median(t_e) if t_e else 0.0}
    return found


def _steps_with(spans: Spans, rows: Collection[int]) -> set[int]:
    """The steps of so many rows, the first and the last of them left out."""
    steps = [
        step
        for step, kind, count in zip(spans.steps, spans.name_index, spans.rows, strict=True)
        if kind == STEP and count in rows
    ]
    return set(steps[1:-1])


def _per_step(spans: Spans, kinds: Collection[int], steps: Collection[int]) -> float:
    totals = dict.fromkeys(steps, 0.0)
    for index, kind in enumerate(spans.name_index):
        if kind in kinds and spans.steps[index] in totals:
            totals[spans.steps[index]] += (spans.ends_ns[index] - spans.starts_ns[index]) * 1e-9
    return median(totals.values())


def _per_micro_batch(spans: Spans, kinds: Collection[int], steps: Collection[int]) -> list[float]:
    totals: dict[tuple[int, int, int], float] = {}
    for index, kind in enumerate(spans.name_index):
        if kind in kinds and spans.steps[index] in steps and spans.layers[index] >= 0:
            key = (spans.steps[index], spans.layers[index], spans.micro_batches[index])
            totals[key] = totals.get(key, 0.0) + (spans.ends_ns[index] - spans.starts_ns[index]) * 1e-9
    return list(totals.values())


def gaps_between_steps(workers: Sequence[Spans], rows: int) -> list[float]:
    """From the last worker's end of a step to the first one's begin of the next, seconds, where both steps have `rows`
    rows over all workers (however they are dealt)."""
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
