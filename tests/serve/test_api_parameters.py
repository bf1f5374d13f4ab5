"""Parameters that stock clients send along: defaults of other servers are accepted, and what can be obeyed is."""

import json
from typing import Any

import pytest

from antiphon.serve.api.guard.harmless import HARMLESS
from antiphon.serve.api.requests import ChatCompletionRequest, CompletionRequest
from tests.serve.api_harness import END, Live, ids, live, says, small_tokenizer

HELLO = [{"role": "user", "content": "hello"}]


def text_of(token_ids: list[int]) -> str:
    return small_tokenizer().decode(token_ids, skip_special_tokens=True)


def events(server: Live, path: str, **body: Any) -> list[dict[str, Any]]:
    """Every event of a streamed answer but the last line."""
    with server.http.stream("POST", path, json={"stream": True, **body}) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_every_harmless_value_is_accepted_and_changes_nothing(server: Live) -> None:
    answers = []
    for ask, model in ((server.complete, CompletionRequest), (server.chat, ChatCompletionRequest)):
        fields = model.model_fields.keys()
        bodies: list[dict[str, Any]] = [{}]
        bodies += [{name: value} for name, entry in HARMLESS.items() if name not in fields for value in entry.values]
        bodies += [dict.fromkeys(HARMLESS.keys() - fields)]
        for body in bodies:
            response = ask(max_tokens=3, seed=1, **body)
            assert response.status_code == 200, (body, response.text)
            answers.append((ask, json.dumps(response.json()["choices"])))
    assert len(set(answers)) == 2  # one for each endpoint
    assert len({repr(submission.params) for submission in server.engine.submissions}) == 1


def test_any_other_value_is_refused_and_the_message_names_those_that_are_not(server: Live) -> None:
    for ask, model in ((server.complete, CompletionRequest), (server.chat, ChatCompletionRequest)):
        for name in HARMLESS.keys() - model.model_fields.keys():
            response = ask(**{name: {"some": "thing"}})
            assert response.status_code == 400, name
            error = response.json()["error"]
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
            assert error["message"].endswith(f"leave it out or send {HARMLESS[name].accepted}")
    assert server.engine.submissions == []


@pytest.mark.parametrize(
    "body",
    [
        {"n": 1, "best_of": 1},
        {"n": 2, "best_of": 2},
        {"best_of": 1},
        {"prompt_cache_key": "conversation-7"},
        {"metadata": {"thread": "7", "k" * 64: "v" * 512}},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"length_penalty": 1},
    ],
)
def test_parameters_that_agree_with_what_happens_are_accepted(server: Live, body: dict[str, Any]) -> None:
    assert server.complete(max_tokens=2, **body).status_code == 200
    assert server.chat(max_tokens=2, **body).status_code == 200


def test_chat_accepts_no_alternatives_without_logprobs(server: Live) -> None:
    assert server.chat(max_tokens=2, top_logprobs=0).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("include_usage", [None, True])
def test_continuous_usage_is_in_every_event(server: Live, path: str, include_usage: bool | None) -> None:
    prompt: dict[str, Any] = {"prompt": "hello"} if path == "/v1/completions" else {"messages": HELLO}
    options = {"continuous_usage_stats": True, "include_usage": include_usage}
    received = events(server, path, **prompt, max_tokens=4, stream_options=options)
    num_prompt = len(server.engine.submissions[0].prompt_token_ids)
    counts = [event["usage"]["completion_tokens"] for event in received]
    expected = [1, 2, 3, 4] if path == "/v1/completions" else [0, 1, 2, 3, 4]  # a chat opens with an empty event
    assert counts == ([*expected, 4] if include_usage else expected)
    for event in received:
        assert event["usage"]["prompt_tokens"] == num_prompt
        assert event["usage"]["total_tokens"] == num_prompt + event["usage"]["completion_tokens"]
    assert (received[-1]["choices"] == []) == bool(include_usage)


def test_no_usage_is_sent_when_it_is_switched_off(server: Live) -> None:
    options = {"continuous_usage_stats": True, "include_usage": False}
    received = events(server, "/v1/completions", prompt="hello", max_tokens=2, stream_options=options)
    assert received
    assert all("usage" not in event for event in received)


def test_continuous_usage_counts_each_answer_alone(server: Live) -> None:
    options = {"continuous_usage_stats": True}
    received = events(server, "/v1/completions", prompt=[[5], [6, 7]], max_tokens=3, stream_options=options)
    last = {event["choices"][0]["index"]: event["usage"] for event in received}
    assert [last[index]["prompt_tokens"] for index in (0, 1)] == [1, 2]
    assert [last[index]["completion_tokens"] for index in (0, 1)] == [3, 3]


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({}, "a b"),
        ({"skip_special_tokens": True}, "a b"),
        ({"skip_special_tokens": False}, "a<|im_start|> b"),
        ({"include_stop_str_in_output": True}, "a b"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, f"a<|im_start|> b{END}"),
    ],
)
def test_special_tokens_are_text_when_asked_for(wanted: dict[str, Any], text: str) -> None:
    with live(says("a<|im_start|> b")) as server:
        assert server.complete(**wanted).json()["choices"][0]["text"] == text
        assert server.chat(**wanted).json()["choices"][0]["message"]["content"] == text
        assert "".join(e["choices"][0]["text"] for e in events(server, "/v1/completions", prompt="x", **wanted)) == text


def test_echo_repeats_the_special_tokens_of_token_ids_when_asked_for(server: Live) -> None:
    prompt = ids(f"a{END}b")
    body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1}
    assert server.complete(**body).json()["choices"][0]["text"] == "ab"
    choice = server.complete(**body, skip_special_tokens=False).json()["choices"][0]
    assert choice["text"] == f"a{END}b"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1 + len(END)]


@pytest.mark.parametrize(("keep", "text"), [(None, "Gr"), (False, "Gr"), (True, "Grüß")])
@pytest.mark.parametrize("tokens_per_output", [1, 4])
def test_the_stop_string_is_text_when_asked_for(keep: bool | None, text: str, tokens_per_output: int) -> None:
    engine = says("Grüße")
    engine.tokens_per_output = tokens_per_output
    with live(engine) as server:
        body = {"stop": "üß", "include_stop_str_in_output": keep}
        choice = server.complete(**body).json()["choices"][0]
        streamed = events(server, "/v1/completions", prompt="x", **body)
    assert (choice["text"], choice["stop_reason"]) == (text, "üß")
    assert "".join(event["choices"][0]["text"] for event in streamed) == text


def test_a_stop_token_is_text_when_asked_for() -> None:
    with live(says("a b", ending=False)) as server:
        body = {"stop_token_ids": [ids("a b")[-1]]}
        shorter = server.complete(**body).json()["choices"][0]["text"]
        assert shorter == text_of(ids("a b")[:-1])
        assert server.complete(**body, include_stop_str_in_output=True).json()["choices"][0]["text"] == "a b"


def test_special_tokens_begin_a_prompt_as_asked_for(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    service = server.server.config.app.state.context.texts  # type: ignore[union-attr]
    encode = service.encode

    async def remember(texts: list[str], *, add_special_tokens: bool, **options: Any) -> list[list[int]]:
        asked.append(add_special_tokens)
        return await encode(texts, add_special_tokens=add_special_tokens, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(service, "encode", remember)
    for value in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        assert server.complete(max_tokens=1, **value).status_code == 200
        assert server.chat(max_tokens=1, **value).status_code == 200
    assert asked == [True, False, True, True, False, False]
