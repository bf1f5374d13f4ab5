"""One answer in the making: engine outputs go in, pieces of text ready to be sent come out. No HTTP, no asyncio.

A piece waits when it might be the beginning of a stop string or holds half a character; the logprobs of its tokens wait
with it. Logprobs cover every generated token, the ending one included (tools that score text count on it); text
holds the stop string, the stop token and special tokens only when the request asks for them.
"""

import math
from dataclasses import dataclass, field

from antiphon.serve.api.prompts import TokenizedPrompt
from antiphon.serve.engine_api import EngineOutput
from antiphon.serve.text.tokenizer import StopStringMatcher, TextTokenizer
from antiphon.serve.text.tool_calls import CallPiece, ToolCallReader
from antiphon.specs.sampling import SamplingParams, TokenLogprob

_IMPOSSIBLE = -9999.0  # JSON has no infinity; OpenAI writes this for tokens that cannot come


def finite(logprob: float) -> float:
    """A log-probability as it is sent."""
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE


@dataclass(slots=True)
class TokenEntry:
    """One token's logprobs and the place in the text where it begins, in characters."""

    token_id: int
    logprob: TokenLogprob | None
    text_offset: int


@dataclass(slots=True)
class ChoiceDelta:
    """What is new about one answer. The last one has `finish_reason`: "stop", "length", "tool_calls", or why the engine
    gave up."""

    index: int
    text: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None


class Choice:
    """The text side of one engine request."""

    def __init__(
        self,
        *,
        index: int,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        stop_strings: tuple[str, ...],
        echo: bool,
        tokenizer: TextTokenizer,
        skip_special_tokens: bool = True,
        keep_stop: bool = False,
        reader: ToolCallReader | None = None,
    ) -> None:
        """`keep_stop`: the text ends with the stop string or stop token that ended it. `reader`: finds calls of tools,
        which are then no part of the text."""
        self.index = index
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finished = False
        self._prompt = prompt
        self._params = params
        self._echo_pending = echo
        shown = reader.mark if reader is not None else ""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens, shown=shown)
        self._prompt_end = self._detokenizer.follow(prompt.token_ids, echoed=echo)
        self._keep_stop = keep_stop
        self._reader = reader
        self._stops = StopStringMatcher(stop_strings)
        self._num_echoed = 0
        self._pending_entries: list[TokenEntry] = []

    def consume(self, output: EngineOutput) -> ChoiceDelta | None:
        """Take one engine output; None when nothing can be said yet. After a stop string `finished` is set although
        the engine does not know: the caller closes the engine's iterator."""
        delta = ChoiceDelta(self.index)
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if self._echo_pending:
            self._echo_pending = False
            self._echo(output, delta)
        for position, token_id in enumerate(output.token_ids):
            is_stop_token = token_id == output.stop_token_id and position == len(output.token_ids) - 1
            logprob = output.logprobs[position] if output.logprobs is not None else None
            delta.text += self._take_token(token_id, logprob, is_stop_token)
            if self._stops.matched is not None:
                return self._finish_by_stop_string(delta, self._stops.matched)
        if output.finish_reason is not None:
            return self._finish_by_engine(output, delta)
        self._read_calls(delta)
        if self._reader is not None and self._reader.satisfied:
            return self._end(delta, "stop", None)
        if not delta.text and not delta.calls:
            return None
        self._move_entries(delta)
        return delta

    def _echo(self, output: EngineOutput, delta: ChoiceDelta) -> None:
        delta.text = self._prompt.text.removesuffix(self._prompt_end)
        if output.prompt_logprobs is not None:
            skip_special_tokens = self._skip_special_tokens and not self._prompt.shows_special_tokens
            detokenizer = self._tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
            for token_id, logprob in zip(self._prompt.token_ids, output.prompt_logprobs, strict=True):
                self._pending_entries.append(TokenEntry(token_id, logprob, detokenizer.num_characters))
                detokenizer.feed(token_id)
        self._num_echoed = len(delta.text)

    def _take_token(self, token_id: int, logprob: TokenLogprob | None, is_stop_token: bool) -> str:
        self.num_tokens += 1
        if logprob is not None:
            offset = self._num_echoed + self._detokenizer.num_characters
            self._pending_entries.append(TokenEntry(token_id, logprob, offset))
        if is_stop_token and not self._keep_stop:
            return ""
        piece = self._detokenizer.feed(token_id)
        # Stop strings count only after min_tokens, as stop tokens do.
        return self._stops.feed(piece) if self.num_tokens > self._params.min_tokens else piece

    def _finish_by_engine(self, output: EngineOutput, delta: ChoiceDelta) -> ChoiceDelta:
        assert output.finish_reason is not None
        delta.text += self._stops.feed(self._detokenizer.flush())
        if self._stops.matched is not None:
            return self._finish_by_stop_string(delta, self._stops.matched)
        delta.text += self._stops.flush()
        delta.error = output.error
        asked_for = output.stop_token_id in self._params.stop_token_ids
        return self._finish(delta, output.finish_reason, output.stop_token_id if asked_for else None)

    def _finish_by_stop_string(self, delta: ChoiceDelta, matched: str) -> ChoiceDelta:
        if self._keep_stop:
            delta.text += matched
        return self._finish(delta, "stop", matched)

    def _read_calls(self, delta: ChoiceDelta) -> None:
        if self._reader is not None:
            reading = self._reader.feed(delta.text)
            delta.text, delta.calls = reading.text, reading.calls

    def _finish(self, delta: ChoiceDelta, reason: str, stop_reason: str | int | None) -> ChoiceDelta:
        self._read_calls(delta)
        if self._reader is not None:
            delta.text += self._reader.flush().text
        return self._end(delta, reason, stop_reason)

    def _end(self, delta: ChoiceDelta, reason: str, stop_reason: str | int | None) -> ChoiceDelta:
        self.finished = True
        if reason == "stop" and self._reader is not None and self._reader.num_calls:
            reason = "tool_calls"
        delta.finish_reason = reason
        delta.stop_reason = stop_reason
        self._move_entries(delta)
        return delta

    def _move_entries(self, delta: ChoiceDelta) -> None:
        delta.entries, self._pending_entries = self._pending_entries, []
