"""The life of requests in the engine: accepted, given to an attention worker, moved when one is lost, ended.

A request is at one worker's scheduler or waits here for one. While steps fail and requests are suspected of it
(`Suspects`), one group of workers, `_place`, is kept for the suspects whose turn it is; all others go elsewhere or
wait. To clear a group for somebody else means to take back all it has; prefix caches keep most of their work.

A worker may die, hang or report an error because of one request. Tried again with everybody else it would fail until
the workers' restart budget is used up, and take the server with it. So failures are charged to the step's requests:

1. A step that failed is tried again as it was: a killed process or a slow peer is nobody's request's fault.
2. Requests that fail again before they are past the point where they failed are suspects. They run without others, in
   two halves, one after the other.
3. A half that fails again is halved again. A request that gets past the point is cleared.
4. A request that fails alone, and for the `MAX_FAILURES`th time or later, is guilty and is ended with an error.
5. What a worker *reports* as an error may be its own condition (a device that no longer works) and not the request's
   doing. Before a report convicts, the request is tried once on a fresh worker. A death is followed by one anyway.

So one culprit among n costs about 2 + log2(n) failures, and no request is convicted in company. Two requests that fail
only together are never convicted: apart they get past the point, so each such failure costs time, not progress.

Rejected: a budget of failures per request without a search (the others of the batch use up theirs with the culprit);
ending all requests of the step (one client could end everybody's).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from antiphon.base.logging import get_logger
from antiphon.serve.engine_api import FinishReason
from antiphon.serve.group import StepGroup
from antiphon.serve.outputs import TrackedRequests
from antiphon.serve.policy.request import Request, RequestStatus
from antiphon.serve.policy.scheduler import choose_attention_worker
from antiphon.serve.running_step import Blamed, StepFailure
from antiphon.serve.statistics import EngineStatistics
from antiphon.serve.workforce import Workforce

_log = get_logger("engine")
MAX_FAILURES = 3
_SUSPECT_AFTER = 2


class Verdict(Enum):
    """What to do after a failed step."""

    REPEAT = "repeat"  # the same step once more
    SEARCH = "search"  # let run who `may_run` says
    RENEW = "renew"  # search, but on a fresh worker in place of the one that reported the error
    GUILTY = "guilty"  # end the request, the only one of the step


@dataclass(slots=True)
class _Record:
    request: Request
    num_failures: int = 0
    num_tokens: int = 0  # cleared once so many are computed
    on_fresh_worker: bool = False


class Suspects:
    """The failures of unfinished requests, and the groups of suspects still to be tried, the last one first.

    `turn` changes whenever another group is to be tried: then nobody else may be left where it runs."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._groups: list[list[str]] = []
        self.turn = 0

    @property
    def searching(self) -> bool:
        return bool(self._groups)

    def is_suspect(self, request_id: str) -> bool:
        """It may not run with others (see `is_on_trial` for whether it may run at all now)."""
        return any(request_id in group for group in self._groups)

    def is_on_trial(self, request_id: str) -> bool:
        """It belongs to the group of suspects that runs now."""
        return bool(self._groups) and request_id in self._groups[-1]

    def num_failures(self, request_id: str) -> int:
        """Failed steps since the request last got past one."""
        record = self._records.get(request_id)
        return 0 if record is None else record.num_failures

    def charge(self, blamed: Sequence[Blamed], *, reported: bool) -> Verdict:
        """A step of these requests failed; `reported`: by a worker that lives on and says it was an error."""
        for request, num_tokens in blamed:
            record = self._records.setdefault(request.request_id, _Record(request))
            record.num_failures += 1
            record.num_tokens = max(record.num_tokens, num_tokens)
        names = [entry.request.request_id for entry in blamed]
        suspects = [name for name in names if self._records[name].num_failures >= _SUSPECT_AFTER]
        if not suspects:
            return Verdict.REPEAT
        for group in self._groups:
            group[:] = [name for name in group if name not in suspects]
        if len(blamed) == 1:
            return self._judge(suspects[0], reported)
        middle = (len(suspects) + 1) // 2
        self._try(suspects[middle:])
        self._try(suspects[:middle])
        return Verdict.SEARCH

    def _judge(self, name: str, reported: bool) -> Verdict:
        """A suspect failed alone."""
        record = self._records[name]
        self._try([name])
        if reported and not record.on_fresh_worker:
            record.on_fresh_worker = True
            return Verdict.RENEW
        return Verdict.GUILTY if record.num_failures >= MAX_FAILURES else Verdict.SEARCH

    def _try(self, group: list[str]) -> None:
        if group:
            self._groups.append(group)
            self.turn += 1

    def note_progress(self) -> None:
        """A step was committed: clear those who are past the point where they failed, and forget those who ended."""
        for name, record in list(self._records.items()):
            if record.request.status is RequestStatus.FINISHED or record.request.num_computed >= record.num_tokens:
                self.forget(name)

    def forget(self, request_id: str) -> None:
        """The request is cleared, or has ended. Unknown ids are ignored."""
        if self._records.pop(request_id, None) is None:
            return
        for group in self._groups:
            if request_id in group:
                group.remove(request_id)
        while self._groups and not self._groups[-1]:
            self._groups.pop()
            self.turn += 1


class RequestDesk:
    """Used by the engine's thread; `tracked` and `num_waiting` may be read by any."""

    def __init__(self, workforce: Workforce, statistics: EngineStatistics, tracked: TrackedRequests) -> None:
        self.tracked = tracked
        self.num_waiting = 0
        self._workforce = workforce
        self._statistics = statistics
        self._unassigned: list[Request] = []
        self._suspects = Suspects()
        self._turn = 0
        self._place: StepGroup | None = None
        self._to_clear: set[StepGroup] = set()

    def accept(self, request: Request) -> None:
        """Put a new request in line."""
        self._unassigned.append(request)

    def take_back(self, requests: list[Request]) -> None:
        """These requests have no worker any more."""
        self._unassigned.extend(requests)
        self._unassigned.sort(key=lambda request: request.arrival)

    def end(self, request_id: str, reason: FinishReason, error: str | None) -> None:
        """Take a request out of wherever it is and tell its sink."""
        if not self.tracked.end(request_id, reason, error):
            return
        for scheduler in self._workforce.schedulers.values():
            scheduler.abort(request_id)
        self._unassigned = [request for request in self._unassigned if request.request_id != request_id]
        self._suspects.forget(request_id)

    def take_masks(self) -> None:
        """Let requests whose masks have come go on; end those whose grammars broke off."""
        for request_id, error in self.tracked.take_masks():
            self.end(request_id, "grammar", error)

    def count_waiting(self) -> None:
        """Bring `num_waiting` up to date."""
        self.num_waiting = len(self._unassigned)
        self.num_waiting += sum(scheduler.num_waiting for scheduler in self._workforce.schedulers.values())

    def note_first_schedules(self) -> None:
        """Queue times of requests that left the queue since the last look."""
        for scheduler in self._workforce.schedulers.values():
            for request in scheduler.occupancy.running:
                tracked = self.tracked.get(request.request_id)
                if tracked is not None and not tracked.scheduled:
                    tracked.scheduled = True
                    self._statistics.prompt_tokens += request.num_prompt
                    self._statistics.record_queue_time(time.monotonic() - tracked.submitted)

    # --- who runs where --------------------------------------------------------------------------------------------

    def assign(self) -> None:
        """Give requests without a worker to the best live one that they may have; the others wait here."""
        self._clear_groups()
        if not self._unassigned:
            return
        live = [(group, name) for group in self._workforce.groups for name in group.live_attention]
        schedulers = {index: self._workforce.schedulers[name] for index, (_, name) in enumerate(live)}
        reserved = {index for index, (group, _) in enumerate(live) if group is self._place}
        unassigned, self._unassigned = self._unassigned, []
        for request in unassigned:
            index = choose_attention_worker(
                request, {i: s for i, s in schedulers.items() if self._may_use(request, i in reserved)}
            )
            if index is None:
                self._unassigned.append(request)
            else:
                schedulers[index].adopt(request)

    def _may_use(self, request: Request, is_reserved: bool) -> bool:
        if self._suspects.is_suspect(request.request_id):
            return is_reserved and self._suspects.is_on_trial(request.request_id)
        return not is_reserved

    def _clear_groups(self) -> None:
        """Take requests back from groups that others are to have, as soon as no step runs there."""
        if not self._suspects.searching:
            self._place = None
        elif self._turn != self._suspects.turn and self._place is not None:
            self._to_clear.add(self._place)
        self._turn = self._suspects.turn
        for group in [group for group in self._to_clear if group.quiet]:
            self._to_clear.remove(group)
            self.take_back(group.withdraw())

    # --- when steps fail -------------------------------------------------------------------------------------------

    def on_progress(self) -> None:
        """Steps may have ended: clear suspects who got on."""
        self._suspects.note_progress()

    def on_failure(self, failure: StepFailure) -> None:
        """A step came to nothing: it is tried again as it was, unless that has failed before."""
        verdict = self._suspects.charge(failure.blamed, reported=failure.reported)
        if verdict is Verdict.REPEAT:
            return
        group = self._workforce.group_of(failure.worker)
        self._place = self._place or group
        self._to_clear.add(group)
        if verdict is Verdict.RENEW:
            group.renew(failure.worker)
        elif verdict is Verdict.GUILTY:
            ((request, _),) = failure.blamed
            num_failures = self._suspects.num_failures(request.request_id)
            count = f"{num_failures} steps with this request failed, the last one with it alone"
            error = f"{count}: {failure.what}; the server has given the request up"
            _log.error("request %s: %s", request.request_id, error)
            self.end(request.request_id, "error", error)
        else:
            _log.warning("steps fail again and again; trying %d requests apart from others", len(failure.blamed))
