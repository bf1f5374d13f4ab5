"""What the HTTP server may ask of an engine: submit, abort, look. No torch, no transport.

The engine runs in its own thread (see `serve/engine.py`); these methods are called from the event loop's thread.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from antiphon.base.errors import UserError
from antiphon.comm.ledger import Traffic
from antiphon.serve.worker.spans import Spans
from antiphon.specs.placement import ExpertPlacement
from antiphon.specs.sampling import PackedLogprobs, PromptLogprobs, SamplingParams

SHUTTING_DOWN = "the server is shutting down and takes no new requests"
# "grammar": the request's grammar could not be followed to its end (the client's mistake); "error": ours.
FinishReason = Literal["stop", "length", "abort", "error", "grammar"]
# "standstill": the step was given up and the group's workers begin anew; "going on": they step again.
EventKind = Literal["ready", "lost", "failed", "standstill", "going on", "placement"]


class QueueFull(UserError):
    """The waiting queue is at its limit. HTTP 429 with `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoRoom(OSError):
    """The system has no descriptor, memory or process left for what the request needs. HTTP 503: it may have later."""


class ShuttingDown(UserError):
    """The engine is draining and takes no new requests. HTTP 503."""


class RequestTooLong(UserError):
    """Prompt plus requested tokens do not fit the model's context or the KV budget. HTTP 400."""


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of one request: the tokens since the last output. The last one has `finish_reason` set.

    `stop_token_id` is the end-of-sequence or stop token that ended it (it is the last of `token_ids`).
    `prompt_logprobs` comes once, with the first output. A struct, because there is one for each token: a frozen
    dataclass takes about five times as long to construct.
    """

    request_id: str
    token_ids: list[int]
    logprobs: PackedLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """Fixed facts about the running engine, for /v1/models, /version and limits."""

    model_name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    layout: str
    num_instances: int
    num_attention: int
    num_experts_workers: int
    expert_names: tuple[str, ...]  # of expert workers, or of the ranks that share experts, over all instances
    num_micro_batches: int
    max_waiting: int
    block_size: int  # tokens of a KV block: what of a prompt is cached is a number of whole ones


class PrefetchCounts(msgspec.Struct):
    """`num_forecasts`: layers whose rows were expected; `num_phase_two`: those whose most popular experts were others;
    `num_copies`: copies asked for ahead of a layer; `num_late`: with its rows."""

    num_forecasts: int = 0
    num_phase_two: int = 0
    num_copies: int = 0
    num_late: int = 0

    def add(self, other: "PrefetchCounts") -> None:
        self.num_forecasts += other.num_forecasts
        self.num_phase_two += other.num_phase_two
        self.num_copies += other.num_copies
        self.num_late += other.num_late


class HandoverCounts(msgspec.Struct):
    """Prompts computed by prefill workers: `num_begun`: hand-overs; `num_done`: those that arrived, with
    `num_tokens`; `num_failed`; `num_recomputed`: prompts that the decode worker computed after all; `exposed_s`: time
    that prefill workers waited at the end of their steps until keys and values had left."""

    num_begun: int = 0
    num_done: int = 0
    num_tokens: int = 0
    num_failed: int = 0
    num_recomputed: int = 0
    exposed_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ShownPool:
    """The workers for one phase, where prefill and decode are apart. `num_requests_arriving`: those that a decode
    worker has admitted and whose keys and values are computed or on their way."""

    name: str
    num_requests_running: int
    num_requests_waiting: int
    num_requests_arriving: int
    kv_cache_usage_ratio: float


@dataclass(frozen=True, kw_only=True)
class ShownEvent:
    """What happened to a worker. `number` counts from 1; `time_s` is Unix time; `worker` is empty if it concerns
    several."""

    number: int
    time_s: float
    kind: EventKind
    worker: str
    text: str


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A reading of the engine's counters; cumulative unless the name says otherwise. Feeds /metrics."""

    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    prefix_cache_hit_tokens: int
    prefix_cache_query_tokens: int
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    num_steps: int
    num_worker_restarts: int
    attention_idle_ratio: float
    expert_idle_ratio: float
    exposed_communication_s: float
    dispatch_bytes: int
    balancedness_per_layer: dict[int, float] = field(default_factory=dict)
    rows_per_expert: dict[int, dict[int, dict[int, float]]] = field(default_factory=dict)  # by layer, worker, expert
    prompt_rows_per_expert: dict[int, list[float]] = field(default_factory=dict)  # by layer; the others are of answers
    expert_rows_per_s: dict[int, float] = field(default_factory=dict)
    placement_changes: int = 0
    prefetch: PrefetchCounts = field(default_factory=PrefetchCounts)
    queue_times_s: list[float] = field(default_factory=list)  # requests first scheduled since the last reading
    exchange: dict[str, Traffic] = field(default_factory=dict)  # by worker
    healthy: bool = True
    status: str = "ok"
    missing: tuple[str, ...] = ()  # workers that cannot step now
    workers: dict[str, str] = field(default_factory=dict)  # all, by name: "ready", or why not
    events: tuple[ShownEvent, ...] = ()  # the newest, oldest first
    handovers: HandoverCounts = field(default_factory=HandoverCounts)
    pools: tuple[ShownPool, ...] = ()  # empty unless prefill and decode are apart


class AsyncEngine(Protocol):
    """The engine as the server sees it."""

    info: EngineInfo

    def submit(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, *, owner: str | None = None
    ) -> AsyncIterator[EngineOutput]:
        """Queue a request and return its outputs. Raises `QueueFull`, `ShuttingDown`, `RequestTooLong` or `UserError`
        at once, before anything is queued. Closing the iterator early (client gone) aborts the request.
        One small request at a time of an `owner` (the HTTP request; None: each its own) may overtake the line."""

    def abort(self, request_id: str) -> None:
        """Forget the request and free its KV blocks at the end of the running step. Unknown ids are ignored."""

    def stats(self) -> EngineStats:
        """A reading of the counters. Never blocks on a step."""

    def place(self, placement: ExpertPlacement) -> int:
        """Move experts to `placement` while serving. Returns how many have to be loaded for it, at once; `UserError` if
        it is not of this model, these workers and their slots."""

    def drain_worker(self, worker: str, *, undo: bool) -> str:
        """From now on the worker gets no requests, and those that it has move to others, with their keys and values; or
        `undo` that. Ends with the process, too. Returns how far it is, as in `EngineStats.workers`. `UserError` if no
        such worker takes requests, or no other."""

    def drain_state(self, worker: str) -> str:
        """How far a worker is drained, without asking for it; `UserError` if none of that name takes requests."""

    def last_steps(self, num_steps: int, timeout_s: float) -> dict[str, Spans]:
        """What the workers of this machine did in their last steps, by name; at most 8 attention and 8 expert
        workers. Waits until they answer, so not on the event loop: as long as a step, at most `timeout_s`."""

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests (`ShuttingDown`), let the running ones finish, abort what is left at the timeout, or as
        soon as no worker is left to compute it."""

    def call_when_given_up(self, callback: Callable[[], None]) -> None:
        """Call `callback`, on any thread, once the engine has ended by itself and will serve no more requests; all of
        them have had their last output by then. Called at once if that has happened already."""
