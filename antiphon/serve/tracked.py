"""Requests the engine has accepted, and what must survive any worker: sink, grammar state, reported log-probabilities.

A request is here from its submission until its last output. Only the engine's thread writes; other threads may ask
whether an id is known.
"""

import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from antiphon.serve.engine_api import EngineOutput, FinishReason
from antiphon.serve.policy.request import Request
from antiphon.serve.policy.step import RequestOutput
from antiphon.serve.streams import Sink
from antiphon.serve.worker.messages import Sampled
from antiphon.specs.sampling import TokenLogprob


class Matcher(Protocol):
    """One sequence's place in its grammar (see `serve/text/structured`)."""

    def fill_bitmask(self) -> NDArray[np.int32]: ...

    def accept(self, token_id: int) -> bool: ...

    @property
    def error(self) -> str | None: ...


@dataclass
class TrackedRequest:
    """A request and where its outputs go."""

    request: Request
    sink: Sink
    submitted: float = field(default_factory=time.monotonic)
    matcher: Matcher | None = None
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    scheduled: bool = False


class TrackedRequests:
    """All unfinished requests by id."""

    def __init__(self) -> None:
        self._by_id: dict[str, TrackedRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def ids(self) -> list[str]:
        return list(self._by_id)

    def add(self, tracked: TrackedRequest) -> None:
        self._by_id[tracked.request.request_id] = tracked

    def get(self, request_id: str) -> TrackedRequest | None:
        return self._by_id.get(request_id)

    def bitmask_of(self, request_id: str) -> bytes | None:
        """The tokens a request's grammar allows next; None for free text."""
        tracked = self._by_id.get(request_id)
        if tracked is None or tracked.matcher is None:
            return None
        return tracked.matcher.fill_bitmask().tobytes()

    def publish(self, progress: list[RequestOutput], sampled: dict[str, Sampled]) -> list[tuple[str, str]]:
        """Turn what a step did, and what the worker said of each request, into outputs: one delivery per sink.

        Returns (id, error) of requests that cannot go on."""
        outputs: dict[int, tuple[Sink, list[EngineOutput]]] = {}
        broken: list[tuple[str, str]] = []
        for request_id, entry in sampled.items():
            if entry.prompt_logprobs and (tracked := self._by_id.get(request_id)) is not None:
                tracked.prompt_logprobs.extend(entry.prompt_logprobs)
        for request, token_id, finish_reason in progress:
            request_id = request.request_id
            tracked = self._by_id.get(request_id)
            if tracked is None:
                continue
            if tracked.matcher is not None and tracked.matcher.error is not None:
                # The mask this token was drawn under says nothing: do not show the token, even if it seems the end.
                broken.append((request_id, _broke_off(tracked.matcher)))
                continue
            output = _output(tracked, token_id, finish_reason, sampled.get(request_id))
            outputs.setdefault(id(tracked.sink), (tracked.sink, []))[1].append(output)
            if finish_reason is not None:
                del self._by_id[request_id]
            elif tracked.matcher is not None and tracked.matcher.error is not None:
                broken.append((request_id, _broke_off(tracked.matcher)))
        for sink, batch in outputs.values():
            sink.deliver(batch)
        return broken

    def end(self, request_id: str, reason: FinishReason, error: str | None) -> bool:
        """Forget a request and tell its sink. False: it is not known (any more)."""
        tracked = self._by_id.pop(request_id, None)
        if tracked is None:
            return False
        tracked.sink.deliver([EngineOutput(request_id=request_id, token_ids=[], finish_reason=reason, error=error)])
        return True


def _broke_off(matcher: Matcher) -> str:
    return f"structured output broke off: {matcher.error}"


def _output(
    tracked: TrackedRequest, token_id: int | None, reason: FinishReason | None, entry: Sampled | None
) -> EngineOutput:
    request = tracked.request
    if tracked.matcher is not None and token_id is not None:
        tracked.matcher.accept(token_id)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    if request.num_output <= 1 and request.params.prompt_logprobs is not None:
        prompt_logprobs = [None, *tracked.prompt_logprobs]
    return EngineOutput(
        request_id=request.request_id,
        token_ids=[] if token_id is None else [token_id],
        logprobs=[entry.logprob] if entry is not None and entry.logprob is not None else None,
        prompt_logprobs=prompt_logprobs,
        finish_reason=reason,
        stop_token_id=token_id if reason == "stop" else None,
        num_cached_tokens=request.num_cached_tokens,
    )
