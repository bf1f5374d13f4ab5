"""Who is blamed for failing steps: the culprits and nobody else, within few failures. Steps here are make-believe."""

from collections.abc import Callable, Sequence
from math import ceil, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.serve.policy.request import Request, new_request
from antiphon.serve.policy.suspects import MAX_FAILED_STEPS, Suspects
from antiphon.specs.sampling import SamplingParams

PROMPT = 8


def make_requests(count: int) -> list[Request]:
    params = SamplingParams(max_tokens=64)
    return [
        new_request(f"r{index}", list(range(3, 3 + PROMPT)), params, arrival=index, seed=0, eos_token_ids=())
        for index in range(count)
    ]


def blame(requests: Sequence[Request]) -> dict[Request, int]:
    return dict.fromkeys(requests, PROMPT)


def is_on_trial(request: Request, suspects: Suspects) -> bool:
    return 0 < request.suspect_group == suspects.turn


class Trials:
    """Runs steps of all requests that may run until the search is over; `fails` decides which step comes to nothing."""

    def __init__(
        self, requests: list[Request], fails: Callable[[list[Request]], bool], *, reported: bool = False
    ) -> None:
        self.suspects = Suspects()
        self.requests = list(requests)
        self.fails = fails
        self.reported = reported
        self.num_failures = 0
        self.num_renewals = 0
        self.guilty: list[Request] = []

    def runnable(self) -> list[Request]:
        if not self.suspects.turn:
            return self.requests
        return [request for request in self.requests if is_on_trial(request, self.suspects)]

    def step(self) -> None:
        running = self.runnable()
        assert running, "a search without anybody to try"
        if not self.fails(running):
            for request in running:
                request.num_computed = PROMPT
            self.suspects.note_progress()
            return
        self.num_failures += 1
        verdict = self.suspects.charge(blame(running), reported=self.reported)
        if verdict == "renew":
            self.num_renewals += 1
        if verdict == "guilty":
            (request,) = running
            assert request.num_failures >= MAX_FAILED_STEPS
            self.guilty.append(request)
            self.requests.remove(request)
            self.suspects.clear(request)

    def finish(self) -> None:
        for _ in range(10_000):
            if not self.requests or all(request.num_computed >= PROMPT for request in self.requests):
                assert not self.suspects.turn
                return
            self.step()
        raise AssertionError("the search does not end")


def test_one_failure_is_nobodys_fault() -> None:
    requests = make_requests(3)
    failures = iter([True])
    trials = Trials(requests, lambda _: next(failures, False))
    trials.finish()
    assert trials.guilty == []
    assert trials.num_failures == 1
    assert requests[0].num_failures == 0


def test_a_request_that_always_fails_alone_is_guilty_at_the_third_failure() -> None:
    (request,) = make_requests(1)
    trials = Trials([request], lambda _: True)
    trials.finish()
    assert trials.guilty == [request]
    assert trials.num_failures == MAX_FAILED_STEPS


@pytest.mark.parametrize("count", [2, 3, 5, 64, 256])
@pytest.mark.parametrize("place", [0.0, 0.5, 0.99])
def test_one_culprit_is_found_by_halves(count: int, place: float) -> None:
    requests = make_requests(count)
    culprit = requests[int(place * count)]
    trials = Trials(requests, lambda running: culprit in running)
    trials.finish()
    assert trials.guilty == [culprit]
    assert trials.num_failures <= 2 + ceil(log2(count))


@settings(max_examples=200, deadline=None)
@given(count=st.integers(1, 40), culprits=st.sets(st.integers(0, 39), max_size=6), reported=st.booleans())
def test_exactly_the_culprits_are_found(count: int, culprits: set[int], reported: bool) -> None:
    requests = make_requests(count)
    guilty = [request for index, request in enumerate(requests) if index in culprits]
    trials = Trials(requests, lambda running: any(request in guilty for request in running), reported=reported)
    trials.finish()
    assert sorted(request.arrival for request in trials.guilty) == [request.arrival for request in guilty]
    assert trials.num_failures <= 1 + len(guilty) * (3 + ceil(log2(max(2, count))))
    assert trials.num_renewals == (len(guilty) if reported else 0)


def test_a_broken_worker_convicts_nobody() -> None:
    """Every step fails until the worker is renewed, as with a device in error."""
    requests = make_requests(8)
    trials = Trials(requests, lambda _: trials.num_renewals == 0, reported=True)
    trials.finish()
    assert trials.guilty == []
    assert trials.num_renewals == 1


def test_requests_that_fail_only_together_go_on_apart() -> None:
    requests = make_requests(6)
    pair = (requests[1], requests[4])
    trials = Trials(requests, lambda running: all(request in running for request in pair))
    trials.finish()
    assert trials.guilty == []


def test_whoever_gets_past_the_point_is_free_and_no_one_else() -> None:
    suspects = Suspects()
    first, second = make_requests(2)
    for _ in range(2):
        suspects.charge({first: 100, second: 20}, reported=False)
    assert is_on_trial(first, suspects)
    assert second.suspect_group
    assert not is_on_trial(second, suspects)
    first.num_computed = 99
    suspects.note_progress()
    assert is_on_trial(first, suspects)
    turn = suspects.turn
    first.num_computed = 100
    suspects.note_progress()
    assert not first.suspect_group
    assert is_on_trial(second, suspects)
    assert suspects.turn != turn
    second.status = "finished"
    suspects.note_progress()
    assert not suspects.turn


def test_company_in_one_failure_is_not_suspected() -> None:
    """Whoever was part of one failure only is not searched; the search is among those who were part of both."""
    suspects = Suspects()
    early, both, late = make_requests(3)
    assert suspects.charge(blame([early, both]), reported=False) == "repeat"
    assert suspects.charge(blame([both, late]), reported=False) == "search"
    assert [bool(request.suspect_group) for request in (early, both, late)] == [False, True, False]


def test_a_request_that_ends_is_forgotten() -> None:
    suspects = Suspects()
    requests = make_requests(4)
    for _ in range(2):
        suspects.charge(blame(requests), reported=False)
    for request in requests:
        assert suspects.turn
        suspects.clear(request)
        suspects.clear(request)
    assert not suspects.turn


def test_part_of_a_group_may_fail_alone() -> None:
    """Two attention workers share a group of suspects and one of them dies: only its requests are charged."""
    suspects = Suspects()
    requests = make_requests(8)
    for _ in range(2):
        suspects.charge(blame(requests), reported=False)
    assert [is_on_trial(request, suspects) for request in requests] == [True] * 4 + [False] * 4
    suspects.charge(blame(requests[:2]), reported=False)
    assert [is_on_trial(request, suspects) for request in requests] == [True] + [False] * 7
    assert all(request.suspect_group for request in requests)
    assert requests[2].num_failures == 2
