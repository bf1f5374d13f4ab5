"""Chat templates, tokenizers and the texts they work on, in processes beside the server: no request holds up another
one, and nothing that comes from a checkpoint is evaluated where streams are served.

The tokenizer keeps the interpreter's lock while it works, its patterns may take any time, and a chat template is a
program: a thread would not help. Three processes take inputs by size, so that what takes milliseconds never waits for
what takes seconds: short texts; chat templates and medium texts; long ones. Within each, clients take turns, and what
is made of several texts is done piece by piece (`text_queue`).

Rejected: a process for each job (tens of milliseconds), and a pool of them (copies of a vocabulary, and still no
promise to short texts once long ones have taken them all).
"""

import array
import asyncio
import concurrent.futures
import math
import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.serve.engine_api import QueueFull, RequestTooLong, ShuttingDown
from antiphon.serve.text.text_process import (
    Answer,
    CompileTemplate,
    Decode,
    Encode,
    Job,
    RenderChat,
    TextConfigure,
    TextRefused,
    TextResult,
    TokenizerSource,
)
from antiphon.serve.text.text_queue import TextLimits, TextQueue, TextRequest
from antiphon.serve.text.tokenizer import TextTokenizer

_log = get_logger("serve.text")
_TEMPLATE, _TOKENIZER = "the model's chat template", "the tokenizer"
_SLICE_CHARACTERS = 16 * 1024  # some ten milliseconds of the tokenizer's time
_SLICE_TOKENS = 4096  # some ten microseconds of the event loop's time
# What the server itself gives to a template, or to the function that renders it.
_NOT_FOR_REQUESTS = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
    "padding", "raise_exception", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "sanitize_control_tokens", "strftime_now", "tokenize", "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip
_Expected = TypeVar("_Expected", TextResult, TokenizerSource)


_Answers = concurrent.futures.Future[list[Answer]]


# What each process takes: its name, inputs up to a number of bytes, chat templates or not; and its niceness: long texts
# step back behind the workers, which share the cores.
_LANES = (("short texts", 4 * 1024, False, 0), ("chats", 32 * 1024, True, 0), ("long texts", math.inf, True, 5))
_CHATS = 1


class TextService:
    """See the module's docstring. Methods are called from event loops; `start` and `close` from any thread. `client` is
    whose request it is: clients take turns.

    Errors: `UserError` when a template refuses or a limit on time or memory is hit, `RequestTooLong` when a text cannot
    fit (its message begins with a verb: say what it is about), `QueueFull` when too many wait."""

    def __init__(self, tokenizer: TextTokenizer, limits: TextLimits = TextLimits()) -> None:
        """Starts nothing; the first job, or `start`, does."""
        self.limits = limits
        self.template_problem: str | None = None
        self._tokenizer = tokenizer
        self._starting = threading.Lock()
        self._queues: list[TextQueue] = []
        self._compiled: _Answers | None = None

    def start(self) -> None:
        """Start the processes, unless they run; returns at once. What is wrong with the chat template is logged."""
        self._started()

    def close(self) -> None:
        """End the processes. Waits for them, seconds at most. Another job would start them again."""
        with self._starting:
            queues, self._queues = self._queues, []
        for queue in queues:
            queue.close()

    async def template_names(self) -> frozenset[str]:
        """The variables that the chat template reads without setting them."""
        if not self._tokenizer.has_chat_template:
            raise UserError("this model has no chat template: use /v1/completions with a prompt")
        if self.template_problem is not None:
            raise UserError(self.template_problem)
        self._started()
        assert self._compiled is not None
        answers = await asyncio.shield(asyncio.wrap_future(self._compiled))
        return frozenset(expect(answers[0], TextResult).names)

    async def render(self, job: RenderChat, client: str = "") -> str:
        """The conversation as one text through the chat template. Special tokens are part of it."""
        await self.template_names()
        try:
            num_bytes = len(msgspec.msgpack.encode(job))
        except (OverflowError, RecursionError, ValueError) as error:
            raise UserError(f"{_TEMPLATE} takes no numbers beyond 64 bits and no deep nesting: {error}") from error
        return expect((await self._ask([job], client, num_bytes))[0], TextResult).text

    async def encode(
        self, texts: list[str], *, add_special_tokens: bool, max_tokens: int | None, client: str = ""
    ) -> list[list[int]]:
        """Ids of each text; `RequestTooLong` as soon as one is certain to have more than `max_tokens`."""
        jobs = [
            Encode(texts=slice, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
            for slice in _slices(texts)
        ]
        if not jobs:
            return []
        answers = await self._ask(jobs, client, sum(map(len, texts)))
        return [await _unpacked(packed) for answer in answers for packed in expect(answer, TextResult).token_ids]

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool, client: str = "") -> str:
        """Text of the ids, which must be at least 0 and below 2**32."""
        packed = await _packed(token_ids)
        answers = await self._ask([Decode(packed, skip_special_tokens)], client, len(packed))
        return expect(answers[0], TextResult).text

    async def _ask(self, jobs: Sequence[Job], client: str, num_bytes: int) -> list[Answer]:
        renders = isinstance(jobs[0], RenderChat)
        what, timeout_s = _TOKENIZER, self.limits.tokenizer_timeout_s
        if renders:
            what, timeout_s = _TEMPLATE, self.limits.template_timeout_s
        lanes = zip(_LANES, self._started(), strict=True)
        queue = next(
            queue
            for (_, max_bytes, takes_chats, _), queue in lanes
            if num_bytes <= max_bytes and (takes_chats or not renders)
        )
        return await asyncio.wrap_future(queue.submit(TextRequest(jobs, what, timeout_s, client, num_bytes)))

    def _started(self) -> list[TextQueue]:
        with self._starting:
            if not self._queues:
                source = TokenizerSource.of(self._tokenizer)
                queues = [self._queue(name, niceness, source) for name, _, _, niceness in _LANES]
                for queue in queues:
                    queue.start()
                self._queues = queues
            if self._tokenizer.has_chat_template and (self._compiled is None or _has_failed(self._compiled)):
                request = TextRequest([CompileTemplate()], _TEMPLATE, self.limits.template_timeout_s)
                self._compiled = self._queues[_CHATS].submit(request)
                self._compiled.add_done_callback(self._note_template)
            return self._queues

    def _queue(self, name: str, niceness: int, source: TokenizerSource) -> TextQueue:
        configure = TextConfigure(source=source, memory_bytes=self.limits.memory_bytes, niceness=niceness)
        return TextQueue(name, configure, self.limits)

    def _note_template(self, compiled: _Answers) -> None:
        """Remember what is wrong with the template. That its process did not start is another matter."""
        if compiled.cancelled() or _has_failed(compiled):
            return
        error = compiled.exception()
        outcome = TextRefused(str(error)) if error is not None else compiled.result()[0]
        if isinstance(outcome, TextRefused):
            self.template_problem = outcome.reason
            _log.warning("no chat completions: %s", outcome.reason)


def expect(answer: Answer, expected: type[_Expected]) -> _Expected:
    """`answer`, or the error that it stands for."""
    if isinstance(answer, TextRefused):
        raise RequestTooLong(answer.reason) if answer.too_long else UserError(answer.reason)
    assert isinstance(answer, expected), f"a {expected.__name__} was asked for, not {type(answer).__name__}"
    return answer


def settable_variables(names: frozenset[str]) -> frozenset[str]:
    """Which of the variables that a template reads a request may set: not the conversation, the tools, or the
    tokenizer's special tokens. A value for a variable that it does not read would be dropped in silence."""
    return frozenset(name for name in names - _NOT_FOR_REQUESTS if not name.endswith("_token"))


def thinking_switches(settable: frozenset[str], *, on: bool) -> dict[str, bool]:
    """The variables that switch reasoning on or off, by the names that templates have for them."""
    return {name: on for name in ("enable_thinking", "thinking") if name in settable}


def _has_failed(compiled: _Answers) -> bool:
    """Not for anything about the template: its process did not start, or ends with the server."""
    if not compiled.done():
        return False
    error = compiled.exception()
    return error is not None and (not isinstance(error, UserError) or isinstance(error, (QueueFull, ShuttingDown)))


def _slices(texts: list[str]) -> Iterator[list[str]]:
    """Neighbours together, as long as they are short."""
    part: list[str] = []
    num_characters = 0
    for text in texts:
        if part and num_characters + len(text) > _SLICE_CHARACTERS:
            yield part
            part, num_characters = [], 0
        part.append(text)
        num_characters += len(text)
    if part:
        yield part


async def _unpacked(packed: bytes) -> list[int]:
    """Ids as integers, some thousand at a time, with a turn for others in between."""
    words = memoryview(packed).cast("I")
    token_ids: list[int] = []
    for begin in range(0, len(words), _SLICE_TOKENS):
        token_ids += words[begin : begin + _SLICE_TOKENS].tolist()
        if len(words) > begin + _SLICE_TOKENS:
            await asyncio.sleep(0)
    return token_ids


async def _packed(token_ids: list[int]) -> bytes:
    """The counterpart of `_unpacked`."""
    words = array.array("I")
    for begin in range(0, len(token_ids), _SLICE_TOKENS):
        words.extend(token_ids[begin : begin + _SLICE_TOKENS])
        if len(token_ids) > begin + _SLICE_TOKENS:
            await asyncio.sleep(0)
    return words.tobytes()
