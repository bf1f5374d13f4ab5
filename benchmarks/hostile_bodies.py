"""Hostile bodies for the server's POST endpoints, from seeds: what `fuzz_bodies` sends.

A body begins as a valid request of one endpoint and is changed at up to three places: a wrong type, a giant or strange
text, a long list, many keys, deep nesting, a strange number, a hostile JSON schema, or damage to the bytes. Most things
are small, some have thousands of items, a few have millions of bytes.
"""

import copy
import json
import math
import random
import string
from collections.abc import Callable
from typing import Any

_GIANT_SHARE = 0.02  # of all changes; the others stay below a few thousand items
_ALPHABETS = (
    string.ascii_lowercase, " ", "a", "\u4e2d\u6587\u5b57\u7b26",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u0301e\u0308",
    "\x00\x01\x7f\ufffd\u2028", "0123456789", '"\\{}[],:', "<|im_start|>", "\n\t\r ",
)  # fmt: skip
_NUMBERS: tuple[Any, ...] = (0, -1, 1, 2, 7, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e-300, 1e300, 100, 101, True)
_OPTIONS = {"temperature": (0, 1), "top_p": (0.5, 1), "top_k": (0, 5), "seed": (1, 2), "n": (1, 2)}
_PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")

Body = dict[str, Any]


def random_body(generator: random.Random) -> tuple[str, bytes]:
    """(path, body) of one hostile request."""
    path = generator.choices(_PATHS, (5, 5, 2, 2))[0]
    value = _valid(path, generator)
    for _ in range(generator.choices((0, 1, 2, 3), (1, 4, 3, 2))[0]):
        generator.choice(_CHANGES)(value, generator)
    content = json.dumps(value, ensure_ascii=generator.random() < 0.5).encode("utf-8", errors="surrogatepass")
    return path, _damaged(content, generator) if generator.random() < 0.1 else content


def _valid(path: str, generator: random.Random) -> Body:
    if path == "/detokenize":
        return {"tokens": [generator.randrange(400) for _ in range(generator.randint(1, 20))]}
    messages = [{"role": "user", "content": _text(generator, 20)} for _ in range(generator.randint(1, 4))]
    if path == "/tokenize":
        return {"messages": messages} if generator.random() < 0.5 else {"prompt": _text(generator, 40)}
    body: Body = {"max_tokens": generator.randint(1, 4), "stream": generator.random() < 0.3}
    body |= {"messages": messages} if path.endswith("chat/completions") else {"prompt": _text(generator, 40)}
    for name, choices in _OPTIONS.items():
        if generator.random() < 0.3:
            body[name] = generator.choice(choices)
    return body


def _text(generator: random.Random, length: int) -> str:
    return "".join(generator.choices(string.ascii_lowercase + " ", k=length))


def _count(generator: random.Random, giant: int) -> int:
    """How many of something: mostly a few, sometimes thousands, rarely a giant number."""
    if generator.random() < _GIANT_SHARE:
        return generator.randint(giant // 4, giant)
    return int(10 ** generator.uniform(0, 3.3))


def _strange_text(generator: random.Random) -> str:
    alphabet = generator.choice(_ALPHABETS)
    return "".join(generator.choices(alphabet, k=16)) * (1 + _count(generator, 6_000_000) // 16)


def _nested(generator: random.Random) -> Any:
    value: Any = 1
    wrap: Callable[[Any], Any] = generator.choice((lambda v: [v], lambda v: {"a": v}, lambda v: {"items": [v]}))
    for _ in range(min(400, _count(generator, 400))):  # deeper ones are made of bytes, see `_damaged`
        value = wrap(value)
    return value


_STRANGE: tuple[Callable[[random.Random], Any], ...] = (
    _strange_text,
    _nested,
    lambda generator: generator.choice(_NUMBERS),
    lambda generator: [_text(generator, 3)] * _count(generator, 400_000),
    lambda generator: [generator.randrange(600)] * _count(generator, 1_000_000),
    lambda generator: [[generator.randrange(400)]] * _count(generator, 500_000),
    lambda generator: {f"k{number}": number for number in range(_count(generator, 300_000))},
    lambda generator: [{"role": generator.choice(("user", "tool", "god")), "content": ""}] * _count(generator, 250_000),
    lambda generator: generator.choice((None, True, False, "", [], {}, [[]], [None], {"": None}, math.nan, math.inf)),
)


def _strange_value(generator: random.Random) -> Any:
    return generator.choice(_STRANGE)(generator)


def _change_value(body: Body, generator: random.Random) -> None:
    if body:
        body[generator.choice(list(body))] = _strange_value(generator)


def _change_inside(body: Body, generator: random.Random) -> None:
    """Go down a random way and change what is there."""
    place: Any = body
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(min(len(place), 5)))
        if not keys:
            return
        key = generator.choice(keys)
        if not isinstance(place[key], (dict, list)) or generator.random() < 0.3:
            place[key] = _strange_value(generator)
            return
        place[key] = copy.copy(place[key])  # others in the list may be the same object
        place = place[key]


_PARAMETERS = (
    "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop",
    "stop_token_ids", "stream", "stream_options", "logprobs", "top_logprobs", "logit_bias", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos", "response_format", "echo", "user",
    "truncate_prompt_tokens", "tools", "tool_choice", "chat_template_kwargs", "best_of", "suffix", "metadata",
    "add_generation_prompt", "add_special_tokens", "return_token_strs", "functions", "skip_special_tokens",
)  # fmt: skip


def _add_parameter(body: Body, generator: random.Random) -> None:
    body[generator.choice(_PARAMETERS)] = _strange_value(generator)


def _add_unknown(body: Body, generator: random.Random) -> None:
    body.update({f"x{number}": None for number in range(_count(generator, 300_000))})


def _add_messages(body: Body, generator: random.Random) -> None:
    text = _strange_text(generator)
    content: Any = generator.choice((text, [{"type": "text", "text": text}], ""))
    num_messages = min(_count(generator, 250_000), 1 + 3_000_000 // (1 + len(content and text)))
    body["messages"] = [{"role": "user", "content": content}] * num_messages


def _add_schema(body: Body, generator: random.Random) -> None:
    count = _count(generator, 6_000)
    pattern = generator.choice(("(a?){500}a{500}", "(x+x+)+y", "[a-z]{1,9999}", "(((", "^$"))
    schema: Any = generator.choice(
        (
            {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(count)}},
            {"enum": [f"v{number}" for number in range(count)]},
            {"type": "string", "pattern": pattern},
            {"type": "array", "items": {"$ref": "#"}, "minItems": generator.choice((0, 3, 10**6))},
            {"$ref": generator.choice(("#", "#/$defs/a", "http://x/y", "#/properties/missing"))},
            {"allOf": [{"type": "string"}, {"type": "integer"}]},
            {"type": "object", "patternProperties": {".*": {"type": "number", "multipleOf": 0.1}}},
            {
                "type": "string",
                "minLength": generator.choice((1, 10**4, 10**9)),
                "maxLength": generator.choice((5, 10**9)),
            },
            _nested(generator),
            _strange_value(generator),
        )
    )
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "fuzz", "schema": schema}}


def _add_bias(body: Body, generator: random.Random) -> None:
    body["logit_bias"] = {
        str(number): generator.choice((-100, 0, 1, 100)) for number in range(_count(generator, 200_000))
    }


_CHANGES = (
    _change_value, _change_inside, _add_parameter, _add_parameter, _add_unknown, _add_messages, _add_schema, _add_bias
)  # fmt: skip


def _with_noise(content: bytes, generator: random.Random) -> bytes:
    place = generator.randrange(len(content) + 1)
    return content[:place] + generator.randbytes(generator.randint(1, 8)) + content[place:]


_DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _with_noise,
    lambda content, generator: content[: generator.randrange(len(content) + 1)],
    lambda content, generator: b"[" * _count(generator, 4_000_000),
    lambda content, generator: b'{"a":' * _count(generator, 1_000_000),
    lambda content, generator: b"\xef\xbb\xbf" + content,
    lambda content, generator: content.replace(b":", b":\\ud800", 1),
    lambda content, generator: content.replace(b"1", b"1" * (1 + _count(generator, 1_000_000)), 1),
)


def _damaged(content: bytes, generator: random.Random) -> bytes:
    return generator.choice(_DAMAGES)(content, generator)


# ---- mixes: legal requests, sent at once, each of which is much work ------------------------------------------------

Request = tuple[str, Body]  # path and body
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"


def _with_schema(schema: Any, max_tokens: int = 4) -> Request:
    wanted = {"type": "json_schema", "json_schema": {"name": "mix", "schema": schema}}
    return _COMPLETIONS, {"prompt": "bada", "max_tokens": max_tokens, "response_format": wanted}


def _bad_schema(number: int, generator: random.Random) -> Any:
    """One that takes long to compile, or cannot be."""
    words = [_text(generator, 12) for _ in range(2000)]
    kinds: tuple[Any, ...] = (
        {"type": "string", "pattern": "(" + "|".join(words) + "){1,200}"},
        {"enum": words},
        {"type": "string", "pattern": f"(a?){{{400 + number}}}a{{{400 + number}}}"},
        {"type": "object", "properties": {word: {"enum": words[:20]} for word in words[:500]}},
    )
    return kinds[number % len(kinds)]


def _many(generator: random.Random, **body: Any) -> Request:
    """256 answers."""
    prompts = [[generator.randrange(5, 300)] * 4 for _ in range(16)]
    return _COMPLETIONS, {"prompt": prompts, "n": 16, "max_tokens": 64, "ignore_eos": True, **body}


def _echo(generator: random.Random, **body: Any) -> Request:
    prompts = [[generator.randrange(5, 300) for _ in range(1000)] for _ in range(64)]
    return _COMPLETIONS, {"prompt": prompts, "echo": True, "logprobs": 20, "max_tokens": 1, **body}


def _chat(generator: random.Random, num_messages: int, **body: Any) -> Request:
    messages = [{"role": "user", "content": _text(generator, 8)} for _ in range(num_messages)]
    return _CHAT, {"messages": messages, "max_tokens": 64, "ignore_eos": True, **body}


_CHAT_LOGPROBS = {"logprobs": True, "top_logprobs": 20}
MIXES: dict[str, Callable[[random.Random], list[Request]]] = {
    "8 new grammars of 80 kB": lambda g: [_with_schema({"const": _text(g, 80_000)}) for _ in range(8)],
    "16 bad schemas and a good one": lambda g: [
        *(_with_schema(_bad_schema(number, g)) for number in range(16)),
        _with_schema({"enum": [_text(g, 8)]}),
    ],
    "echo, 20 logprobs, 64 x 1,000 ids": lambda g: [_echo(g)],
    "the same as a stream": lambda g: [_echo(g, stream=True)],
    "4 x tokenize and detokenize": lambda g: [
        *(("/tokenize", {"prompt": _text(g, 900), "return_token_strs": True}) for _ in range(4)),
        *(("/detokenize", {"tokens": [g.randrange(300) for _ in range(1000)]}) for _ in range(4)),
    ],
    "4 x tokenize too much": lambda g: [("/tokenize", {"prompt": _text(g, 900_000)}) for _ in range(4)],
    "8 chats of 60 turns": lambda g: [_chat(g, 60, max_tokens=1) for _ in range(8)],
    "256 answers, 20 logprobs": lambda g: [_many(g, logprobs=20)],
    "256 streams, 20 logprobs": lambda g: [_many(g, logprobs=20, stream=True)],
    "4 chats of 16 answers, 20 logprobs": lambda g: [_chat(g, 1, n=16, **_CHAT_LOGPROBS) for _ in range(4)],
    "the same as streams": lambda g: [_chat(g, 1, n=16, stream=True, **_CHAT_LOGPROBS) for _ in range(4)],
    "256 answers, 300 biases": lambda g: [_many(g, logit_bias={str(number): 1 for number in range(300)})],
    "256 answers, 16 long stop texts": lambda g: [_many(g, stop=[" " * 1000 + _text(g, 20) for _ in range(16)])],
}
