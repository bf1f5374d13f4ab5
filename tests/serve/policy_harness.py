"""A make-believe attention worker and model for tests of the policy. The next token is a hash of the whole history.

The worker's cache stores, for each slot of each block, the digest of the history up to that token. Before it computes
a row it checks that the cache holds exactly the history the row must see: a block shared wrongly, freed too early or
never filled is found at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from antiphon.serve.policy.block_book import BlockPool
from antiphon.serve.policy.request import Request, SchedulerConfig, SequenceStart, StepPlan, check_request, new_request
from antiphon.serve.policy.scheduler import Scheduler
from antiphon.specs.sampling import SamplingParams

EOS = 2


def digest(tokens: list[int]) -> bytes:
    return blake2b(repr(tokens).encode(), digest_size=8).digest()


def next_token(history: list[int]) -> int:
    return digest(history)[0] % 24


def expected_output(prompt: list[int], params: SamplingParams) -> list[int]:
    """What the model says when nothing limits it."""
    output: list[int] = []
    while len(output) < params.max_tokens:
        output.append(next_token(prompt + output))
        if (output[-1] == EOS and not params.ignore_eos) or output[-1] in params.stop_token_ids:
            break
    return output


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert that blocks, slots and queues agree."""
    book = scheduler.book
    running, waiting = list(book.running), list(book.waiting)
    check_blocks(book.pool, [request.block_table for request in running])
    assert {request.request_id for request in running + waiting} == set(scheduler.requests)
    slots = [request.slot for request in running] + book.free_slots
    assert sorted(slots) == list(range(scheduler.config.num_slots))
    lane, members = book.lane, [request for request in running if request.num_promised_blocks]
    assert len(lane) == len({request.owner for request in members}) == len(members) <= scheduler.config.express_slots
    assert book.num_free_slots >= 0
    assert lane.num_kept == scheduler.config.express_blocks - sum(len(request.block_table) for request in members)
    assert book.pool.num_free >= lane.num_kept >= 0, "blocks of the express lane are taken"
    assert all(len(request.block_table) <= request.num_promised_blocks for request in members)
    assert not any(request.num_promised_blocks for request in waiting)
    assert book.num_waiting_tokens == sum(len(request.token_ids) for request in waiting)
    assert all(not request.block_table for request in waiting)


def check_blocks(pool: BlockPool, tables: Sequence[Sequence[int]]) -> None:
    """Assert every invariant of a pool, given the tables of all requests that hold blocks."""
    held = [0] * pool.num_blocks
    for table in tables:
        assert len(set(table)) == len(table), "a table names a block twice"
        for block in table:
            held[block] += 1
    assert held == pool._num_refs, "reference counts differ from the tables"
    assert set(pool._free) == {block for block in range(pool.num_blocks) if held[block] == 0}
    for digest, block in pool._block_of.items():
        assert pool._digest_of[block] == digest
    assert sum(digest is not None for digest in pool._digest_of) == len(pool._block_of)
    for block, count in enumerate(held):
        assert count < 2 or pool._digest_of[block] is not None, f"block {block} is shared but not published"


@dataclass
class FakeWorker:
    """Applies plans as `step.py` says, and computes them."""

    block_size: int
    cache: dict[int, bytes] = field(default_factory=dict)
    starts: dict[int, SequenceStart] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    slot_of: dict[str, int] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> tuple[list[int], list[tuple[str, int]]]:
        """Sampled tokens, and (request, position) of the prompt rows that reported."""
        for request_id in plan.released:
            self.slot_of.pop(request_id, None)
        for start in plan.starts:
            assert start.slot not in self.slot_of.values() or self.slot_of.get(start.request_id) == start.slot
            self.slot_of[start.request_id] = start.slot
            self.starts[start.slot] = start
            self.tokens[start.slot] = list(start.token_ids)
        sampled, reported = [], []
        for step in plan.sequences:
            slot = step.slot
            assert self.slot_of[step.request_id] == slot
            if step.first_new_block == 0:
                self.tables[slot] = []
            table = self.tables[slot]
            assert len(table) >= step.first_new_block, "a gap in the block table"
            table[step.first_new_block :] = step.new_blocks
            tokens = self.tokens[slot]
            end = step.start + len(step.token_ids)
            assert len(tokens) >= step.start
            tokens[step.start : end] = step.token_ids
            for position in range(end):
                place = table[position // self.block_size] * self.block_size + position % self.block_size
                if position >= step.start:
                    self.cache[place] = digest(tokens[: position + 1])
                assert self.cache.get(place) == digest(tokens[: position + 1]), "the cache holds another history"
            reported += [(step.request_id, step.start + row) for row in range(step.logprob_begin, step.logprob_end)]
            if step.samples:
                assert end == len(tokens)
                sampled.append(next_token(tokens))
        return sampled, reported


@dataclass
class Simulation:
    """A scheduler with its worker, and a record of what came out."""

    config: SchedulerConfig
    outputs: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str | None] = field(default_factory=dict)
    reported: list[tuple[str, int]] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    mask_delays: dict[str, int] = field(default_factory=dict)  # by request: plans that each of its masks takes
    num_side_by_side: int = 1

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config)
        self.worker = FakeWorker(self.config.block_size)
        self.num_submitted = 0
        self.masks_due: list[tuple[int, Request]] = []
        self.num_plans = 0

    def ask_mask(self, request: Request) -> None:
        if delay := self.mask_delays.get(request.request_id, 0):
            request.awaits_mask = True
            self.masks_due.append((self.num_plans + delay, request))

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        arrival: int | None = None,
        owner: str | None = None,
    ) -> Request:
        arrival = self.num_submitted if arrival is None else arrival
        request = new_request(request_id, prompt, params, arrival=arrival, seed=0, eos_token_ids=(EOS,), owner=owner)
        check_request(request, self.config)
        self.scheduler.add(request)
        self.num_submitted += 1
        self.outputs[request_id] = []
        self.reasons[request_id] = None
        self.ask_mask(request)
        return request

    def plan(self) -> StepPlan | None:
        self.num_plans += 1
        for due, request in list(self.masks_due):
            if due <= self.num_plans:
                request.awaits_mask = False
                self.masks_due.remove((due, request))
        plan = self.scheduler.schedule(self.num_side_by_side)
        if plan is not None:
            assert not any(self.scheduler.requests[step.request_id].awaits_mask for step in plan.sequences)
            assert plan.num_tokens == sum(len(step.token_ids) for step in plan.sequences)
            assert plan.num_tokens <= self.config.max_batch_tokens
            assert all(step.token_ids for step in plan.sequences)
            assert self.scheduler.num_running <= self.config.num_slots
            self.plans.append(plan)
        check_scheduler(self.scheduler)
        return plan

    def plan_ahead(self, before: StepPlan) -> StepPlan | None:
        """The step behind one that runs."""
        if any(self.mask_delays.get(step.request_id) for step in before.sequences):
            return None  # as the engine: what a grammar allows behind an unknown token is unknown
        plan = self.scheduler.schedule_ahead(before, self.num_side_by_side)
        check_scheduler(self.scheduler)
        return plan

    def compute(self, plan: StepPlan, made: tuple[list[int], list[tuple[str, int]]] | None = None) -> list[Request]:
        """`made`: what the worker made of the plan, if it has run it already."""
        sampled, reported = self.worker.run(plan) if made is None else made
        progress = self.scheduler.commit(plan, sampled)
        check_scheduler(self.scheduler)
        live = {request.request_id for request in progress} | set(self.scheduler.requests)
        self.reported += [entry for entry in reported if entry[0] in live]
        for request in progress:
            assert self.reasons[request.request_id] is None, "progress after the end"
            assert request.finish_reason != "abort", "progress of an aborted request"
            if request.newest_token_id is not None:
                self.outputs[request.request_id].append(request.newest_token_id)
                self.ask_mask(request)
            self.reasons[request.request_id] = request.finish_reason
            assert self.outputs[request.request_id] == request.token_ids[request.num_prompt :]
        return progress

    def written(self, plan: StepPlan) -> dict[int, bytes]:
        """What the cache holds at the places that the plan's rows are for."""
        size, places = self.config.block_size, []
        for step in plan.sequences:
            table = self.scheduler.requests[step.request_id].block_table
            positions = range(step.start, step.start + len(step.token_ids))
            places += [table[position // size] * size + position % size for position in positions]
        return {place: self.worker.cache[place] for place in places}

    def lose_worker(self) -> None:
        """The worker is lost, and comes back with an empty cache."""
        for request in self.scheduler.remove_all(cache_lost=True):
            self.scheduler.add(request)
        self.worker = FakeWorker(self.config.block_size)
        check_scheduler(self.scheduler)

    def withdraw(self) -> None:
        """All requests are taken back and given to the same worker again."""
        for request in self.scheduler.remove_all():
            self.scheduler.add(request)
        check_scheduler(self.scheduler)

    def step(self) -> bool:
        plan = self.plan()
        if plan is not None:
            self.compute(plan)
        return plan is not None

    def run(self, max_steps: int = 10_000) -> int:
        """Steps until everything is done."""
        for step in range(max_steps):
            if not self.step():
                return step
        raise AssertionError(f"not done after {max_steps} steps")
