"""The scheduler of one attention worker: requests in, plans out, results back; and which worker gets a request.

`plan = schedule()`, run it, `commit(plan, tokens)`. Several plans may be in flight, of different requests or of chunks
of one prompt, if the worker runs steps side by side. What can go wrong in between:

- a request is aborted during the step: it keeps its blocks until `commit`, which drops its token;
- an expert worker is lost: the attention worker's cache is intact, so the very same plan is sent again;
- the attention worker and its cache are lost: `remove_all(cache_lost=True)`, and other workers take over, or this one
  when it is back;
- a request of the step is suspected of making it fail: `remove_all()`, and the engine gives them to workers anew.

Only `commit` moves a request forward. A plan that was never committed has changed which request holds
which block, nothing else; that is why recovery needs no undo log.
"""

from collections.abc import Mapping, Sequence

from antiphon.serve.engine_api import FinishReason
from antiphon.serve.policy.block_book import BlockBook
from antiphon.serve.policy.fill_step import fill_step
from antiphon.serve.policy.request import PENDING, Request, SchedulerConfig, SequenceStep, StepPlan

RUNNING_SEQUENCE_TOKENS = 16  # what a running sequence costs a new one, in tokens, because it slows every step


class Scheduler:
    """Owns the KV blocks of one attention worker and all requests routed to it. Not thread-safe."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.book = BlockBook(config)
        self.requests: dict[str, Request] = {}
        self._in_flight: dict[int, StepPlan] = {}  # by step, oldest first
        self._next_step_id = 0
        self.may_plan_ahead = True

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def num_running(self) -> int:
        return len(self.book.running)

    @property
    def num_arriving(self) -> int:
        """Those running requests whose keys and values are being handed over."""
        return self.book.num_arriving

    @property
    def num_waiting(self) -> int:
        return len(self.book.waiting)

    def add(self, request: Request) -> None:
        """Queue a request that `check_request` found no fault with; it waits in its order of arrival."""
        self.requests[request.request_id] = request
        self.book.add(request)

    def end(self, request_id: str) -> Request | None:
        """End a request early. Its blocks are free at once, or with the commit of its step in flight, or when nothing
        arrives there any more. Unknown id: None."""
        request = self.requests.get(request_id)
        if request is None or request.status == "finished":
            return None
        if request.status == "waiting" or not (self.is_in_flight(request) or request.arrives):
            self._drop(request)
        request.status = "finished"
        request.finish_reason = "abort"
        return request

    def schedule(self, num_side_by_side: int = 1) -> StepPlan | None:
        """The next step, or None if there is nothing to compute, or all that is left waits for masks, arrivals or steps
        in flight. `num_side_by_side`: steps that may be in flight; each gets a fair share."""
        most = max(1, 2 * num_side_by_side - 1)  # with those ahead of others
        assert len(self._in_flight) < most, f"{len(self._in_flight)} plans were not committed"
        plan = fill_step(self.book, self._next_step_id, num_side_by_side)
        if not plan.sequences:
            waits = self._in_flight or any(each.awaits_mask or each.arrives for each in self.requests.values())
            assert waits or not self.requests, "requests are left, but none can run"
            return None
        self.book.released.clear()
        return self._send(plan)

    def schedule_ahead(self, before: StepPlan, num_side_by_side: int = 1) -> StepPlan | None:
        """The step behind `before`, which is in flight: the same requests, with the tokens that it samples for them
        (`PENDING`). One that ends with such a token has a row for nothing, which `commit` drops.

        None where a step that knows more is better: requests wait for a place or are in the middle of their prompts,
        blocks are scarce, or the step has more than its share of requests."""
        book, size = self.book, self.config.block_size
        if not self.may_plan_ahead or book.waiting or not all(step.samples for step in before.sequences):
            return None
        if not all(self.is_in_flight(each) or each.arrives for each in book.running):
            return None
        going_on = [self.requests[step.request_id] for step in before.sequences]
        going_on = [request for request in going_on if self._may_go_on(request)]
        growing = [request for request in going_on if len(request.token_ids) == len(request.block_table) * size]
        num_promised = sum(1 for request in growing if request.num_promised_blocks)
        is_scarce = len(growing) - num_promised > book.num_free_blocks
        if not going_on or is_scarce or len(going_on) > -(-len(book.running) // num_side_by_side):
            return None
        book.lane.num_kept -= num_promised
        for request in growing:
            request.block_table.append(book.pool.allocate_one())
        sequences = tuple(self._pending_step(request) for request in going_on)
        return self._send(StepPlan(self._next_step_id, (), (), sequences, len(sequences)))

    def _may_go_on(self, request: Request) -> bool:
        """It does not end with its next token for sure."""
        num_tokens = len(request.token_ids) + 1
        num_left = request.num_prompt + request.params.max_tokens - num_tokens
        return request.finish_reason is None and num_left > 0 and num_tokens < self.config.max_model_len

    def _pending_step(self, request: Request) -> SequenceStep:
        first, start = request.num_blocks_sent, len(request.token_ids)
        request.num_blocks_sent = len(request.block_table)
        request.planned_step, request.planned_end = self._next_step_id, start + 1
        new_blocks = tuple(request.block_table[first:])
        return SequenceStep(request.request_id, request.slot, (PENDING,), start, first, new_blocks, True, 0, 0)

    def _send(self, plan: StepPlan) -> StepPlan:
        self._next_step_id += 1
        self._in_flight[plan.step_id] = plan
        self.book.steps_in_flight.add(plan.step_id)
        return plan

    def commit(self, plan: StepPlan, sampled: Sequence[int]) -> list[Request]:
        """The plan was computed; `sampled` has one token per sequence with `samples`, in the plan's order.

        Returns the requests that got a token or ended; not those aborted meanwhile."""
        assert self._in_flight.pop(plan.step_id, None) is plan, f"step {plan.step_id} is not in flight"
        self.book.steps_in_flight.discard(plan.step_id)
        progress = []
        tokens = iter(sampled)
        for step in plan.sequences:
            request = self.requests[step.request_id]
            token_id = next(tokens) if step.samples else None
            if request.finish_reason is not None:
                continue
            request.num_computed = step.start + len(step.token_ids)  # its steps are committed in order
            if step.logprob_end > step.logprob_begin:
                request.num_prompt_logprobs = step.start + step.logprob_end
            if request.num_computed % self.config.block_size == 0 or len(step.token_ids) > 1:
                self.book.offer_computed(request)
            if token_id is None and request.num_computed < len(request.token_ids):
                continue
            if self.take_token(request, token_id) and not self.is_in_flight(request):
                self._drop(request)
            progress.append(request)
        assert next(tokens, None) is None, "more tokens than sampling sequences"
        self._remove_aborted()
        self.book.generation_tokens += sum(1 for request in progress if request.num_output)
        return progress

    def take_token(self, request: Request, token_id: int | None) -> bool:
        """All that was known of it is computed, and this is its next token. True: it has ended with that, and holds
        what it holds until it leaves."""
        if token_id is None:
            reason: FinishReason | None = "length"  # max_tokens is 0: the prompt was all there was to do
        else:
            request.token_ids.append(token_id)
            reason = _finish_reason(request, self.config.max_model_len)
        if reason is not None:
            request.finish_reason = reason
            request.status = "finished"
        return reason is not None

    def with_known_tokens(self, micro_batches: list[list[SequenceStep]]) -> list[list[SequenceStep]]:
        """Rows of steps in flight, with the tokens that were committed since they were planned ahead."""
        return [list(map(self._known, each)) if _is_ahead(each) else each for each in micro_batches]

    def _known(self, sequence: SequenceStep) -> SequenceStep:
        request = self.requests[sequence.request_id]
        token_ids = request.token_ids[sequence.start : sequence.start + 1]
        if not token_ids and request.finish_reason is not None:
            token_ids = [0]  # aborted before its token came: a row for nothing, which `commit` drops
        return sequence._replace(token_ids=tuple(token_ids)) if token_ids else sequence

    def released_by(self, plan: StepPlan, *, is_again: bool) -> list[str]:
        """What the worker is to forget with a plan. `is_again`: it was sent before, and failed; a request that runs
        again since then, started by another plan, is left out."""
        kept = {each.request_id for each in self.book.running} if is_again else set()
        kept -= {start.request_id for start in plan.starts}
        return [request_id for request_id in plan.released if request_id not in kept]

    def take_arriving(self) -> list[Request]:
        """Requests admitted since the last call whose keys and values a prefill worker is to compute."""
        taken, self.book.arriving = self.book.arriving, []
        return [request for request in taken if request.arrives]

    def ask_again(self, request: Request) -> None:
        """Nothing has arrived for it: `take_arriving` returns it once more, with a block for a token that came
        meanwhile where one is free."""
        self.book.complete_table(request)
        self.book.arriving.append(request)

    def stop_arriving(self, request: Request) -> None:
        """Nothing arrives for it: steps of this worker compute what is missing, in the blocks that it has."""
        self.book.stop_arriving(request)

    def arrive(self, request: Request, num_computed: int) -> None:
        """The keys and values of that many tokens have arrived whole."""
        self.book.arrive(request, num_computed)
        if request.status == "finished":
            self._drop(request)

    def is_in_flight(self, request: Request) -> bool:
        """A plan in flight computes something for it."""
        return request.planned_step in self.book.steps_in_flight

    def remove(self, request: Request, *, nothing_comes: bool = False) -> None:
        """It leaves, and what it has computed stays to be found. Only while no plan with it is in flight and nothing
        writes to its blocks. `nothing_comes`: it is arriving, and nothing will come any more."""
        assert not self.is_in_flight(request), f"a plan with {request.request_id} is in flight"
        assert nothing_comes or not request.arrives, f"the blocks of {request.request_id} are written to"
        self._drop(request)

    def remove_all(self, *, cache_lost: bool = False) -> list[Request]:
        """Hand over all requests, oldest first, for schedulers to `add`. Plans in flight are void: the worker must have
        ended them, or never have seen them. Requests whose keys and values arrive stay until `remove`.

        `cache_lost`: the worker is gone. Otherwise it keeps what can be found in its cache."""
        for plan in self._in_flight.values():
            self.book.released.extend(plan.released)
        self._in_flight.clear()
        self.book.steps_in_flight.clear()
        self._remove_aborted(also_arriving=cache_lost)
        taken = self.book.remove_all(cache_lost=cache_lost)
        self.requests = {request.request_id: request for request in self.book.running}
        return taken

    def _drop(self, request: Request) -> None:
        self.book.remove(request)
        del self.requests[request.request_id]

    def _remove_aborted(self, *, also_arriving: bool = False) -> None:
        """Free what ended while a step with it was in flight."""
        ended = [request for request in self.book.running if request.status == "finished"]
        for request in ended:
            if not self.is_in_flight(request) and (also_arriving or not request.arrives):
                self._drop(request)


def _is_ahead(sequences: Sequence[SequenceStep]) -> bool:
    return bool(sequences) and sequences[0].token_ids == (PENDING,)


def _finish_reason(request: Request, max_model_len: int) -> FinishReason | None:
    """Why the request ends with the token it was just given, or None if it goes on.

    A stop token that is also the last one allowed counts as "stop", as in OpenAI's API. The API handles stop
    strings. `min_tokens` is enforced in one place only, the sampler, which bans `stop_ids` until enough tokens are
    out: a stop token that comes nevertheless (a complete grammar allows nothing else) ends the request.
    """
    num_tokens = len(request.token_ids)
    if request.token_ids[-1] in request.stop_ids:
        return "stop"
    if num_tokens - request.num_prompt >= request.params.max_tokens or num_tokens >= max_model_len:
        return "length"
    return None


def choose_attention_worker(request: Request, live_schedulers: Mapping[int, Scheduler]) -> int | None:
    """Key of the scheduler that gets a new request; None if no worker is alive. All must have the same block size.

    Among live workers, in this order:

    1. one with a slot and KV blocks for the request beside everything it has accepted already, or in its express lane;
    2. the least work before the first token, in tokens: the request's own tokens that are *not* in that worker's prefix
       cache, the prompt tokens queued there, and `RUNNING_SEQUENCE_TOKENS` for each sequence there, because those that
       wait run before it;
    3. the most free blocks; then the lowest index, so that a choice can be repeated.

    So the longest prefix hit wins among workers of equal load, and a hit is worth the tokens it spares, no more.
    Rejected: the longest hit always wins. With a system prompt that all requests share, every request would follow the
    first one.
    """
    ranked = [(*_burden(request, scheduler), index) for index, scheduler in live_schedulers.items()]
    return min(ranked)[-1] if ranked else None


def has_room(request: Request, scheduler: Scheduler) -> bool:
    """It could run there beside everything that the worker has accepted already."""
    return not _burden(request, scheduler)[0]


def _burden(request: Request, scheduler: Scheduler) -> tuple[bool, int, int]:
    book = scheduler.book
    block_size = scheduler.config.block_size
    num_hit = len(book.find_prefix(request)) * block_size
    num_new = len(request.token_ids) - num_hit
    num_queued = book.num_waiting_tokens + book.num_prefill_tokens_left
    has_room = (
        book.num_free_slots > scheduler.num_waiting and book.num_free_blocks * block_size >= num_queued + num_new
    ) or book.lane.takes(request)
    work = num_new + num_queued + RUNNING_SEQUENCE_TOKENS * (scheduler.num_running + scheduler.num_waiting)
    return not has_room, work, -book.num_free_blocks
