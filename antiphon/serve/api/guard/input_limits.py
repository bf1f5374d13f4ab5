"""How large a request may be, and the checks that cost next to nothing and come before those that do.

What cannot fit the context is refused by its size, before it is decoded, validated or tokenized. So the work for one
request is bounded, whatever its body holds, and other requests go on meanwhile.

1. While the body arrives its bytes are counted, and the characters JSON builds structure with. They count in texts,
   too: the limits are above what texts that fit a context hold, and what passes them decodes in milliseconds.
2. After decoding, the lengths of lists and objects, field by field.
3. Before tokenizing, characters: a text of more than the context's tokens times the longest token cannot fit.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from antiphon.base.system import MemoryTrimmer
from antiphon.serve.api.errors import ApiError, bad_request, too_busy
from antiphon.serve.api.settings import ServerSettings
from antiphon.serve.text.tokenizer import TextTokenizer

_MIN_BODY_BYTES = 1024 * 1024
_MAX_BODY_BYTES = 8 * 1024 * 1024
_MIN_BODY_MEMORY_BYTES = 256 * 1024 * 1024
_NUM_LARGEST_BODIES = 4
_FREE_BODY_BYTES = 64 * 1024
# A token is about one Chinese character or four Latin ones; written as \u4e2d it takes 6 bytes a character.
_BODY_BYTES_PER_TOKEN = 24
_NUM_SEPARATORS = 256 * 1024
_NUM_NAMES = 32 * 1024
# Integers beyond 64 bits are decoded a hundred times slower than others, and no parameter needs one.
_NUM_LONG_NUMBERS = 8 * 1024
_LONG_NUMBER = b"0" * 20
_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_TRUNCATED_CHARACTERS = 1024 * 1024
_MAX_MESSAGES = 2048
_MAX_OBJECTS = 2 * _MAX_MESSAGES
_MAX_FREE_OBJECTS = 16 * 1024  # in what no model validates object by object
_FREE = frozenset({"response_format", "tools", "chat_template_kwargs", "text", "output_config"})
_MAX_OBJECT_NAMES = 8 * 1024


@dataclass(frozen=True, kw_only=True)
class InputLimits:
    """What one request may hold. `max_separators` counts commas and opening brackets, `max_names` colons, both wherever
    they stand in the body. `max_truncated_characters` is for texts of which only the last tokens are kept."""

    max_body_bytes: int
    max_separators: int
    max_names: int
    max_prompt_tokens: int
    max_prompt_characters: int
    max_truncated_characters: int
    max_prompts: int
    max_stop_strings: int
    vocab_size: int
    max_messages: int = _MAX_MESSAGES
    max_objects: int = _MAX_OBJECTS
    max_object_names: int = _MAX_OBJECT_NAMES

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
        elif name in ("messages", "input") and len(value) > self.max_messages:
            raise bad_request(f"{name} has {len(value)} messages: at most {self.max_messages} a request", param=name)
        elif name in ("stop", "stop_sequences") and len(value) > self.max_stop_strings:
            raise bad_request(f"{name} has {len(value)} texts: at most {self.max_stop_strings}", param=name)

    def _check_objects(self, name: str, value: object) -> None:
        """Every object below `value`. Lists of texts or numbers are not walked through."""
        most = max(self.max_objects, _MAX_FREE_OBJECTS) if name in _FREE else self.max_objects
        remaining = [value]
        num_objects = 0
        while remaining:
            item = remaining.pop()
            if isinstance(item, dict):
                num_objects += 1
                if len(item) > self.max_object_names:
                    raise bad_request(
                        f"{name} holds an object of {len(item)} names: at most {self.max_object_names}", param=name
                    )
                remaining.extend(item.values())
            elif isinstance(item, list) and item and isinstance(item[0], (dict, list)):
                remaining.extend(item)
            if num_objects > most:
                raise bad_request(f"{name} holds more than {most} objects: send fewer", param=name)

    def check_num_tokens(self, num_tokens: int, param: str) -> None:
        """`ApiError` 400 when `num_tokens` do not fit."""
        if num_tokens > self.max_prompt_tokens:
            message = f"{param} has {num_tokens} tokens, the limit is {self.max_prompt_tokens}: shorten it"
            raise too_long(message, param)

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
            raise too_long(
                f"{param} has {len(text)} characters: at most {self.max_truncated_characters} are tokenized to keep the"
                " last tokens of them; send only the end of the text",
                param,
            )
        if not truncated and len(text) > self.max_prompt_characters:
            raise too_long(
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
        max_prompt_tokens=max_tokens,
        max_prompt_characters=max_characters,
        max_truncated_characters=max(max_characters, _TRUNCATED_CHARACTERS),
        max_prompts=settings.max_prompts_per_request,
        max_stop_strings=settings.max_stop_strings,
        vocab_size=vocab_size,
    )


@dataclass
class StructureCount:
    """Counts a body's structure as it arrives."""

    limits: InputLimits
    num_bytes: int = 0
    num_separators: int = 0
    num_names: int = 0
    num_long_numbers: int = 0
    tail: bytes = b""  # of the piece before: a number may be cut

    def add(self, chunk: bytes) -> None:
        """Take note of the next bytes. `ApiError` 413 or 400 once there is too much of something."""
        limits = self.limits
        self.num_bytes += len(chunk)
        if self.num_bytes > limits.max_body_bytes:
            raise body_too_large(limits.max_body_bytes)
        self.num_separators += chunk.count(b",") + chunk.count(b"[") + chunk.count(b"{")
        self.num_names += chunk.count(b":")
        zeros = self.tail + chunk.translate(_DIGITS_AS_ZEROS)
        self.num_long_numbers += zeros.count(_LONG_NUMBER)
        self.tail = zeros[1 - len(_LONG_NUMBER) :]
        if self.num_separators > limits.max_separators:
            raise _too_much_structure("commas and opening brackets", limits.max_separators)
        if self.num_names > limits.max_names:
            raise _too_much_structure("colons", limits.max_names)
        if self.num_long_numbers > _NUM_LONG_NUMBERS:
            raise _too_much_structure(f"times {len(_LONG_NUMBER)} digits in a row", _NUM_LONG_NUMBERS)


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


def too_long(message: str, param: str) -> ApiError:
    return bad_request(message, param=param, code="context_length_exceeded")


def body_too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the request body is larger than {max_bytes} bytes: send a shorter one",
        code="request_too_large",
        headers={"connection": "close"},
    )


def _too_much_structure(what: str, limit: int) -> ApiError:
    return ApiError(
        400,
        f"the request body holds more than {limit} {what}: send fewer or shorter lists, or several requests",
        code="request_too_large",
        headers={"connection": "close"},
    )
