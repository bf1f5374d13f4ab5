"""One request as the policy sees it: tokens, progress and blocks; the limits that it must fit; its part of a step,
and what rows cost.

Prompt and output live in one list, because that is what has to be computed: after a preemption, or when the worker
that held the keys and values is lost, `num_computed` goes back to 0 and the very same list is computed again. No token
is repeated or lost, since a token enters the list once, when it is sampled.

A request that could never run is refused before it is queued. In the queue it would block those behind it without end.

A `StepPlan` is what one step computes: the message from the scheduler to its attention worker. A worker keeps, per
slot, the request's tokens, sampling state and block table. A plan therefore carries the whole of a request once
(`SequenceStart`) and afterwards only what is new: one token, now and then one block. Applying a plan is idempotent
(tables are written at stated positions, tokens at stated positions), so a step that failed because an expert worker was
lost is simply sent again. `SequenceStep` and `SequenceStart` are named tuples: a plan of 1,024 sequences is built for
every token, and frozen dataclasses take about five times as long to construct.

Rejected: separate prompt and output lists with a "recompute" mode. Every consumer would have to join them again.
"""

from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Literal, NamedTuple

from antiphon.base.errors import UserError
from antiphon.serve.engine_api import FinishReason, RequestTooLong
from antiphon.specs.counts import reserved_blocks
from antiphon.specs.sampling import SamplingParams

PENDING = -1  # in the place of a token that the step before samples: its worker knows it first


RequestStatus = Literal["waiting", "running", "finished"]


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """`arrival` orders requests over all attention workers (smaller is older) and must be unique.

    `seed` is `params.seed` or one the engine drew; it stays with the request wherever it is computed.
    `token_ids` is owned by the request: prompt first, then output. `stop_ids`: tokens that end it.
    `owner`: what it belongs to; one request of an owner at a time may use the express lane.
    """

    request_id: str
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    arrival: int
    stop_ids: frozenset[int]
    owner: str

    status: RequestStatus = "waiting"
    finish_reason: FinishReason | None = None
    num_computed: int = 0  # leading tokens whose keys and values are in the cache
    block_table: list[int] = field(default_factory=list)
    block_digests: list[bytes] = field(default_factory=list)  # of full blocks, see `block_book`; outlives preemption
    num_blocks_sent: int = 0  # leading entries of `block_table` that the worker knows
    num_blocks_offered: int = 0  # leading blocks that are offered to other requests
    slot: int = -1  # the worker's row for this request, -1 unless running
    planned_step: int = -1  # the last step that computes something for this request
    planned_end: int = 0  # leading tokens that are computed after that step
    num_admissions: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    num_prompt_logprobs: int = 0  # prompt positions already reported, if asked for
    num_promised_blocks: int = 0  # if above 0 it is in the express lane
    awaits_mask: bool = False  # which tokens its grammar allows next is still being computed: no step takes it
    # Where prefill and decode are apart (`serve/handovers`):
    prefills_apart: bool = False  # a prefill worker is to compute what is missing when it is admitted
    arrives: bool = False  # keys and values are being handed over: no step takes it, and its blocks stay with it
    had_by: str = ""  # the worker that has its keys and values, and hands them over to the next one
    num_lost_handovers: int = 0  # of the tokens known by now
    origin: "Request | None" = None  # the request that this one computes the keys and values for, on a prefill worker
    # While steps with it fail, see `suspects`:
    num_failures: int = 0  # failed steps since it last got past one
    num_tokens_to_pass: int = 0  # it is past them once it has computed that number of tokens
    suspect_group: int = 0  # the group that it runs with, without others; 0: not suspected
    was_on_fresh_worker: bool = False

    @property
    def tracked_id(self) -> str:
        """What the client's request is called: its own name, or its origin's."""
        return self.request_id if self.origin is None else self.origin.request_id

    @property
    def turn(self) -> tuple[int, int, bool]:
        """Requests wait, and give up their memory for others, in this order: the smallest goes first. Where a
        request meets what was computed there for it elsewhere, in a step that goes on, it has a turn of its own."""
        return self.params.priority, self.arrival, self.origin is not None

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def newest_token_id(self) -> int | None:
        """The last token of the output; None before the first."""
        return self.token_ids[-1] if self.num_output else None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Rows of the prompt are still to be reported; the first token has nothing before it."""
        return self.params.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt - 1

    def forget_computed(self) -> None:
        """Back to "nothing computed": the caller has released the blocks and the slot."""
        self.num_computed = 0
        self.block_table = []
        self.num_blocks_sent = 0
        self.num_blocks_offered = 0
        self.slot = -1
        self.planned_step = -1


def new_request(
    request_id: str,
    prompt_token_ids: list[int],
    params: SamplingParams,
    *,
    arrival: int,
    seed: int,
    eos_token_ids: tuple[int, ...],
    owner: str | None = None,
) -> Request:
    """A waiting request with its own copy of the prompt. `owner` None: it belongs to nothing but itself."""
    stop_ids = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids |= frozenset(eos_token_ids)
    return Request(
        request_id=request_id,
        token_ids=list(prompt_token_ids),
        num_prompt=len(prompt_token_ids),
        params=params,
        seed=seed,
        arrival=arrival,
        stop_ids=stop_ids,
        owner=request_id if owner is None else owner,
    )


def prefill_of(origin: Request, request_id: str) -> Request:
    """What a prefill worker computes of `origin`: all that is known, and the next token if it wants one."""
    params = origin.params
    max_tokens = min(params.max_tokens, origin.num_output + 1)
    return Request(
        request_id=request_id,
        token_ids=list(origin.token_ids),
        num_prompt=origin.num_prompt,
        params=replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens)),
        seed=origin.seed,
        arrival=origin.arrival,
        stop_ids=origin.stop_ids,
        owner=origin.owner,
        block_digests=list(origin.block_digests),
        num_prompt_logprobs=origin.num_prompt_logprobs,
        origin=origin,
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one attention worker. `max_batch_tokens`: rows of a step over all its micro-batches.

    `context_tokens_per_row`: how many cached keys cost as much to attend to as everything else costs for one row; a
    step's prompt chunks cost at most as much as `max_batch_tokens` rows without a context (`chunk_cost`).
    `logprob_row_cost`: what a row whose prompt log-probability is asked for costs, in rows of other prompts.
    `watermark_blocks`: blocks that admission leaves free for running requests to grow into (None: 1% of all, at
    least one), so that an admitted request does not push another one out in the next step.
    `express_slots`, `express_blocks`: the express lane (`ExpressLane`); its slots come on top of `max_running`, its
    blocks are some of `num_blocks`. 0: there is none.
    `vocab_size` None: token ids are not checked.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_batch_tokens: int = 2048
    context_tokens_per_row: float = 1024.0
    logprob_row_cost: float = 1.0
    max_running: int = 256
    watermark_blocks: int | None = None
    express_slots: int = 0
    express_blocks: int = 0
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_model_len", "max_batch_tokens", "max_running"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.max_batch_tokens < self.num_slots:
            raise UserError(
                f"max_batch_tokens is {self.max_batch_tokens}, max_running is {self.num_slots}: each running request "
                "needs room for one token a step; raise max_batch_tokens or lower max_running"
            )
        if self.express_slots < 0 or not 0 <= self.express_blocks < self.num_blocks:
            raise UserError(
                f"express_slots is {self.express_slots}, express_blocks {self.express_blocks}: at least 0, and fewer "
                f"blocks than all {self.num_blocks}"
            )
        if self.watermark_blocks is not None and self.watermark_blocks < 0:
            raise UserError(f"watermark_blocks is {self.watermark_blocks}: it must be at least 0")

    @property
    def num_slots(self) -> int:
        return self.max_running + self.express_slots

    @property
    def num_main_blocks(self) -> int:
        """Blocks that a request outside the express lane may hold."""
        return self.num_blocks - self.express_blocks

    @property
    def num_express_rows(self) -> int:
        """Tokens of the longest prompt in the express lane: all that it may hold fit into one step (`ExpressLane`)."""
        return self.max_batch_tokens // self.express_slots if self.express_slots else 0

    @property
    def num_reserved_blocks(self) -> int:
        return reserved_blocks(self.num_blocks) if self.watermark_blocks is None else self.watermark_blocks


def check_request(request: Request, config: SchedulerConfig) -> None:
    """Raise `RequestTooLong` or `UserError` for a request that this worker could never finish."""
    if request.num_prompt == 0:
        raise UserError("the prompt is empty: it must hold at least 1 token")
    needed = request.num_prompt + request.params.max_tokens
    asked = f"prompt ({request.num_prompt}) plus max_tokens ({request.params.max_tokens}) is {needed} tokens"
    if needed > config.max_model_len:
        raise RequestTooLong(
            f"{asked}, above the context length of {config.max_model_len}: shorten the prompt or lower max_tokens"
        )
    capacity = config.num_main_blocks * config.block_size
    if needed > capacity:
        raise RequestTooLong(
            f"{asked}, above the {capacity} that the KV memory of one attention worker holds: "
            "shorten the prompt, lower max_tokens, or give the server more KV memory"
        )
    if config.vocab_size is not None:
        _check_token_ids(request, config.vocab_size)


def _check_token_ids(request: Request, vocab_size: int) -> None:
    sources = (
        ("the prompt", request.token_ids),
        ("stop_token_ids", request.params.stop_token_ids),
        ("logit_bias", request.params.logit_bias),
        ("allowed_token_ids", request.params.allowed_token_ids),
        ("logprob_token_ids", request.params.logprob_token_ids),
        ("bad_words", [token for word in request.params.bad_words for token in word]),
    )
    for name, ids in sources:
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            raise UserError(f"{name} names token {wrong}: it must be between 0 and {vocab_size - 1}")


def chunk_cost(start: int, num_rows: int, context_tokens_per_row: float) -> float:
    """Cost of rows at positions `start` on: row r sees start + r + 1 keys; summed over `num_rows` rows.

    `context_tokens_per_row`: how many cached keys cost as much to attend to as everything else costs for one row."""
    visible_keys = num_rows * start + num_rows * (num_rows + 1) / 2
    return num_rows + visible_keys / context_tokens_per_row


def rows_for_cost(start: int, cost: float, context_tokens_per_row: float) -> float:
    """How many rows from position `start` on cost that much: the inverse of `chunk_cost`.

    With c = `context_tokens_per_row` and b = c + start + 1/2 it is the positive root of r²/2 + b·r = c·cost."""
    b = context_tokens_per_row + start + 0.5
    return sqrt(b * b + 2 * context_tokens_per_row * cost) - b


class SequenceStart(NamedTuple):
    """A request that the worker does not know (any more): everything about it but its blocks.

    `token_ids` are all known tokens, `num_prompt` of them from the prompt; `stop_ids` are sorted.
    """

    request_id: str
    slot: int
    token_ids: tuple[int, ...]
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]


class SequenceStep(NamedTuple):
    """New tokens of one sequence. Row r is at position `start + r`.

    `new_blocks` go into the block table from entry `first_new_block` on; 0 there means the table begins anew.
    `samples`: the last row yields the next token, number `start + len(token_ids) - num_prompt` of the output.
    `token_ids` (`PENDING`,): the token that the step in flight before this one samples for the request.
    Rows `logprob_begin` to `logprob_end - 1` report the log-probability of the prompt token that follows them.
    """

    request_id: str
    slot: int
    token_ids: tuple[int, ...]
    start: int
    first_new_block: int
    new_blocks: tuple[int, ...]
    samples: bool
    logprob_begin: int
    logprob_end: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of one attention worker. To be applied in this order: `released`, `starts`, `sequences`.

    `released`: requests whose state the worker may drop (finished, aborted or preempted; a slot may be taken at once).
    Decodes come first in `sequences`, then prefills of the express lane, running prefills, and the newly admitted.
    """

    step_id: int
    released: tuple[str, ...]
    starts: tuple[SequenceStart, ...]
    sequences: tuple[SequenceStep, ...]
    num_tokens: int
