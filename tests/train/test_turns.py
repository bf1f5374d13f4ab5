"""Works in turns: who runs when is a matter of where they give way, not of time."""

import time
from functools import partial

import pytest

from antiphon.train.layer_run import Turns


def work(turns: Turns, seen: list[str], name: str, parts: int, slow_s: float = 0.0) -> None:
    for part in range(parts):
        time.sleep(slow_s)
        seen.append(f"{name}{part}")
        turns.give_way()


@pytest.mark.parametrize("slow_s", [0.0, 0.01])
def test_the_order_is_that_of_giving_way(slow_s: float) -> None:
    turns, seen = Turns(), list[str]()
    turns.together([partial(work, turns, seen, "a", 4, slow_s), partial(work, turns, seen, "b", 2)])
    assert seen == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_others_go_on_when_one_fails() -> None:
    turns, seen = Turns(), list[str]()

    def fail() -> None:
        work(turns, seen, "a", 1)
        raise ValueError("a peer is gone")

    with pytest.raises(ValueError, match="a peer is gone"):
        turns.together([fail, partial(work, turns, seen, "b", 3)])
    assert seen == ["a0", "b0", "b1", "b2"]
    turns.together([partial(work, turns, seen, "c", 1)])
    assert seen[-1] == "c0"


def test_alone_nothing_is_waited_for() -> None:
    Turns().give_way()
