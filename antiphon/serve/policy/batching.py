"""Fills one step of one attention worker: continuous batching with chunked prefill under a token budget.

1. Decodes (one token to compute), oldest first. One that needs a block when none is free pushes out the
   latest-arrived running request, which goes back to the front of the waiting line and is recomputed later.
2. Running prefills, oldest first, in chunks of what is left of the token budget and of the free blocks.
3. Waiting requests, strictly in order of arrival, if blocks for *all* their known tokens are free, with the watermark
   left over. Not in a step that preempted: that would only be pushed out again. (Blocks that running prefills have
   still to claim need no account: while one of them is short of tokens, step 2 has used up the budget or the blocks.)

Nobody starves: the oldest running request can push out everybody else, only requests that fit an empty worker are
queued, and nobody overtakes the head of the line. The latest-arrived request, when it finds no block, waits in place:
pushing itself out would cost its cache and win nothing.

Rejected: admitting on the first chunk alone (prompts half computed push each other out); swapping to host memory
(more state to lose with a worker, and grouped-query or latent caches are quick to recompute); letting small requests
overtake a large head (better use of memory, but the head may then wait for ever).
"""

from dataclasses import dataclass, field

from antiphon.cost.kv_blocks import blocks_of
from antiphon.serve.policy.occupancy import WorkerOccupancy
from antiphon.serve.policy.request import Request, RequestStatus
from antiphon.serve.policy.step import SequenceStart, SequenceStep, StepPlan


@dataclass(slots=True)
class _Draft:
    """A plan being put together. `budget`: rows that may still be added; `num_left`: tokens of running prefills
    that this step does not reach."""

    step_id: int
    budget: int
    num_left: int = 0
    sequences: list[SequenceStep] = field(default_factory=list)
    starts: list[SequenceStart] = field(default_factory=list)


def fill_step(occupancy: WorkerOccupancy, step_id: int) -> StepPlan:
    """Choose what to compute next; takes blocks and slots for it. Empty if nobody waits or runs."""
    draft = _Draft(step_id, occupancy.config.max_batch_tokens)
    num_preemptions = occupancy.counters.num_preemptions
    prefills = _add_decodes(occupancy, draft)
    _add_prefills(occupancy, draft, prefills)
    if occupancy.counters.num_preemptions == num_preemptions:
        _admit_waiting(occupancy, draft)
    occupancy.num_prefill_tokens_left = draft.num_left
    return StepPlan(
        step_id=step_id,
        released=tuple(occupancy.released),
        starts=tuple(draft.starts),
        sequences=tuple(draft.sequences),
        num_tokens=occupancy.config.max_batch_tokens - draft.budget,
    )


def _add_decodes(occupancy: WorkerOccupancy, draft: _Draft) -> list[Request]:
    """Step 1. Returns the running requests that take the general way: chunks, and what the worker must be told anew.

    This loop runs once per sequence and token; it does by hand what `_add_chunk` does, for one token."""
    others = []
    pool, block_size, step_id = occupancy.pool, occupancy.config.block_size, draft.step_id
    for request in occupancy.running:  # loses elements at its end while we preempt
        start = request.num_computed
        table = request.block_table
        first = request.num_blocks_sent
        if len(request.token_ids) - start != 1 or first == 0 or start < request.num_prompt:
            others.append(request)
            continue
        if start == len(table) * block_size:
            if pool.num_free == 0 and not occupancy.preempt_later_than(request, step_id):
                continue
            table.append(pool.allocate_one())
        new_blocks: tuple[int, ...] = ()
        if len(table) != first:
            new_blocks = tuple(table[first:])
            request.num_blocks_sent = len(table)
        request.planned_step = step_id
        token_ids = (request.token_ids[start],)
        draft.sequences.append(
            SequenceStep(request.request_id, request.slot, token_ids, start, first, new_blocks, True, 0, 0)
        )
    draft.budget -= len(draft.sequences)
    return others


def _add_prefills(occupancy: WorkerOccupancy, draft: _Draft, prefills: list[Request]) -> None:
    """Step 2."""
    pool, block_size = occupancy.pool, occupancy.config.block_size
    for request in prefills:
        if request.status is not RequestStatus.RUNNING:
            continue  # pushed out by an older request
        room = len(request.block_table) * block_size - request.num_computed
        if draft.budget > 0 and room + pool.num_free == 0:
            occupancy.preempt_later_than(request, draft.step_id)
        num_left = len(request.token_ids) - request.num_computed
        num_tokens = min(num_left, draft.budget, room + pool.num_free * block_size)
        if num_tokens > 0:
            _add_chunk(occupancy, draft, request, num_tokens)
        draft.num_left += num_left - num_tokens


def _admit_waiting(occupancy: WorkerOccupancy, draft: _Draft) -> None:
    """Step 3."""
    pool, config = occupancy.pool, occupancy.config
    while occupancy.waiting and draft.budget > 0 and occupancy.free_slots:
        request = occupancy.waiting.oldest
        found = occupancy.find_prefix(request)
        num_new = blocks_of(len(request.token_ids), config.block_size) - len(found)
        num_spare = config.num_reserved_blocks if occupancy.running else 0
        if pool.num_free < num_new + pool.num_idle(found) + num_spare:
            return
        occupancy.start(request, found)
        num_left = len(request.token_ids) - request.num_computed
        num_tokens = min(num_left, draft.budget)
        _add_chunk(occupancy, draft, request, num_tokens)
        draft.num_left += num_left - num_tokens


def _add_chunk(occupancy: WorkerOccupancy, draft: _Draft, request: Request, num_tokens: int) -> None:
    """Plan the next `num_tokens` of a request. The blocks they need must be free."""
    start = request.num_computed
    end = start + num_tokens
    num_missing = blocks_of(end, occupancy.config.block_size) - len(request.block_table)
    if num_missing > 0:
        request.block_table += occupancy.pool.allocate(num_missing)
    first = request.num_blocks_sent
    if first == 0:
        draft.starts.append(_sequence_start(request))
    logprob_begin, logprob_end = _prompt_logprob_rows(request, start, end)
    draft.sequences.append(
        SequenceStep(
            request_id=request.request_id,
            slot=request.slot,
            token_ids=tuple(request.token_ids[start:end]),
            start=start,
            first_new_block=first,
            new_blocks=tuple(request.block_table[first:]),
            samples=end == len(request.token_ids) and request.params.max_tokens > 0,
            logprob_begin=logprob_begin,
            logprob_end=logprob_end,
        )
    )
    request.num_blocks_sent = len(request.block_table)
    request.planned_step = draft.step_id
    draft.budget -= num_tokens


def _sequence_start(request: Request) -> SequenceStart:
    return SequenceStart(
        request_id=request.request_id,
        slot=request.slot,
        token_ids=tuple(request.token_ids),
        num_prompt=request.num_prompt,
        params=request.params,
        seed=request.seed,
        stop_ids=tuple(sorted(request.stop_ids)),
    )


def _prompt_logprob_rows(request: Request, start: int, end: int) -> tuple[int, int]:
    """Rows of a chunk whose prompt log-probabilities are asked for and not yet reported: [begin, end), maybe empty."""
    if not request.wants_prompt_logprobs:
        return 0, 0
    begin = max(request.num_prompt_logprobs - start, 0)
    return begin, max(begin, min(end, request.num_prompt - 1) - start)
