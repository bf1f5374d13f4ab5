"""Fills one step of one attention worker: continuous batching with chunked prefill under a token budget.

1. Decodes (one token to compute), by their turn: the smallest priority first, then the oldest. One that needs a block
   when none is free pushes out the running request whose turn is last, which waits again and is recomputed later.
2. Prefills of the express lane (`ExpressLane`), and requests that enter it: small ones that would wait for the main
   way. They take at most half of the rows that decodes leave.
3. Running prefills, oldest first, in chunks.
4. Waiting requests, strictly by their turn, if blocks for *all* their known tokens are free beside those that
   running prefills have still to claim, with the watermark left over. Not in a step that preempted: that would only be
   pushed out again.

Chunks share the rows that decodes leave, so that a short prompt does not wait for the long ones before it: each takes
at most half of what is left while others want some, and what no request needs goes to the oldest (`_shares`). Together
they cost at most as much as `max_batch_tokens` rows without a context (`chunk_cost`): rows far into a long prompt take
longer, as do rows that report log-probabilities, and all requests wait for a step.

No request starves: the oldest running one can push out all others but the lane, only requests that fit beside the lane
are queued, and of one priority no others overtake the head of the line. The last request, when it finds no block,
waits in place: pushing itself out would cost its cache and win nothing.

Where a worker runs several steps side by side (`num_side_by_side`), each step has the same share of running requests
and of the budget; a request is in one of them at a time, but for a long prompt: its next chunk may be in the next step
before the one before it has ended. The worker computes a layer of the later chunk after that of the earlier one, and
ends their steps in that order (`worker/side_by_side`).

A request that awaits its mask (its grammar is slow) takes part in nothing, keeps its blocks, may be pushed out, and may
be overtaken: once the mask is there, its age gives it back its place. Nor does one whose keys and values a prefill
worker hands over: it has its blocks from the first, and is not pushed out.

Rejected: all rows to the oldest prefill (a request of seven tokens waited 0.8 s behind one of 8,000); equal shares (all
long prompts end late); admitting on the first chunk alone (prompts half computed push each other out); swapping to host
memory (more state to lose with a worker, and grouped-query or latent caches are quick to recompute); letting small
requests overtake a large head outside the lane (better use of memory, but the head may then wait without end).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from antiphon.serve.policy.block_book import BlockBook
from antiphon.serve.policy.request import (
    Request,
    SequenceStart,
    SequenceStep,
    StepPlan,
    chunk_cost,
    rows_for_cost,
)
from antiphon.specs.counts import blocks_of

_NUM_SHARING = 8  # waiting requests that have a share; those behind them take what is left


@dataclass(slots=True)
class _Draft:
    """A plan being put together. `budget`: rows that may still be added; `cost`: what they may cost; `num_left`: tokens
    of running prefills that this step does not reach; `num_claimed`: blocks that those still need."""

    step_id: int
    budget: int
    cost: float
    most_decodes: int
    num_left: int = 0
    num_claimed: int = 0
    sequences: list[SequenceStep] = field(default_factory=list)
    starts: list[SequenceStart] = field(default_factory=list)


def fill_step(book: BlockBook, step_id: int, num_side_by_side: int = 1) -> StepPlan:
    """Choose what to compute next; takes blocks and slots for it. Empty if no request waits or runs but those of steps
    in flight."""
    config = book.config
    budget = -(-config.max_batch_tokens // num_side_by_side)
    draft = _Draft(step_id, budget, float(budget), -(-len(book.running) // num_side_by_side))
    num_preemptions = book.num_preemptions
    prefills = _add_decodes(book, draft)
    if config.express_slots:
        prefills = _serve_lane(book, draft, prefills)
    if prefills or book.waiting:
        shares = _shares(book, draft, prefills)
        _add_prefills(book, draft, prefills, shares)
        if book.num_preemptions == num_preemptions:
            _admit_waiting(book, draft, shares)
    book.num_prefill_tokens_left = draft.num_left
    return StepPlan(
        step_id=step_id,
        released=tuple(book.released),
        starts=tuple(draft.starts),
        sequences=tuple(draft.sequences),
        num_tokens=budget - draft.budget,
    )


def _add_decodes(book: BlockBook, draft: _Draft) -> list[Request]:
    """Step 1. Returns the running requests that take the general way: chunks, and those that the worker does not know.

    This loop runs once per sequence and token; it does by hand what `_add_chunk` does, for one token."""
    others = []
    pool, lane, block_size, step_id = book.pool, book.lane, book.config.block_size, draft.step_id
    in_flight, most_decodes = book.steps_in_flight, draft.most_decodes
    for request in book.running:  # loses elements behind the current one while we preempt
        if request.awaits_mask:
            continue
        if request.planned_step in in_flight:
            others += _beside_its_step(book, draft, request)
            continue
        start = request.num_computed
        table = request.block_table
        first = request.num_blocks_sent
        if len(request.token_ids) - start != 1 or first == 0 or start < request.num_prompt:
            if not request.arrives:
                others.append(request)
            continue
        if len(draft.sequences) == most_decodes:
            continue
        if start == len(table) * block_size:
            if request.num_promised_blocks:
                lane.num_kept -= 1
            elif pool.num_free == lane.num_kept and not book.preempt_later_than(request, step_id):
                continue
            table.append(pool.allocate_one())
        new_blocks: tuple[int, ...] = ()
        if len(table) != first:
            new_blocks = tuple(table[first:])
            request.num_blocks_sent = len(table)
        request.planned_step, request.planned_end = step_id, start + 1
        token_ids = (request.token_ids[start],)
        draft.sequences.append(
            SequenceStep(request.request_id, request.slot, token_ids, start, first, new_blocks, True, 0, 0)
        )
    draft.budget -= len(draft.sequences)
    return others


def _beside_its_step(book: BlockBook, draft: _Draft, request: Request) -> list[Request]:
    """A request of a step in flight: the rest of its prompt may follow in the step beside that one. Else it has no part
    in this step, and what it still needs is counted."""
    if request.planned_end < len(request.token_ids) and request.status == "running":
        return [request]
    if len(request.token_ids) - request.num_computed > 1:
        draft.num_left += len(request.token_ids) - request.num_computed
    if not request.num_promised_blocks:
        num_missing = blocks_of(len(request.token_ids), book.config.block_size) - len(request.block_table)
        draft.num_claimed += max(0, num_missing)  # one planned ahead has its pending token's block already
    return []


def _serve_lane(book: BlockBook, draft: _Draft, prefills: Sequence[Request]) -> list[Request]:
    """Step 2. Returns the prefills of the main way."""
    if _is_crowded(book, draft, len(prefills)):
        for request in list(book.waiting) if book.lane.num_free_slots else ():
            if not request.awaits_mask and book.lane.takes(request):
                book.lane.add(request)
                book.start(request, [])
                if not book.await_arrival(request):
                    prefills = [*prefills, request]
    budget = -(-draft.budget // 2)
    for request in prefills:
        if request.num_promised_blocks:
            num_tokens = min(budget, _num_left(request, book), _affordable(request, book, draft.cost / 2))
            _add_chunk(book, draft, request, num_tokens)
            budget -= num_tokens
    return [request for request in prefills if not request.num_promised_blocks]


def _is_crowded(book: BlockBook, draft: _Draft, num_prefills: int) -> bool:
    """Whether a waiting request might get no slot, no blocks or too few rows in the main way. Asked in each step."""
    config, num_waiting = book.config, len(book.waiting)
    if num_waiting == 0:
        return False
    if num_waiting > book.num_free_slots or draft.budget >> (num_prefills + num_waiting) < config.num_express_rows:
        return True
    num_tokens = book.num_waiting_tokens + book.num_prefill_tokens_left
    num_most = num_tokens // config.block_size + num_waiting + num_prefills + config.num_reserved_blocks
    return book.num_free_blocks < num_most


def _shares(book: BlockBook, draft: _Draft, prefills: Sequence[Request]) -> dict[str, int]:
    """Rows for each prefill and for the first that wait, if blocks allow: half of what is left, the last one all of it,
    and what they did not need to the oldest."""
    ratio = book.config.context_tokens_per_row
    may_start = (request for request in book.waiting if not (request.awaits_mask or request.prefills_apart))
    some_waiting = islice(may_start, min(_NUM_SHARING, book.num_free_slots))
    wanted = [(request, _num_left(request, book)) for request in (*prefills, *some_waiting)]
    shares: dict[str, int] = {}
    budget, cost = draft.budget, draft.cost
    for part in (2, 1):
        for request, num_left in wanted:
            given = shares.get(request.request_id, 0)
            divisor = 1 if request is wanted[-1][0] else part
            start = _first_row(request, book) + given
            price = _price(request, book)
            affordable = int(rows_for_cost(start, cost / divisor / price, ratio)) or not shares  # the oldest goes on
            rows = min(num_left - given, -(-budget // divisor), affordable)
            shares[request.request_id] = given + rows
            budget -= rows
            cost = max(0.0, cost - price * chunk_cost(start, rows, ratio))
    return shares


def _price(request: Request, book: BlockBook) -> float:
    """What a row of its prompt costs."""
    return book.config.logprob_row_cost if request.wants_prompt_logprobs else 1.0


def _affordable(request: Request, book: BlockBook, cost: float) -> int:
    """Rows that it may have for `cost`, at least one."""
    ratio = book.config.context_tokens_per_row
    return max(1, int(rows_for_cost(_first_row(request, book), cost / _price(request, book), ratio)))


def _first_row(request: Request, book: BlockBook) -> int:
    """The first row that no step computes yet: behind what a step in flight does."""
    return request.planned_end if request.planned_step in book.steps_in_flight else request.num_computed


def _num_left(request: Request, book: BlockBook) -> int:
    return len(request.token_ids) - _first_row(request, book)


def _add_prefills(book: BlockBook, draft: _Draft, prefills: Sequence[Request], shares: Mapping[str, int]) -> None:
    """Step 3."""
    block_size = book.config.block_size
    for request in prefills:
        if request.status != "running":
            continue  # pushed out by an older request
        share = shares[request.request_id]
        num_fitting = len(request.block_table) * block_size - _first_row(request, book)
        if share > 0 and num_fitting + book.num_free_blocks == 0:
            book.preempt_later_than(request, draft.step_id)
        _add_chunk(book, draft, request, min(share, num_fitting + book.num_free_blocks * block_size))


def _admit_waiting(book: BlockBook, draft: _Draft, shares: Mapping[str, int]) -> None:
    """Step 4."""
    pool, config = book.pool, book.config
    while draft.budget > 0 and book.num_free_slots > 0:
        request = next((each for each in book.waiting if not each.awaits_mask), None)
        if request is None:
            return
        found = book.find_prefix(request)
        num_new = blocks_of(len(request.token_ids), config.block_size) - len(found)
        has_company = len(book.running) > len(book.lane)
        num_spare = draft.num_claimed + (config.num_reserved_blocks if has_company else 0)
        if book.num_free_blocks < num_new + pool.num_idle(found) + num_spare:
            return
        share = shares.get(request.request_id, draft.budget)
        if share == 0:
            return
        book.start(request, found)
        if book.await_arrival(request):
            continue
        affordable = _affordable(request, book, draft.cost)
        _add_chunk(book, draft, request, min(share, _num_left(request, book), affordable))


def _add_chunk(book: BlockBook, draft: _Draft, request: Request, num_tokens: int) -> None:
    """Plan the next `num_tokens` of a request, maybe none. The blocks they need must be free."""
    config = book.config
    start = _first_row(request, book)
    end = start + num_tokens
    num_missing = blocks_of(end, config.block_size) - len(request.block_table)
    if num_missing > 0:
        request.block_table += book.pool.allocate(num_missing)
    if not request.num_promised_blocks:
        draft.num_left += len(request.token_ids) - end
        draft.num_claimed += blocks_of(len(request.token_ids), config.block_size) - len(request.block_table)
    elif num_missing > 0:
        book.lane.num_kept -= num_missing
    if num_tokens <= 0:
        return
    draft.budget -= num_tokens
    cost = _price(request, book) * chunk_cost(start, num_tokens, config.context_tokens_per_row)
    draft.cost = max(0.0, draft.cost - cost)
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
    request.planned_step, request.planned_end = draft.step_id, end


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
