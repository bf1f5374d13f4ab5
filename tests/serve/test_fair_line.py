"""The line before a text process: who comes next, and how many may wait."""

import threading

import pytest

from antiphon.serve.engine_api import QueueFull
from antiphon.serve.text.fair_line import FairLine, WaitingCount

LARGE = 1024 * 1024


def drained(line: FairLine[str]) -> list[str]:
    return [str(line.take(0)) for _ in range(len(line))]


def test_clients_take_turns_however_many_one_has_waiting() -> None:
    line: FairLine[str] = FairLine()
    for number in range(64):
        line.put(f"a{number}", "a", 0.0, LARGE)
    line.put("b0", "b", 1.0, LARGE)
    line.put("c0", "c", 2.0, LARGE)
    line.put("b1", "b", 3.0, LARGE)
    assert drained(line)[:6] == ["a0", "b0", "c0", "a1", "b1", "a2"]


def test_a_client_goes_on_behind_the_others() -> None:
    """A request of several jobs comes back after each: the other clients' come first, and no other of its own."""
    line: FairLine[str] = FairLine()
    line.put("a, in three pieces", "a", 0.0, LARGE)
    line.put("a, later", "a", 1.0, LARGE)
    line.put("b0", "b", 1.0, LARGE)
    line.put("b1", "b", 1.0, LARGE)
    order = []
    for _ in range(3):
        order.append(line.take(0))
        line.put("a, in three pieces", "a", 0.0, LARGE)
        order.append(line.take(0))
        if order[-1] == "b1":
            break
    assert order == ["a, in three pieces", "b0", "a, in three pieces", "b1"]
    assert drained(line) == ["a, in three pieces", "a, later"]


def test_small_work_of_one_client_goes_before_large_work_but_not_for_ever() -> None:
    line: FairLine[str] = FairLine()
    line.put("large", "a", 0.0, 8 * LARGE)
    for second in range(20):
        line.put(f"small {second}", "a", float(second), 100)
    order = drained(line)
    assert order[0] == "small 0"
    assert order.index("large") == 10, "it waits for what came in its first 10 s"


def test_an_empty_line_waits_and_a_closed_one_does_not() -> None:
    line: FairLine[str] = FairLine()
    assert line.take(0.01) is None
    assert not line.is_closed
    taken: list[str | None] = []
    taker = threading.Thread(target=lambda: taken.append(line.take(30)))
    taker.start()
    line.put("x", "a", 0.0, 1)
    taker.join(20)
    assert taken == ["x"]
    line.put("left", "a", 0.0, 1)
    line.close()
    assert line.take(30) == "left"
    assert line.take(30) is None
    assert line.is_closed


def test_what_waits_is_bounded_for_one_client_and_for_all() -> None:
    count = WaitingCount(max_requests=2, max_bytes=100)
    for client in ("a", "b", "c", "d"):
        for _ in range(2):
            count.add(client, 1, "the tokenizer")
        with pytest.raises(QueueFull, match="2 requests of this client wait for the tokenizer, the limit is 2: try"):
            count.add(client, 1, "the tokenizer")
    with pytest.raises(QueueFull, match="8 requests of all clients wait for the tokenizer, the limit is 8"):
        count.add("e", 1, "the tokenizer")
    count.remove("a", 1)
    count.add("e", 1, "the tokenizer")


def test_what_waits_is_bounded_in_bytes_but_one_request_alone_may_be_larger() -> None:
    count = WaitingCount(max_requests=64, max_bytes=100)
    count.add("a", 1000, "the tokenizer")
    with pytest.raises(QueueFull, match="requests of this client of 1000 B wait for the tokenizer, the limit is 100 B"):
        count.add("a", 1, "the tokenizer")
    with pytest.raises(QueueFull, match="requests of all clients of 1000 B wait"):
        count.add("b", 1, "the tokenizer")
    count.remove("a", 1000)
    count.add("a", 100, "the tokenizer")
