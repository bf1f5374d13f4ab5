"""Earlier turns as agents send them back: reasoning, refusals, cache marks, names, roles that the template knows."""

from typing import Any

import pytest

from tests.serve.api_harness import fake_engine, live, small_tokenizer
from tests.serve.test_api_tools import ADD, HERMES, LOOK, TWO_CALLS, says

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{% if message.reasoning_content %}<think>"
    "{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}{% endfor %}{# 'observation' #}"
)
ASKED: dict[str, Any] = {"role": "user", "content": "a"}


def prompt_of(messages: list[dict[str, Any]], template: str = TEMPLATE) -> str:
    with live(fake_engine(), chat_template=template) as server:
        response = server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
        assert response.status_code == 200, response.text
        return small_tokenizer().decode(server.engine.submissions[0].prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_of_earlier_turns_is_given_back(name: str) -> None:
    turns = [ASKED, {"role": "assistant", "content": "b", name: "why"}, ASKED]
    assert prompt_of(turns) == "[user]a[assistant]<think>why</think>b[user]a"


def test_reasoning_is_left_out_where_the_model_does_not_see_it_again() -> None:
    turns = [ASKED, {"role": "assistant", "content": "b", "reasoning_content": "why"}, ASKED]
    template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    assert prompt_of(turns, template) == "[user]a[assistant]b[user]a"


def test_a_refusal_is_what_the_model_said() -> None:
    for turn in ({"content": None, "refusal": "no"}, {"content": [{"type": "refusal", "refusal": "no"}]}):
        assert prompt_of([ASKED, {"role": "assistant", **turn}, ASKED]) == "[user]a[assistant]no[user]a"


def test_what_client_libraries_add_to_an_answer_changes_nothing() -> None:
    """They send a null for every field that they know of, and what they parsed."""
    function = {"name": "add", "arguments": '{"m": 1}', "parsed_arguments": {"m": 1}, "new": None}
    call = {"id": "1", "type": "function", "function": function, "caller": None, "provider_specific_fields": {"a": 1}}
    added = {"provider_specific_fields": {"reasoning": "x"}, "parsed": {"good": True}, "audio": None, "new": None}
    part = {"type": "text", "text": "a", "parsed_output": {"n": 1}, "citations": None}
    turns = [
        {"role": "user", "content": [part]},
        {"role": "assistant", "content": None, "tool_calls": [call], **added},
        {"role": "tool", "tool_call_id": "1", "content": [part]},
    ]
    assert '{"name": "add", "arguments": {"m": 1}}' in prompt_of(turns, HERMES)
    with live(fake_engine(), chat_template=HERMES) as server:
        calls = {"role": "assistant", "tool_calls": [{**call, "unheard_of": 1}]}
        refused = server.chat(messages=[ASKED, calls]).json()["error"]
        assert refused["param"] == "messages[1].tool_calls[0].unheard_of"


def test_marks_for_caches_and_a_single_name_change_nothing() -> None:
    mark = {"type": "ephemeral"}
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "s", "cache_control": mark}], "name": "it"},
        {**ASKED, "name": "bob", "cache_control": mark},
        {**ASKED, "name": "bob"},
    ]
    assert prompt_of(turns) == "[system]s[user]a[user]a"


def test_marks_for_caches_may_be_at_tools() -> None:
    mark = {"type": "ephemeral"}
    marked = {**ADD, "function": {**ADD["function"], "cache_control": mark}, "cache_control": mark}
    with live(says("x"), chat_template=HERMES) as server:
        for tools in ([ADD], [marked]):
            assert server.chat(tools=tools).status_code == 200
        first, second = (submission.prompt_token_ids for submission in server.engine.submissions)
    assert first == second


def test_a_role_that_the_template_names_is_used() -> None:
    assert prompt_of([ASKED, {"role": "observation", "content": "o"}]) == "[user]a[observation]o"


def test_a_role_that_the_template_writes_is_used_and_one_that_it_drops_is_refused() -> None:
    assert prompt_of([ASKED, {"role": "poet", "content": "o"}]) == "[user]a[poet]o"
    drops = "{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}{% endif %}{% endfor %}"
    with live(fake_engine(), chat_template=drops) as server:
        refused = server.http.post("/v1/chat/completions", json={"messages": [ASKED, {"role": "poet", "content": "o"}]})
        assert refused.json()["error"]["param"] == "messages[1].role"


def test_the_id_of_a_result_may_be_missing_where_the_template_does_not_read_it() -> None:
    result = {"role": "tool", "content": "r"}
    assert prompt_of([ASKED, result], TEMPLATE + "{# 'tool' #}") == "[user]a[tool]r"
    with live(fake_engine(), chat_template=TEMPLATE + "{# 'tool' #}{{ messages[-1].tool_call_id }}") as server:
        refused = server.http.post("/v1/chat/completions", json={"messages": [ASKED, result]})
        assert refused.json()["error"]["param"] == "messages[1].tool_call_id"


def test_only_allowed_tools_are_called() -> None:
    choice: dict[str, Any] = {"mode": "auto", "tools": [LOOK]}
    with live(says(TWO_CALLS), chat_template=HERMES) as tools:
        body = {"tools": [ADD, LOOK], "tool_choice": {"type": "allowed_tools", "allowed_tools": choice}}
        message = tools.chat(**body).json()["choices"][0]["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["look"]
        prompt = small_tokenizer().decode(tools.engine.submissions[0].prompt_token_ids, skip_special_tokens=False)
        assert "a + b" in prompt
        choice["mode"] = "required"
        tools.chat(**body)
        assert tools.engine.submissions[1].params.grammar is not None
        choice["tools"] = [{"type": "function", "function": {"name": "walk"}}]
        assert "'walk': it is not among tools" in tools.chat(**body).json()["error"]["message"]
