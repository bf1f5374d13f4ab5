"""One answer in the making: engine outputs go in, pieces of text ready to be sent come out. No HTTP, no waiting.

A piece waits when it might be the beginning of a stop string (`text/stop_strings`) or holds half a character; the
logprobs of its tokens wait with it. Logprobs cover every generated token, the ending one included (tools that score
text count on it); text holds the stop string, the stop token and special tokens only when the request asks for them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, repeat

from antiphon.serve.api.metrics import RequestClock
from antiphon.serve.api.requests import GenerationRequest
from antiphon.serve.engine_api import EngineOutput
from antiphon.serve.text.answer_fields import CallPiece
from antiphon.serve.text.answer_reader import AnswerReader
from antiphon.serve.text.stop_strings import StopSearch, StopStrings
from antiphon.serve.text.tokenizer import TextTokenizer
from antiphon.specs.sampling import PromptLogprobs, SamplingParams, TokenLogprob

_ENTRIES_A_SLICE = 32  # of a prompt: half a millisecond to encode with twenty alternatives each


@dataclass(frozen=True)
class TokenizedPrompt:
    """One prompt; `text` is what `echo` repeats, with the texts of special tokens or without."""

    token_ids: list[int]
    text: str
    shows_special_tokens: bool = False


@dataclass(slots=True)
class TokenEntry:
    """One token's logprobs and the place in the text where it begins, in characters."""

    token_id: int
    logprob: TokenLogprob | None
    text_offset: int


@dataclass(slots=True)
class ChoiceDelta:
    """What is new about one answer: reasoning, then text, then calls. The last has `finish_reason`: "stop", "length",
    "tool_calls", or why the engine gave up.

    `echoed`: entries of the prompt's tokens, which come before `entries` and are made while they are read. `token_ids`
    and, in the first one, `prompt_token_ids`: if they are reported. `prompt_logprobs` comes once, if computed."""

    index: int
    text: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    echoed: Iterator[TokenEntry] | None = None
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None

    def slices(self) -> Iterator["ChoiceDelta"]:
        """This delta in parts of a bounded length, without `echoed`, each made when it is asked for."""
        if self.echoed is not None:
            part = ChoiceDelta(self.index, text=self.text, prompt_token_ids=self.prompt_token_ids)
            echoed, self.echoed, self.text, self.prompt_token_ids = self.echoed, None, "", None
            while entries := list(islice(echoed, _ENTRIES_A_SLICE)):
                part.entries = entries
                yield part
                part = ChoiceDelta(self.index)
        yield self


class ChoiceText:
    """One request of the engine: its outputs and their times, and the text that they become. `is_in_line`: the engine
    has not begun it; `ended_by_engine`: it says no more of it."""

    def __init__(
        self,
        *,
        clock: RequestClock,
        index: int,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        request: GenerationRequest,
        stops: StopStrings | None,
        echo: bool,
        tokenizer: TextTokenizer,
        reader: AnswerReader | None = None,
        shows_reasoning: bool = True,
    ) -> None:
        """`reader`: finds reasoning and calls of tools, which are then no part of the text."""
        self.clock = clock
        self.is_in_line = True
        self.ended_by_engine = False
        self.index = index
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_cached_tokens = 0
        self.finished = False
        self._prompt = prompt
        self._params = params
        self._echo_pending = echo
        marks = reader.marks if reader is not None else frozenset[str]()
        self._tokenizer = tokenizer
        self._skip_special_tokens = request.skip_special_tokens is not False
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=self._skip_special_tokens, marks=marks)
        self._prompt_end = self._detokenizer.follow(prompt.token_ids, echoed=echo)
        self._keep_stop = bool(request.include_stop_str_in_output)
        self._reader = reader
        self._shows_reasoning = shows_reasoning
        self._stops = None if stops is None else StopSearch(stops)
        self._num_echoed = 0
        self._reports_ids = bool(request.return_token_ids)
        self._pending_entries: list[TokenEntry] = []
        self._pending_ids: list[int] = []
        self._pending_prompt_logprobs: PromptLogprobs | None = None
        self._pending_prompt_ids = prompt.token_ids if self._reports_ids else None

    def consume(self, output: EngineOutput) -> ChoiceDelta | None:
        """Take one engine output; None when nothing can be said yet. After a stop string `finished` is set although
        the engine does not know: the caller closes the engine's iterator."""
        delta = ChoiceDelta(self.index)
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self._pending_prompt_logprobs = output.prompt_logprobs or self._pending_prompt_logprobs
        if self._echo_pending:
            self._echo_pending = False
            self._echo(output, delta)
        logprobs = output.logprobs if output.logprobs is not None else repeat(None)
        for position, (token_id, logprob) in enumerate(zip(output.token_ids, logprobs, strict=False)):
            is_stop_token = token_id == output.stop_token_id and position == len(output.token_ids) - 1
            self._read_token(delta, self._take_token(token_id, logprob, is_stop_token))
            if self._stops is not None and self._stops.matched is not None:
                return self._finish_by_stop_string(delta, self._stops.matched)
        if output.finish_reason is not None:
            return self._finish_by_engine(output, delta)
        if self._reader is not None and self._reader.satisfied:
            return self._end(delta, "stop", None)
        if not (delta.text or delta.reasoning or delta.calls) and delta.echoed is None:
            return None
        self._move_entries(delta)
        return delta

    def _echo(self, output: EngineOutput, delta: ChoiceDelta) -> None:
        delta.text = self._prompt.text.removesuffix(self._prompt_end)
        if output.prompt_logprobs is not None:
            delta.echoed = self._echoed(output.prompt_logprobs)
        self._num_echoed = len(delta.text)

    def _echoed(self, logprobs: PromptLogprobs) -> Iterator[TokenEntry]:
        skip_special_tokens = self._skip_special_tokens and not self._prompt.shows_special_tokens
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
        for token_id, logprob in zip(self._prompt.token_ids, logprobs, strict=True):
            yield TokenEntry(token_id, logprob, detokenizer.num_characters)
            detokenizer.feed(token_id)

    def _take_token(self, token_id: int, logprob: TokenLogprob | None, is_stop_token: bool) -> str:
        self.num_tokens += 1
        if self._reports_ids:
            self._pending_ids.append(token_id)
        if logprob is not None:
            offset = self._num_echoed + self._detokenizer.num_characters
            self._pending_entries.append(TokenEntry(token_id, logprob, offset))
        piece = "" if is_stop_token and not self._keep_stop else self._detokenizer.feed(token_id)
        if self._stops is None or self.num_tokens <= self._params.min_tokens:
            return piece  # stop strings count only after min_tokens, as stop tokens do
        text = self._stops.feed(piece, token_id)
        if self._stops.matched is not None and self._stops.is_special(token_id):
            text += self._detokenizer.flush()  # bytes before the special token that waited for more
        return text

    def _finish_by_engine(self, output: EngineOutput, delta: ChoiceDelta) -> ChoiceDelta:
        assert output.finish_reason is not None
        rest = self._detokenizer.flush()
        self._read(delta, rest if self._stops is None else self._stops.flush(rest))
        if self._stops is not None and self._stops.matched is not None:
            return self._finish_by_stop_string(delta, self._stops.matched)
        delta.error = output.error
        asked_for = output.stop_token_id in self._params.stop_token_ids
        self._read(delta, "", is_over=True)
        return self._end(delta, output.finish_reason, output.stop_token_id if asked_for else None)

    def _finish_by_stop_string(self, delta: ChoiceDelta, matched: str) -> ChoiceDelta:
        if self._keep_stop:
            self._read(delta, matched)
        self._read(delta, "", is_over=True)
        return self._end(delta, "stop", matched)

    def _read_token(self, delta: ChoiceDelta, text: str) -> None:
        was_reasoning = self._reader is not None and self._reader.is_reasoning
        self._read(delta, text)
        self.num_reasoning_tokens += was_reasoning or (self._reader is not None and self._reader.is_reasoning)

    def _read(self, delta: ChoiceDelta, text: str, *, is_over: bool = False) -> None:
        """Add to `delta` what `text` turns out to be."""
        if self._reader is None:
            delta.text += text
            return
        reading = self._reader.flush() if is_over else self._reader.feed(text)
        delta.text += reading.text
        delta.reasoning += reading.reasoning if self._shows_reasoning else ""
        for piece in reading.calls:
            if delta.calls and delta.calls[-1].index == piece.index:
                delta.calls[-1].arguments += piece.arguments
            else:
                delta.calls.append(piece)

    def _end(self, delta: ChoiceDelta, reason: str, stop_reason: str | int | None) -> ChoiceDelta:
        self.finished = True
        if reason == "stop" and self._reader is not None and self._reader.num_calls:
            is_cut = stop_reason is not None and self._reader.is_call_cut  # by the client's own stop
            reason = "stop" if is_cut else "tool_calls"
        delta.finish_reason = reason
        delta.stop_reason = stop_reason
        self.clock.finished(reason)
        self._move_entries(delta)
        return delta

    def give_up(self) -> None:
        """The rest of the answer is not read."""
        if not self.finished:
            self.finished = True
            self.clock.finished("abort")

    def _move_entries(self, delta: ChoiceDelta) -> None:
        delta.entries, self._pending_entries = self._pending_entries, []
        delta.token_ids, self._pending_ids = self._pending_ids, []
        delta.prompt_token_ids, self._pending_prompt_ids = self._pending_prompt_ids, None
        delta.prompt_logprobs, self._pending_prompt_logprobs = self._pending_prompt_logprobs, None
