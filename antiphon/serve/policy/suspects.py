"""Which request makes steps fail: suspects run apart from others, in halves, until the guilty one fails alone.

A worker may die, hang or report an error because of one request. Tried again with all others it would fail until
the workers' restart budget is used up, and take the server with it. So failures are charged to the step's requests:

1. A step that failed is tried again as it was: a killed process or a slow peer is no request's fault.
2. Requests that fail again before they are past the point where they failed are suspects. They run without others, in
   two halves, one after the other.
3. A half that fails again is halved again. A request that gets past the point is cleared.
4. A request that fails alone, and for the `MAX_FAILED_STEPS`th time or later, is guilty: the engine ends it with an
   error.
5. What a worker *reports* as an error may be its own condition (a device that no longer works) and not the request's
   doing. Before a report convicts, the request is tried once on a fresh worker. A death is followed by one anyway.

So one culprit among n costs about 2 + log2(n) failures, and no request is convicted in company. Two requests that fail
only together are never convicted: apart they get past the point, so each such failure costs time, not progress.

Rejected: a budget of failures per request without a search (the others of the batch use up theirs with the culprit);
ending all requests of the step (one client could end those of all others).
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from antiphon.serve.policy.request import Request

MAX_FAILED_STEPS = 3
_SUSPECT_AFTER = 2


# What to do after a failed step: the same step once more; run the suspects of `turn`, without others; search, but on a
# fresh worker in place of the one that reported the error; end the request, the only one of the step.
Verdict = Literal["repeat", "search", "renew", "guilty"]


class Suspects:
    """The failures of unfinished requests. Suspects carry the number of their group (`Request.suspect_group`).
    `charged`: each was in a failed step and has not got past it; without any there is nothing to ask here."""

    def __init__(self) -> None:
        self.charged: list[Request] = []
        self._num_groups = 0

    @property
    def turn(self) -> int:
        """The group that runs now, the newest; 0: no request is suspected. When it changes, the place where suspects
        run must be cleared of all others."""
        return max((request.suspect_group for request in self.charged), default=0)

    def charge(self, blamed: Mapping[Request, int], *, reported: bool) -> Verdict:
        """A step of these requests failed, in which each would have reached that number of computed tokens.
        `reported`: by a worker that lives on and says it was an error."""
        for request, num_tokens in blamed.items():
            if not request.num_failures:
                self.charged.append(request)
            request.num_failures += 1
            request.num_tokens_to_pass = max(request.num_tokens_to_pass, num_tokens)
        suspects = [request for request in blamed if request.num_failures >= _SUSPECT_AFTER]
        if not suspects:
            return "repeat"
        if len(blamed) == 1:
            return self._judge(suspects[0], reported)
        middle = (len(suspects) + 1) // 2
        self._group(suspects[middle:])
        self._group(suspects[:middle])
        return "search"

    def _judge(self, request: Request, reported: bool) -> Verdict:
        """A suspect failed alone."""
        self._group([request])
        if reported and not request.was_on_fresh_worker:
            request.was_on_fresh_worker = True
            return "renew"
        return "guilty" if request.num_failures >= MAX_FAILED_STEPS else "search"

    def _group(self, requests: Sequence[Request]) -> None:
        """Make a group of these, taken out of their earlier ones."""
        self._num_groups += 1
        for request in requests:
            request.suspect_group = self._num_groups

    def note_progress(self) -> None:
        """A step was committed: clear the requests that are past the point where they failed, and those that ended."""
        for request in list(self.charged):
            if request.status == "finished" or request.num_computed >= request.num_tokens_to_pass:
                self.clear(request)

    def clear(self, request: Request) -> None:
        """The request is no suspect, or has ended. Nothing happens if it was never charged."""
        if request.num_failures:
            self.charged.remove(request)
            request.num_failures = request.num_tokens_to_pass = request.suspect_group = 0
            request.was_on_fresh_worker = False
