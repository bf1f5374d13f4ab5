"""What `/dashboard/data` answers: one reading of everything that the page and `antiphon top` show.

Series and spans are parallel lists, because a name for each number would be most of the bytes.
"""

from typing import Literal

from pydantic import BaseModel, Field

from antiphon.serve.engine_api import EventKind

SpanKind = Literal["attention", "to experts", "experts", "waiting", "to attention", "to decode", "sampling"]


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


class ShownPool(BaseModel):
    """The workers for one phase, where prefill and decode are apart."""

    name: str
    num_requests_running: int
    num_requests_waiting: int
    num_requests_arriving: int = Field(description="Admitted; keys and values are computed or on their way.")
    kv_cache_usage_ratio: float


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


class ShownEvent(BaseModel):
    number: int
    time_s: float
    kind: EventKind
    worker: str
    text: str


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
