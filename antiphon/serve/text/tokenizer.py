"""A model's tokenizer: texts to ids, ids to the text that a client gets.

Encoding and decoding at once go straight to the Rust tokenizer, decoding token by token through `detokenizer`. Chat
templates are rendered in another process (`text_service`).
"""

import re
from functools import cached_property
from typing import Any

import tokenizers

from antiphon.base.errors import UserError
from antiphon.serve.text.detokenizer import IncrementalDetokenizer, TokenBytes

ChatMessage = dict[str, Any]


class TextTokenizer:
    """Text to ids and back for one model. Safe to call from several threads.

    `template_sources`: the chat template, several by name, or None. `special_tokens`: the names templates know them
    by (``bos_token``) and their texts. `grammar_problem`: why answers cannot follow grammars, if that was found out."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        template_sources: str | dict[str, str] | None = None,
        special_tokens: dict[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.backend.no_truncation()
        self.backend.no_padding()
        self.template_sources = template_sources
        self.special_tokens = special_tokens or {}
        self.token_bytes = TokenBytes(self.backend)
        self.vocab_size: int = self.backend.get_vocab_size(with_added_tokens=True)
        self.grammar_problem: str | None = None
        self._keys_read: dict[str, bool] = {}
        self._ids_of_marks: dict[frozenset[str], frozenset[int]] = {}  # a few: of the model's own dialect

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`; `add_special_tokens` puts in front what the model was trained with (often a BOS token).

        Holds the interpreter's lock all the while, some microseconds a character."""
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except UnicodeEncodeError as error:
            raise UserError("the text holds a lone surrogate, which is not a character: remove it") from error
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of `token_ids`; bytes that are no character become U+FFFD, ids without a token become nothing."""
        text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_string(self, token_id: int) -> str:
        """One token for people to read; half a character is written ``bytes:\\xe2\\x82`` as OpenAI does."""
        raw = self.token_bytes.of(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def vocabulary_string(self, token_id: int) -> str:
        """One token as the vocabulary spells it; "" for an id without a token."""
        return self.backend.id_to_token(token_id) or ""

    def detokenizer(
        self, *, skip_special_tokens: bool = True, marks: frozenset[str] = frozenset()
    ) -> IncrementalDetokenizer:
        """A fresh incremental detokenizer for one sequence; special tokens in `marks` are not skipped."""
        if marks not in self._ids_of_marks:
            specials = self.token_bytes.special_ids.items()
            found = (token_id for text, token_id in specials if any(text in mark for mark in marks))
            self._ids_of_marks[marks] = frozenset(found)
        shown_ids = self._ids_of_marks[marks]
        return IncrementalDetokenizer(self.token_bytes, skip_special_tokens=skip_special_tokens, shown_ids=shown_ids)

    @cached_property
    def max_token_characters(self) -> int:
        """How many characters of a text one token can stand for at most.

        A normaliser may shorten the text first: canonical composition makes one character of up to four."""
        # A byte-level vocabulary spells one character a byte, so that it can only say too much.
        longest = max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)
        return longest if self.backend.normalizer is None else 4 * longest

    @cached_property
    def mean_token_characters(self) -> float:
        """Average length of the vocabulary's tokens, as they are spelled there."""
        lengths = list(map(len, self.backend.get_vocab(with_added_tokens=True)))
        return sum(lengths) / max(1, len(lengths))

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_template)

    @property
    def chat_template(self) -> str:
        """The template's text; of several named ones, all of them; "" for none."""
        sources = self.template_sources or ""
        return sources if isinstance(sources, str) else "\n".join(sources.values())

    def template_reads(self, key: str) -> bool:
        """Whether the chat template mentions `message.key`; a key it does not read would be dropped in silence."""
        if key not in self._keys_read:
            mention = rf"""\.{key}\b|['"]{key}['"]"""
            self._keys_read[key] = re.search(mention, self.chat_template) is not None
        return self._keys_read[key]
