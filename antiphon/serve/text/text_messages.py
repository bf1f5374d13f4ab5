"""What the server and a process that works on texts say to each other, as MessagePack of declared types.

The server sends `Configure` and, after `Ready`, one job at a time; each is answered before the next is sent.
"""

from typing import Any

import msgspec

from antiphon.serve.text.tokenizer import ChatMessage


class Configure(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message. `tokenizer_json` is the tokenizer's own form; `memory_bytes` what may be added to the memory
    the process has once the tokenizer is loaded; `niceness` how far the process steps back behind others."""

    tokenizer_json: str
    chat_template: str | dict[str, str] | None
    special_tokens: dict[str, str]
    memory_bytes: int
    niceness: int


class CompileTemplate(msgspec.Struct, frozen=True, tag=True):
    """Answered by an empty `Text`, or `Refused` with what is wrong with the template."""


class RenderChat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answered by `Text`."""

    messages: list[ChatMessage]
    add_generation_prompt: bool
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any] | None
    max_characters: int


class Encode(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answered by `TokenIds`, or by `Refused` as soon as a text is certain to have more than `max_tokens` tokens."""

    texts: list[str]
    add_special_tokens: bool
    max_tokens: int | None


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Text`. Ids are 32-bit words in this machine's byte order."""

    token_ids: bytes
    skip_special_tokens: bool


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The tokenizer is loaded; jobs may come."""


class Text(msgspec.Struct, frozen=True, tag=True):
    text: str


class TokenIds(msgspec.Struct, frozen=True, tag=True):
    """For each text its ids, 32-bit words in this machine's byte order."""

    of_texts: list[bytes]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """What the client is told. `too_long`: its input does not fit the context."""

    reason: str
    too_long: bool = False


Job = CompileTemplate | RenderChat | Encode | Decode
Answer = Text | TokenIds | Refused
