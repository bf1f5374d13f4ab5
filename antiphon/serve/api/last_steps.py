"""The last steps as bars: the workers' spans in the window of the steps of the one that stepped last.

Expert workers answer in the middle of a step, attention workers at its end. A step of which an expert worker has not
told all is left out. Replicas step each for itself, so the steps of one set the window; others' spans are cut to it.
"""

from collections.abc import Iterable, Mapping

from antiphon.serve.api.dashboard_reading import LastSteps, SpanKind, StepBounds, WorkerSpans
from antiphon.serve.worker.spans import ATTENTION, COMBINE, DISPATCH, EXPERTS, NAMES, REPLY, SAMPLE, STEP, Spans

_MAX_STEPS = 2
_KINDS: dict[int, SpanKind] = {
    ATTENTION: "attention",
    DISPATCH: "to experts",
    EXPERTS: "experts",
    COMBINE: "waiting",
    REPLY: "to attention",
    SAMPLE: "sampling",
}
_IN_ONE_WORKER: dict[int, SpanKind | None] = {DISPATCH: "experts", COMBINE: None}  # a replica computes both halves


def last_steps(spans: Mapping[str, Spans], now_ns: int) -> LastSteps | None:
    """None when no worker has finished a step. `now_ns` on the clock of the spans."""
    steppers = [recorded for recorded in spans.values() if STEP in recorded.name_index]
    if not steppers:
        return None
    bounds = _bounds(max(steppers, key=lambda recorded: max(end_ns for _, _, end_ns in _bounds(recorded))))
    shown = [each for each in bounds if _is_complete(each[0], spans)][-_MAX_STEPS:] or bounds[-1:]
    start_ns, end_ns = shown[0][1], shown[-1][2]
    workers = [_drawn(name, recorded, start_ns, end_ns) for name, recorded in sorted(spans.items())]
    return LastSteps(
        ended_s_ago=max(0.0, (now_ns - end_ns) * 1e-9),
        length_us=(end_ns - start_ns) / 1000,
        steps=[
            StepBounds(number=step, start_us=(start - start_ns) / 1000, length_us=(end - start) / 1000)
            for step, start, end in shown
        ],
        workers=[worker for worker in workers if worker.kinds],
        left_out=[],
    )


def _bounds(recorded: Spans) -> list[tuple[int, int, int]]:
    """(step, start, end) of each whole step, oldest first."""
    columns = zip(recorded.name_index, recorded.steps, recorded.starts_ns, recorded.ends_ns, strict=True)
    return [(step, start_ns, end_ns) for name, step, start_ns, end_ns in columns if name == STEP]


def _is_complete(step: int, spans: Mapping[str, Spans]) -> bool:
    """Every expert worker that tells of its work tells of all that attention workers got back in this step."""
    combined = _places(step, COMBINE, spans.values())
    experts = [recorded for recorded in spans.values() if EXPERTS in recorded.name_index]
    return all(combined <= _places(step, EXPERTS, [recorded]) for recorded in experts)


def _places(step: int, kind: int, spans: Iterable[Spans]) -> set[tuple[int, int]]:
    """(layer, micro-batch) of the step's spans of a kind."""
    return {
        (layer, micro_batch)
        for recorded in spans
        for name, its_step, layer, micro_batch in zip(
            recorded.name_index, recorded.steps, recorded.layers, recorded.micro_batches, strict=True
        )
        if (name, its_step) == (kind, step)
    }


def _drawn(name: str, recorded: Spans, start_ns: int, end_ns: int) -> WorkerSpans:
    """The spans inside the window, those at its edges cut."""
    assert not recorded.names or recorded.names == NAMES, "workers and engine are of one version"
    kinds = _KINDS | _IN_ONE_WORKER if name.startswith("replica") else _KINDS
    drawn = WorkerSpans(name=name, kinds=[], layers=[], micro_batches=[], rows=[], starts_us=[], lengths_us=[])
    for index, kind_index in enumerate(recorded.name_index):
        kind = kinds.get(kind_index)
        start = max(start_ns, recorded.starts_ns[index])
        end = min(end_ns, recorded.ends_ns[index])
        if kind is None or end <= start:
            continue
        drawn.kinds.append(kind)
        drawn.layers.append(recorded.layers[index])
        drawn.micro_batches.append(recorded.micro_batches[index])
        drawn.rows.append(recorded.rows[index])
        drawn.starts_us.append((start - start_ns) / 1000)
        drawn.lengths_us.append((end - start) / 1000)
    return drawn
