"""How much one request may hold, and the bodies of all requests together.

What cannot fit the context is refused by its size, before it is decoded, validated or tokenized. So the work for one
request is bounded, whatever its body holds, and other requests go on meanwhile. These checks cost next to nothing and
come before what does:

1. While the body arrives its bytes are counted, and the characters JSON builds structure with (`guard/body`).
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
_TRUNCATED_CHARACTERS = 1024 * 1024
_MAX_MESSAGES = 2048
_MAX_OBJECTS = 2 * _MAX_MESSAGES
_MAX_FREE_OBJECTS = 16 * 1024  # in what no model validates object by object
_FREE = frozenset({"response_format", "tools", "chat_template_kwargs", "text", "output_config"})
_MAX_OBJECT_NAMES = 8 * 1024
_MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024  # of one of them
MAX_CALLS = 128  # of tools, in one turn of an assistant


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
