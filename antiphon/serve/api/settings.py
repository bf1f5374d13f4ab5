"""What the operator of the server decides: where it listens, who may use it, and how much one request may ask; and the
limits that follow (`InputLimits`), whose checks cost next to nothing and come before what does.

What cannot fit the context is refused by its size, before it is decoded, validated or tokenized. So the work for one
request is bounded, whatever its body holds, and other requests go on meanwhile.

1. While the body arrives its bytes are counted, and the characters JSON builds structure with (`guard/body`).
2. After decoding, the lengths of lists and objects, field by field.
3. Before tokenizing, characters: a text of more than the context's tokens times the longest token cannot fit.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from antiphon.base.errors import UserError
from antiphon.base.system import MemoryTrimmer
from antiphon.serve.api.errors import ApiError, bad_request, too_busy
from antiphon.serve.config import MAX_TIMEOUT_S
from antiphon.serve.text.dialects import dialect_of
from antiphon.serve.text.tokenizer import TextTokenizer
from antiphon.specs.plan import Predicted

_MIN_BODY_BYTES = 1024 * 1024
_MAX_BODY_BYTES = 8 * 1024 * 1024
_MIN_BODY_MEMORY_BYTES = 256 * 1024 * 1024
_NUM_LARGEST_BODIES = 4
_FREE_BODY_BYTES = 64 * 1024
# A token is about one Chinese character or four Latin ones; written as \u4e2d it takes 6 bytes a character.
_BODY_BYTES_PER_TOKEN = 24
_NUM_SEPARATORS = 256 * 1024
_NUM_NAMES = 32 * 1024
_TRUNCATED_CHARACTERS = 1024 * 1024
_MAX_MESSAGES = 2048
_MAX_OBJECTS = 2 * _MAX_MESSAGES
_MAX_FREE_OBJECTS = 16 * 1024  # in what no model validates object by object
_FREE = frozenset({"response_format", "tools", "chat_template_kwargs", "text", "output_config"})
_MAX_OBJECT_NAMES = 8 * 1024
_MAX_STOP_STRINGS = 16


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits and identity of one server. Everything has a safe default; nothing here concerns the model.

    `api_keys` empty: no key is asked for. `allowed_hosts`: its own names (`middlewares`). `cors_origins`: pages of
    other servers that may use this one, ``https://host``, or ``*``. `served_model_names`: the first is the one that
    answers have; empty: the engine's. `model_root`: where the model comes from. `own_chat_template`: in place of the
    checkpoint's. `chat_template_kwargs`: variables of the template, unless a request sets them. `max_streams` counts
    HTTP requests that generate, streaming or not. `max_prompt_tokens` None: only the model's context limits prompts.
    `reasoning_parser` and `tool_parser` None: the chat template shows how the model marks reasoning and calls.
    `root_path`: what a proxy puts before the paths, ``/models/a``; requests may have it or not.
    `return_tokens_as_token_ids` and `force_include_usage` (in each event of a stream): whether answers have them that
    were not asked for it.
    `max_body_bytes` None: what a request that fits the context may need (`input_limits`). `max_answer_bytes` limits one
    answer, estimated before it is made (`parameters`). `predicted`: what the loaded plan promised, None
    without a plan.

    A connection has `header_timeout_s` from its first byte (a new one: from its begin) to a request's complete head. It
    may be idle for `keep_alive_timeout_s` between requests. A client must take some of what waits for it within
    `send_timeout_s`. An address may have `max_slow_bodies` requests whose body is late. `max_unread_bytes` of a
    streamed answer may wait for a client that is slower than the engine.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    model_root: str | None = None
    own_chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    reasoning_parser: str | None = None
    tool_parser: str | None = None
    root_path: str = ""
    return_tokens_as_token_ids: bool = False
    force_include_usage: bool = False
    max_body_bytes: int | None = None
    body_timeout_s: float = 60.0
    header_timeout_s: float = 10.0
    keep_alive_timeout_s: float = 75.0
    send_timeout_s: float = 60.0
    max_unread_bytes: int = 1024 * 1024
    max_answer_bytes: int = 64 * 1024 * 1024
    max_connections: int = 2048
    max_slow_bodies: int = 128
    max_prompt_tokens: int | None = None
    max_streams: int = 1024
    max_prompts_per_request: int = 128
    drain_timeout_s: float = 30.0
    predicted: Predicted | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UserError(f"--port is {self.port}: use 1 to 65535, or 0 for any free port")
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise UserError(
                    f"--cors-origin {origin!r} is no origin: write for example https://chat.example.com, or *"
                )
        if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", self.root_path):
            raise UserError(
                f"--root-path {self.root_path!r} is no path: write for example /models/a, without / at the end"
            )
        dialect_of("", reasoning_parser=self.reasoning_parser, tool_parser=self.tool_parser)  # knows the names
        counts = (
            ("--max-body-bytes", 1 if self.max_body_bytes is None else self.max_body_bytes),
            ("--max-streams", self.max_streams),
            ("--max-connections", self.max_connections),
            ("--max-slow-bodies", self.max_slow_bodies),
            ("max_unread_bytes", self.max_unread_bytes),
            ("--max-answer-bytes", self.max_answer_bytes),
            ("--max-prompt-tokens", 1 if self.max_prompt_tokens is None else self.max_prompt_tokens),
            ("max_prompts_per_request", self.max_prompts_per_request),
        )
        for name, value in counts:
            if value < 1:
                raise UserError(f"{name} is {value}: it must be at least 1")
        if not 0 <= self.drain_timeout_s <= MAX_TIMEOUT_S:
            raise UserError(f"--drain-timeout is {self.drain_timeout_s:g} s: it must be 0 to {MAX_TIMEOUT_S:.0f}")
        timeouts = (
            ("header_timeout_s", self.header_timeout_s),
            ("keep_alive_timeout_s", self.keep_alive_timeout_s),
            ("--send-timeout", self.send_timeout_s),
        )
        for name, timeout_s in timeouts:
            if not 0 < timeout_s <= MAX_TIMEOUT_S:
                raise UserError(f"{name} is {timeout_s:g} s: it must be above 0 and at most {MAX_TIMEOUT_S:.0f}")


@dataclass(frozen=True, kw_only=True)
class InputLimits:
    """What one request may hold. `max_separators` counts commas and opening brackets, `max_names` colons, both wherever
    they stand in the body. `max_truncated_characters` is for texts of which only the last tokens are kept."""

    max_body_bytes: int
    max_separators: int
    max_names: int
    max_model_len: int
    max_prompt_tokens: int
    max_prompt_characters: int
    max_truncated_characters: int
    max_prompts: int
    vocab_size: int

    def check_fields(self, body: dict[str, Any]) -> None:
        """`ApiError` 400 for a field of a decoded body whose lists or objects are too long; looks at no item of a list
        that is too long. Whether the fields are right is not judged here."""
        for name, value in body.items():
            if isinstance(value, list):
                self._check_list(name, value, truncated=body.get("truncate_prompt_tokens") is not None)
            self._check_objects(name, value)

    def _check_list(self, name: str, value: list[Any], *, truncated: bool) -> None:
        if name == "prompt" and value and not isinstance(value[0], int):
            if len(value) > self.max_prompts:
                raise bad_request(
                    f"prompt holds {len(value)} prompts: at most {self.max_prompts} a request", param="prompt"
                )
        elif name in ("prompt", "tokens") and not truncated:
            self.check_num_tokens(len(value), name)
        elif name in ("messages", "input") and len(value) > _MAX_MESSAGES:
            raise bad_request(f"{name} has {len(value)} messages: at most {_MAX_MESSAGES} a request", param=name)
        elif name in ("stop", "stop_sequences") and len(value) > _MAX_STOP_STRINGS:
            raise bad_request(f"{name} has {len(value)} texts: at most {_MAX_STOP_STRINGS}", param=name)

    def _check_objects(self, name: str, value: object) -> None:
        """Every object below `value`. Lists of texts or numbers are not walked through."""
        most = _MAX_FREE_OBJECTS if name in _FREE else _MAX_OBJECTS
        remaining = [value]
        num_objects = 0
        while remaining:
            item = remaining.pop()
            if isinstance(item, dict):
                num_objects += 1
                if len(item) > _MAX_OBJECT_NAMES:
                    raise bad_request(
                        f"{name} holds an object of {len(item)} names: at most {_MAX_OBJECT_NAMES}", param=name
                    )
                remaining.extend(item.values())
            elif isinstance(item, list) and item and isinstance(item[0], (dict, list)):
                remaining.extend(item)
            if num_objects > most:
                raise bad_request(f"{name} holds more than {most} objects: send fewer", param=name)

    def too_long(self, message: str, param: str) -> ApiError:
        """The refusal of what does not fit. Clients that shorten a conversation by themselves look for these words, or
        for the code."""
        words = f"{message} (this model's maximum context length is {self.max_model_len} tokens)"
        return bad_request(words, param=param, code="context_length_exceeded")

    def check_num_tokens(self, num_tokens: int, param: str) -> None:
        """`ApiError` 400 when `num_tokens` do not fit."""
        if num_tokens > self.max_prompt_tokens:
            message = f"{param} has {num_tokens} tokens, the limit is {self.max_prompt_tokens}: shorten it"
            raise self.too_long(message, param)

    def check_token_ids(self, token_ids: list[int], param: str) -> None:
        """`ApiError` 400 when an id is outside the model's vocabulary."""
        largest = max(token_ids, default=0)
        if largest >= self.vocab_size:
            raise bad_request(
                f"{param}: token id {largest} is out of vocabulary: ids must be below {self.vocab_size}", param=param
            )

    def check_text(self, text: str, param: str, *, truncated: bool) -> None:
        """`ApiError` 400 when a text cannot fit, or is too long to keep only the last of its tokens."""
        if truncated and len(text) > self.max_truncated_characters:
            raise self.too_long(
                f"{param} has {len(text)} characters: at most {self.max_truncated_characters} are tokenized to keep the"
                " last tokens of them; send only the end of the text",
                param,
            )
        if not truncated and len(text) > self.max_prompt_characters:
            raise self.too_long(
                f"{param} has {len(text)} characters, the limit is {self.max_prompt_characters}"
                f" ({self.max_prompt_tokens} tokens of the longest there are): shorten it",
                param,
            )


def input_limits(
    settings: ServerSettings, max_model_len: int, vocab_size: int, tokenizer: TextTokenizer
) -> InputLimits:
    """The limits that follow from the operator's settings, the context and the vocabulary."""
    max_tokens = min(max_model_len, settings.max_prompt_tokens or max_model_len)
    # Special tokens that the tokenizer adds are few, and take no character.
    max_characters = max_tokens * tokenizer.max_token_characters
    derived_bytes = min(_MAX_BODY_BYTES, _MIN_BODY_BYTES + _BODY_BYTES_PER_TOKEN * max_model_len)
    return InputLimits(
        max_body_bytes=settings.max_body_bytes or derived_bytes,
        max_separators=_NUM_SEPARATORS + max_model_len,
        max_names=_NUM_NAMES + max_model_len,
        max_model_len=max_model_len,
        max_prompt_tokens=max_tokens,
        max_prompt_characters=max_characters,
        max_truncated_characters=max(max_characters, _TRUNCATED_CHARACTERS),
        max_prompts=settings.max_prompts_per_request,
        vocab_size=vocab_size,
    )


class BodyMemory:
    """How many bytes of bodies all requests together may hold, from their arrival until they are decoded.

    A body's first part is free, so that large bodies that do not end keep no small ones out: the limit on connections
    bounds how many small ones there are."""

    def __init__(self, max_body_bytes: int, trimmer: MemoryTrimmer) -> None:
        self._trimmer = trimmer
        self._limit_bytes = max(_MIN_BODY_MEMORY_BYTES, _NUM_LARGEST_BODIES * max_body_bytes)
        self._num_bytes = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[bytes], None]]:
        """Yields what to call with every piece of one body; `ApiError` 429 where it does not fit."""
        num_free, num_held = _FREE_BODY_BYTES, 0

        def take(piece: bytes) -> None:
            nonlocal num_free, num_held
            num_counted = max(0, len(piece) - num_free)
            num_free -= len(piece) - num_counted
            if num_counted and self._num_bytes + num_counted > self._limit_bytes:
                raise too_busy("the large bodies of other requests take all memory for bodies: try again later", 1.0)
            self._num_bytes += num_counted
            num_held += num_counted

        try:
            yield take
        finally:
            self._num_bytes -= num_held
            if num_held:
                self._trimmer.note_large_input()
