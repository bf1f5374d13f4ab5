"""What requests show of a grammar that broke off while a mask was computed, and whose outputs are whose."""

import asyncio
import gc
import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from antiphon.base.errors import UserError
from antiphon.serve.engine_api import EngineOutput
from antiphon.serve.mask_pool import MaskJob
from antiphon.serve.outputs import AsyncSink, ThreadSink, TrackedRequest, TrackedRequests
from antiphon.serve.policy.request import new_request
from antiphon.specs.sampling import SamplingParams
from tests.waiting import wait_until

END = 7


class BreakingMatcher:
    """As the parser is with a mask that is beyond its limits: it allows the end, and only the error tells."""

    is_slow = False
    grammar_id = "x"

    def __init__(self) -> None:
        self.error: str | None = None
        self.accepted: list[int] = []

    def fill_bitmask(self) -> NDArray[np.int32]:
        if self.accepted:
            self.error = "too many items"
        return np.array([1 << END], dtype=np.int32)

    def accept(self, token_id: int) -> bool:
        self.accepted.append(token_id)
        return True


class Collected:
    def __init__(self) -> None:
        self.outputs: list[EngineOutput] = []

    def deliver(self, outputs: list[EngineOutput]) -> None:
        self.outputs += outputs


NOT_ALLOWED = "none of allowed_token_ids may come next; allow more, or leave one of the two out"


@pytest.mark.parametrize(
    ("allowed_ids", "why"), [((), "too many items"), ((3, 4), "too many items"), ((4,), NOT_ALLOWED)]
)
def test_a_request_awaits_its_masks_and_ends_with_a_broken_one(allowed_ids: tuple[int, ...], why: str) -> None:
    params = SamplingParams(allowed_token_ids=allowed_ids)
    request = new_request("a", [5], params, arrival=0, seed=1, eos_token_ids=(END,))
    sink, matcher = Collected(), BreakingMatcher()
    woken = threading.Event()
    tracked = TrackedRequests(woken.set)
    tracked.add(TrackedRequest(request, sink, mask=MaskJob(matcher)))
    assert request.awaits_mask
    assert woken.wait(60)
    assert tracked.take_masks() == []
    assert not request.awaits_mask
    assert tracked.mask_of("a") == bytes([1 << END, 0, 0, 0])
    woken.clear()
    request.token_ids.append(3)
    tracked.publish([request], {})
    assert request.awaits_mask
    assert not sink.outputs, "they wait until the next step is on its way"
    tracked.hand_out()
    assert [output.token_ids for output in sink.outputs] == [[3]], "the token was drawn under a good mask"
    assert woken.wait(60)
    broken: list[tuple[str, str]] = []
    wait_until(lambda: bool(broken.extend(tracked.take_masks()) or broken), "the broken mask")
    assert broken == [("a", f"structured output broke off: {why}")]
    assert request.awaits_mask, "nothing may be drawn under this mask"
    assert tracked.end(*broken[0][:1], "grammar", broken[0][1])
    tracked.hand_out()
    assert [output.finish_reason for output in sink.outputs] == [None, "grammar"]
    assert matcher.accepted == [3]
    tracked.close()


def test_steps_wait_for_masks_that_are_near_and_for_no_others() -> None:
    tracked = TrackedRequests(lambda: None)
    for name, is_slow in (("quick", False), ("slow", True)):
        matcher = BreakingMatcher()
        matcher.is_slow = is_slow
        request = new_request(name, [5], SamplingParams(), arrival=0, seed=1, eos_token_ids=(END,))
        tracked.add(TrackedRequest(request, Collected(), mask=MaskJob(matcher)))
    tracked.take_masks()
    assert tracked.mask_patience_s is None, "first masks delay nobody"
    jobs = {name: MaskJob(BreakingMatcher(), 3) for name in ("quick", "slow")}
    jobs["slow"].is_slow = True
    tracked._awaited = jobs
    tracked.take_masks()
    assert [tracked.is_mask_near(ids) for ids in (["quick"], ["slow"], ["free"])] == [True, False, False]
    jobs["quick"].asked_s -= 1.0
    tracked.take_masks()
    assert tracked.mask_patience_s is None, "not for ever"
    tracked.close()


def test_outputs_of_an_aborted_request_never_reach_the_next_one_of_its_name() -> None:
    """The engine hears of the abort later, and what it had made before then, with its last word, comes later still."""

    def made(token: int, *, last: bool = False) -> list[EngineOutput]:
        return [EngineOutput(request_id="a", token_ids=[token], finish_reason="abort" if last else None)]

    async def talk() -> None:
        sink, aborted = AsyncSink(), list[str]()
        stream = sink.open("a", aborted.append)
        sink.deliver(made(1))
        assert (await anext(stream)).token_ids == [1]
        await stream.aclose()
        await stream.aclose()
        assert aborted == ["a"]
        for outputs in ([], made(2)):
            sink.deliver(outputs)
            await asyncio.sleep(0)
            with pytest.raises(UserError, match="'a' is in use"):
                sink.open("a", aborted.append)
        sink.deliver(made(3, last=True))
        await asyncio.sleep(0)
        other = sink.open("a", aborted.append)
        sink.deliver(made(4))
        sink.deliver(made(5, last=True))
        assert [output.token_ids async for output in other] == [[4], [5]]
        unread = sink.open("a", aborted.append)
        sink.deliver(made(6, last=True))
        await asyncio.sleep(0)
        await unread.aclose()
        assert aborted == ["a"], "it had ended"
        sink.open("a", aborted.append)

    asyncio.run(talk())


def test_a_thread_reads_all_that_comes_and_its_descriptor_goes_with_it() -> None:
    gc.collect()  # what tests before this one left
    num_open = _num_descriptors()
    outputs = [EngineOutput(request_id=str(index % 3), token_ids=[index]) for index in range(300)]
    last = [EngineOutput(request_id=str(index), token_ids=[], finish_reason="stop") for index in range(3)]
    _deliver_and_read(outputs, last)
    gc.collect()
    assert _num_descriptors() == num_open


def _deliver_and_read(outputs: list[EngineOutput], last: list[EngineOutput]) -> None:
    sink = ThreadSink()

    def deliver() -> None:
        for output in [*outputs, *last]:
            sink.deliver([output])

    thread = threading.Thread(target=deliver)
    thread.start()
    assert list(sink.outputs(3)) == [*outputs, *last]
    thread.join()
    sink.deliver([outputs[0], last[0], outputs[1]])
    sink.deliver(last[1:])
    assert list(sink.outputs(1)) == [outputs[0], last[0]]  # delivered before they were read
    assert list(sink.outputs(2)) == [outputs[1], *last[1:]]  # and nothing is lost in between


def _num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
