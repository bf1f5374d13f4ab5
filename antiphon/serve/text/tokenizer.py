"""A model's tokenizer: texts to ids, ids to the text that a client gets, at once or one token at a time.

Encoding and decoding at once go straight to the Rust tokenizer. Chat templates are rendered in another process
(`text_service`). One token at a time, text is what the tokenizer's own decoder makes of all tokens at once: a generated
text is the concatenation of its tokens' bytes. Knowing the bytes of every token makes streaming exact and cheap: no
window of earlier tokens has to be decoded again for every new one, and logprobs can report `bytes`.

Two families of tokenizers spell bytes in their vocabulary, and every MoE model we know uses one of them:

1. byte-level BPE (GPT-2, Qwen, DeepSeek, Llama 3): one printable character per byte, by the table below. Bytes that are
   no character become U+FFFD, as UTF-8 says.
2. sentencepiece (Mixtral, Llama 2): `▁` is a space, `<0x0A>` is a byte, everything else is plain text. Its decoder
   looks at a run of bytes as a whole: if one of them is wrong, each byte of the run becomes U+FFFD. So the characters
   of a run are held back until it ends, up to `_MAX_HELD_BYTES`. Many drop a space in front of the whole text.

An answer is the text that prompt and answer have together, without the prompt's: the space is dropped only where the
prompt has no text, and a character that the prompt began is completed.

Rejected: decoding a sliding window and taking the difference. It decodes every token twice, holds back text that
really contains U+FFFD, and cannot tell the bytes of half a character.
"""

import codecs
import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import tokenizers

from antiphon.base.errors import CheckpointError, UserError

ChatMessage = dict[str, Any]
_REPLACEMENT = "\ufffd"
_SENTENCEPIECE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LONGEST_CHARACTER_BYTES = 4
_MAX_HELD_BYTES = 64
_NUM_COMPARED = 512  # tokens whose text is compared with the library's, at the start
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


def byte_level_alphabet() -> dict[str, int]:
    """The character byte-level BPE writes for each byte: printable Latin-1 stands for itself, the rest from U+0100
    up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + position): byte for position, byte in enumerate(unprintable)}


def _steps_of(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The decoder's steps in order, however deep its sequences are."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps_of(part)]
    return [decoder]


class TokenBytes:
    """Looks up and remembers the bytes of each token id of one tokenizer.

    `has_runs`: some tokens are bytes that are a text only with those beside them; `in_run`: those that were looked up.
    `dropped_spaces`: how many spaces in front of a whole text its decoder drops. `drops_of_first`: it drops the marks
    of words in the first token."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """`CheckpointError` when the tokenizer spells its vocabulary in a way we cannot read."""
        state = backend.decoder.__getstate__() if backend.decoder is not None else b"null"
        self._backend = backend
        self._alphabet: dict[str, int] | None = None
        self._replaced: list[tuple[str, str]] = []
        self._word_mark: str | None = None
        self.drops_of_first = self.has_runs = False
        self.dropped_spaces = 0
        steps = _steps_of(json.loads(state))
        types = [str(step["type"]) for step in steps]
        if not {"ByteLevel", "ByteFallback", "Metaspace"} & set(types) or not self._take_steps(steps):
            raise CheckpointError(
                f"the tokenizer's decoder is {', '.join(types) or 'missing'}: Antiphon reads byte-level BPE and"
                " sentencepiece tokenizers (decoder ByteLevel, ByteFallback or Metaspace)"
            )
        self._added = {
            token_id: (str(added.content), bool(added.special))
            for token_id, added in backend.get_added_tokens_decoder().items()
        }
        self._known: dict[int, bytes] = {}
        self.in_run: set[int] = set()
        self._compare()

    def _take_steps(self, steps: list[dict[str, Any]]) -> bool:
        """Whether every step is one that is known, in a place where it means what it means here."""
        fused = False
        for position, step in enumerate(steps):
            kind = step["type"]
            if kind == "ByteLevel":
                self._alphabet = byte_level_alphabet()
                return all(other["type"] == "Fuse" for number, other in enumerate(steps) if number != position)
            if kind == "Replace":
                pattern = step["pattern"].get("String")
                if not pattern or (fused and len(pattern) != 1):
                    return False
                self._replaced.append((pattern, step["content"]))
            elif kind == "Metaspace" and not fused and self._word_mark is None:
                self._word_mark = step["replacement"]
                self.drops_of_first = step.get("prepend_scheme") != "never"
            elif kind == "ByteFallback" and not fused:
                self.has_runs = True
            elif kind == "Strip" and fused and step["content"] == " " and not step["stop"]:
                self.dropped_spaces += step["start"]
            elif kind == "Fuse":
                fused = True
            else:
                return False
        return True

    def of(self, token_id: int) -> bytes:
        """The token's bytes; a special token's are its name; an id the tokenizer does not have has none."""
        if (known := self._known.get(token_id)) is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def in_text(self, token_id: int) -> bytes:
        """As `of`, but special tokens leave no trace: what the token adds to the text a user sees."""
        added = self._added.get(token_id)
        return b"" if added is not None and added[1] else self.of(token_id)

    def at_start(self, token_id: int) -> bytes:
        """As `of`, for the first token of a text."""
        if self.drops_of_first and self._word_mark is not None:
            token = self._backend.id_to_token(token_id) or ""
            return self._spelled(token.replace(self._word_mark, "")).encode()
        return self.of(token_id)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The special tokens, which leave no trace in a text, by what they are called."""
        return {text: token_id for token_id, (text, is_special) in self._added.items() if is_special and text}

    @cached_property
    def added_ids(self) -> dict[str, int]:
        """The tokens that were added to the vocabulary, special or not, by what they are called."""
        return {text: token_id for token_id, (text, _) in self._added.items() if text}

    def _look_up(self, token_id: int) -> bytes:
        token: str = self._backend.id_to_token(token_id) or ""
        if self._alphabet is not None:
            spelled_bytes = [self._alphabet.get(character) for character in token]
            whole = [byte for byte in spelled_bytes if byte is not None]
            return bytes(whole) if len(whole) == len(token) else token.encode()
        byte = _SENTENCEPIECE_BYTE.fullmatch(token) if self.has_runs else None
        if byte is not None:
            self.in_run.add(token_id)
            return bytes([int(byte.group(1), 16)])
        return self._spelled(token).encode()

    def _spelled(self, token: str) -> str:
        for pattern, content in self._replaced:
            token = token.replace(pattern, content)
        return token if self._word_mark is None else token.replace(self._word_mark, " ")

    def _compare(self) -> None:
        """`CheckpointError` if the library decodes any of many tokens otherwise, first or behind another."""
        num_tokens = self._backend.get_vocab_size(with_added_tokens=True)
        some = {*range(0, num_tokens, max(num_tokens // _NUM_COMPARED, 1)), *list(self._added)[:_NUM_COMPARED]}
        before = min(some, default=0)
        for token_id in sorted(some):
            for ids in ([token_id], [before, token_id]):
                ours = IncrementalDetokenizer(self, skip_special_tokens=False).whole(ids)
                theirs = self._backend.decode(ids, skip_special_tokens=False)
                if ours != theirs:
                    raise CheckpointError(
                        f"the tokenizer's token {token_id} reads {theirs!r} in the tokenizers library, and {ours!r} "
                        "here: convert the tokenizer to byte-level BPE"
                    )


class IncrementalDetokenizer:
    """Token ids in, text out, one token at a time, with no character ever broken.

    A token may hold half a UTF-8 character; such bytes wait until the rest arrives. Special tokens add nothing, unless
    `skip_special_tokens` is false or it is among `shown_ids`."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        *,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._token_bytes = token_bytes
        self._bytes_of = token_bytes.in_text if skip_special_tokens else token_bytes.of
        self._shown_ids = shown_ids
        self._num_sent = 0
        self._num_spaces = token_bytes.dropped_spaces  # that may still be dropped
        self._is_first = token_bytes.drops_of_first
        self._num_unwanted = 0  # U+FFFD for what the prompt ended in
        self._forget_run()

    @property
    def num_characters(self) -> int:
        """How many characters of the text are complete, those included that wait for the end of a run of bytes."""
        held = "" if self._broken else self._held
        dropped = min(len(held) - len(held.lstrip(" ")), self._num_spaces)
        return self._num_sent + len(held) - dropped

    def feed(self, token_id: int) -> str:
        """The characters this token completes, possibly none."""
        is_shown = token_id in self._shown_ids
        token_bytes = self._token_bytes.of(token_id) if is_shown else self._bytes_of(token_id)
        if not token_bytes:
            return ""
        if token_id in self._token_bytes.in_run:
            self._is_first = False
            return self._send(self._take_run(token_bytes))
        if not self._token_bytes.has_runs:
            return self._send(self._utf8.decode(self._at_start(token_id, token_bytes)))
        return self._send(self._end_run() + self._at_start(token_id, token_bytes).decode())

    def flush(self) -> str:
        """What is left of an unfinished character, as U+FFFD. Call it once, at the end."""
        return self._send(self._end_run() if self._token_bytes.has_runs else self._utf8.decode(b"", final=True))

    def whole(self, token_ids: Sequence[int]) -> str:
        """The text of all tokens. Not after `feed`."""
        return "".join([*map(self.feed, token_ids), self.flush()])

    def follow(self, prompt_ids: Sequence[int], *, echoed: bool) -> str:
        """Continue the text of `prompt_ids`. Before the first `feed`.

        Returns how the prompt's text ends if that is no whole character. `echoed`: the caller leaves this out, and it
        comes with the answer, completed or as it was."""
        if any(self._bytes_of(token_id) for token_id in prompt_ids):  # ends at the first that has text
            self._num_spaces, self._is_first = 0, False
        last, has_runs = self._last_bytes(prompt_ids), self._token_bytes.has_runs
        decoder = self._half if has_runs else self._utf8
        try:
            characters = decoder.decode(last)
        except UnicodeDecodeError:
            self._broken = True
            return ""
        half = decoder.getstate()[0]
        if not half:
            return ""
        if has_runs:
            self._held, self._num_held_bytes = (characters, len(last)) if echoed else ("", len(half))
        self._num_unwanted = 0 if echoed else max(self._num_held_bytes, 1)
        return _REPLACEMENT * (len(last) if has_runs else 1)

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        """The end of a prompt that its continuation may change: the run of bytes that it ends with, or a few bytes."""
        last: list[bytes] = []
        num_bytes = 0
        for token_id in reversed(token_ids):
            if not (token_bytes := self._bytes_of(token_id)):
                continue
            if self._token_bytes.has_runs and token_id not in self._token_bytes.in_run:
                break
            last.append(token_bytes)
            num_bytes += len(token_bytes)
            if not self._token_bytes.has_runs and num_bytes >= _LONGEST_CHARACTER_BYTES:
                break
        return b"".join(reversed(last))

    def _at_start(self, token_id: int, token_bytes: bytes) -> bytes:
        if not self._is_first:
            return token_bytes
        self._is_first = False
        return self._token_bytes.at_start(token_id)

    def _forget_run(self) -> None:
        self._utf8 = _Utf8Decoder(errors="replace")
        self._half = _Utf8Decoder(errors="strict")
        self._held, self._num_held_bytes, self._broken = "", 0, False

    def _take_run(self, token_bytes: bytes) -> str:
        """More of a run of bytes; what can be said of it already."""
        if self._broken:
            return _REPLACEMENT * len(token_bytes)
        self._num_held_bytes += len(token_bytes)
        try:
            self._held += self._half.decode(token_bytes)
        except UnicodeDecodeError:
            self._broken = True
            return _REPLACEMENT * self._num_held_bytes
        if self._num_held_bytes < _MAX_HELD_BYTES:
            return ""
        text, self._held = self._held, ""
        self._num_held_bytes = len(self._half.getstate()[0])
        return text

    def _end_run(self) -> str:
        is_half = not self._broken and self._half.getstate()[0]
        text = _REPLACEMENT * self._num_held_bytes if is_half else "" if self._broken else self._held
        self._forget_run()
        return text

    def _send(self, text: str) -> str:
        """`text` without what is not wanted at the start."""
        while text and self._num_unwanted:
            if not text.startswith(_REPLACEMENT):
                self._num_unwanted = 0
                break
            text, self._num_unwanted = text[1:], self._num_unwanted - 1
        if text and self._num_spaces:
            kept = text.lstrip(" ")
            num_dropped = min(len(text) - len(kept), self._num_spaces)
            self._num_spaces = 0 if kept or num_dropped < len(text) else self._num_spaces - num_dropped
            text = text[num_dropped:]
        self._num_sent += len(text)
        return text


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
