"""One answer in the making: engine outputs go in, pieces of text ready to be sent come out. No HTTP, no asyncio.

A piece waits when it might be the beginning of a stop string or holds half a character; the logprobs of its tokens wait
with it. Logprobs cover every generated token, the ending one included (tools that score text count on it); text never
contains the stop string, the stop token or special tokens.
"""

from dataclasses import dataclass, field

from antiphon.serve.api.prompts import TokenizedPrompt
from antiphon.serve.engine_api import EngineOutput
from antiphon.serve.text.stop_strings import StopStringMatcher
from antiphon.serve.text.tokenizer import TextTokenizer
from antiphon.specs.sampling import SamplingParams, TokenLogprob


@dataclass(slots=True)
class TokenEntry:
    """One token's logprobs and the place in the text where it begins, in characters."""

    token_id: int
    logprob: TokenLogprob | None
    text_offset: int


@dataclass(slots=True)
class ChoiceDelta:
    """What is new about one answer. The last one has `finish_reason`: "stop", "length", or the engine's failure."""

    index: int
    text: str = ""
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
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finished = False
        self._prompt = prompt
        self._params = params
        self._echo_pending = echo
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopStringMatcher(stop_strings)
        self._text_offset = 0
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
                return self._finish(delta, "stop", self._stops.matched)
        if output.finish_reason is not None:
            return self._finish_by_engine(output, delta)
        if not delta.text:
            return None
        self._move_entries(delta)
        return delta

    def _echo(self, output: EngineOutput, delta: ChoiceDelta) -> None:
        delta.text = self._prompt.text
        if output.prompt_logprobs is not None:
            detokenizer = self._tokenizer.detokenizer()
            offset = 0
            for token_id, logprob in zip(self._prompt.token_ids, output.prompt_logprobs, strict=True):
                self._pending_entries.append(TokenEntry(token_id, logprob, offset))
                offset += len(detokenizer.feed(token_id))
        self._text_offset = len(self._prompt.text)

    def _take_token(self, token_id: int, logprob: TokenLogprob | None, is_stop_token: bool) -> str:
        self.num_tokens += 1
        if logprob is not None:
            self._pending_entries.append(TokenEntry(token_id, logprob, self._text_offset))
        if is_stop_token:
            return ""
        piece = self._detokenizer.feed(token_id)
        self._text_offset += len(piece)
        # Stop strings count only after min_tokens, as stop tokens do.
        return self._stops.feed(piece) if self.num_tokens > self._params.min_tokens else piece

    def _finish_by_engine(self, output: EngineOutput, delta: ChoiceDelta) -> ChoiceDelta:
        assert output.finish_reason is not None
        delta.text += self._stops.feed(self._detokenizer.flush())
        if self._stops.matched is not None:
            return self._finish(delta, "stop", self._stops.matched)
        delta.text += self._stops.flush()
        delta.error = output.error
        asked_for = output.stop_token_id in self._params.stop_token_ids
        return self._finish(delta, output.finish_reason, output.stop_token_id if asked_for else None)

    def _finish(self, delta: ChoiceDelta, reason: str, stop_reason: str | int | None) -> ChoiceDelta:
        self.finished = True
        delta.finish_reason = reason
        delta.stop_reason = stop_reason
        self._move_entries(delta)
        return delta

    def _move_entries(self, delta: ChoiceDelta) -> None:
        delta.entries, self._pending_entries = self._pending_entries, []
