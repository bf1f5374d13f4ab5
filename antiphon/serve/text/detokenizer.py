"""Token ids in, text out, one token at a time, with no character ever broken.

A token may hold half a UTF-8 character; such bytes wait until the rest arrives. Bytes that can never become a
character turn into U+FFFD as soon as that is certain, exactly as decoding the whole sequence at once would do.
"""

import codecs

from antiphon.serve.text.token_bytes import TokenBytes

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """The text of one sequence. Special tokens add nothing."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._utf8 = _Utf8Decoder(errors="replace")

    def feed(self, token_id: int) -> str:
        """The characters this token completes, possibly none."""
        return self._utf8.decode(self._token_bytes.in_text(token_id))

    def flush(self) -> str:
        """What is left of an unfinished character, as U+FFFD. Call it once, at the end."""
        return self._utf8.decode(b"", final=True)
