"""Requests in order of arrival, whatever order they are put in: the waiting line, and the list of running ones.

A sorted Python list: new requests append, preempted ones go back to the front, requests of a lost worker in between.
All three are one binary search and one `memmove`. Rejected: a heap, which cannot be read in order or lose an element
in the middle (an abort).
"""

from bisect import bisect_left
from collections.abc import Iterator

from antiphon.serve.policy.request import Request


def _arrival(request: Request) -> int:
    return request.arrival


class ArrivalQueue:
    """Oldest first. Iteration tolerates removal of requests behind the current one."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def oldest(self) -> Request:
        return self._requests[0]

    @property
    def latest(self) -> Request:
        return self._requests[-1]

    def add(self, request: Request) -> None:
        requests = self._requests
        if not requests or request.arrival > requests[-1].arrival:
            requests.append(request)
            return
        index = bisect_left(requests, request.arrival, key=_arrival)
        assert requests[index].arrival != request.arrival, f"two requests have arrival {request.arrival}"
        requests.insert(index, request)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, request.arrival, key=_arrival)
        assert self._requests[index] is request, f"request {request.request_id} is not in the queue"
        del self._requests[index]

    def take_all(self) -> list[Request]:
        """Empty the queue; the requests that were in it, oldest first."""
        requests, self._requests = self._requests, []
        return requests
