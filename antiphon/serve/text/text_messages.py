"""What the server and a process that works on texts say to each other, as MessagePack of declared types.

The server sends `TextConfigure` and, after `TextReady`, one job at a time; each is answered before the next is sent.
"""

from typing import Any

import msgspec
import tokenizers

from antiphon.serve.text.tokenizer import ChatMessage, TextTokenizer

MAX_TEMPLATE_CHARACTERS = 1024 * 1024  # published ones have up to some ten thousand


class TokenizerSource(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """All that a checkpoint says about texts. `tokenizer_json` is the tokenizer's own form."""

    tokenizer_json: str
    chat_template: str | dict[str, str] | None
    special_tokens: dict[str, str]

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> "TokenizerSource":
        return cls(
            tokenizer_json=tokenizer.backend.to_str(),
            chat_template=tokenizer.template_sources,
            special_tokens=tokenizer.special_tokens,
        )

    def tokenizer(self) -> TextTokenizer:
        """The tokenizer this describes. Holds the interpreter's lock for up to seconds."""
        backend = tokenizers.Tokenizer.from_str(self.tokenizer_json)
        return TextTokenizer(backend, self.chat_template, self.special_tokens)


class TextConfigure(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message. `source` None: a `ReadTokenizer` comes before other jobs. `memory_bytes` is what may be added
    to the memory the process has once it is ready; `niceness` how far it steps back behind others."""

    source: TokenizerSource | None
    memory_bytes: int
    niceness: int


class ReadTokenizer(msgspec.Struct, frozen=True, tag=True):
    """Read the checkpoint in `folder`, for jobs that come later. Answered by `TokenizerSource`, or `TextRefused`."""

    folder: str


class TryGrammars(msgspec.Struct, frozen=True, tag=True):
    """Make what grammars need of the tokenizer, for a model of `vocab_size` ids. Answered by an empty `TextResult`,
    or `TextRefused`."""

    vocab_size: int


class CompileTemplate(msgspec.Struct, frozen=True, tag=True):
    """Answered by `TemplateNames`, or `TextRefused` with what is wrong with the template."""


class RenderChat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A conversation as one text. `template_kwargs` are further names for the template and replace special tokens.
    Answered by `TextResult`, or `TextRefused` when the template refuses it or beyond `max_characters`."""

    messages: list[ChatMessage]
    add_generation_prompt: bool
    max_characters: int
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None


class Encode(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answered by `TokenIds`, or by `TextRefused` as soon as a text certainly has more than `max_tokens` tokens."""

    texts: list[str]
    add_special_tokens: bool
    max_tokens: int | None


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Answered by `TextResult`. Ids are 32-bit words in this machine's byte order."""

    token_ids: bytes
    skip_special_tokens: bool


class TextReady(msgspec.Struct, frozen=True, tag=True):
    """The tokenizer is loaded, if there is one; jobs may come."""


class TextResult(msgspec.Struct, frozen=True, tag=True):
    text: str


class TokenIds(msgspec.Struct, frozen=True, tag=True):
    """The ids of each text, 32-bit words in this machine's byte order."""

    of_texts: list[bytes]


class TemplateNames(msgspec.Struct, frozen=True, tag=True):
    """The variables that a chat template reads without setting them."""

    names: list[str]


class TextRefused(msgspec.Struct, frozen=True, tag=True):
    """Why the client gets no answer. `too_long`: its input does not fit the context."""

    reason: str
    too_long: bool = False


Job = ReadTokenizer | TryGrammars | CompileTemplate | RenderChat | Encode | Decode
Answer = TokenizerSource | TemplateNames | TextResult | TokenIds | TextRefused
