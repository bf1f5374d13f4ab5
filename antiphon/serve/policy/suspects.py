"""Whom to blame for steps that fail: the requests in them, and among those a search for the one that does it.

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

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from antiphon.serve.policy.request import Request, RequestStatus

MAX_FAILURES = 3
_SUSPECT_AFTER = 2


class Blamed(NamedTuple):
    """A request of a failed step, which would have computed its first `num_tokens` tokens."""

    request: Request
    num_tokens: int


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
