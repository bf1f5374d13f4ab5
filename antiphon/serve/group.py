"""Workers that depend on each other: attention and expert workers, or a replica.

    start_steps  every attention worker with work gets its plan, cut into micro-batches
    on_message   a worker has computed its part: its requests move forward, and what they got goes to their sinks;
                 or the step has failed: its parts stay, to be sent again unchanged (plans may be applied twice)
    on_death     its requests move to other attention workers, or wait for its return, and are computed again

Attention workers step in one of two ways:

    barrier   together: the next step begins when all have answered. The engine names for each micro-batch the workers
              that take part, so experts wait for exactly those and an idle worker delays no other
    free      each for itself: the next step begins with a worker's own answer, and a slow one delays no other. Expert
              workers compute what is ready of a layer together (`comm/m2n/ready_batches`). A worker runs as many steps
              side by side as there are micro-batches, each of other requests (`worker/side_by_side`). Behind each of
              these lanes the next step may wait at the worker, planned before the tokens are known that it begins with.
              Replicas that plan ahead (`ServeConfig.plans_ahead`) step this way too, with one lane

What needs all to stand still (to begin anew, to remove requests) holds new steps until no step runs; where experts
are may change beside steps (`placement_control`). How the workers begin anew after a failure is in `recovery`.

A failed step may be a request's doing: the group names whose it can be, and the engine judges (`policy/suspects`).
An attention worker fails over one of its own requests. Where an expert worker fails, or a worker makes others wait, it
may be any request of the step.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.base.logging import get_logger
from antiphon.serve.outputs import TrackedRequests
from antiphon.serve.placement_control import Balancer, PlacementControl
from antiphon.serve.policy.micro_batches import split_into_micro_batches
from antiphon.serve.policy.request import Request, SequenceStep, StepPlan
from antiphon.serve.policy.scheduler import Scheduler
from antiphon.serve.recovery import Members, Recovery
from antiphon.serve.statistics import EngineStatistics
from antiphon.serve.worker.messages import (
    ExchangeReport,
    ExpertReport,
    Pool,
    Prepared,
    ResetDone,
    RunStep,
    StepFailed,
    StepResult,
    WorkerReady,
)
from antiphon.serve.worker_handle import WorkerName, WorkerProcess

if TYPE_CHECKING:
    from antiphon.serve.handovers import Handovers

_log = get_logger("engine")


@dataclass(frozen=True, kw_only=True)
class StepFailure:
    """A step came to nothing, as `worker` said or showed by dying.

    `blamed`: the requests that may be why, and how many tokens of each would have been computed after the step.
    `reported`: the worker lives on and says that computing failed."""

    worker: WorkerName
    what: str
    reported: bool
    blamed: dict[Request, int]


# An attention worker, and which of its steps: lane i has two in turn, at i and at i + the number of lanes.
_Place = tuple[WorkerName, int]


@dataclass
class _Part:
    """One attention worker's part of a step. `plan` None: it has no rows, and takes part because others need its
    experts. `step`: number of the step with which it was sent last. `is_masked`: it has grammars to follow."""

    plan: StepPlan | None
    micro_batches: list[list[SequenceStep]]
    step: int = 0
    is_masked: bool = False


class StepGroup:
    """Driven by the engine's thread: `start_steps`, `on_message`, `on_death`, `on_tick`."""

    def __init__(
        self,
        *,
        members: Members,
        schedulers: list[Scheduler],
        num_micro_batches: int,
        statistics: EngineStatistics,
        tracked: TrackedRequests,
        timeout_s: float,
        steps_freely: bool = False,
        plans_ahead: bool = False,
        placing: PlacementControl | None = None,
        balancer: Balancer | None = None,
        record: Callable[[int, int, bytes, bytes, bytes], None] | None = None,
        first_expert: int = 0,
    ) -> None:
        """`placing`: where experts are, if attention workers do not have them all; `balancer`: decides where they
        should be; `first_expert`: number of its first expert worker over all groups. `plans_ahead`: each step is one
        micro-batch, and behind it the next one waits at the worker. `record` takes step, worker, the
        experts that its rows chose and were expected to choose, and which rows are of prompts.

        `handovers`, for which requests of other workers are computed here, are set before the first step."""
        self.members = members
        self.schedulers = dict(zip(members.attention, schedulers, strict=True))
        self.placing = placing
        self._balancer = balancer
        self._record = record
        self._first_expert = first_expert
        self._fleet = members.fleet
        self._statistics = statistics
        self._tracked = tracked
        self.handovers: Handovers | None = None
        self._num_micro_batches = num_micro_batches
        self._steps_freely = steps_freely
        self._plans_ahead = plans_ahead
        self._num_lanes = num_micro_batches if plans_ahead else 1
        self._is_held = False
        self._recovery = Recovery(members, statistics, timeout_s, placing, lambda: self.quiet)
        self._parts: dict[_Place, _Part] = {}  # planned and not computed
        self._running: list[_Place] = []  # whose parts were sent, and not answered yet
        self._num_steps = self._num_results = 0  # sent to all its workers, and come from them
        self._counted_until_s = 0.0  # time in which steps ran

    @property
    def pool(self) -> Pool:
        """The phase that its workers are for."""
        return self.members.attention[0].pool

    @property
    def live_attention(self) -> list[WorkerName]:
        """The attention workers that can step now."""
        return self._recovery.live_attention

    @property
    def ready(self) -> bool:
        """All experts and at least one attention worker can step."""
        return bool(self.live_attention)

    @property
    def complete(self) -> bool:
        """All workers can step."""
        return self._recovery.complete

    @property
    def num_side_by_side(self) -> int:
        """Steps that may run at once, each with a number of its own."""
        return len(self.schedulers) * self._num_lanes if self._steps_freely else 1

    @property
    def quiet(self) -> bool:
        """No step runs."""
        return not self._running

    # --- a step ----------------------------------------------------------------------------------------------------

    def start_steps(self) -> None:
        """Plan and send the next steps, or those that failed again, where none is running and there is work."""
        if self._is_held or not (self.quiet or self._steps_freely) or not self._prepare_steps():
            return
        if not self._steps_freely:
            self._start_together()
            return
        self._start_freely()
        if self._plans_ahead:
            self._start_freely()  # the steps behind those that have just begun

    def _start_together(self) -> None:
        """One step of all workers that have work."""
        places = [(name, 0) for name in self.live_attention]
        if not self._parts and any(self._awaits_mask(name) for name, _ in places):
            return
        for place in places:
            if place not in self._parts:
                self._plan(place)
        ready = [place for place in places if place in self._parts]
        if ready and self.members.share_experts:
            self._parts |= {place: _Part(None, []) for place in places if place not in ready}
            ready = places
        if ready:
            self._send_step(ready)

    def _start_freely(self) -> None:
        """A step in each lane that has none; behind one that runs, the next."""
        for name in self.live_attention:
            is_late = self._awaits_mask(name)
            for lane in range(self._num_lanes):
                first, second = (name, lane), (name, lane + self._num_lanes)
                taken = [place for place in (first, second) if place in self._parts]
                if not taken and not is_late:
                    self._plan(first)
                elif len(taken) == 1 and taken[0] in self._running and self._plans_ahead:
                    self._plan_ahead(taken[0], second if taken[0] == first else first)
        live = set(self.live_attention)
        ready = [place for place in self._parts if place[0] in live and place not in self._running]
        for place in sorted(ready, key=lambda place: self._parts[place].step or math.inf):  # failed ones in their order
            self._send_step([place])

    def _places(self, name: WorkerName) -> list[_Place]:
        return [(name, index) for index in range(2 * self._num_lanes)]

    def _plan_ahead(self, before: _Place, place: _Place) -> None:
        part = self._parts[before]
        if part.plan is None or part.is_masked:
            return
        if (plan := self.schedulers[place[0]].schedule_ahead(part.plan, self._num_lanes)) is not None:
            self._parts[place] = _Part(plan, [list(plan.sequences)])

    def hold(self) -> None:
        """No step begins from now on, until `remove_all`."""
        self._is_held = True

    def _awaits_mask(self, name: WorkerName) -> bool:
        """Worth waiting for: it comes soon."""
        return self._tracked.is_mask_near(self.schedulers[name].requests)

    def _send_step(self, places: list[_Place]) -> None:
        """The parts at these places are one step."""
        if self.quiet:
            self._counted_until_s = time.monotonic()
        self._running += places
        self._num_steps += 1
        self._recovery.note_step([name for name, _ in places])
        for name, message in self._messages(places).items():
            self._fleet.send(self._fleet.workers[name], message)

    def _prepare_steps(self) -> bool:
        """Take back expert workers that were missing; let experts move on. False: no step may begin now."""
        if self.placing is None or self._recovery.phase != "stepping":
            return True
        members, missing = self.members, self.members.missing_experts()
        if self.placing.absent - missing:
            if self.quiet:
                self._recovery.begin()
            return False
        if not missing:
            if self._balancer is not None:
                self._balancer.advance(self.placing)
            informed = [] if members.share_experts else members.loaded_attention()
            running = [self._parts[place].step for place in self._running]
            self.placing.advance(informed, members.expert_holders, running)
        return True

    def _plan(self, place: _Place) -> None:
        scheduler = self.schedulers[place[0]]
        if (plan := scheduler.schedule(self._num_lanes)) is None:
            return
        if self._plans_ahead:
            micro_batches = [list(plan.sequences)]
        else:
            ratio = scheduler.config.context_tokens_per_row
            micro_batches = split_into_micro_batches(plan.sequences, self._num_micro_batches, ratio)
        self._parts[place] = _Part(plan, micro_batches)

    def _messages(self, places: list[_Place]) -> dict[WorkerName, RunStep]:
        """A step at these places, as each of their workers gets it."""
        parts = {place[0]: self._parts[place] for place in places}
        num_micro_batches = max(len(part.micro_batches) for part in parts.values())
        participants = [
            [name.index for name, part in parts.items() if len(part.micro_batches) > index]
            for index in range(num_micro_batches)
        ]
        every = [sequences for part in parts.values() for sequences in part.micro_batches]
        sizes = [[len(sequence.token_ids) for sequence in sequences] for sequences in every]
        prefill, most_rows = any(count > 1 for rows in sizes for count in rows), max(map(sum, sizes))
        messages = {}
        for name, part in parts.items():
            plan, is_again, part.step = part.plan, part.step > 0, self._num_steps
            missing = num_micro_batches - len(part.micro_batches) if self.members.share_experts else 0
            bitmasks = self._bitmasks(name, plan)
            part.is_masked = bool(bitmasks)
            messages[name] = RunStep(
                step=self._num_steps,
                released=[] if plan is None else self.schedulers[name].released_by(plan, is_again=is_again),
                starts=list(plan.starts) if plan is not None else [],
                micro_batches=self.schedulers[name].with_known_tokens(part.micro_batches) + [[]] * missing,
                participants=participants,
                first_micro_batch=places[0][1] % self._num_lanes,
                prefill=prefill,
                most_rows=most_rows,
                placement=0 if self.placing is None else self.placing.current.version,
                bitmasks=bitmasks,
                offers=self.handovers.offers(plan) if self.handovers is not None and plan is not None else [],
            )
        return messages

    def _bitmasks(self, name: WorkerName, plan: StepPlan | None) -> dict[str, bytes]:
        """What grammars allow next, of the sequences that get a token."""
        sampling = [sequence.request_id for sequence in plan.sequences if sequence.samples] if plan is not None else []
        requests = self.schedulers[name].requests
        masks = {request_id: self._tracked.mask_of(requests[request_id].tracked_id) for request_id in sampling}
        return {request_id: mask for request_id, mask in masks.items() if mask is not None}

    def _commit(self, place: _Place, result: StepResult) -> None:
        """A worker has computed its part: move its requests forward and hand out what they got."""
        self._stop_running(place)
        plan = self._parts.pop(place).plan
        if plan is None:
            return
        sampled = {entry.request_id: entry for entry in result.requests}
        tokens = []
        for sequence in plan.sequences:
            if sequence.samples:
                token_id = sampled[sequence.request_id].token_id
                assert token_id is not None, "a sampling sequence yields a token"
                tokens.append(token_id)
        (self.handovers or self._tracked).publish(self.schedulers[place[0]].commit(plan, tokens), sampled)

    def _give_up(self, name: WorkerName) -> None:
        """A worker has not computed its parts, if it had any: the same again, next time."""
        for place in set(self._places(name)).intersection(self._running):
            self._stop_running(place)
            if self._parts[place].plan is None:
                del self._parts[place]

    def _stop_running(self, place: _Place) -> None:
        self._running.remove(place)
        if self.placing is not None:
            self.placing.note_step_over(self._parts[place].step)

    def remove_all(self) -> list[Request]:
        """Hand over all requests, oldest first; the plans that failed are void. Only while no step runs."""
        assert self.quiet, "a step is running"
        self._is_held = False
        self._parts.clear()
        return [request for scheduler in self.schedulers.values() for request in scheduler.remove_all()]

    # --- what workers say ------------------------------------------------------------------------------------------

    def on_message(self, worker: WorkerProcess, message: object) -> StepFailure | None:
        """Handle one message. A `StepFailure` is to be charged to its requests."""
        if isinstance(message, StepFailed):
            return self._on_failure(worker, message)
        if isinstance(message, StepResult):
            self._on_result(worker.name, message)
        elif isinstance(message, ExpertReport):
            assert self.placing is not None, "only experts that others use are counted"
            self._statistics.record_experts(self._first_expert + message.index, message)
            if self._balancer is not None:
                self._balancer.note_busy(message)
        elif isinstance(message, ExchangeReport):
            self._statistics.record_exchange(str(worker.name), message.traffic)
        elif isinstance(message, WorkerReady):
            worker.ready = True
            if self.placing is not None:
                self.placing.on_ready(worker, is_loaded=self.members.is_loaded(worker.name.leader))
            self._recovery.on_ready(worker, message)
        elif isinstance(message, ResetDone):
            self._recovery.on_joined(worker, message.epoch)
        elif isinstance(message, Prepared) and self.placing is not None:
            self.placing.on_prepared(worker, message)
        return None

    def _on_result(self, name: WorkerName, result: StepResult) -> None:
        place = next((each for each in self._running if each[0] == name and self._is_of(each, result.step)), None)
        if place is None:
            return  # given up: a step beside it failed, or a rank died behind it and its requests have moved
        sizes = [len(sequence.token_ids) for part in self._parts[place].micro_batches for sequence in part]
        self._commit(place, result)
        self._statistics.record_step(result, () if self.placing is None else tuple(self.placing.current.owners))
        if self._balancer is not None:
            period = self._num_results // self.num_side_by_side if self._steps_freely else result.step
            self._balancer.count(period, result.expert_rows)
        self._num_results += 1
        if self._record is not None and result.routed:
            prompts = b"".join(bytes([size > 1]) * size for size in sizes)
            self._record(result.step, name.index, result.routed, result.forecasts, prompts)
        if self.quiet or self._steps_freely:
            counted_until_s, self._counted_until_s = self._counted_until_s, time.monotonic()
            self._statistics.record_group_step(self._counted_until_s - counted_until_s, len(self.members.experts))
        self._recovery.advance()

    def _on_failure(self, worker: WorkerProcess, failed: StepFailed) -> StepFailure | None:
        failure: StepFailure | None = None
        if failed.reason != "aborted" and self._recovery.phase == "stepping":  # later ones report the same
            reported = failed.reason == "error"
            suspects = [each for each in self._running if not reported or each[0] == worker.name.leader]
            suspects = [each for each in suspects if self._is_of(each, failed.step)] or suspects
            failure = self._failure(worker.name, f"{worker.name}: {failed.message}", suspects, reported=reported)
        if failed.reason != "aborted":
            _log.error("%s: %s", worker.name, failed.message)
            self._statistics.note_event("failed", failed.message, str(worker.name))
        self._give_up(worker.name)
        self._recovery.on_step_failed(worker, failed)
        return failure

    def _is_of(self, place: _Place, step: int) -> bool:
        return self._parts[place].step == step

    def _failure(
        self, worker: WorkerName, what: str, suspects: Iterable[_Place], *, reported: bool = False
    ) -> StepFailure | None:
        """Running steps fail, maybe over a request that one of `suspects` computes. None: they compute nothing."""
        blamed: dict[Request, int] = {}
        for place in suspects:
            plan = self._parts[place].plan
            for sequence in plan.sequences if plan is not None else ():
                request = self.schedulers[place[0]].requests[sequence.request_id]
                if request.status != "finished":  # an aborted one has its place until the step ends
                    blamed[request] = max(blamed.get(request, 0), sequence.start + len(sequence.token_ids))
        return StepFailure(worker=worker, what=what, reported=reported, blamed=blamed) if blamed else None

    # --- workers that are gone, or hang ------------------------------------------------------------------------------

    def on_death(self, worker: WorkerProcess, reason: str) -> tuple[StepFailure | None, list[Request]]:
        """A worker is gone. Returns the failure of the step it was in, and its requests, which need another worker."""
        name = worker.name.leader
        computes = name in self.schedulers
        failure: StepFailure | None = None
        homeless: list[Request] = []
        if self._recovery.phase == "stepping":
            suspects = [each for each in self._running if not computes or each[0] == name]
            failure = self._failure(name, f"{worker.name} died: {reason}", suspects)
        if computes:
            self._give_up(name)
            for place in self._places(name):
                self._parts.pop(place, None)
            homeless = self.schedulers[name].remove_all(cache_lost=True)
        self._recovery.on_death(name)
        return failure, homeless

    def renew(self, name: WorkerName) -> None:
        """Replace a worker that lives but may be broken: it takes part in nothing more, its death is noticed as any."""
        worker = self._fleet.workers[name]
        worker.ready = False
        worker.kill("its errors may be its own")
        self._recovery.expel(name)

    def on_tick(self) -> None:
        """Kill workers that have owed an answer for too long."""
        for name, waited_s in self._recovery.overdue([name for name, _ in self._running]):
            _log.error("%s has not answered for %.1f s: killing it", name, waited_s)
            self._fleet.workers[name].kill(f"it has not answered for {waited_s:.1f} s")
