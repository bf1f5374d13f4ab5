"""Token logprobs in the two shapes OpenAI's API has: parallel lists for completions, objects for chat."""

import math
from typing import Any

from antiphon.serve.api.choice import TokenEntry
from antiphon.serve.text.tokenizer import TextTokenizer

# JSON has no infinity; OpenAI writes this for tokens that cannot come.
_IMPOSSIBLE = -9999.0


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE


def completion_logprobs(entries: list[TokenEntry], tokenizer: TextTokenizer) -> dict[str, Any]:
    """The completions shape. The sampled token is always among `top_logprobs`, as in OpenAI's API, so that a client can
    see whether it was the most likely one; tokens that read the same keep the likelier value."""
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprob is None:
            tops.append(None)
            continue
        pairs = [*entry.logprob.top, (entry.logprob.token_id, entry.logprob.logprob)]
        top: dict[str, float] = {}
        for token_id, logprob in pairs:
            top.setdefault(tokenizer.token_string(token_id), _finite(logprob))
        tops.append(top)
    return {
        "tokens": [tokenizer.token_string(entry.token_id) for entry in entries],
        "token_logprobs": [None if entry.logprob is None else _finite(entry.logprob.logprob) for entry in entries],
        "top_logprobs": tops,
        "text_offset": [entry.text_offset for entry in entries],
    }


def chat_logprobs(entries: list[TokenEntry], tokenizer: TextTokenizer) -> dict[str, Any]:
    """The chat shape: each token with its bytes and its alternatives, best first."""
    content = []
    for entry in entries:
        assert entry.logprob is not None, "chat has no echo"
        described = _chat_token(entry.token_id, entry.logprob.logprob, tokenizer)
        described["top_logprobs"] = [_chat_token(*alternative, tokenizer) for alternative in entry.logprob.top]
        content.append(described)
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, tokenizer: TextTokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_string(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes.of(token_id)),
    }
