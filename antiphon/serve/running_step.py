"""The step that workers run together: each attention worker's part of it, from its plan to the commit or the failure.

A part that failed is kept and sent again unchanged: plans are idempotent (`policy/step`). What a failure means for the
workers is the group's business (`group.py`), what it means for the requests the engine's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from antiphon.serve.outputs import TrackedRequests
from antiphon.serve.policy.micro_batches import micro_batch_steps
from antiphon.serve.policy.request import Request, RequestStatus
from antiphon.serve.policy.scheduler import Scheduler
from antiphon.serve.policy.step import SequenceStep, StepPlan
from antiphon.serve.worker.messages import RunStep, StepResult
from antiphon.serve.worker_process import WorkerName


class Blamed(NamedTuple):
    """A request of a failed step, which would have computed its first `num_tokens` tokens."""

    request: Request
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class StepFailure:
    """A step came to nothing, as `worker` said or showed by dying; `blamed` are the requests that may be why.

    `reported`: the worker lives on and says that computing failed."""

    worker: WorkerName
    what: str
    reported: bool
    blamed: list[Blamed]


@dataclass(frozen=True)
class _Part:
    """`plan` None: the worker has no rows, and takes part because others need its experts."""

    plan: StepPlan | None
    micro_batches: list[list[SequenceStep]]


class RunningStep:
    """One step at a time over the attention workers' schedulers; what it made goes to the `tracked` requests."""

    def __init__(
        self,
        schedulers: Mapping[WorkerName, Scheduler],
        num_micro_batches: int,
        tracked: TrackedRequests,
        *,
        all_take_part: bool = False,
    ) -> None:
        """`all_take_part`: every worker computes in every micro-batch, with or without rows of its own."""
        self._all_take_part = all_take_part
        self._schedulers = schedulers
        self._num_micro_batches = num_micro_batches
        self._tracked = tracked
        self._running: dict[WorkerName, _Part] = {}
        self._failed: dict[WorkerName, _Part] = {}
        self._num_steps = 0

    @property
    def number(self) -> int:
        """Of the last step that began."""
        return self._num_steps

    @property
    def workers(self) -> list[WorkerName]:
        """Attention workers that have not answered yet; empty: no step runs."""
        return list(self._running)

    def begin(self, workers: Iterable[WorkerName], placement: int = 0) -> dict[WorkerName, RunStep]:
        """What to send to each of `workers` that has something to compute: a part that failed, or a new plan.
        `placement`: the version by which rows go to experts. Nothing while masks are about to come."""
        assert not self._running, "a step is running"
        workers = list(workers)
        if not self._failed and any(self._tracked.is_mask_near(self._schedulers[name].requests) for name in workers):
            return {}
        for name in workers:
            if (failed := self._failed.pop(name, None)) is not None:
                self._running[name] = failed
                continue
            scheduler = self._schedulers[name]
            if (plan := scheduler.schedule()) is not None:
                ratio = scheduler.config.context_tokens_per_row
                self._running[name] = _Part(plan, micro_batch_steps(plan.sequences, self._num_micro_batches, ratio))
        if self._all_take_part and self._running:
            for name in workers:
                self._running.setdefault(name, _Part(None, []))
        participants = self._participants()
        self._num_steps += bool(self._running)
        sizes = self._sizes()
        prefill, most_rows = any(count > 1 for rows in sizes for count in rows), max(map(sum, sizes), default=0)
        return {
            name: self._message(part, participants, prefill=prefill, most_rows=most_rows, placement=placement)
            for name, part in self._running.items()
        }

    def _sizes(self) -> list[list[int]]:
        """Rows of every sequence of every micro-batch, of all workers."""
        every = [sequences for part in self._running.values() for sequences in part.micro_batches]
        return [[len(sequence.token_ids) for sequence in sequences] for sequences in every]

    def _participants(self) -> list[list[int]]:
        num_micro_batches = max((len(part.micro_batches) for part in self._running.values()), default=0)
        return [
            [name.index for name, part in self._running.items() if len(part.micro_batches) > index]
            for index in range(num_micro_batches)
        ]

    def _message(
        self, part: _Part, participants: list[list[int]], *, prefill: bool, most_rows: int, placement: int
    ) -> RunStep:
        plan, bitmasks = part.plan, {}
        for sequence in plan.sequences if plan is not None else ():
            if sequence.samples and (mask := self._tracked.mask_of(sequence.request_id)) is not None:
                bitmasks[sequence.request_id] = mask
        missing = len(participants) - len(part.micro_batches) if self._all_take_part else 0
        return RunStep(
            step=self._num_steps,
            released=list(plan.released) if plan is not None else [],
            starts=list(plan.starts) if plan is not None else [],
            micro_batches=part.micro_batches + [[]] * missing,
            participants=participants,
            prefill=prefill,
            most_rows=most_rows,
            placement=placement,
            bitmasks=bitmasks,
        )

    def commit(self, name: WorkerName, result: StepResult) -> None:
        """A worker has computed its part: move its requests forward and hand out what they got."""
        part = self._running.pop(name)
        if part.plan is None:
            return
        scheduler = self._schedulers[name]
        sampled = {entry.request_id: entry for entry in result.requests}
        tokens = []
        for sequence in part.plan.sequences:
            if sequence.samples:
                token_id = sampled[sequence.request_id].token_id
                assert token_id is not None, "a sampling sequence yields a token"
                tokens.append(token_id)
        self._tracked.publish(scheduler.commit(part.plan, tokens), sampled)

    def fail(self, name: WorkerName) -> None:
        """A worker has not computed its part, if it had one: the same again, next time."""
        if (part := self._running.pop(name, None)) is not None and part.plan is not None:
            self._failed[name] = part

    def lose(self, name: WorkerName) -> list[Request]:
        """A worker is gone and its cache with it. Returns its requests, which need another worker."""
        self._running.pop(name, None)
        self._failed.pop(name, None)
        return self._schedulers[name].evacuate()

    def withdraw(self) -> list[Request]:
        """Take all requests back, and the parts that failed with them. Only while no step runs."""
        assert not self._running, "a step is running"
        self._failed.clear()
        return [request for scheduler in self._schedulers.values() for request in scheduler.withdraw()]

    def failure(
        self, worker: WorkerName, what: str, owners: Iterable[WorkerName], *, reported: bool = False
    ) -> StepFailure | None:
        """The running step fails, maybe over a request that one of `owners` computes. None: they compute nothing."""
        blamed = []
        for owner in owners:
            requests = self._schedulers[owner].requests
            plan = self._running[owner].plan if owner in self._running else None
            for sequence in plan.sequences if plan is not None else ():
                request = requests[sequence.request_id]
                if request.status is not RequestStatus.FINISHED:  # an aborted one has its place until the step ends
                    blamed.append(Blamed(request, sequence.start + len(sequence.token_ids)))
        return StepFailure(worker=worker, what=what, reported=reported, blamed=blamed) if blamed else None
