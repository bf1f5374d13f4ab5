"""A model's tokenizer: texts to ids, ids to the text that a client gets, up to its stop strings; its chat template.

Encoding goes straight to the Rust tokenizer, decoding through `TokenBytes`. Chat templates are rendered in another
process (`text_service`). Nothing here imports `transformers`, which takes seconds and 200 MB: `tokenizer_files` reads a
checkpoint with it, and that process does without.

A generated text is the concatenation of its tokens' bytes. Knowing the bytes of every token makes streaming exact and
cheap: no window of earlier tokens has to be decoded again for every new one, and logprobs can report `bytes`.

Two families of tokenizers spell bytes in their vocabulary, and every MoE model we know uses one of them:

1. byte-level BPE (GPT-2, Qwen, DeepSeek, Llama 3): one printable character per byte, by the table below;
2. sentencepiece BPE (Mixtral, Llama 2): `▁` is a space, `<0x0A>` is a byte, everything else is plain text.

Rejected: decoding a sliding window and taking the difference. It decodes every token twice, holds back text that
really contains U+FFFD, and cannot tell the bytes of half a character.

Stop strings are found in text that arrives in pieces. Every stop string has a matcher state: the length of its longest
prefix that ends the text so far, moved on by one character at a time with the failure function of Knuth, Morris and
Pratt (1977). The longest state of all is how many characters must wait. So the result does not depend on where the
pieces were cut, and the cost per character does not depend on how long the stop strings are.

When several match, the one that is complete first wins; of those complete at the same character, the longest.
"""

import codecs
import json
import re
from functools import cached_property, lru_cache
from typing import Any

import tokenizers

from antiphon.base.errors import CheckpointError, UserError

ChatMessage = dict[str, Any]
_SENTENCEPIECE_SPACE = "\u2581"
_SENTENCEPIECE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


def byte_level_alphabet() -> dict[str, int]:
    """The character byte-level BPE writes for each byte: printable Latin-1 stands for itself, the rest from U+0100
    up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    unprintable = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + position): byte for position, byte in enumerate(unprintable)})
    return alphabet


def _decoder_types(decoder: object) -> set[str]:
    """All `type` names in a decoder's JSON form, however deep its sequences are."""
    if isinstance(decoder, dict):
        nested = [_decoder_types(value) for value in decoder.values()]
        return {str(decoder["type"])}.union(*nested) if "type" in decoder else set().union(*nested)
    if isinstance(decoder, list):
        return set().union(*(_decoder_types(part) for part in decoder))
    return set()


class TokenBytes:
    """Looks up and remembers the bytes of each token id of one tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """`CheckpointError` when the tokenizer spells its vocabulary in a way we cannot read."""
        state = backend.decoder.__getstate__() if backend.decoder is not None else b"null"
        types = _decoder_types(json.loads(state))
        if not types & {"ByteLevel", "ByteFallback", "Metaspace"}:
            raise CheckpointError(
                f"the tokenizer's decoder is {sorted(types) or 'missing'}: Antiphon reads byte-level BPE and"
                " sentencepiece tokenizers (decoder ByteLevel, ByteFallback or Metaspace)"
            )
        self._backend = backend
        self._alphabet = byte_level_alphabet() if "ByteLevel" in types else None
        self._added = {
            token_id: (added.content.encode(), bool(added.special))
            for token_id, added in backend.get_added_tokens_decoder().items()
        }
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """The token's bytes; a special token's are its name; an id the tokenizer does not have has none."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def in_text(self, token_id: int) -> bytes:
        """As `of`, but special tokens leave no trace: what the token adds to the text a user sees."""
        added = self._added.get(token_id)
        return b"" if added is not None and added[1] else self.of(token_id)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The special tokens, which leave no trace in a text, by what they are called."""
        specials = ((added.decode(), token_id) for token_id, (added, is_special) in self._added.items() if is_special)
        return {text: token_id for text, token_id in specials if text}

    def added_id(self, text: str) -> int | None:
        """The id of the token that was added to the vocabulary as `text`, special or not; None when there is none."""
        wanted = text.encode()
        return next((token_id for token_id, (added, _) in self._added.items() if added == wanted), None)

    def _look_up(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added[0]
        spelled: str | None = self._backend.id_to_token(token_id)
        if spelled is None:
            return b""
        if self._alphabet is not None:
            spelled_bytes = [self._alphabet.get(character) for character in spelled]
            return bytes(byte for byte in spelled_bytes if byte is not None)
        byte = _SENTENCEPIECE_BYTE.fullmatch(spelled)
        if byte is not None:
            return bytes([int(byte.group(1), 16)])
        return spelled.replace(_SENTENCEPIECE_SPACE, " ").encode()


class IncrementalDetokenizer:
    """Token ids in, text out, one token at a time, with no character ever broken.

    A token may hold half a UTF-8 character; such bytes wait until the rest arrives. Bytes that can never become a
    character turn into U+FFFD as soon as that is certain, exactly as decoding the whole sequence at once would do.
    Special tokens add nothing, unless `skip_special_tokens` is false or it is `shown`."""

    def __init__(self, token_bytes: TokenBytes, *, skip_special_tokens: bool = True, shown: str = "") -> None:
        self._token_bytes = token_bytes
        self._bytes_of = token_bytes.in_text if skip_special_tokens else token_bytes.of
        self._shown_id = token_bytes.added_id(shown)
        self._utf8 = _Utf8Decoder(errors="replace")

    def feed(self, token_id: int) -> str:
        """The characters this token completes, possibly none."""
        if token_id == self._shown_id:
            return self._utf8.decode(self._token_bytes.of(token_id))
        return self._utf8.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        """What is left of an unfinished character, as U+FFFD. Call it once, at the end."""
        return self._utf8.decode(b"", final=True)


@lru_cache(64)  # an answer of n has the stop strings of the others
def _failure_function(pattern: str) -> list[int]:
    """`failure[i]`: length of the longest proper prefix of `pattern[:i + 1]` that is also its suffix."""
    failure = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[position] != pattern[length]:
            length = failure[length - 1]
        length += pattern[position] == pattern[length]
        failure[position] = length
    return failure


class StopStringMatcher:
    """One sequence's stop strings. `matched` is the one that was found, then the matcher is spent."""

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        assert all(stop_strings), "empty stop strings are refused by the request's validation"
        self.matched: str | None = None
        self._patterns = stop_strings
        self._failures = [_failure_function(pattern) for pattern in stop_strings]
        self._states = [0] * len(stop_strings)
        self._held = ""

    def feed(self, piece: str) -> str:
        """Take new text, return what is certain not to belong to a stop string (all of it before a match)."""
        assert self.matched is None, "the sequence has ended"
        if not self._patterns:
            return piece
        text = self._held + piece
        for position in range(len(self._held), len(text)):
            self._advance(text[position])
            if self.matched is not None:
                self._held = ""
                return text[: position + 1 - len(self.matched)]
        num_held = max(self._states)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """The text that was held back for a match that did not come. Call it once, at the end."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> None:
        for number, (pattern, failure) in enumerate(zip(self._patterns, self._failures, strict=True)):
            length = self._states[number]
            while length and pattern[length] != character:
                length = failure[length - 1]
            length += pattern[length] == character
            self._states[number] = length
            if length == len(pattern) and (self.matched is None or length > len(self.matched)):
                self.matched = pattern


class TextTokenizer:
    """Text to ids and back for one model. Safe to call from several threads.

    `template_sources`: the chat template, several by name, or None. `special_tokens`: the names templates know them
    by (``bos_token``) and their texts."""

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
        self._keys_read: dict[str, bool] = {}

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
        bytes_of = self.token_bytes.in_text if skip_special_tokens else self.token_bytes.of
        return b"".join(map(bytes_of, token_ids)).decode("utf-8", errors="replace")

    def token_string(self, token_id: int) -> str:
        """One token for people to read; half a character is written ``bytes:\\xe2\\x82`` as OpenAI does."""
        raw = self.token_bytes.of(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def detokenizer(self, *, skip_special_tokens: bool = True, shown: str = "") -> IncrementalDetokenizer:
        """A fresh incremental detokenizer for one sequence; the special token `shown` is not skipped."""
        return IncrementalDetokenizer(self.token_bytes, skip_special_tokens=skip_special_tokens, shown=shown)

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
