"""The scheduler of one attention worker: requests in, plans out, results back.

`plan = schedule()`, run it, `commit(plan, tokens)`; one plan is in flight at a time. What can go wrong in between:

- a request is aborted during the step: it keeps its blocks until `commit`, which drops its token;
- an expert worker is lost: the attention worker's cache is intact, so the very same plan is sent again, or
  `rollback(plan)` and schedule anew (then new arrivals and aborts count);
- the attention worker and its cache are lost: `requeue_all()` if it comes back, `evacuate()` if others take over;
- somebody in the step is suspected of making it fail: `withdraw()`, and the engine decides anew who runs.

Only `commit` moves a request forward. A plan that was never committed has changed who holds which block, nothing else;
that is why recovery needs no undo log.
"""

from collections.abc import Sequence

from antiphon.base.errors import UserError
from antiphon.serve.engine_api import FinishReason, QueueFull
from antiphon.serve.policy.batching import fill_step
from antiphon.serve.policy.limits import SchedulerConfig, check_request
from antiphon.serve.policy.occupancy import WorkerOccupancy
from antiphon.serve.policy.request import Request, RequestStatus
from antiphon.serve.policy.step import Progress, StepPlan


class Scheduler:
    """Owns the KV blocks of one attention worker and all requests routed to it. Not thread-safe."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.occupancy = WorkerOccupancy(config)
        self.requests: dict[str, Request] = {}
        self.counters = self.occupancy.counters
        self._in_flight: StepPlan | None = None
        self._next_step_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def num_running(self) -> int:
        return len(self.occupancy.running)

    @property
    def num_waiting(self) -> int:
        return len(self.occupancy.waiting)

    def submit(self, request: Request) -> None:
        """Queue a new request. `RequestTooLong`, `QueueFull` or `UserError` at once, with nothing changed."""
        check_request(request, self.config)
        if request.request_id in self.requests:
            raise UserError(f"request id {request.request_id!r} is in use: choose another")
        if self.num_waiting >= self.config.max_waiting:
            raise QueueFull(
                f"{self.num_waiting} requests are waiting, the limit is {self.config.max_waiting}: try again later",
                self.config.retry_after_s,
            )
        self.adopt(request)

    def adopt(self, request: Request) -> None:
        """Queue a request accepted before, on a worker of the same limits; it waits in its order of arrival."""
        self.requests[request.request_id] = request
        self.occupancy.enqueue(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request. Its blocks are free at once, or with the commit of the step in flight. Unknown id: None."""
        request = self.requests.get(request_id)
        if request is None or request.status is RequestStatus.FINISHED:
            return None
        if request.status is RequestStatus.WAITING:
            self.occupancy.dequeue(request)
            del self.requests[request_id]
        elif self._in_flight is None:
            self._retire(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = "abort"
        return request

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute. A plan must be committed or rolled back."""
        assert self._in_flight is None, "the last plan was neither committed nor rolled back"
        plan = fill_step(self.occupancy, self._next_step_id)
        if not plan.sequences:
            assert not self.requests, "requests are left, but none can run"
            return None
        self.occupancy.released.clear()
        self._next_step_id += 1
        self._in_flight = plan
        return plan

    def commit(self, plan: StepPlan, sampled: Sequence[int]) -> list[Progress]:
        """The plan was computed; `sampled` has one token per sequence with `samples`, in the plan's order.

        Returns what happened to each request that got a token or ended; not those aborted meanwhile."""
        self._land(plan)
        progress = []
        tokens = iter(sampled)
        for step in plan.sequences:
            request = self.requests[step.request_id]
            token_id = next(tokens) if step.samples else None
            if request.finish_reason is not None:
                continue
            request.num_computed = step.start + len(step.token_ids)
            if step.logprob_end > step.logprob_begin:
                request.num_prompt_logprobs = step.start + step.logprob_end
            if request.num_computed % self.config.block_size == 0 or len(step.token_ids) > 1:
                self.occupancy.publish_computed(request)
            if token_id is not None:
                request.token_ids.append(token_id)
                reason = _finish_reason(request, self.config.max_model_len)
            elif request.num_computed == len(request.token_ids):
                reason = "length"  # max_tokens is 0: the prompt was all there was to do
            else:
                continue
            if reason is not None:
                request.finish_reason = reason
                request.status = RequestStatus.FINISHED
                self._retire(request)
            progress.append(Progress(request, token_id, reason))
        assert next(tokens, None) is None, "more tokens than sampling sequences"
        self._retire_aborted()
        self.counters.num_steps += 1
        self.counters.generation_tokens += sum(1 for entry in progress if entry.token_id is not None)
        return progress

    def rollback(self, plan: StepPlan) -> None:
        """The plan was not computed, and the worker may have seen it or not: plan anew, and tell it all again.

        Requests keep their blocks and their place. Not needed to send the very same plan again."""
        self._land(plan)
        for step in plan.sequences:
            self.requests[step.request_id].num_blocks_sent = step.first_new_block
        self.occupancy.released.extend(plan.released)
        self._retire_aborted()

    def requeue_all(self) -> list[Request]:
        """The worker and its cache are lost: every running request waits again, to be recomputed from its tokens.

        A plan in flight is void. Returns the requests that were running and were not aborted, oldest first."""
        self._in_flight = None
        self._retire_aborted()
        requeued = self.occupancy.requeue_all()
        self.occupancy.forget_worker()
        return requeued

    def evacuate(self) -> list[Request]:
        """As `requeue_all`, but hand over all requests, oldest first, for other schedulers to `adopt`."""
        self.requeue_all()
        return self._hand_over()

    def withdraw(self) -> list[Request]:
        """Hand over all requests, oldest first; the worker lives and keeps what can be found in its cache.

        A plan in flight is void: the worker must have ended it, or never have seen it."""
        if self._in_flight is not None:
            self.rollback(self._in_flight)
        self.occupancy.requeue_all()
        return self._hand_over()

    def _hand_over(self) -> list[Request]:
        self.requests.clear()
        self.occupancy.num_waiting_tokens = 0
        return self.occupancy.waiting.take_all()

    def check(self) -> None:
        """Assert that blocks, slots and queues agree. For tests."""
        running, waiting = list(self.occupancy.running), list(self.occupancy.waiting)
        self.occupancy.pool.check([request.block_table for request in running])
        assert {request.request_id for request in running + waiting} == set(self.requests)
        slots = [request.slot for request in running] + self.occupancy.free_slots
        assert sorted(slots) == list(range(self.config.max_running))
        assert self.occupancy.num_waiting_tokens == sum(len(request.token_ids) for request in waiting)
        assert all(not request.block_table for request in waiting)

    def _land(self, plan: StepPlan) -> None:
        assert plan is self._in_flight, f"step {plan.step_id} is not the one in flight"
        self._in_flight = None

    def _retire(self, request: Request) -> None:
        self.occupancy.retire(request)
        del self.requests[request.request_id]

    def _retire_aborted(self) -> None:
        """Free what was aborted while a step was in flight."""
        for request in [request for request in self.occupancy.running if request.status is RequestStatus.FINISHED]:
            self._retire(request)


def _finish_reason(request: Request, max_model_len: int) -> FinishReason | None:
    """Why the request ends with the token it was just given, or None if it goes on.

    A stop token that is also the last one allowed counts as "stop", as in OpenAI's API. Stop strings are the API's
    business. `min_tokens` is enforced in one place only, the sampler, which bans `stop_ids` until enough tokens are
    out: a stop token that comes nevertheless (a complete grammar allows nothing else) ends the request.
    """
    num_tokens = len(request.token_ids)
    if request.token_ids[-1] in request.stop_ids:
        return "stop"
    if num_tokens - request.num_prompt >= request.params.max_tokens or num_tokens >= max_model_len:
        return "length"
    return None
