"""Chat templates and long texts, in two processes beside the server, so that no request holds up another.

The tokenizer keeps the interpreter's lock while it works, and a chat template is a program of the checkpoint: neither
may run where streams are served, and a thread would not help. One process takes inputs up to `_SHORT_INPUT_BYTES`, the
other one longer ones, so that long texts never delay short ones; within each it is first come, first served.

Rejected: a process for each job (tens of milliseconds), and a pool of them (copies of a vocabulary, and still no
promise to short texts once long ones have taken them all).
"""

import array
import asyncio
import concurrent.futures
import threading
from typing import Any, TypeVar

import msgspec

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.serve.engine_api import QueueFull, RequestTooLong, ShuttingDown
from antiphon.serve.text.text_messages import (
    Answer,
    CompileTemplate,
    Configure,
    Decode,
    Encode,
    Job,
    Refused,
    RenderChat,
    Text,
    TokenIds,
)
from antiphon.serve.text.text_queue import TextLimits, TextQueue
from antiphon.serve.text.tokenizer import ChatMessage, TextTokenizer

_log = get_logger("serve.text")
_SHORT_INPUT_BYTES = 32 * 1024  # takes the tokenizer some tens of milliseconds
_NICENESS = 5  # long texts step back behind the workers, which share the cores
_TEMPLATE, _TOKENIZER = "the model's chat template", "the tokenizer"
_Expected = TypeVar("_Expected", Text, TokenIds)


class TextService:
    """See the module's docstring. Methods are called from event loops; `start` and `close` from any thread.

    Errors: `UserError` when a template refuses or a limit on time or memory is hit, `RequestTooLong` when a text cannot
    fit (its message begins with a verb: say what it is about), `QueueFull` when too many wait."""

    def __init__(self, tokenizer: TextTokenizer, limits: TextLimits | None = None) -> None:
        """Starts nothing; the first job, or `start`, does."""
        self.limits = limits or TextLimits()
        self.template_problem: str | None = None
        self._tokenizer = tokenizer
        self._starting = threading.Lock()
        self._queues: tuple[TextQueue, TextQueue] | None = None

    def start(self) -> None:
        """Start both processes, unless they run; returns at once. What is wrong with the chat template is logged."""
        self._started()

    def close(self) -> None:
        """End both processes. Waits for them, seconds at most. Another job would start them again."""
        with self._starting:
            queues, self._queues = self._queues, None
        for jobs in queues or ():
            jobs.close()

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        return [pid for jobs in self._queues or () if (pid := jobs.pid) is not None]

    async def render(
        self,
        messages: list[ChatMessage],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        max_characters: int,
    ) -> str:
        """The conversation as one text through the chat template. Special tokens are part of it."""
        if not self._tokenizer.has_chat_template:
            raise UserError("this model has no chat template: use /v1/completions with a prompt")
        if self.template_problem is not None:
            raise UserError(self.template_problem)
        job = RenderChat(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            template_kwargs=template_kwargs,
            max_characters=max_characters,
        )
        return (await self._ask(job, _TEMPLATE, self.limits.template_timeout_s, Text)).text

    async def encode(self, texts: list[str], *, add_special_tokens: bool, max_tokens: int | None) -> list[list[int]]:
        """Ids of each text; `RequestTooLong` as soon as one is certain to have more than `max_tokens`."""
        job = Encode(texts=texts, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
        answer = await self._ask(job, _TOKENIZER, self.limits.tokenizer_timeout_s, TokenIds)
        return [array.array("I", packed).tolist() for packed in answer.of_texts]

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of the ids, which must be at least 0 and below 2**32."""
        job = Decode(array.array("I", token_ids).tobytes(), skip_special_tokens)
        return (await self._ask(job, _TOKENIZER, self.limits.tokenizer_timeout_s, Text)).text

    async def _ask(self, job: Job, what: str, timeout_s: float, expected: type[_Expected]) -> _Expected:
        try:
            num_bytes = len(msgspec.msgpack.encode(job))
        except (OverflowError, RecursionError, ValueError) as error:
            raise UserError(f"{what} takes no numbers beyond 64 bits and no deep nesting: {error}") from error
        short, long = self._started()
        jobs = short if num_bytes <= _SHORT_INPUT_BYTES else long
        answer = await asyncio.wrap_future(jobs.submit(job, what, timeout_s))
        if isinstance(answer, Refused):
            raise RequestTooLong(answer.reason) if answer.too_long else UserError(answer.reason)
        assert isinstance(answer, expected), f"{type(answer).__name__} is no answer to {type(job).__name__}"
        return answer

    def _started(self) -> tuple[TextQueue, TextQueue]:
        with self._starting:
            if self._queues is None:
                configure = Configure(
                    tokenizer_json=self._tokenizer.backend.to_str(),
                    chat_template=self._tokenizer.template_sources,
                    special_tokens=self._tokenizer.special_tokens,
                    memory_bytes=self.limits.memory_bytes,
                    niceness=0,
                )
                nicer = msgspec.structs.replace(configure, niceness=_NICENESS)
                self._queues = (
                    TextQueue("short texts", configure, self.limits),
                    TextQueue("long texts", nicer, self.limits),
                )
                for jobs in self._queues:
                    jobs.start()
                if self._tokenizer.has_chat_template:
                    checked = self._queues[0].submit(CompileTemplate(), _TEMPLATE, self.limits.template_timeout_s)
                    checked.add_done_callback(self._note_template)
            return self._queues

    def _note_template(self, checked: "concurrent.futures.Future[Answer]") -> None:
        """Remember what is wrong with the template. That its process did not start is another matter."""
        error = checked.exception()
        if isinstance(error, (QueueFull, ShuttingDown)) or not isinstance(error, UserError | None):
            return
        told = Refused(str(error)) if error is not None else checked.result()
        if isinstance(told, Refused):
            self.template_problem = told.reason
            _log.warning("no chat completions: %s", told.reason)
