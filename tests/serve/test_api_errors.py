"""What the server refuses: in OpenAI's shape, with a message that helps, and never as a 5xx."""

import dataclasses
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from starlette.testclient import TestClient

from antiphon.serve.api.server import create_app
from antiphon.serve.api.settings import ServerSettings
from antiphon.serve.engine_api import QueueFull, RequestTooLong, ShuttingDown
from tests.serve.api_harness import Live, fake_engine, live, says, small_tokenizer

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Live]:
    with live(fake_engine(), max_body_bytes=100_000, max_prompts_per_request=4) as running:
        yield running


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "\n" not in body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": "warm"}, "temperature", "temperature is 'warm': it must be a valid number"),
    ({"temperature": -0.1}, "temperature", "at least 0"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_k": -2}, "top_k", "at least -1"),
    ({"min_p": 1.5}, "min_p", "at most 1"),
    ({"max_tokens": -1}, "max_tokens", "at least 0"),
    ({"max_tokens": 2.5}, "max_tokens", "valid integer"),
    ({"max_tokens": True}, "max_tokens", "valid integer"),
    ({"max_tokens": "5"}, "max_tokens", "valid integer"),
    ({"max_tokens": 10**30}, "max_tokens", "at most"),
    ({"max_tokens": 256}, "max_tokens", "maximum context length is 256"),
    ({"min_tokens": 20}, "min_tokens", "at most max_tokens (16)"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": 17}, "n", "at most 16"),
    ({"seed": 2**63}, "seed", "at most"),
    ({"seed": 1.5}, "seed", "valid integer"),
    ({"stop": ""}, "stop", "1 to 1024 characters"),
    ({"stop": ["a", 5]}, "stop", "a text or a list of texts"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stop_token_ids": [512]}, "stop_token_ids", "ids must be below 512"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "at least 0"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids", "has 129 items: it must have at most 128 items"),
    ({"logit_bias": {"512": 1}}, "logit_bias", "ids must be below 512"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "digits in quotes"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "digits in quotes"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {"1": "x"}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": [1]}, "logit_bias", "an object"),
    ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias", "at most 1024"),
    ({"presence_penalty": 2.1}, "presence_penalty", "at most 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "at least -2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "stream_options.include_obfuscation is true: it must be false",
    ),
    ({"logprobs": 21}, "logprobs", "at most 20"),
    ({"logprobs": True}, "logprobs", "valid integer"),
    ({"echo": 1}, "echo", "valid boolean"),
    ({"user": 5}, "user", "valid string"),
    ({"prompt": ""}, "prompt", "no tokens"),
    ({"prompt": []}, "prompt", "not empty"),
    ({"prompt": [[]]}, "prompt", "no tokens"),
    ({"prompt": ["a", 1]}, "prompt", "a text, a list of texts"),
    ({"prompt": [1.5]}, "prompt", "a text, a list of texts"),
    ({"prompt": {"a": 1}}, "prompt", "a text, a list of texts"),
    ({"prompt": None}, "prompt", "a text, a list of texts"),
    ({"prompt": [512]}, "prompt", "ids must be below 512"),
    ({"prompt": [-1]}, "prompt", "a text, a list of texts"),
    ({"prompt": [10**30]}, "prompt", "a text, a list of texts"),
    ({"prompt": [7] * 257}, "prompt", "257 tokens, the limit is 256"),
    ({"prompt": ["a"] * 5}, "prompt", "at most 4 a request"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    ({"best_of": 2}, "best_of", "it must be n (1)"),
    ({"best_of": 1, "n": 2}, "best_of", "it must be n (2)"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs is the number of alternatives"),
    ({"max_completion_tokens": 2}, "max_completion_tokens", "it is called max_tokens"),
    (
        {"suffix": "x"},
        "suffix",
        """suffix is 'x': insertion into text is not supported; leave it out or send null or \"\"""",
    ),
    ({"messages": HELLO}, "messages", "unknown parameter"),
    ({"frobnicate": 1}, "frobnicate", "unknown parameter: frobnicate"),
    ({"tools": [{}]}, "tools", "only /v1/chat/completions has it"),
    ({"frobnicate": None}, "frobnicate", "unknown parameter"),
    (
        {"response_format": {"type": "xml"}},
        "response_format",
        "response_format has the type 'xml': it must be 'text', 'json_object' or 'json_schema'",
    ),
    ({"response_format": {}}, "response_format.type", "response_format.type is missing"),
    ({"response_format": "json"}, "response_format", "response_format is 'json': it must be an object"),
    ({"guided_json": 5}, "guided_json", "guided_json is 5: it must be an object or a valid string"),
    ({"guided_choice": []}, "guided_choice", "guided_choice has no items: it must have at least 1 item"),
    ({"guided_choice": [""]}, "guided_choice[0]", "guided_choice[0] is '': it must have at least 1 character"),
    ({"user": "u" * 513}, "user", "it must have at most 512 characters, not 513"),
    ({"request_id": "a b"}, "request_id", "request_id is 'a b': it must match the pattern ^[!-~]{1,128}$"),
    ({"n": True}, "n", "n is true: it must be a valid integer"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD_COMPLETIONS)
@pytest.mark.parametrize("stream", [None, True])
def test_bad_completions_are_400_and_name_the_parameter(
    server: Live, body: dict[str, Any], param: str, message: str, stream: bool | None
) -> None:
    if stream and "stream_options" in body:
        pytest.skip("is about streaming itself")
    error = error_of(server.complete(**{"stream": stream, **body}), 400)
    assert error["param"] == param
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert server.engine.submissions == []


BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "messages has no items: it must have at least 1 item"),
    ({"messages": None}, "messages", "messages is null: it must be an array"),
    ({"messages": "hi"}, "messages", "messages is 'hi': it must be an array"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "does not read results of tools"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "messages[0].tool_call_id",
     "messages[0].tool_call_id is 'a': it must be null"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content", "missing"),
    ({"messages": ["x"]}, "messages[0]", "messages[0] is 'x': it must be an object"),
    ({"messages": [{"role": "user", "content": "x", "name": "bob"}, {"role": "user", "content": "x", "name": "ann"}]},
     "messages[1].name", "does not read names"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls", "unknown parameter"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0]",
     "it is of type 'image_url': this server reads text only"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text",
     "string"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
    ({"messages": [{"role": "user", "content": "x", "image": "y"}]}, "messages[0].image", "unknown parameter"),
    ({"messages": [{"other": 1}]}, "messages[0].role", "messages[0].role is missing"),
    ({"messages": [{"role": "user", "content": {"text": "x"}}]}, "messages[0].content",
     "messages[0].content is an object: it must be a valid string"),
    ({"messages": [{"role": "assistant", "assistant": {}, "content": 5}]}, "messages[0].content",
     "messages[0].content is 5"),
    ({"tool_choice": {"named": "x"}}, "tool_choice.type", "tool_choice.type is missing"),
    ({"tool_choice": {"type": "allowed_tools", "allowed": 1}}, "tool_choice.allowed_tools",
     "tool_choice.allowed_tools is missing"),
    ({"use_beam_search": True}, "use_beam_search", "beam search is not supported; leave it out or send null or false"),
    ({"use_beam_search": 0}, "use_beam_search", "send null or false"),
    ({"priority": False}, "priority", "valid integer"),
    ({"metadata": {"run": 5}}, "metadata.run", "string"),
    ({"metadata": {"k" * 65: "a"}}, "metadata", "at most 64 characters"),
    ({"metadata": {str(n): "a" for n in range(17)}}, "metadata", "at most 16 items"),
    ({"prompt_cache_retention": "48h"}, "prompt_cache_retention", 'send null, "in_memory", "in-memory" or "24h"'),
    ({"audio": {}}, "audio", "leave it out or send null"),
    ({"prompt": "x"}, "prompt", "only /v1/completions has it"),
    ({"echo": True}, "echo", "needs continue_final_message"),
    ({"logprobs": 5}, "logprobs", "valid boolean"),
    ({"top_logprobs": 5}, "top_logprobs", "needs logprobs"),
    ({"max_tokens": 0}, "max_tokens", "at least 1 token"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "send one of them"),
    ({"max_completion_tokens": 1000}, "max_tokens", "maximum context length is 256"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "message"), BAD_CHATS)
def test_bad_chats_are_400_and_name_the_parameter(server: Live, body: dict[str, Any], param: str, message: str) -> None:
    error = error_of(server.chat(**body), 400)
    assert error["param"].startswith(param)
    assert message in error["message"]


@pytest.mark.parametrize(
    "schema",
    [{"type": "objekt"}, {"type": "string", "pattern": "(("}, {"$ref": "#/nope"}, {"not": {}}, {"enum": []}],
)
def test_schemas_that_cannot_be_followed_are_400(server: Live, schema: dict[str, Any]) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert "JSON schema cannot be used" in error_of(server.chat(response_format=wanted), 400)["message"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "an array"),
        (b'"text"', "a string"),
        (b"null", "it must be a JSON object"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN"),
        (b'{"prompt": "x", "temperature": Infinity}', "not JSON"),
        (b'{"prompt": "x", "temperature": 1e999}', "not JSON"),
        (b'{"prompt": "\\ud800"}', "lone surrogates"),
        (b'{"prompt": "\\ud800 x"}', "lone surrogates"),
        (b'{"prompt": "\xed\xa0\x80"}', "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON"),
        (b'{"prompt": "x", "max_tokens": %d}' % (10**400), "max_tokens"),
        (b'{"prompt": "x", "max_tokens": %d}' % (10**4000), "max_tokens|not JSON"),
        (b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "too large|nested too deeply|larger"),
        (b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", "nested too deeply"),
        (b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}", "a text, a list of texts"),
    ],
)
def test_what_is_not_json_is_400(server: Live, content: bytes, message: str) -> None:
    response = server.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    error = error_of(response, 413 if len(content) > 100_000 else 400)
    assert any(part in error["message"] for part in message.split("|"))


def test_a_deep_schema_is_400(server: Live) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error_of(server.chat(response_format=wanted), 400)


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
def test_wrong_content_is_415(server: Live, headers: dict[str, str]) -> None:
    error_of(server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers), 415)


def test_unknown_paths_and_methods_have_the_same_shape(server: Live) -> None:
    assert "/openapi.json" in error_of(server.http.get("/v2/models"), 404)["message"]
    response = server.http.get("/v1/completions")
    error_of(response, 405)
    assert response.headers["allow"] == "POST"
    several = server.http.put("/v1/responses/resp-1", json={})
    error_of(several, 405)
    assert several.headers["allow"] == "DELETE, GET, HEAD"


def test_another_model_is_404(server: Live) -> None:
    for response in (server.complete(model="gpt-x"), server.http.get("/v1/models/gpt-x")):
        error = error_of(response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        server.openai.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": "x"}])


def test_too_long_prompts_have_openais_code(server: Live) -> None:
    assert error_of(server.complete(prompt="hello " * 400), 400)["code"] == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.completions.create(model="fake-moe", prompt="hello " * 400)
    assert caught.value.code == "context_length_exceeded"


def test_bodies_are_limited_while_they_arrive(server: Live) -> None:
    whole = server.http.post("/v1/completions", json={"prompt": "x" * 200_000})
    error = error_of(whole, 413)
    assert error["code"] == "request_too_large"
    assert "100000 bytes" in error["message"]

    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(30):
            yield b"x" * 10_000

    try:  # chunked: no Content-Length says how much will come
        response = server.http.post("/v1/completions", content=pieces(), headers={"content-type": "application/json"})
    except httpx.WriteError:
        pass  # the server closed the connection while we were still writing
    else:
        error_of(response, 413)
    assert server.complete(max_tokens=1).status_code == 200


def test_bodies_that_do_not_arrive_are_408() -> None:
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    )
    with live(fake_engine(), body_timeout_s=0.05) as server:
        address = ("127.0.0.1", httpx.URL(server.url).port or 80)
        with socket.create_connection(address, timeout=10) as connection:
            connection.sendall(request)
            assert connection.recv(4096).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (QueueFull("64 requests are waiting, the limit is 64: try again later", 2.5), 429, "rate_limit_exceeded"),
        (ShuttingDown("draining"), 503, "shutting_down"),
        (RequestTooLong("needs 90 KV blocks, there are 80: shorten it"), 400, "context_length_exceeded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_engine_refusals(server: Live, refusal: Exception, status: int, code: str, stream: bool) -> None:
    server.engine.refuse_with = refusal
    response = server.complete(stream=stream)
    error = error_of(response, status)
    assert (error["code"], error["message"]) == (code, str(refusal))
    assert response.headers.get("retry-after") == {429: "3", 503: "5"}.get(status)


def test_when_one_answer_is_refused_the_others_are_taken_back(server: Live) -> None:
    server.engine.refuse_with = QueueFull("the queue is full", 1.0)
    server.engine.refuse_from_request = 2
    error_of(server.complete(n=4), 429)
    assert [submission.aborted for submission in server.engine.submissions] == [True, True]
    server.engine.refuse_with = None
    assert server.complete(n=4).status_code == 200


@pytest.mark.parametrize("with_exception", [False, True])
def test_a_failing_engine_is_500_before_and_an_event_after_streaming_began(server: Live, with_exception: bool) -> None:
    server.engine.fail_after_tokens = 2
    server.engine.fail_with = RuntimeError("boom") if with_exception else None
    expected = "boom" if with_exception else "lost experts[1]"
    for n in (1, 2):
        error = error_of(server.complete(n=n), 500)
        assert expected in error["message"]
        assert (error["type"], error["code"]) == ("server_error", "engine_error")
    with pytest.raises(openai.APIError, match=re.escape(expected)):
        list(server.openai.completions.create(model="fake-moe", prompt="x", stream=True))
    server.engine.reset()
    assert server.complete().status_code == 200


def test_without_a_chat_template_chat_is_refused(server: Live) -> None:
    tokenizer = server.server.config.app.state.context.tokenizer  # type: ignore[union-attr]
    sources, tokenizer.template_sources = tokenizer.template_sources, None
    try:
        assert "use /v1/completions" in error_of(server.chat(), 400)["message"]
    finally:
        tokenizer.template_sources = sources


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [512]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_bad_tokenize_requests(server: Live, path: str, body: dict[str, Any], param: str) -> None:
    assert error_of(server.http.post(path, json=body), 400)["param"] == param


def test_a_model_without_an_end_token_is_served_but_follows_no_grammar() -> None:
    engine = fake_engine()
    engine.info = dataclasses.replace(engine.info, eos_token_ids=())
    app = create_app(engine, small_tokenizer(), ServerSettings())
    with TestClient(app, base_url="http://localhost") as client:
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        refused = client.post("/v1/completions", json={"prompt": "x", "response_format": {"type": "json_object"}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "response_format"


def test_stop_strings_in_the_middle_of_refusals_leave_the_server_whole() -> None:
    with live(says("abc")) as server:
        for _ in range(3):
            error_of(server.complete(stop=""), 400)
            assert server.complete(stop="b").json()["choices"][0]["text"] == "a"
        assert server.server.config.app.state.context.num_active == 0  # type: ignore[union-attr]
