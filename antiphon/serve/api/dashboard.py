"""What `/dashboard/data` answers, one reading of everything that the page and `antiphon top` show, and how it is made:
the engine's counters a second apart, its last steps, its events. Series and spans are parallel lists, because a name
for each number would be most of the bytes.

The server samples the counters once a second, so that the page shows the last minutes as soon as it is opened. All who
look share a reading that is at most `_FRESH_S` old: ten open pages cost the workers as much as one.

The last steps are bars: the workers' spans in the window of the steps of the one that stepped last.
Expert workers answer in the middle of a step, attention workers at its end. A step that an expert worker has not
reported in full is left out. Replicas and instances step each for itself, so the steps of one set the window; others'
spans are cut to it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from antiphon import __version__
from antiphon.serve.api.metrics import ServerMetrics
from antiphon.serve.engine_api import AsyncEngine, EngineStats, ShownEvent, ShownPool
from antiphon.serve.worker.spans import (
    ATTENTION,
    COMBINE,
    DISPATCH,
    EXPERTS,
    HAND_OVER,
    NAMES,
    REPLY,
    SAMPLE,
    STEP,
    Spans,
)

SpanKind = Literal["attention", "to experts", "experts", "waiting", "to attention", "to decode", "sampling"]
_HISTORY_S = 300
_FRESH_S = 0.5
_NUM_STEPS = 3  # one more than is drawn: workers answer while the last one runs
_PATIENCE_S = 3.0  # with workers that are asked for their last steps
_MAX_STEPS = 2
_KINDS: dict[int, SpanKind] = {
    ATTENTION: "attention",
    DISPATCH: "to experts",
    EXPERTS: "experts",
    COMBINE: "waiting",
    REPLY: "to attention",
    HAND_OVER: "to decode",
    SAMPLE: "sampling",
}
_IN_ONE_WORKER: dict[int, SpanKind | None] = {DISPATCH: "experts", COMBINE: None}  # a replica computes both halves


class WorkerState(BaseModel):
    name: str
    state: str = Field(description="`ready`, or why it cannot compute now.")


class Now(BaseModel):
    """Counters are totals since the start. Shares are 0 to 1; null where there is nothing to share."""

    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage_ratio: float
    prefix_cache_hit_ratio: float | None
    attention_idle_ratio: float
    expert_idle_ratio: float | None = Field(description="Null where experts have no workers of their own.")
    num_steps: int
    num_preemptions: int
    num_worker_restarts: int
    num_placement_changes: int


class ShownHandovers(BaseModel):
    """Prompts that prefill workers computed, since the start."""

    num_done: int
    num_failed: int
    num_recomputed: int = Field(description="Prompts that a decode worker computed after all.")


class History(BaseModel):
    """The last minutes, a value a second, oldest first. Rates are means between two values."""

    ago_s: list[float]
    generation_tokens_per_s: list[float]
    prompt_tokens_per_s: list[float]
    answers_per_s: list[float]
    num_requests_running: list[int]
    num_requests_waiting: list[int]
    attention_idle_ratio: list[float]
    expert_idle_ratio: list[float]
    exposed_ratio: list[float] = Field(
        description="Share of the time in which an attention worker waited while no expert computed for it."
    )


class WorkerSpans(BaseModel):
    """What one worker did, a list for each property."""

    name: str
    kinds: list[SpanKind]
    layers: list[int] = Field(description="-1: no layer's.")
    micro_batches: list[int]
    rows: list[int]
    starts_us: list[float]
    lengths_us: list[float]


class StepBounds(BaseModel):
    number: int
    start_us: float
    length_us: float


class LastSteps(BaseModel):
    """The steps that ended last, of the worker that stepped last; times count from the first one's begin."""

    ended_s_ago: float
    length_us: float
    steps: list[StepBounds]
    workers: list[WorkerSpans]
    left_out: list[str] = Field(description="Workers without spans: too many to draw, elsewhere, or silent.")


class WorkerLoad(BaseModel):
    """An expert worker, the experts of a layer that it holds, and how many rows each of them had lately."""

    name: str
    experts: list[int]
    rows: list[int]


class PhaseLoad(BaseModel):
    """Rows that each expert of a layer had lately, by expert, and how uneven they are."""

    phase: Literal["prefill", "decode"]
    rows: list[int]
    largest_share: float = Field(description="Of the most popular expert, times the mean of all.")


class LayerLoad(BaseModel):
    layer: int
    balancedness: float = Field(description="Mean / maximum rows of an expert worker; 1 is perfect balance.")
    workers: list[WorkerLoad]
    phases: list[PhaseLoad] = Field(
        default=[], description="Rows of prompts and rows of answers; empty without prompts."
    )


class DashboardReading(BaseModel):
    version: str
    model: str
    layout: str
    num_micro_batches: int
    time_s: float = Field(description="Unix time of the reading.")
    up_s: float
    status: str
    healthy: bool
    workers: list[WorkerState]
    now: Now
    pools: list[ShownPool] = Field(default=[], description="Empty unless prefill and decode are apart.")
    handovers: ShownHandovers | None = None
    history: History
    last_steps: LastSteps | None = Field(description="Null before the first step.")
    load: list[LayerLoad]
    events: list[ShownEvent]


class Dashboard:
    """Used from the event loop's thread only."""

    def __init__(self, engine: AsyncEngine, metrics: ServerMetrics, model_name: str) -> None:
        self._engine = engine
        self._metrics = metrics
        self._model_name = model_name
        self._started_s = time.monotonic()
        self._counted: tuple[float, dict[str, float]] | None = None  # the last counters, and when they were taken down
        self._history: deque[dict[str, float]] = deque(maxlen=_HISTORY_S)  # values of a `History`, and their time
        self._lock = asyncio.Lock()
        self._last_steps: LastSteps | None = None
        self._stepped_s = 0.0  # when the last steps were over
        self._reading = b""
        self._read_s = 0.0

    def sample(self) -> None:
        """Take the counters down, and what became of them since the last time. To be called once a second."""
        stats, now_s = self._metrics.read_stats(), time.monotonic()
        counters = {
            "generation_tokens": stats.generation_tokens,
            "prompt_tokens": stats.prompt_tokens,
            "answers": self._metrics.num_answers,
            "exposed_s": stats.exposed_communication_s,
        }
        if self._counted is not None:
            then_s, before = self._counted
            took_s = max(1e-3, now_s - then_s)
            rates = {name: round(max(0.0, count - before[name]) / took_s, 3) for name, count in counters.items()}
            exposed = rates.pop("exposed_s") / (self._engine.info.num_instances * self._engine.info.num_attention)
            row = {f"{name}_per_s": rate for name, rate in rates.items()} | {
                "exposed_ratio": min(1.0, exposed),
                "taken_s": now_s,
                "num_requests_running": stats.num_running,
                "num_requests_waiting": stats.num_waiting,
                "attention_idle_ratio": round(stats.attention_idle_ratio, 4),
                "expert_idle_ratio": round(stats.expert_idle_ratio, 4),
            }
            self._history.append(row)
        self._counted = now_s, counters

    async def reading(self) -> bytes:
        """A `DashboardReading` as JSON. Waits for the workers' spans, at most `_PATIENCE_S`."""
        async with self._lock:
            if time.monotonic() - self._read_s > _FRESH_S:
                self._note_steps(await asyncio.to_thread(self._engine.last_steps, _NUM_STEPS, _PATIENCE_S))
                self._reading = self._compose().model_dump_json().encode()
                self._read_s = time.monotonic()
            return self._reading

    def _note_steps(self, spans: dict[str, Spans]) -> None:
        """What busy workers have not reported in time is reported next time; until then the steps before are shown."""
        steps = last_steps(spans, time.monotonic_ns())
        if steps is not None:
            self._last_steps, self._stepped_s = steps, time.monotonic() - steps.ended_s_ago

    def _compose(self) -> DashboardReading:
        stats, steps = self._metrics.read_stats(), self._last_steps
        info, now_s = self._engine.info, time.monotonic()
        names = History.model_fields.keys() - {"ago_s"}
        series: dict[str, Any] = {name: [row[name] for row in self._history] for name in names}
        if steps is not None:
            steps.ended_s_ago = time.monotonic() - self._stepped_s
            steps.left_out = [name for name in stats.workers if name not in {worker.name for worker in steps.workers}]
        return DashboardReading(
            version=__version__,
            model=self._model_name,
            layout=info.layout,
            num_micro_batches=info.num_micro_batches,
            time_s=time.time(),
            up_s=time.monotonic() - self._started_s,
            status=stats.status,
            healthy=stats.healthy,
            workers=[WorkerState(name=name, state=state) for name, state in stats.workers.items()],
            now=_now(stats, has_expert_workers=info.num_experts_workers > 0),
            pools=list(stats.pools),
            handovers=_handovers(stats),
            history=History(ago_s=[round(now_s - row["taken_s"], 2) for row in self._history], **series),
            last_steps=steps,
            load=_load(stats, info.expert_names),
            events=list(stats.events),
        )


def _now(stats: EngineStats, *, has_expert_workers: bool) -> Now:
    looked_up = stats.prefix_cache_query_tokens
    return Now(
        num_requests_running=stats.num_running,
        num_requests_waiting=stats.num_waiting,
        kv_cache_usage_ratio=stats.kv_blocks_used / max(1, stats.kv_blocks_total),
        prefix_cache_hit_ratio=stats.prefix_cache_hit_tokens / looked_up if looked_up else None,
        attention_idle_ratio=stats.attention_idle_ratio,
        expert_idle_ratio=stats.expert_idle_ratio if has_expert_workers else None,
        num_steps=stats.num_steps,
        num_preemptions=stats.num_preemptions,
        num_worker_restarts=stats.num_worker_restarts,
        num_placement_changes=stats.placement_changes,
    )


def _handovers(stats: EngineStats) -> ShownHandovers | None:
    counts = stats.handovers
    if not stats.pools:
        return None
    return ShownHandovers(num_done=counts.num_done, num_failed=counts.num_failed, num_recomputed=counts.num_recomputed)


def _load(stats: EngineStats, names: Sequence[str]) -> list[LayerLoad]:
    return [
        LayerLoad(
            layer=layer,
            balancedness=stats.balancedness_per_layer[layer],
            workers=[
                WorkerLoad(
                    name=names[worker],
                    experts=list(held),
                    rows=[round(rows) for rows in held.values()],
                )
                for worker, held in workers.items()
            ],
            phases=_phases(stats.prompt_rows_per_expert.get(layer), workers.values()),
        )
        for layer, workers in stats.rows_per_expert.items()
        if layer in stats.balancedness_per_layer
    ]


def _phases(prompts: list[float] | None, held_by_workers: Iterable[Mapping[int, float]]) -> list[PhaseLoad]:
    """What workers computed, split by what attention workers say of prompts; those report later than these."""
    if prompts is None:
        return []
    totals = [0.0] * len(prompts)
    for held in held_by_workers:
        for expert, rows in held.items():
            totals[expert] += rows
    answers = [max(0.0, total - of_prompts) for total, of_prompts in zip(totals, prompts, strict=True)]
    by_phase: dict[Literal["prefill", "decode"], list[float]] = {"prefill": prompts, "decode": answers}
    return [
        PhaseLoad(
            phase=phase,
            rows=[round(count) for count in rows],
            largest_share=max(rows) * len(rows) / sum(rows) if any(rows) else 0.0,
        )
        for phase, rows in by_phase.items()
    ]


def last_steps(spans: Mapping[str, Spans], now_ns: int) -> LastSteps | None:
    """None when no worker has finished a step. `now_ns` on the clock of the spans."""
    steppers = [name for name, recorded in spans.items() if STEP in recorded.name_index]
    if not steppers:
        return None
    newest = max(steppers, key=lambda name: max(end_ns for _, _, end_ns in _bounds(spans[name])))
    bounds = _bounds(spans[newest])
    together = {name: recorded for name, recorded in spans.items() if _instance(name) == _instance(newest)}
    shown = [each for each in bounds if _is_complete(each[0], together)][-_MAX_STEPS:] or bounds[-1:]
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


def _instance(name: str) -> str:
    """``1/experts[0]`` -> ``"1"``; the first instance is not named. Steps are counted within one."""
    return name.rpartition("/")[0]


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
    kinds = _KINDS | _IN_ONE_WORKER if name.rpartition("/")[2].startswith("replica") else _KINDS
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
