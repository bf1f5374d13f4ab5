"""Answers as JSON, encoded while they are made.

With log-probabilities an answer is a hundred times as large as its text. Encoded at its end it would hold the event
loop for seconds, and until then its objects would take six times the memory of its bytes. So what a token adds becomes
bytes when the token comes: appended to a whole answer, or sent with the next event. What is left for the end is to put
the pieces in order.

The JSON of a token's text is remembered, so that a token with twenty alternatives costs some ten microseconds.
"""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

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
        """The string, behind the text `before`."""
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

    def _chat_token(self, token_id: int, logprob: float) -> str:
        before, after = self.chat_halves(token_id)
        return f"{before}{_number(logprob)}{after}"

    def chat_entry(self, entry: TokenEntry) -> str:
        """A token with its bytes and its alternatives, best first."""
        assert entry.logprob is not None, "chat has no echo"
        tops = ",".join([f"{self._chat_token(token_id, logprob)}}}" for token_id, logprob in entry.logprob.top])
        return f'{self._chat_token(entry.token_id, entry.logprob.logprob)},"top_logprobs":[{tops}]}}'


def _number(logprob: float) -> str:
    return repr(logprob) if math.isfinite(logprob) else _IMPOSSIBLE


class LogprobsJson:
    """Log-probabilities as one endpoint spells them: an object of lists, to each of which `spelled` adds an item for
    each token. `more`: what the object has beside them."""

    def __init__(
        self, lists: tuple[str, ...], spelled: Callable[[TokenEntry], Iterable[str]], more: dict[str, Any] | None = None
    ) -> None:
        self._names = lists
        self._spelled = spelled
        self._more = more or {}
        self._lists = [bytearray() for _ in lists]

    def __len__(self) -> int:
        """Bytes that wait."""
        return sum(map(len, self._lists))

    def add(self, entry: TokenEntry) -> None:
        for items, item in zip(self._lists, self._spelled(entry), strict=True):
            items += f"{item},".encode()

    def take(self) -> Encoded:
        """Those added since the last time."""
        lists, self._lists = self._lists, [bytearray() for _ in self._names]
        for items in lists:
            del items[-1:]
        encoded = (Encoded([b"[", items, b"]"]) for items in lists)
        return encoded_object({**dict(zip(self._names, encoded, strict=True)), **self._more})


def completion_logprobs(tokens: TokenJson) -> LogprobsJson:
    """Parallel lists. The sampled token is always among `top_logprobs`, as in OpenAI's API, so that a client can see
    whether it was the most likely one. It comes first, as vLLM has it; tokens that read the same keep the likelier
    value."""

    def spelled(entry: TokenEntry) -> Iterable[str]:
        own, text = entry.logprob, tokens.text(entry.token_id)
        if own is None:
            return text, "null", "null", str(entry.text_offset)
        top: dict[str, float] = {}
        for token_id, logprob in ((own.token_id, own.logprob), *own.top):
            name = tokens.text(token_id)
            if name not in top or logprob > top[name]:
                top[name] = logprob
        tops = ",".join([f"{name}:{_number(value)}" for name, value in top.items()])
        return text, _number(own.logprob), f"{{{tops}}}", str(entry.text_offset)

    return LogprobsJson(("tokens", "token_logprobs", "top_logprobs", "text_offset"), spelled)


def chat_logprobs(tokens: TokenJson) -> LogprobsJson:
    """One list."""
    return LogprobsJson(("content",), lambda entry: (tokens.chat_entry(entry),), {"refusal": None})


def prompt_logprob(tokens: TokenJson, logprob: TokenLogprob | None) -> str:
    """What is said of one token of a prompt: it and its alternatives by their ids, as vLLM writes them."""
    if logprob is None:
        return "null"
    ranked = {token_id: (value, rank) for rank, (token_id, value) in enumerate(logprob.top, 1)}
    ranked[logprob.token_id] = (logprob.logprob, logprob.rank)
    entries = (
        f'"{token_id}":{{"logprob":{_number(value)},"rank":{rank},"decoded_token":{tokens.text(token_id)}}}'
        for token_id, (value, rank) in ranked.items()
    )
    return f"{{{','.join(entries)}}}"


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
