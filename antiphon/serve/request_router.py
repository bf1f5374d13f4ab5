"""Which worker has a request: it waits here for one, or is at one worker's scheduler.

    add             a new request, or one whose worker is lost, waits here
    add_to_workers  the best live worker gets it
    end             it leaves, from wherever it is, and its sink hears of it

While steps fail and requests are suspected of it (`policy/suspects`), one group of workers, `_trial_group`, is kept for
the suspects whose turn it is; all others go elsewhere or wait. To clear a group for others means to remove all its
requests from it; prefix caches keep most of their work.

Rejected: to bind a request to its worker for good. It would be lost with the worker, or wait for its return while
others are idle.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from antiphon.base.logging import get_logger
from antiphon.serve.engine_api import FinishReason
from antiphon.serve.group import StepFailure, StepGroup
from antiphon.serve.handovers import Handovers
from antiphon.serve.outputs import TrackedRequests
from antiphon.serve.policy.request import Request
from antiphon.serve.policy.scheduler import Scheduler, choose_attention_worker, has_room
from antiphon.serve.policy.suspects import Suspects
from antiphon.serve.statistics import EngineStatistics
from antiphon.serve.worker_handle import WorkerName
from antiphon.serve.workforce import Workforce

_log = get_logger("engine")


class RequestRouter:
    """Used by the engine's thread; `tracked` and `num_waiting` may be read by any."""

    def __init__(
        self,
        workforce: Workforce,
        statistics: EngineStatistics,
        tracked: TrackedRequests,
        handovers: Handovers | None = None,
    ) -> None:
        """`handovers`: prompts go to prefill workers."""
        self.tracked = tracked
        self._handovers = handovers
        self.num_waiting = 0
        self._workforce = workforce
        self._statistics = statistics
        self._unassigned: list[Request] = []
        self._suspects = Suspects()
        self._turn = 0
        self._trial_group: StepGroup | None = None
        self._to_clear: set[StepGroup] = set()

    def add(self, requests: Sequence[Request]) -> None:
        """These requests have no worker, or none any more."""
        self._unassigned.extend(requests)
        self._unassigned.sort(key=lambda request: request.turn)

    def end(self, request_id: str, reason: FinishReason, error: str | None) -> None:
        """Take a request out of wherever it is and send its sink the last output. Unknown ids are ignored."""
        tracked = self.tracked.get(request_id)
        if tracked is None:
            return
        self.tracked.end(request_id, reason, error)
        for scheduler in self._workforce.request_schedulers.values():
            scheduler.end(request_id)
        if self._handovers is not None:
            self._handovers.end(request_id)
        self._unassigned = [request for request in self._unassigned if request.request_id != request_id]
        self._suspects.clear(tracked.request)

    def take_masks(self) -> None:
        """Let requests whose masks have come go on; end those whose grammars broke off."""
        for request_id, error in self.tracked.take_masks():
            self.end(request_id, "grammar", error)

    def count_waiting(self) -> None:
        """Bring `num_waiting` up to date."""
        self.num_waiting = len(self._unassigned)
        self.num_waiting += sum(scheduler.num_waiting for scheduler in self._workforce.request_schedulers.values())

    def note_first_schedules(self) -> None:
        """Queue times of requests that left the queue since the last look."""
        for scheduler in self._workforce.schedulers.values() if self.tracked.has_unscheduled else ():
            for request in scheduler.book.running:
                if request.arrives:
                    continue
                if (tracked := self.tracked.note_scheduled(request.tracked_id)) is not None:
                    self._statistics.prompt_tokens += request.num_prompt
                    self._statistics.record_queue_time(time.monotonic() - tracked.submitted)

    # --- which worker gets a request -----------------------------------------------------------------------------

    def add_to_workers(self) -> None:
        """Give requests without a worker to the best live one that they may have; the others wait here."""
        self._clear_groups()
        self._drain_workers()
        unassigned, self._unassigned = self._unassigned, []
        for request in unassigned:
            scheduler = self._best_for(request)
            if scheduler is None:
                self._unassigned.append(request)
            else:
                request.prefills_apart = self._handovers is not None and self._handovers.wanted_for(request)
                scheduler.add(request)

    def _best_for(self, request: Request) -> Scheduler | None:
        live = [(group, name) for group in self._workforce.request_groups for name in group.live_attention]
        able = {
            index: self._workforce.schedulers[name]
            for index, (group, name) in enumerate(live)
            if name not in self._workforce.drained and self._may_use(request, group is self._trial_group)
        }
        index = choose_attention_worker(request, able)
        return None if index is None else able[index]

    def _drain_workers(self) -> None:
        """Move what drained workers have to others: what waits at once, what runs when one has room for it."""
        for name, scheduler in self._workforce.request_schedulers.items():
            scheduler.may_plan_ahead = name not in self._workforce.drained  # else they would always be in flight
        for name in self._workforce.drained & self._workforce.request_schedulers.keys():
            scheduler = self._workforce.schedulers[name]
            for request in list(scheduler.requests.values()):
                if scheduler.is_in_flight(request):
                    continue
                if request.origin is None and request.status == "waiting":
                    scheduler.remove(request)
                    self.add([request])
                elif request.origin is None and not (request.arrives or request.awaits_mask or request.suspect_group):
                    self._move(request, name, scheduler)

    def _move(self, request: Request, name: WorkerName, scheduler: Scheduler) -> None:
        target = self._best_for(request)
        if target is not None and has_room(request, target):
            scheduler.remove(request)
            request.had_by, request.prefills_apart = str(name), self._handovers is not None
            target.add(request)

    def _may_use(self, request: Request, is_reserved: bool) -> bool:
        if request.suspect_group:
            return is_reserved and request.suspect_group == self._turn
        return not is_reserved

    def _clear_groups(self) -> None:
        """Remove requests from groups that others are to have, as soon as no step runs there."""
        turn, self._turn = self._turn, self._suspects.turn if self._suspects.charged else 0
        if not self._turn:
            self._trial_group = None
        elif self._turn != turn and self._trial_group is not None:
            self._to_clear.add(self._trial_group)
        for group in self._to_clear:
            group.hold()
        for group in [group for group in self._to_clear if group.quiet]:
            self._to_clear.remove(group)
            if self._handovers is not None:
                self._handovers.clear(group)
            self.add([request for request in group.remove_all() if request.origin is None])

    # --- when steps fail -------------------------------------------------------------------------------------------

    def on_progress(self) -> None:
        """Steps may have ended: clear suspects that got past the point where they failed."""
        if self._suspects.charged:
            self._suspects.note_progress()

    def on_failure(self, failure: StepFailure) -> None:
        """A step came to nothing: it is tried again as it was, unless that has failed before."""
        if any(request.origin for request in failure.blamed):  # it computed for other workers: they do that themselves
            self._to_clear.add(self._workforce.group_of[failure.worker])
            failure = replace(failure, blamed={r: tokens for r, tokens in failure.blamed.items() if r.origin is None})
            if not failure.blamed:
                return
        verdict = self._suspects.charge(failure.blamed, reported=failure.reported)
        if verdict == "repeat":
            return
        group = self._workforce.group_of[failure.worker]
        self._trial_group = self._trial_group or group
        self._to_clear.add(group)
        if verdict == "renew":
            group.renew(failure.worker)
        elif verdict == "guilty":
            (request,) = failure.blamed
            count = f"{request.num_failures} steps with this request failed, the last one with it alone"
            error = f"{count}: {failure.what}; the server has given the request up"
            _log.error("request %s: %s", request.request_id, error)
            self.end(request.request_id, "error", error)
        else:
            _log.warning("steps fail again and again; trying %d requests apart from others", len(failure.blamed))
