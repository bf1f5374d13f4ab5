"""What requests show of a grammar that broke off while a token was being chosen."""

import numpy as np
from numpy.typing import NDArray

from antiphon.serve.engine_api import EngineOutput
from antiphon.serve.outputs import TrackedRequest, TrackedRequests
from antiphon.serve.policy.request import new_request
from antiphon.serve.policy.step import RequestOutput
from antiphon.specs.sampling import SamplingParams

END = 7


class BrokenMatcher:
    """As the parser is after a mask that was beyond its limits: it allows the end, and only the error tells."""

    error = "too many items"

    def fill_bitmask(self) -> NDArray[np.int32]:
        return np.array([1 << END], dtype=np.int32)

    def accept(self, token_id: int) -> bool:
        raise AssertionError("the token was chosen under a mask that means nothing")


class Collected:
    def __init__(self) -> None:
        self.outputs: list[EngineOutput] = []

    def deliver(self, outputs: list[EngineOutput]) -> None:
        self.outputs += outputs


def test_an_end_that_a_broken_grammar_allowed_is_not_shown_as_the_end() -> None:
    request = new_request("a", [5], SamplingParams(grammar="x"), arrival=0, seed=1, eos_token_ids=(END,))
    sink = Collected()
    tracked = TrackedRequests()
    tracked.add(TrackedRequest(request, sink, matcher=BrokenMatcher()))
    assert tracked.publish([RequestOutput(request, END, "stop")], {}) == [
        ("a", "structured output broke off: too many items")
    ]
    assert sink.outputs == []
    assert tracked.end("a", "grammar", "structured output broke off: too many items")
    assert [output.finish_reason for output in sink.outputs] == ["grammar"]
