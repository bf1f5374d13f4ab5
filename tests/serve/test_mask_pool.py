"""Masks in turns: slow grammars delay each other, a broken one nobody, and what is given up is not computed."""

import threading
from collections.abc import Hashable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from antiphon.base.fair_line import FairLine
from antiphon.serve.mask_pool import MaskJob, MaskPool
from tests.waiting import wait_until


class Panic(BaseException):
    """As the library's panics, no `Exception`."""


class HeldMatcher:
    """Its masks come when `may_go` is set; `order` notes who was computed."""

    error: str | None = None

    def __init__(self, grammar_id: Hashable, order: list[Hashable], *, is_slow: bool = False) -> None:
        self.grammar_id = grammar_id
        self.is_slow = is_slow
        self.may_go = threading.Event()
        self.began = threading.Event()
        self.accepted: list[int] = []
        self.fails = False
        self._order = order

    def fill_bitmask(self) -> NDArray[np.int32]:
        self.began.set()
        if self.fails:
            raise Panic
        assert self.may_go.wait(60)
        self._order.append(self.grammar_id)
        return np.array([len(self.accepted)], dtype=np.int32)

    def accept(self, token_id: int) -> bool:
        self.accepted.append(token_id)
        return True


@pytest.fixture
def pool() -> Iterator[MaskPool]:
    made = MaskPool(lambda: None)
    yield made
    made.close()


def test_owners_take_turns() -> None:
    line: FairLine[int] = FairLine()
    for item in range(5):
        line.put("greedy", item)
    line.put("modest", 10)
    line.put("late", 20)
    assert (len(line), line.num_of("greedy"), line.num_of("nobody")) == (7, 5, 0)
    assert [line.take() for _ in range(7)] == [0, 10, 20, 1, 2, 3, 4]


def test_slow_grammars_hold_one_thread_and_take_turns(pool: MaskPool) -> None:
    order: list[Hashable] = []
    slow = [HeldMatcher(name, order, is_slow=True) for name in "aaaab"]
    quick = [HeldMatcher(number, order) for number in range(20)]
    for matcher in (*slow[1:], *quick):
        matcher.may_go.set()
    jobs = [MaskJob(matcher) for matcher in slow]
    pool.ask(jobs[:1])
    assert slow[0].began.wait(60)
    pool.ask(jobs[1:])
    quick_jobs = [MaskJob(matcher, 5) for matcher in quick]
    pool.ask(quick_jobs)
    wait_until(lambda: all(job.done for job in quick_jobs), "the quick masks")
    assert [job.mask for job in quick_jobs] == [b"\1\0\0\0"] * 20, "the token is taken first"
    assert not any(job.done for job in jobs), "one thread computes slow masks"
    slow[0].may_go.set()
    wait_until(lambda: all(job.done for job in jobs), "the slow masks")
    assert [name for name in order if isinstance(name, str)] == ["a", "a", "b", "a", "a"]


def test_a_panic_is_the_error_of_its_sequence(pool: MaskPool) -> None:
    broken, fine = HeldMatcher("broken", []), HeldMatcher("fine", [])
    broken.fails = True
    fine.may_go.set()
    for _ in range(4):  # more than there are threads
        jobs = [MaskJob(broken), MaskJob(fine)]
        pool.ask(jobs)
        wait_until(lambda jobs=jobs: all(job.done for job in jobs), "both")  # type: ignore[misc]
        assert [job.error for job in jobs] == ["the grammar failed (Panic)", None]
        assert [job.mask is None for job in jobs] == [True, False]


def test_what_is_given_up_is_not_computed(pool: MaskPool) -> None:
    first, second = (HeldMatcher(name, [], is_slow=True) for name in "ab")
    jobs = [MaskJob(first), MaskJob(second)]
    pool.ask(jobs)
    assert first.began.wait(60)
    jobs[1].cancelled = True
    first.may_go.set()
    last = HeldMatcher("c", [], is_slow=True)
    last.may_go.set()
    pool.ask([job := MaskJob(last)])
    wait_until(lambda: job.done, "the last mask")
    assert not second.began.is_set()


def test_no_thread_to_be_had_is_an_error_of_these_requests(pool: MaskPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    matcher = HeldMatcher("a", [])
    matcher.may_go.set()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool.ask([job := MaskJob(matcher)])
    assert (job.done, job.error) == (True, "the server cannot start a thread for it now: try again later")
    monkeypatch.undo()
    pool.ask([job := MaskJob(matcher)])
    wait_until(lambda: job.done, "the mask")
    assert job.error is None
