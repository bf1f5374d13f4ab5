"""Token ids in, text out, one token at a time, with no character ever broken.

A token may hold half a UTF-8 character; such bytes wait until the rest arrives. Bytes that can never become a
character turn into U+FFFD as soon as that is certain, exactly as decoding the whole sequence at once would do.
"""

import codecs

from antiphon.serve.text.token_bytes import TokenBytes

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """The text of one sequence. Special tokens add nothing, unless `skip_special_tokens` is false or it is `shown`."""

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
