"""What requests show of a grammar that broke off while a mask was computed."""

import threading

import numpy as np
from numpy.typing import NDArray

from antiphon.serve.engine_api import EngineOutput
from antiphon.serve.mask_pool import MaskJob
from antiphon.serve.outputs import TrackedRequest, TrackedRequests
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


def test_a_request_awaits_its_masks_and_ends_with_a_broken_one() -> None:
    request = new_request("a", [5], SamplingParams(), arrival=0, seed=1, eos_token_ids=(END,))
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
    assert broken == [("a", "structured output broke off: too many items")]
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
