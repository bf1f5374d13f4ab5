"""What bytes one token stands for.

A generated text is the concatenation of its tokens' bytes, read as UTF-8. Knowing the bytes of every token makes
streaming exact and cheap: no window of earlier tokens has to be decoded again for every new one, and logprobs can
report `bytes`.

Two families of tokenizers spell bytes in their vocabulary, and every MoE model we know uses one of them:

1. byte-level BPE (GPT-2, Qwen, DeepSeek, Llama 3): one printable character per byte, by the table below;
2. sentencepiece BPE (Mixtral, Llama 2): `▁` is a space, `<0x0A>` is a byte, everything else is plain text.

Rejected: decoding a sliding window and taking the difference. It decodes every token twice, holds back text that
really contains U+FFFD, and cannot tell the bytes of half a character.
"""

import codecs
import json
import re

import tokenizers

from antiphon.base.errors import CheckpointError

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
