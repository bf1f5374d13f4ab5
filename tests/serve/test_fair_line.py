"""The line before a text process: who comes next, and how many may wait."""

import threading

import pytest

from antiphon.base.fair_line import FairLine
from antiphon.serve.engine_api import QueueFull
from antiphon.serve.text.text_process import CompileTemplate, TextConfigure
from antiphon.serve.text.text_queue import TextLimits, TextQueue, TextRequest, WaitingBytes

LARGE = 1024 * 1024


def put(line: FairLine[str], item: str, client: str, came_s: float, num_bytes: int) -> None:
    """As a text process's line does."""
    line.put(client, item, TextRequest([], "", 1.0, client, num_bytes, came_s=came_s).due_s)


def drained(line: FairLine[str]) -> list[str]:
    return [line.take() for _ in range(len(line))]


def test_clients_take_turns_however_many_one_has_waiting() -> None:
    line: FairLine[str] = FairLine()
    for number in range(64):
        put(line, f"a{number}", "a", 0.0, LARGE)
    put(line, "b0", "b", 1.0, LARGE)
    put(line, "c0", "c", 2.0, LARGE)
    put(line, "b1", "b", 3.0, LARGE)
    assert drained(line)[:6] == ["a0", "b0", "c0", "a1", "b1", "a2"]


def test_a_client_goes_on_behind_the_others() -> None:
    """A request of several jobs comes back after each: the other clients' come first, and no other of its own."""
    line: FairLine[str] = FairLine()
    put(line, "a, in three pieces", "a", 0.0, LARGE)
    put(line, "a, later", "a", 1.0, LARGE)
    put(line, "b0", "b", 1.0, LARGE)
    put(line, "b1", "b", 1.0, LARGE)
    order = []
    for _ in range(3):
        order.append(line.take())
        put(line, "a, in three pieces", "a", 0.0, LARGE)
        order.append(line.take())
        if order[-1] == "b1":
            break
    assert order == ["a, in three pieces", "b0", "a, in three pieces", "b1"]
    assert drained(line) == ["a, in three pieces", "a, later"]


def test_small_work_of_one_client_goes_before_large_work_but_not_for_ever() -> None:
    line: FairLine[str] = FairLine()
    put(line, "large", "a", 0.0, 8 * LARGE)
    for second in range(20):
        put(line, f"small {second}", "a", float(second), 100)
    order = drained(line)
    assert order[0] == "small 0"
    assert order.index("large") == 10, "it waits for what came in its first 10 s"


def test_an_empty_line_waits_and_a_closed_one_does_not() -> None:
    queue = TextQueue("texts", TextConfigure(source=None, memory_bytes=0, niceness=0), TextLimits())
    taken: list[TextRequest | None] = []
    taker = threading.Thread(target=lambda: taken.append(queue._take()))
    taker.start()
    first, left = (TextRequest([CompileTemplate()], "the template", 1.0) for _ in range(2))
    queue.submit(first)
    taker.join(20)
    assert taken == [first]
    queue.submit(left)
    queue._line.put("", left)
    with queue._changed:
        queue._closing = True
    assert [queue._take() for _ in range(3)] == [left, left, None]


def test_what_waits_is_bounded_for_one_client_and_for_all() -> None:
    """A small text counts as 4 KiB."""
    count = WaitingBytes(8 * 1024)
    for client in ("a", "b", "c", "d"):
        for _ in range(2):
            count.add(client, 1, "the tokenizer")
        with pytest.raises(
            QueueFull, match=r"of this client of 8\.0 KiB wait for the tokenizer, the limit is 8\.0 KiB: try"
        ):
            count.add(client, 1, "the tokenizer")
    with pytest.raises(QueueFull, match=r"of all clients of 32\.0 KiB wait for the tokenizer, the limit is 32\.0 KiB"):
        count.add("e", 1, "the tokenizer")
    count.remove("a", 1)
    count.add("e", 1, "the tokenizer")


def test_one_request_alone_may_be_larger_than_the_limit() -> None:
    count = WaitingBytes(8 * 1024)
    count.add("a", 100_000, "the tokenizer")
    with pytest.raises(QueueFull, match=r"requests of this client of 97\.7 KiB wait for the tokenizer"):
        count.add("a", 1, "the tokenizer")
    with pytest.raises(QueueFull, match=r"requests of all clients of 97\.7 KiB wait"):
        count.add("b", 1, "the tokenizer")
    count.remove("a", 100_000)
    count.add("a", 8 * 1024, "the tokenizer")
