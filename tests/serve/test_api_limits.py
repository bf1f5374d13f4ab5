"""What one request may hold: the limits themselves, just below and just above, and that they come from the context."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from antiphon.base.errors import shortened
from antiphon.serve.api.input_limits import InputLimits, input_limits
from antiphon.serve.api.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from antiphon.serve.api.server import create_app
from antiphon.serve.api.settings import ServerSettings
from antiphon.serve.text.tokenizer import TextTokenizer
from tests.serve.api_harness import Live, fake_engine, live, small_tokenizer
from tests.serve.test_api_errors import HELLO, error_of

CONTEXT = 256
TOO_LONG = "context_length_exceeded"


def limits_for(max_model_len: int, tokenizer: TextTokenizer | None = None, **settings: Any) -> InputLimits:
    return input_limits(ServerSettings(**settings), max_model_len, 1000, tokenizer or small_tokenizer())


def max_characters() -> int:
    return CONTEXT * small_tokenizer().max_token_characters


@pytest.mark.parametrize(
    ("max_model_len", "expected_bytes"), [(256, 2**20 + 24 * 256), (40960, 2**20 + 24 * 40960), (2**20, 2**23)]
)
def test_the_largest_body_follows_from_the_context(max_model_len: int, expected_bytes: int) -> None:
    assert limits_for(max_model_len).max_body_bytes == expected_bytes
    assert limits_for(max_model_len, max_body_bytes=100).max_body_bytes == 100
    assert limits_for(max_model_len, max_body_bytes=2**30).max_body_bytes == 2**30


def test_the_largest_body_is_413_with_its_size(server: Live) -> None:
    error = error_of(server.complete(prompt="x" * 1_100_000), 413)
    assert str(2**20 + 24 * CONTEXT) in error["message"]


def test_the_longest_token_and_a_normaliser_bound_the_characters() -> None:
    tokenizer = small_tokenizer()
    longest = max(tokenizer.backend.get_vocab(), key=len)
    assert tokenizer.max_token_characters == len(longest)
    normalising = type(tokenizer.backend).from_str(
        json.dumps(json.loads(tokenizer.backend.to_str()) | {"normalizer": {"type": "NFC"}})
    )
    assert TextTokenizer(normalising).max_token_characters == 4 * len(longest)


def test_characters_that_cannot_fit_are_refused_and_one_fewer_are_counted(server: Live) -> None:
    beyond = error_of(server.complete(prompt="x" * (max_characters() + 1)), 400)
    assert (beyond["code"], beyond["param"]) == (TOO_LONG, "prompt")
    assert f"{max_characters() + 1} characters, the limit is {max_characters()}" in beyond["message"]
    within = error_of(server.complete(prompt="x" * max_characters()), 400)
    assert within["code"] == TOO_LONG
    assert "tokens, " in within["message"]
    assert server.complete(prompt="hello " * 20).status_code == 200


@pytest.mark.parametrize("text", ["hello " * 399, "hello " * 401, "xy" * 1100])
def test_long_and_short_texts_count_the_same(server: Live, text: str) -> None:
    """The first is tokenized in the server, the others are not."""
    num_tokens = len(small_tokenizer().encode(text, add_special_tokens=True))
    error = error_of(server.complete(prompt=text), 400)
    assert error["code"] == TOO_LONG
    assert f"prompt has {num_tokens} tokens, the limit is 256" in error["message"]


@pytest.mark.parametrize("num_kept", [1, 100, 200])
@pytest.mark.parametrize("text", ["hello world, " * 100, "hello world, " * 4_000])
def test_truncated_prompts_are_the_exact_end_of_the_whole(server: Live, text: str, num_kept: int) -> None:
    assert server.complete(prompt=text, truncate_prompt_tokens=num_kept).status_code == 200
    (submission,) = server.engine.submissions
    assert submission.prompt_token_ids == small_tokenizer().encode(text, add_special_tokens=True)[-num_kept:]
    answer = server.chat(truncate_prompt_tokens=num_kept, messages=[{"role": "user", "content": text}])
    assert answer.status_code == 200
    rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    expected = small_tokenizer().encode(rendered, add_special_tokens=False)[-num_kept:]
    assert server.engine.submissions[1].prompt_token_ids == expected


def test_texts_to_truncate_have_a_limit_of_their_own() -> None:
    text = "x" * (2**20 + 1)
    with live(fake_engine(), max_body_bytes=2**22) as server:
        error = error_of(server.complete(prompt=text, truncate_prompt_tokens=5), 400)
        assert (error["code"], error["param"]) == (TOO_LONG, "prompt")
        assert "at most 1048576 are tokenized" in error["message"]
        chat = server.chat(messages=[{"role": "user", "content": text}], truncate_prompt_tokens=5)
        error = error_of(chat, 400)
        assert (error["code"], error["param"]) == (TOO_LONG, "messages")
        assert "more than 1048576 characters after the chat template" in error["message"]


def test_many_texts_are_tokenized_in_order(server: Live) -> None:
    texts = [f"number {number} " * 20 for number in range(12)]
    assert server.complete(prompt=texts, max_tokens=1).status_code == 200
    asked = [submission.prompt_token_ids for submission in server.engine.submissions]
    assert asked == [small_tokenizer().encode(text, add_special_tokens=True) for text in texts]
    server.engine.reset()
    assert server.complete(prompt=[[5, 6], [7]], max_tokens=1, echo=True).json()["choices"][1]["index"] == 1


LISTS: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/chat/completions", {"messages": HELLO * 2049}, "messages", "messages has 2049 messages: at most 2048"),
    ("/v1/completions", {"prompt": ["x"] * 129}, "prompt", "129 prompts: at most 128"),
    ("/v1/completions", {"prompt": [[1]] * 129}, "prompt", "129 prompts: at most 128"),
    ("/v1/completions", {"prompt": [7] * 257}, "prompt", "257 tokens, the limit is 256"),
    ("/detokenize", {"tokens": [7] * 257}, "tokens", "257 tokens, the limit is 256"),
    ("/v1/completions", {"prompt": "x", "stop": ["x"] * 17}, "stop", "at most 16"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {str(n): 1 for n in range(2000)}}, "logit_bias", "at most 1024"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 6_000}]},
        "messages",
        "more than 4096 objects",
    ),
    (
        "/v1/completions",
        {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
            "properties": {f"p{n}": {} for n in range(8193)}}}}},
        "response_format",
        "an object of 8193 names: at most 8192",
    ),
    ("/v1/completions", {"prompt": "x"} | {f"k{n}": 1 for n in range(1000)}, "k0", "unknown parameter: k0"),
    ("/v1/completions", {"k" * 5000: 1}, shortened("k" * 5000), "unknown parameter: kkk"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "message"), LISTS)
def test_lists_and_objects_have_limits(server: Live, path: str, body: dict[str, Any], param: str, message: str) -> None:
    error = error_of(server.http.post(path, json=body), 400)
    assert error["param"] == param
    assert message in error["message"]
    assert len(error["message"]) < 500


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt":"' + b"," * 262_401 + b'"}', "more than 262400 commas and opening brackets"),
        (b'{"prompt":"' + b":" * 33_025 + b'"}', "more than 33024 colons"),
        (b'{"prompt":[' + b",".join([b"1" * 100] * 1640) + b"]}", "more than 8192 times 20 digits in a row"),
        (b'{"prompt":[' + b",".join([b"1" * 100] * 1630) + b"]}", "1630 tokens, the limit is 256"),
        (b'{"prompt":"' + b"," * 262_399 + b'"}', "characters, the limit"),
    ],
)
def test_structure_is_counted_wherever_it_stands(server: Live, content: bytes, message: str) -> None:
    response = server.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert message in error_of(response, 400)["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_counting_tokens_takes_a_place_among_the_running_requests(path: str) -> None:
    body = {"/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [65]}}[path]
    engine = fake_engine()
    engine.hold_after_tokens = 1
    with live(engine, max_streams=1) as server, httpx.Client(base_url=server.url) as other:
        with server.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            refused = other.post(path, json=body)
            assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
            assert refused.headers["retry-after"] == "1"
            engine.release()
            assert list(lines)
        assert other.post(path, json=body).status_code == 200
        assert server.server.config.app.state.context.num_active == 0  # type: ignore[union-attr]
        server.server.config.app.state.context.draining = True  # type: ignore[union-attr]
        assert error_of(other.post(path, json=body), 503)["code"] == "shutting_down"


def test_what_does_not_fit_the_context_is_not_counted(server: Live) -> None:
    for text in ("hello " * 300, "hello " * 600):
        error = error_of(server.http.post("/tokenize", json={"prompt": text}), 400)
        assert (error["code"], error["param"]) == (TOO_LONG, "prompt")
    messages = [{"role": "user", "content": "hello " * 600}]
    error = error_of(server.http.post("/tokenize", json={"messages": messages}), 400)
    assert (error["code"], error["param"]) == (TOO_LONG, "messages")


def test_long_token_lists_are_answered_in_full() -> None:
    with live(fake_engine(max_model_len=50_000)) as server:
        text = "hello 中文 " * 4000
        counted = server.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        expected = small_tokenizer().encode(text, add_special_tokens=True)
        assert len(expected) > 8192, "long enough for the other process"
        assert (counted["count"], counted["tokens"]) == (len(expected), expected)
        assert counted["token_strs"] == list(map(small_tokenizer().vocabulary_string, expected))
        assert server.http.post("/detokenize", json={"tokens": expected}).json() == {"prompt": text}


def list_schemas(schema: object) -> Iterator[dict[str, Any]]:
    """All lists in a pydantic core schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        for key, value in schema.items():
            if key not in ("serialization", "json_schema_input_schema"):  # those validate nothing
                yield from list_schemas(value)
    elif isinstance(schema, (list, tuple)):
        for value in schema:
            yield from list_schemas(value)


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest])
def test_every_list_of_a_request_stops_at_its_first_mistake(model: type[Any]) -> None:
    """pydantic would collect them all: a million wrong messages, a million errors."""
    found = list(list_schemas(model.__pydantic_core_schema__))
    assert all(schema.get("fail_fast") for schema in found), [schema for schema in found if not schema.get("fail_fast")]
    assert found


def test_large_bodies_are_taken_one_at_a_time_and_answered_all(server: Live) -> None:
    """More bytes than are decoded at once: the way of large bodies, for right and wrong ones."""
    padding = " " * 200_000
    right = f'{{"prompt": "x", {padding} "max_tokens": 1}}'.encode()
    wrong = f'{{"prompt": "x", {padding} "max_tokens": "1"}}'.encode()
    for content, status in ((right, 200), (wrong, 400), (b"[" + padding.encode() + b"]", 400), (right, 200)):
        response = server.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert response.status_code == status


def test_the_application_alone_starts_what_it_needs() -> None:
    """Without the server around it, as tests and other programs use it."""
    app = create_app(fake_engine(), small_tokenizer(), ServerSettings())
    with TestClient(app, base_url="http://localhost") as client:
        assert client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1}).status_code == 200
    app.state.context.texts.close()
