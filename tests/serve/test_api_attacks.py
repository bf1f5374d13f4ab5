"""Requests made to hold up a server: each is refused or served within the limits, and another client does not notice.

Figures are printed (`pytest -s`). The bound is generous because test machines are slow and shared.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.attack_harness import Target, attack, target

LONGEST_WAIT_S = 1.5
MAX_GROWTH_BYTES = 64 * 2**20
NUM_BYTES = 7_900_000


def listed(name: str, item: str, num_items: int) -> bytes:
    return f'{{"{name}":[{",".join([item] * num_items)}]}}'.encode()


def text_prompt(piece: str) -> bytes:
    num_bytes = len(piece.encode())
    return json.dumps({"prompt": piece * (NUM_BYTES // num_bytes), "max_tokens": 1}, ensure_ascii=False).encode()


def short_prompt(piece: str, num_characters: int) -> bytes:
    return json.dumps({"prompt": piece * (num_characters // len(piece)), "max_tokens": 1}).encode()


def named(prefix: str, num_names: int) -> bytes:
    return ",".join(f'"{prefix}{number}":1' for number in range(num_names)).encode()


MESSAGE = '{"role":"user","content":""}'
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Path, body (made when it is needed), number of clients at once.
ATTACKS: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "7.9 MB of text": (COMPLETIONS, lambda: text_prompt("hello world. "), 1),
    "7.9 MB of text, four times": (COMPLETIONS, lambda: text_prompt("hello world. "), 4),
    "280,000 empty messages": (CHAT, lambda: listed("messages", MESSAGE, 280_000), 1),
    "tokenize 7.9 MB of Chinese": ("/tokenize", lambda: text_prompt("中文").replace(b', "max_tokens": 1', b""), 1),
    "detokenize a million ids": ("/detokenize", lambda: listed("tokens", "65", 1_000_000), 1),
    "a million wrong messages": (CHAT, lambda: listed("messages", "{}", 1_000_000), 1),
    "1.9 million prompts of one token": (COMPLETIONS, lambda: listed("prompt", "[1]", 1_900_000), 1),
    "500,000 unknown names": (COMPLETIONS, lambda: b"{" + named("k", 500_000) + b"}", 1),
    # What passes the first count.
    "40,000 unknown names": (COMPLETIONS, lambda: b'{"prompt":"x",' + named("k", 40_000) + b"}", 4),
    "2,000 wrong messages": (CHAT, lambda: listed("messages", '{"role":1,"a":2,"b":3,"c":4}', 2_000), 4),
    "a message of 40,000 names": (
        CHAT,
        lambda: b'{"messages":[{"role":"user","content":"x",' + named("k", 40_000) + b"}]}",
        4,
    ),
    "a message of 60,000 parts": (
        CHAT,
        lambda: b'{"messages":[{"role":"user","content":[' + b",".join([b"{}"] * 60_000) + b"]}]}",
        4,
    ),
    "100,000 prompts": (COMPLETIONS, lambda: listed("prompt", '"x"', 100_000), 4),
    "100,000 prompts of ids": (COMPLETIONS, lambda: listed("prompt", "[1]", 100_000), 4),
    "40,000 biases": (COMPLETIONS, lambda: b'{"prompt":"x","logit_bias":{' + named("", 40_000) + b"}}", 4),
    "100,000 stop texts": (COMPLETIONS, lambda: listed("stop", '"x"', 100_000), 4),
    "100,000 wrong stop ids": (COMPLETIONS, lambda: listed("stop_token_ids", '"x"', 100_000), 4),
    "250,000 wrong ids": ("/detokenize", lambda: listed("tokens", '"x"', 250_000), 4),
    "a name of 7.9 MB": (COMPLETIONS, lambda: b'{"' + b"k" * NUM_BYTES + b'":1}', 4),
    "a temperature of 7.9 MB": (COMPLETIONS, lambda: b'{"prompt":"x","temperature":"' + b"9" * NUM_BYTES + b'"}', 4),
    "7.9 MB of escapes": (COMPLETIONS, lambda: b'{"prompt":"' + rb"\u0041" * (NUM_BYTES // 6) + b'"}', 4),
    "1,800 integers of 4,300 digits": (COMPLETIONS, lambda: listed("prompt", "1" * 4300, 1800), 4),
    "250,000 integers beyond 64 bits": (COMPLETIONS, lambda: listed("prompt", "1" * 21, 250_000), 4),
    "2,000 messages of two parts": (
        CHAT,
        lambda: listed("messages", '{"role":"user","content":[{"type":"text","text":"x"}]}', 2_000),
        4,
    ),
    "7.9 MB of brackets": (COMPLETIONS, lambda: b'{"prompt":' + b"[" * NUM_BYTES, 1),
    "128 texts of 60 KB": (
        COMPLETIONS,
        lambda: json.dumps({"prompt": ["hello world. " * 4600] * 128, "max_tokens": 1}).encode(),
        1,
    ),
    "32 texts of 60 KB": (
        COMPLETIONS,
        lambda: json.dumps({"prompt": ["hello world. " * 4600] * 32, "max_tokens": 1}).encode(),
        1,
    ),
    "7.9 MB of text, truncated": (
        COMPLETIONS,
        lambda: text_prompt("hello world. ").replace(b'"max_tokens": 1', b'"max_tokens":1,"truncate_prompt_tokens":5'),
        2,
    ),
    # Legal, and much at once: each process beside the server has its line full.
    "40 texts of 30 KB at once": (COMPLETIONS, lambda: short_prompt("hello world. ", 30_000), 40),
    "40 texts of 3 KB at once": (COMPLETIONS, lambda: short_prompt("hello world. ", 3_000), 40),
    "30 chats of 30 KB at once": (
        CHAT,
        lambda: (
            listed("messages", json.dumps({"role": "user", "content": "hello world. " * 23}), 100)[:-1]
            + b',"max_tokens":1}'
        ),
        30,
    ),
    "20 times 8,000 ids to text at once": ("/detokenize", lambda: listed("tokens", "65", 8_000), 20),
    "20 times 6,000 tokens as texts at once": (
        "/tokenize",
        lambda: json.dumps({"prompt": "hello world. " * 1_500, "return_token_strs": True}).encode(),
        20,
    ),
    "a message of 7.9 MB": (
        CHAT,
        lambda: listed("messages", json.dumps({"role": "user", "content": "a" * NUM_BYTES}), 1),
        2,
    ),
}


LISTED = set(list(ATTACKS)[:8])
# In a long context the sizes of these are those of requests that may be served.
WORK = (
    "7.9 MB of text, four times",
    "tokenize 7.9 MB of Chinese",
    "7.9 MB of text, truncated",
    "128 texts of 60 KB",
    "32 texts of 60 KB",
    "40 texts of 30 KB at once",
    "40 texts of 3 KB at once",
    "30 chats of 30 KB at once",
    "20 times 8,000 ids to text at once",
    "20 times 6,000 tokens as texts at once",
    "a message of 7.9 MB",
)
SLOW = ("128 texts of 60 KB",)  # seconds of work for the tokenizer
# Of each kind of work one is in the quick lane: others are long texts, a message, and many requests at once.
SLOW_WORK = (
    "128 texts of 60 KB",
    "32 texts of 60 KB",
    "a message of 7.9 MB",
    "40 texts of 30 KB at once",
    "30 chats of 30 KB at once",
)


def cases(names: Iterable[str], slow: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]


@pytest.fixture(scope="module")
def short_context() -> Iterator[Target]:
    with target(8192) as running:
        yield running


@pytest.fixture(scope="module")
def long_context() -> Iterator[Target]:
    with target(2**17) as running:
        yield running


@pytest.mark.parametrize("name", cases((name for name in ATTACKS if "at once" not in name), SLOW))
def test_another_client_does_not_notice(short_context: Target, name: str) -> None:
    is_unnoticed(short_context, name, {400, 413})


@pytest.mark.parametrize("name", cases(WORK, SLOW_WORK))
def test_work_for_one_client_is_not_noticed_by_another(long_context: Target, name: str) -> None:
    is_unnoticed(long_context, name, {200, 400, 429})


def is_unnoticed(server: Target, name: str, statuses: set[int]) -> None:
    path, body, num_clients = ATTACKS[name]
    outcome = attack(server, path, body(), num_clients)
    print(f"\n{name}: {outcome}")
    assert outcome.longest_s < LONGEST_WAIT_S
    assert outcome.statuses <= statuses
    for status, answer in outcome.answers:
        assert status == 200 or len(json.dumps(answer)) < 2000, "what is told back is short"


def test_memory_comes_back(long_context: Target) -> None:
    attack(long_context, COMPLETIONS, b'{"prompt":"x"}')
    before = long_context.rss_bytes
    most = before
    for name in LISTED - set(WORK):
        path, body, num_clients = ATTACKS[name]
        attack(long_context, path, body(), num_clients, least_s=0)
        most = max(most, long_context.rss_bytes)
    deadline = time.monotonic() + 60
    while long_context.rss_bytes > before + MAX_GROWTH_BYTES and time.monotonic() < deadline:
        time.sleep(0.5)
    after = long_context.rss_bytes
    print(f"\n{before / 2**20:.0f} MiB before, {most / 2**20:.0f} at most, {after / 2**20:.0f} after")
    assert after <= before + MAX_GROWTH_BYTES


def test_a_template_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% if messages[0].content == 'go' %}{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}"
        "{% endfor %}{% endif %}{{ messages[0].content }}"
    )
    with target(8192, template) as server:
        outcome = attack(server, CHAT, b'{"messages":[{"role":"user","content":"go"}]}')
        print(f"\na template without an end: {outcome}")
        assert outcome.longest_s < LONGEST_WAIT_S
        (answer,) = outcome.answers
        assert answer[0] == 400
        assert "chat template took longer than 2 s" in answer[1]["error"]["message"]
        assert server.post(CHAT, b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1}')[0] == 200
