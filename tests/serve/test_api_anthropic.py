"""Anthropic's Messages API: what its requests mean to the model, and how answers are spelled, whole and streamed."""

import json
import socket
from typing import Any

import pytest

from antiphon.serve.text.dialects import Dialect, ReasoningFormat
from tests.serve.api_harness import (
    Live,
    fake_engine,
    ids,
    live,
    post,
    read_answer,
    small_grammars,
    small_tokenizer,
)
from tests.serve.test_api_tools import HERMES, says

LOOK = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    "cache_control": {"type": "ephemeral"},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sky"}}\n</tool_call>'
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA_FORMAT = {"type": "json_schema", "schema": {"const": "yes"}}


def send(server: Live, **body: Any) -> Any:
    return server.http.post("/v1/messages", json={"messages": HELLO, "max_tokens": 150, **body})


def streamed(server: Live, **body: Any) -> list[dict[str, Any]]:
    with server.http.stream(
        "POST", "/v1/messages", json={"messages": HELLO, "stream": True, "max_tokens": 150, **body}
    ) as response:
        assert response.status_code == 200, response.read()
        blocks = response.read().decode().split("\n\n")
    events = []
    for block in filter(None, blocks):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a stream, as the protocol says."""
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    arguments = ""
    for event in events[1:-1]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            arguments = ""
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                block[key] += delta[key]
        elif event["type"] == "content_block_stop" and message["content"][event["index"]]["type"] == "tool_use":
            message["content"][event["index"]]["input"] = json.loads(arguments)
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    return message


def test_a_text_is_answered_and_streamed_alike() -> None:
    with live(says("Grüß Gott")) as server:
        whole = send(server).json()
        other = added_up(streamed(server))
        prompt = server.engine.submissions[0].prompt_token_ids
    assert whole["content"] == [{"type": "text", "text": "Grüß Gott"}]
    assert (whole["type"], whole["role"], whole["stop_reason"], whole["stop_sequence"]) == (
        "message", "assistant", "end_turn", None,
    )  # fmt: skip
    usage = whole["usage"]
    num_cached, num_kept = len(prompt) // 2, len(prompt) // 16 * 16  # of the engine here; of blocks that are whole
    assert usage["cache_read_input_tokens"] == num_cached
    assert usage["cache_creation_input_tokens"] == num_kept - num_cached > 0
    assert usage["input_tokens"] == len(prompt) - num_kept
    assert usage["output_tokens"] == len(ids("Grüß Gott")) + 1
    assert whole.pop("id") != other.pop("id")
    assert whole == other


def test_why_an_answer_ended_is_said() -> None:
    with live(says("one two")) as server:
        cut = send(server, max_tokens=1).json()
        stopped = send(server, stop_sequences=["two"]).json()
        streams = added_up(streamed(server, stop_sequences=["two"]))
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")
    assert (streams["stop_reason"], streams["stop_sequence"]) == ("stop_sequence", "two")


def test_an_answer_may_fill_the_rest_of_the_context() -> None:
    """Clients ask for as much as the largest models give."""
    with live(fake_engine(max_model_len=64)) as server:
        whole = send(server, max_tokens=32_000).json()
        stream = added_up(streamed(server, max_tokens=32_000))
        num_prompt = len(server.engine.submissions[0].prompt_token_ids)
        assert send(server, max_tokens=64 - num_prompt).json()["stop_reason"] == "max_tokens"
    for message in (whole, stream):
        assert message["stop_reason"] == "model_context_window_exceeded"
        assert message["usage"]["output_tokens"] == 64 - num_prompt


def test_clients_know_what_is_too_long_and_that_conversations_are_not_kept(server: Live) -> None:
    """By these words; by this code a client goes on without."""
    long = send(server, messages=[{"role": "user", "content": "x" * 100_000}]).json()["error"]
    assert long["message"].startswith("prompt is too long: messages has ")
    assert "this model's maximum context length is 256 tokens" in long["message"]
    assert long["details"] == {"error_code": "context_length_exceeded"}
    thread = send(server, thread={"type": "create"})
    assert (thread.status_code, thread.json()["error"]["details"]) == (
        400,
        {"error_code": "thread_unsupported_request"},
    )
    assert thread.headers["request-id"] == thread.headers["x-request-id"]


def test_what_client_libraries_add_to_an_answer_changes_nothing() -> None:
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}, "new": None}
    said = [{"type": "text", "text": "a", "parsed_output": {"n": 1}, "citations": None, "new": None}, call]
    result = {"type": "tool_result", "tool_use_id": "1", "content": "b", "new": None}
    turns = [*HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    with live(says("x"), chat_template=HERMES) as server:
        assert send(server, messages=turns, tools=[LOOK]).status_code == 200


def test_calls_are_blocks_and_the_conversation_goes_back() -> None:
    with live(says(f"Well.{CALL}"), chat_template=HERMES) as server:
        whole = send(server, tools=[LOOK]).json()
        other = added_up(streamed(server, tools=[LOOK]))
        for message in (whole, other):
            (text, call) = message["content"]
            assert text == {"type": "text", "text": "Well."}
            assert (call["type"], call["name"], call["input"]) == ("tool_use", "look", {"at": "the sky"})
            assert message["stop_reason"] == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "blue"}]}
        turns = [*HELLO, {"role": "assistant", "content": whole["content"]}, {"role": "user", "content": [result]}]
        server.engine.submissions.clear()
        assert send(server, messages=turns, system="be kind", tools=[LOOK]).status_code == 200
        prompt = small_tokenizer().decode(server.engine.submissions[0].prompt_token_ids, skip_special_tokens=False)
    for part in ("be kind", "Looks.", '"at": "the sky"', "blue"):
        assert part in prompt
    assert prompt.index("the sky") < prompt.index("blue")


@pytest.mark.parametrize(
    ("choice", "is_forced"),
    [({"type": "auto"}, False), ({"type": "any"}, True), ({"type": "tool", "name": "look"}, True)],
)
def test_a_call_can_be_forced(choice: dict[str, Any], is_forced: bool) -> None:
    with live(says("x"), chat_template=HERMES) as server:
        send(server, tools=[LOOK], tool_choice=choice)
        assert (server.engine.submissions[0].params.grammar is not None) == is_forced


def test_tokens_are_counted_as_they_are_sent(server: Live) -> None:
    body = {"messages": HELLO, "system": [{"type": "text", "text": "be kind"}]}
    counted = server.http.post("/v1/messages/count_tokens", json=body).json()
    send(server, **body)
    assert counted == {"input_tokens": len(server.engine.submissions[0].prompt_token_ids)}


@pytest.mark.parametrize(
    ("body", "status", "kind", "message"),
    [
        ({"model": "claude-x"}, 404, "not_found_error", "does not exist here"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400,
         "invalid_request_error", "messages[0].content[0]: it is a block of type 'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "invalid_request_error",
         "tools[0]: it is of type 'web_search_20250305'"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "say which tool"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "1", "name": "f", "input": {}}] * 129}]}, 400, "invalid_request_error", "128"),
        ({"unheard_of": 1}, 400, "invalid_request_error", "unknown parameter: unheard_of"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, 400, "invalid_request_error", "shorten it"),
    ],
)  # fmt: skip
def test_refusals_have_the_shape_of_this_api(
    server: Live, body: dict[str, Any], status: int, kind: str, message: str
) -> None:
    response = send(server, **body)
    assert response.status_code == status
    answer = response.json()
    assert (answer["type"], answer["error"]["type"]) == ("error", kind)
    assert message in answer["error"]["message"]


@pytest.mark.parametrize("root_path", ["", "/models/a"])
def test_refusals_before_the_application_have_its_shape(root_path: str) -> None:
    """By the address of the page, and by the connection itself."""
    body = {"messages": HELLO, "max_tokens": 1}
    with live(fake_engine(), root_path=root_path) as server:
        page = server.http.post(f"{root_path}/v1/messages", json=body, headers={"origin": "https://evil.example"})
        with server.connect() as connection:
            connection.sendall(post(f"{root_path}/v1/messages", body)[:-5])
            connection.shutdown(socket.SHUT_WR)
            status, _, answer = read_answer(connection)
    assert (page.status_code, status) == (403, 400)
    for kind, refusal in (("permission_error", page.json()), ("invalid_request_error", json.loads(answer))):
        assert (refusal["type"], refusal["error"]["type"]) == ("error", kind)


def test_keys_may_come_as_this_api_sends_them() -> None:
    with live(fake_engine(), api_keys=("secret",)) as server:
        body = {"messages": HELLO, "max_tokens": 1}
        for key, status in (("secret", 200), ("other", 401)):
            headers = {"x-api-key": key}
            request = server.http.build_request("POST", "/v1/messages", json=body, headers=headers)
            del request.headers["authorization"]
            answer = server.http.send(request)
            assert answer.status_code == status
        assert answer.json()["error"]["type"] == "authentication_error"


def test_a_failure_on_the_way_is_an_event() -> None:
    engine = fake_engine()
    engine.fail_after_tokens = 2
    with live(engine) as server:
        with server.http.stream(
            "POST", "/v1/messages", json={"messages": HELLO, "max_tokens": 5, "stream": True}
        ) as answer:
            last = answer.read().decode().split("\n\n")[-2]
        assert send(server).json()["error"]["type"] == "api_error"
    assert last.startswith("event: error\n")
    assert "lost experts[1]" in last


def test_arguments_that_are_no_json_are_not_lost() -> None:
    broken = CALL.replace('{"at": "the sky"}', '{"at": sky}')
    with live(says(broken), chat_template=HERMES) as server:
        (call,) = send(server, tools=[LOOK]).json()["content"]
    assert call["input"] == {"INVALID_JSON": '{"at": sky}'}


@pytest.mark.parametrize("value", ['"\\ud800"', "NaN"])
def test_arguments_that_no_answer_can_hold_are_not_lost(value: str) -> None:
    with live(says(CALL.replace('"the sky"', value)), chat_template=HERMES) as server:
        (call,) = send(server, tools=[LOOK]).json()["content"]
        assert call["input"] == {"INVALID_JSON": f'{{"at": {value}}}'}
        assert streamed(server, tools=[LOOK])[-1]["type"] == "message_stop"


def test_large_whole_numbers_are_answered() -> None:
    with live(says(CALL.replace('"the sky"', str(10**30))), chat_template=HERMES) as server:
        (call,) = send(server, tools=[LOOK]).json()["content"]
    assert call["input"] == {"at": 1e30}


def prompt_after(server: Live, *turns: dict[str, Any], **body: Any) -> str:
    server.engine.submissions.clear()
    assert send(server, messages=[*HELLO, *turns], **body).status_code == 200
    token_ids = server.engine.submissions[0].prompt_token_ids
    return small_tokenizer().decode(token_ids, skip_special_tokens=False)


def test_a_turn_of_the_model_at_the_end_is_gone_on_with(server: Live) -> None:
    begun = {"role": "assistant", "content": "The sky"}
    assert prompt_after(server, begun).endswith("<|im_start|>assistant\nThe sky")
    blocks = [{"type": "text", "text": "The "}, {"type": "text", "text": "sky"}]
    assert prompt_after(server, {**begun, "content": blocks}).endswith("<|im_start|>assistant\nThe \nsky")
    asked = prompt_after(server)
    for nothing in ("", [], [{"type": "redacted_thinking", "data": "x"}]):
        assert prompt_after(server, {**begun, "content": nothing}) == asked
    counted = server.http.post("/v1/messages/count_tokens", json={"messages": [*HELLO, begun]}).json()
    assert counted["input_tokens"] == len(ids(prompt_after(server, begun)))


@pytest.mark.parametrize(
    ("role", "content", "param", "message"),
    [
        ("user", [{"type": "thinking", "thinking": "x"}], "messages[1].content[0]", "user says text and tool_result"),
        ("user", [{"type": "tool_use", "id": "1", "name": "f", "input": {}}], "messages[1].content[0]", "'tool_use'"),
        ("assistant", [{"type": "text", "text": "x"}, {"type": "tool_result", "tool_use_id": "1"}],
         "messages[1].content[1]", "the assistant says text and thinking"),
        ("system", [{"type": "tool_result", "tool_use_id": "1"}], "messages[1].content[0]", "the system says text"),
        ("user", [], "messages[1].content", "has no items"),
    ],
)  # fmt: skip
def test_blocks_that_would_be_lost_are_refused(server: Live, role: str, content: Any, param: str, message: str) -> None:
    answer = send(server, messages=[*HELLO, {"role": role, "content": content}])
    assert answer.status_code == 400
    said = answer.json()["error"]["message"]
    assert said.startswith(param)
    assert message in said


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [LOOK, LOOK]}, "tools"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema", "schema": {"type": "nothing"}}}, "output_format"),
        (
            {"output_format": {"type": "json_schema", "schema": {}}, "output_config": {"format": SCHEMA_FORMAT}},
            "output_format",
        ),
    ],
)
def test_refusals_of_the_chat_name_what_the_client_sent(body: dict[str, Any], param: str) -> None:
    with live(says("yes"), chat_template=HERMES) as server:
        response = send(server, **body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert param in message
    assert not any(word in message for word in ("tool_calls", "max_completion", "response_format", "json_schema"))


def test_a_format_may_have_its_former_name_or_both() -> None:
    config = {"format": SCHEMA_FORMAT}
    with live(says('"yes"')) as server:
        for body in ({"output_config": config}, {"output_format": SCHEMA_FORMAT, "output_config": config}):
            assert send(server, **body).status_code == 200
        assert send(server, output_format=SCHEMA_FORMAT, output_config={"effort": "low"}).status_code == 200
        assert len({submission.params.grammar for submission in server.engine.submissions}) == 1


def test_results_that_a_template_does_not_read_are_named_as_they_were_sent() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": "blue"}
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    text = {"type": "text", "text": "there"}
    turns = [*HELLO, {"role": "assistant", "content": [text, call]}, {"role": "user", "content": [result]}]
    with live(says("yes"), chat_template="{% for m in messages %}{{ m.content }}{% endfor %}") as server:
        answer = send(server, messages=turns, system="be kind")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("messages[1].content: this model's chat template does not read")


def test_thinking_is_a_block_and_comes_back() -> None:
    template = HERMES.replace("{{ message['content'] }}", "{{ message.reasoning_content }}{{ message['content'] }}")
    template += "{# <think> </think> #}{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}"
    with live(says("<think>hm</think>yes"), chat_template=template) as server:
        whole = send(server, thinking={"type": "enabled", "budget_tokens": 1024}).json()
        other = added_up(streamed(server))
        for message in (whole, other):
            thinking, text = message["content"]
            assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm")
            assert text == {"type": "text", "text": "yes"}
        turns = [*HELLO, {"role": "assistant", "content": whole["content"]}, *HELLO]
        send(server, messages=turns, thinking={"type": "disabled"})
        token_ids = server.engine.submissions[-1].prompt_token_ids
        prompt = small_tokenizer().decode(token_ids, skip_special_tokens=False)
    assert "hmyes" in prompt
    assert "quick" in prompt


def test_a_budget_ends_the_thinking_where_a_token_can(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = {"thinking": {"type": "enabled", "budget_tokens": 3}}
    with live(says("x"), chat_template=HERMES + "{# <think> </think> #}") as server:
        assert send(server, max_tokens=9, **budget).status_code == 200  # no token ends it, and clients send it anyway
        assert server.engine.submissions[-1].params.grammar is None
    form = ReasoningFormat(name="x", begin="<|im_start|>", end="<|im_start|>", starts_open=True)
    monkeypatch.setattr("antiphon.serve.api.context.dialect_of", lambda *_, **__: Dialect(reasoning=form))
    with live(says("x"), chat_template=HERMES) as server:
        send(server, max_tokens=9, **budget)
        grammar = server.engine.submissions[-1].params.grammar
        assert grammar is not None
        matcher = small_grammars().matcher(grammar)
        thought, (end,) = ids("abc"), ids("<|im_start|>")
        assert len(thought) >= 3
        assert all(map(matcher.accept, thought[:3]))
        assert matcher.accept(end)
        matcher = small_grammars().matcher(grammar)
        assert [matcher.accept(token) for token in (*thought[:3], thought[0])] == [True, True, True, False]
        send(server, max_tokens=3, **budget)
        assert server.engine.submissions[-1].params.grammar is None  # the answer ends first
