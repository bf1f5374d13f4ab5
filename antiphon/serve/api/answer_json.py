"""Answers as JSON, encoded while they are made.

With log-probabilities an answer is a hundred times as large as its text. Encoded at its end it would hold the event
loop for seconds, and until then its objects would take six times the memory of its bytes. So what a token adds becomes
bytes when the token comes: appended to a whole answer, or sent with the next event. What is left for the end is to put
the pieces in order.

The JSON of a token's text is remembered, so that a token with twenty alternatives costs some ten microseconds.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Protocol

import msgspec

from antiphon.serve.api.choice import ChoiceDelta, TokenEntry
from antiphon.serve.text.answer_fields import CallPiece
from antiphon.serve.text.tokenizer import TextTokenizer
from antiphon.specs.sampling import TokenLogprob

encode_json = msgspec.json.Encoder().encode
_IMPOSSIBLE = "-9999.0"  # JSON has no infinity; OpenAI writes this for tokens that cannot come
_NUM_REMEMBERED = 16 * 1024


class Encoded:
    """A JSON value in pieces, which are not copied until they are sent."""

    def __init__(self, parts: list[bytes | bytearray]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def joined(self) -> bytes:
        return b"".join(self.parts)


def encoded_object(fields: dict[str, Any]) -> Encoded:
    """The JSON object of `fields`, of which some values may be `Encoded`."""
    parts: list[bytes | bytearray] = [b"{"]
    for name, value in fields.items():
        parts.append(encode_json(name) + b":")
        parts += value.parts if isinstance(value, Encoded) else [encode_json(value)]
        parts.append(b",")
    parts[-1] = b"}"
    return Encoded(parts)


def encoded_list(items: Iterable[Encoded]) -> Encoded:
    """The JSON array of `items`."""
    parts: list[bytes | bytearray] = []
    for item in items:
        parts += [b",", *item.parts]
    return Encoded([b"[", *parts[1:], b"]"])


def named_event(type: str, **fields: Any) -> bytes:
    """A server-sent event of this type, which its JSON names as well."""
    return b"event: %s\ndata: %s\n\n" % (type.encode(), encode_json({"type": type, **fields}))


class GrowingText:
    """A JSON string that is added to."""

    def __init__(self) -> None:
        self._escaped = bytearray(b'"')

    def __len__(self) -> int:
        return len(self._escaped)

    @property
    def is_empty(self) -> bool:
        return len(self._escaped) == 1

    def add(self, text: str) -> None:
        self._escaped += encode_json(text)[1:-1]

    def encoded(self, before: str = "") -> Encoded:
        """Behind the text `before`."""
        begin = [encode_json(before)[:-1], self._escaped[1:]] if before else [self._escaped]
        return Encoded([*begin, b'"'])


class TokenJson:
    """The JSON of tokens' texts; `as_ids`: each is written ``token_id:N`` in place of its text."""

    def __init__(self, tokenizer: TextTokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self.text = lru_cache(_NUM_REMEMBERED)(self._text)
        self.chat_halves = lru_cache(_NUM_REMEMBERED)(self._chat_halves)

    def _text(self, token_id: int) -> str:
        """The token in quotes."""
        text = f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_string(token_id)
        return encode_json(text).decode()

    def _chat_halves(self, token_id: int) -> tuple[str, str]:
        """What a chat's entry of the token has before and after its log-probability, the closing brace left out."""
        token_bytes = encode_json(list(self._tokenizer.token_bytes.of(token_id))).decode()
        return f'{{"token":{self.text(token_id)},"logprob":', f',"bytes":{token_bytes}'


class LogprobsJson(Protocol):
    """Log-probabilities as one endpoint spells them."""

    def add(self, entry: TokenEntry) -> None: ...

    def take(self) -> Encoded:
        """Those added since the last time."""

    def __len__(self) -> int:
        """Bytes that wait."""


def _number(logprob: float) -> str:
    return repr(logprob) if math.isfinite(logprob) else _IMPOSSIBLE


class CompletionLogprobsJson:
    """Parallel lists. The sampled token is always among `top_logprobs`, as in OpenAI's API, so that a client can see
    whether it was the most likely one. It comes first, as vLLM has it; tokens that read the same keep the likelier
    value."""

    _COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

    def __init__(self, tokens: TokenJson) -> None:
        self._text = tokens.text
        self._columns = [bytearray() for _ in self._COLUMNS]

    def __len__(self) -> int:
        return sum(map(len, self._columns))

    def add(self, entry: TokenEntry) -> None:
        tokens, logprobs, tops, offsets = self._columns
        tokens += f"{self._text(entry.token_id)},".encode()
        logprobs += b"null," if entry.logprob is None else f"{_number(entry.logprob.logprob)},".encode()
        tops += b"null," if entry.logprob is None else self._top(entry.logprob)
        offsets += b"%d," % entry.text_offset

    def _top(self, entry: TokenLogprob) -> bytes:
        text = self._text
        top: dict[str, float] = {}
        for token_id, logprob in ((entry.token_id, entry.logprob), *entry.top):
            name = text(token_id)
            if name not in top or logprob > top[name]:
                top[name] = logprob
        return f"{{{','.join([f'{name}:{_number(value)}' for name, value in top.items()])}}},".encode()

    def take(self) -> Encoded:
        columns, self._columns = self._columns, [bytearray() for _ in self._COLUMNS]
        lists = [Encoded([b"[", column, b"]"]) for column in columns]
        for column in columns:
            del column[-1:]
        return encoded_object(dict(zip(self._COLUMNS, lists, strict=True)))


class ChatLogprobsJson:
    """One list: each token with its bytes and its alternatives, best first."""

    def __init__(self, tokens: TokenJson) -> None:
        self._halves = tokens.chat_halves
        self._content = bytearray()

    def __len__(self) -> int:
        return len(self._content)

    def add(self, entry: TokenEntry) -> None:
        assert entry.logprob is not None, "chat has no echo"
        tops = [f"{self._token(token_id, logprob)}}}" for token_id, logprob in entry.logprob.top]
        own = self._token(entry.token_id, entry.logprob.logprob)
        self._content += f'{own},"top_logprobs":[{",".join(tops)}]}},'.encode()

    def _token(self, token_id: int, logprob: float) -> str:
        before, after = self._halves(token_id)
        return f"{before}{_number(logprob)}{after}"

    def take(self) -> Encoded:
        content, self._content = self._content, bytearray()
        del content[-1:]
        return encoded_object({"content": Encoded([b"[", content, b"]"]), "refusal": None})


class PromptLogprobsJson:
    """A list with an object for each token of a prompt: it and its alternatives by their ids, as vLLM writes them."""

    def __init__(self, tokens: TokenJson) -> None:
        self._text = tokens.text
        self._list = bytearray()

    def add(self, logprob: TokenLogprob | None) -> None:
        if logprob is None:
            self._list += b"null,"
            return
        ranked = {token_id: (value, rank) for rank, (token_id, value) in enumerate(logprob.top, 1)}
        ranked[logprob.token_id] = (logprob.logprob, logprob.rank)
        entries = (
            f'"{token_id}":{{"logprob":{_number(value)},"rank":{rank},"decoded_token":{self._text(token_id)}}}'
            for token_id, (value, rank) in ranked.items()
        )
        self._list += f"{{{','.join(entries)}}},".encode()

    def encoded(self) -> Encoded:
        return Encoded([b"[", self._list[:-1], b"]"])


class AnswerInTheMaking:
    """A whole answer, of which the pieces come one after the other. `logprobs` None: they were not asked for."""

    def __init__(self, index: int, logprobs: LogprobsJson | None) -> None:
        self.index = index
        self.text = GrowingText()
        self.reasoning = GrowingText()
        self.logprobs = logprobs
        self.calls: list[tuple[CallPiece, GrowingText]] = []  # its first piece, and all its arguments
        self.num_bytes = 0  # what it holds, about
        self.prompt_token_ids: list[int] | None = None
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def add(self, delta: ChoiceDelta) -> None:
        num_before = len(self.text) + len(self.reasoning) + len(self.logprobs or b"")
        self.text.add(delta.text)
        self.reasoning.add(delta.reasoning)
        if self.logprobs is not None:
            for entry in delta.entries:
                self.logprobs.add(entry)
        for piece in delta.calls:
            if piece.id is not None:
                self.calls.append((piece, GrowingText()))
            self.calls[-1][1].add(piece.arguments)
            self.num_bytes += len(piece.arguments)
        self.prompt_token_ids = delta.prompt_token_ids or self.prompt_token_ids
        self.token_ids += delta.token_ids
        self.num_bytes += len(self.text) + len(self.reasoning) + len(self.logprobs or b"") - num_before
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
