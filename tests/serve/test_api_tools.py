"""Tools and other ways to steer the chat template, over HTTP: what the model reads, what clients get back."""

import json
from typing import Any

import pytest

from antiphon.base.errors import UserError
from antiphon.serve.api.settings import ServerSettings
from tests.serve.api_harness import END, Live, eos_id, fake_engine, ids, live, small_grammars, small_tokenizer
from tests.serve.fake_engine import FakeEngine

TURNS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "{% if message.role == 'tool' %} for {{ message.tool_call_id }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not thinking | default(true) %}no {% endif %}{% endif %}"
)
HERMES = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}" + TURNS
BARE = HERMES.replace("<tool_call>\n", "").replace("\n</tool_call>", "")
LLAMA = BARE + """{# {"name": "f", "parameters": {}} #}"""
APPENDS = HERMES.replace("{{ call.function | tojson }}", "{{ 'call ' + call.function.arguments }}")

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "a + b",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"const": 3}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
LOOK = {"type": "function", "function": {"name": "look"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 3}}\n</tool_call>'
TWO_CALLS = f'Wait.\n{CALL}\n<tool_call>\n{{"name": "look", "arguments": {{}}}}\n</tool_call>'
HELLO = [{"role": "user", "content": "hello"}]


def says(text: str, tokens_per_output: int = 1) -> FakeEngine:
    """An engine with room for descriptions of tools, whose every answer is `text`."""
    engine = fake_engine(script=lambda _prompt, params: [*ids(text), eos_id()][: params.max_tokens], max_model_len=4096)
    engine.tokens_per_output = tokens_per_output
    return engine


def prompt_of(server: Live, number: int = -1) -> str:
    """What the model read."""
    return small_tokenizer().decode(server.engine.submissions[number].prompt_token_ids, skip_special_tokens=False)


def refusal(server: Live, **body: Any) -> tuple[str, str]:
    """(param, message) of a 400."""
    response = server.chat(**body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def functions_of(message: Any) -> list[tuple[str, Any]]:
    """(name, arguments) of a message's calls, as the official client has them."""
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


def streamed(server: Live, **body: Any) -> tuple[Any, str, list[Any]]:
    """(message, finish reason, events) of a streamed chat, put together by the official client."""
    with server.openai.chat.completions.stream(model="fake-moe", messages=HELLO, **body) as stream:  # type: ignore[arg-type]
        events = [event.chunk for event in stream if event.type == "chunk"]
        choice = stream.get_final_completion().choices[0]
    return choice.message, choice.finish_reason, events


EXPECTED = [("add", {"a": 1, "b": 3}), ("look", {})]


@pytest.mark.parametrize("tokens_per_output", [1, 5, 1000])
def test_calls_reach_the_client(tokens_per_output: int) -> None:
    tools: Any = [ADD, LOOK]
    with live(says(TWO_CALLS, tokens_per_output), chat_template=HERMES) as server:
        whole = server.openai.chat.completions.create(
            model="fake-moe", messages=HELLO, tools=tools, tool_choice="auto", parallel_tool_calls=True
        )  # type: ignore[call-overload]
        message, reason, events = streamed(server, tools=tools)
    choice = whole.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Wait.\n", "tool_calls")
    assert functions_of(choice.message) == EXPECTED
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert (message.content, reason) == ("Wait.\n", "tool_calls")
    assert functions_of(message) == EXPECTED
    pieces = [piece for event in events for piece in event.choices[0].delta.tool_calls or []]
    first = [piece for piece in pieces if piece.id is not None]
    assert [(piece.index, piece.type, piece.function.name) for piece in first] == [
        (0, "function", "add"),
        (1, "function", "look"),
    ]
    assert all(piece.function.name is None for piece in pieces if piece.id is None)
    if tokens_per_output == 1:
        assert len(pieces) > 10, "arguments come as they are written"


def test_tools_are_described_to_the_model() -> None:
    with live(says("x"), chat_template=HERMES) as server:
        strict = {"type": "function", "function": {**ADD["function"], "strict": None}}
        assert server.chat(tools=[strict, LOOK]).status_code == 200
        assert prompt_of(server).startswith(json.dumps(ADD) + "\n")
        assert '{"name": "look", "parameters": {"type": "object", "properties": {}}}' in prompt_of(server)
        tokens = server.http.post("/tokenize", json={"messages": HELLO, "tools": [ADD, LOOK]}).json()["tokens"]
        assert tokens == server.engine.submissions[-1].prompt_token_ids
        plain = server.chat(tools=[ADD], tool_choice="none")
        assert "add" not in prompt_of(server)
        assert "tool_calls" not in plain.json()["choices"][0]["message"]


def test_with_tool_choice_none_calls_are_text() -> None:
    with live(says(CALL), chat_template=HERMES) as server:
        choice = server.chat(tools=[ADD], tool_choice="none").json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        choice = server.chat(tools=[LOOK]).json()["choices"][0]  # no such tool
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


def test_a_call_without_text_has_no_content_and_one_cut_off_says_so() -> None:
    with live(says(CALL), chat_template=HERMES) as server:
        assert server.chat(tools=[ADD]).json()["choices"][0]["message"]["content"] is None
        cut = server.chat(tools=[ADD], max_tokens=len(ids(CALL)) - 15).json()["choices"][0]
        assert cut["finish_reason"] == "length"
        assert '{"a": 1, "b": 3}'.startswith(cut["message"]["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize(
    ("stop", "reason"),
    [({"stop": '"b"'}, "stop"), ({"stop_token_ids": ids("}")}, "stop"), ({"stop": "</tool_call>"}, "tool_calls")],
)
def test_a_call_that_the_clients_own_stop_cuts_off_says_so(stop: dict[str, Any], reason: str) -> None:
    with live(says(CALL), chat_template=HERMES) as server:
        choice = server.chat(tools=[ADD], **stop).json()["choices"][0]
        arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
        assert '{"a": 1, "b": 3}'.startswith(arguments)
        assert (choice["finish_reason"], arguments.endswith("}")) == (reason, reason == "tool_calls")
        assert choice["stop_reason"] in (stop.get("stop"), *stop.get("stop_token_ids", ()))
        body = {key: value for key, value in stop.items() if key == "stop"} | {"extra_body": stop}
        assert streamed(server, tools=[ADD], **body)[1] == reason


def test_without_parallel_calls_the_answer_ends_after_the_first() -> None:
    with live(says(TWO_CALLS), chat_template=HERMES) as server:
        choice = server.chat(tools=[ADD, LOOK], parallel_tool_calls=False).json()["choices"][0]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["add"]
        assert choice["finish_reason"] == "tool_calls"
        assert server.engine.submissions[0].aborted
        message, reason, _ = streamed(server, tools=[ADD, LOOK], parallel_tool_calls=False)
        assert (functions_of(message), reason) == (EXPECTED[:1], "tool_calls")


def test_several_answers_are_read_apart() -> None:
    with live(says(TWO_CALLS), chat_template=HERMES) as server:
        choices = server.chat(tools=[ADD, LOOK], n=2, logprobs=True).json()["choices"]
    assert [len(choice["message"]["tool_calls"]) for choice in choices] == [2, 2]
    assert [len(choice["logprobs"]["content"]) for choice in choices] == [len(ids(TWO_CALLS)) + 1] * 2


@pytest.mark.parametrize("template", [HERMES, LLAMA])
@pytest.mark.parametrize(
    ("choice", "name"),
    [("required", "add"), ({"type": "function", "function": {"name": "look"}}, "look")],
)
def test_a_call_can_be_forced(template: str, choice: Any, name: str) -> None:
    with live(says("no"), chat_template=template) as server:
        answer = server.chat(tools=[ADD, LOOK], tool_choice=choice).json()["choices"][0]
        message, reason, _ = streamed(server, tools=[ADD, LOOK], tool_choice=choice)
    assert answer["finish_reason"] == reason == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == message.tool_calls[0].function.name == name
    arguments = json.loads(call["function"]["arguments"])
    assert isinstance(arguments, dict)
    if name == "add":
        assert arguments["a"] in {1, 2}
        assert arguments["b"] == 3


def test_strict_tools_and_formats_bind_the_answer() -> None:
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "fine"}}}
    with live(says("x"), chat_template=HERMES) as server:
        server.chat(tools=[ADD])
        server.chat(tools=[strict])
        answer = server.chat(tools=[ADD], response_format=schema).json()["choices"][0]
        server.chat(tools=[ADD], response_format={"type": "json_object"}, max_tokens=5)
    assert [submission.params.grammar is None for submission in server.engine.submissions] == [
        True,
        False,
        False,
        False,
    ]
    assert answer["message"].get("tool_calls") or json.loads(answer["message"]["content"]) == "fine"


BACK = [
    *HELLO,
    {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1,  "b":3}'}},
        {"id": "call_2", "index": 1, "function": {"name": "look", "arguments": ""}},
    ]},
    {"role": "tool", "tool_call_id": "call_1", "content": "4", "name": "add"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "seen"}]},
]  # fmt: skip


def test_calls_and_results_of_earlier_turns_reach_the_model() -> None:
    with live(says("4"), chat_template=HERMES) as server:
        answer = server.chat(messages=BACK, tools=[ADD, LOOK])
        assert answer.json()["choices"][0]["message"]["content"] == "4"
        prompt = prompt_of(server)
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 3}}\n</tool_call>' in prompt
    assert '{"name": "look", "arguments": {}}' in prompt
    assert f"<|im_start|>tool\n4 for call_1{END}\n<|im_start|>tool\nseen for call_2{END}\n" in prompt


def with_arguments(text: str) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": text}}
    return [*HELLO, {"role": "assistant", "tool_calls": [call]}]


@pytest.mark.parametrize(
    "text", ['{"a":' * 5000 + "1" + "}" * 5000, "[" * 100_000, '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "[1]"]
)
def test_arguments_are_read_as_strictly_as_requests(text: str) -> None:
    with live(says("4"), chat_template=HERMES) as server:
        param, message = refusal(server, messages=with_arguments(text))
    assert param == "messages[1].tool_calls[0].function.arguments"
    assert "is not a JSON object as text" in message


def test_arguments_keep_the_numbers_that_fit() -> None:
    with live(says("4"), chat_template=HERMES) as server:
        text = f'{{"a": {2**64 - 1}, "b": {-(2**63)}, "c": {10**30}}}'
        assert server.chat(messages=with_arguments(text)).status_code == 200
        assert f'{{"a": {2**64 - 1}, "b": {-(2**63)}, "c": 1e+30}}' in prompt_of(server)


def test_templates_that_append_arguments_get_them_as_text() -> None:
    with live(says("4"), chat_template=APPENDS) as server:
        assert server.chat(messages=BACK).status_code == 200
        assert 'call {"a": 1, "b": 3}' in prompt_of(server)


def test_what_a_template_does_not_read_is_refused() -> None:
    with live(says("x")) as server:
        assert refusal(server, tools=[ADD]) == (
            "tools",
            "tools: this model's chat template does not read tools; leave them out",
        )
        assert server.chat(tools=[ADD], tool_choice="none").status_code == 200
        assert refusal(server, messages=BACK)[0] == "messages[1].tool_calls"
        assert refusal(server, messages=[*HELLO, BACK[2]])[0] == "messages[1].role"
    with live(says("x"), chat_template=BARE) as server:
        assert "--tool-parser" in refusal(server, tools=[ADD])[1]
        assert server.chat(tools=[ADD], tool_choice="none").status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice", "send tools to choose from"),
        ({"tool_choice": "always", "tools": [ADD]}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [ADD]}, "tool_choice", "not among"),
        ({"tools": [ADD, ADD]}, "tools", "same name"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "'function'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [LOOK] * 129}, "tools", "at most 128"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}],
          "tool_choice": "required"}, "tools", "cannot be used"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
        ({"messages": [{**BACK[1], "tool_calls": [{"id": "1", "type": "function",
          "function": {"name": "f", "arguments": "[1]"}}]}]},
         "messages[0].tool_calls[0].function.arguments", "JSON object"),
    ],
)  # fmt: skip
def test_mistakes_are_named(body: dict[str, Any], param: str | None, message: str) -> None:
    with live(says("x"), chat_template=HERMES) as server:
        found = refusal(server, **body)
    assert found[0] == param
    assert message in found[1]


def test_tools_that_ask_for_nothing_are_accepted() -> None:
    with live(says("x")) as server:
        for body in ({"tools": []}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": True}):
            assert server.chat(tools=body.pop("tools", None), **body).status_code == 200


def test_template_variables_can_be_set() -> None:
    with live(says("x"), chat_template=HERMES) as server:
        assert server.chat(chat_template_kwargs={"thinking": False}).status_code == 200
        assert prompt_of(server).endswith("assistant\nno ")
        assert server.chat(chat_template_kwargs={}).status_code == 200
        assert prompt_of(server).endswith("assistant\n")
        for name in ("messages", "tools", "add_generation_prompt", "frobnicate", "tokenize"):
            param, message = refusal(server, chat_template_kwargs={name: []})
            assert param == "chat_template_kwargs"
            assert message.endswith("set are: thinking")


def test_reasoning_effort_is_a_template_variable_or_nothing() -> None:
    with live(says("x"), chat_template=TURNS + "{{ reasoning_effort }}") as server:
        assert server.chat(reasoning_effort="low").status_code == 200
        assert prompt_of(server).endswith("low")
    with live(says("x")) as server:
        assert server.chat(reasoning_effort="none").status_code == 200
        assert refusal(server, reasoning_effort="low")[0] == "reasoning_effort"


def test_reasoning_effort_switches_where_the_template_has_no_more_than_a_switch() -> None:
    with live(says("x"), chat_template=TURNS, chat_template_kwargs={"thinking": False}) as server:
        for body, is_off in (
            ({}, True),
            ({"reasoning_effort": "low"}, False),
            ({"reasoning_effort": "none"}, True),
            ({"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}}, False),
        ):
            assert server.chat(**body).status_code == 200
            assert prompt_of(server).endswith("no ") == is_off
        for effort, is_off in (("none", True), ("high", False)):
            body = {"input": "a", "reasoning": {"effort": effort}}
            assert server.http.post("/v1/responses", json=body).json()["reasoning"]["effort"] == effort
            assert prompt_of(server).endswith("no ") == is_off


def test_the_last_message_can_be_continued() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "it is m "}]
    with live(says("x")) as server:
        assert server.chat(messages=messages, continue_final_message=True).status_code == 200
        assert prompt_of(server) == f"<|im_start|>user\nhello{END}\n<|im_start|>assistant\nit is m "
        assert server.chat(messages=messages, add_generation_prompt=False).status_code == 200
        assert prompt_of(server).endswith(f"it is m {END}\n")
        both = {"continue_final_message": True, "add_generation_prompt": True}
        assert "exclude each other" in refusal(server, messages=messages, **both)[1]
        assert "must be the assistant's" in refusal(server, continue_final_message=True)[1]
        asked = {"messages": messages, "continue_final_message": True}
        assert server.http.post("/tokenize", json=asked).json()["tokens"] == ids(prompt_of(server, 0))
    with live(says("x"), chat_template="{% for m in messages %}{{ m.content | upper }}{% endfor %}") as server:
        assert "cannot end in a message" in refusal(server, messages=messages, continue_final_message=True)[1]


REASONS = HERMES + "{# <think></think> #}{% if add_generation_prompt and thinking %}<think>\n{% endif %}"
THOUGHT = f"I look.\n</think>\n\nWell. {CALL}"


def test_reasoning_is_a_field_of_its_own() -> None:
    opened: Any = {"chat_template_kwargs": {"thinking": True}}
    with live(says(THOUGHT), chat_template=REASONS) as server:
        answer = server.chat(tools=[ADD], **opened).json()
        message, usage = answer["choices"][0]["message"], answer["usage"]
        assert message["reasoning"] == message["reasoning_content"] == "I look."
        assert message["content"] == "Well. "
        assert message["tool_calls"][0]["function"]["name"] == "add"
        num_reasoning = len(ids("I look.\n</think>"))
        assert usage["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}
        with_usage: Any = {"stream_options": {"include_usage": True}, "extra_body": opened}
        message, reason, events = streamed(server, tools=[ADD], **with_usage)
        deltas = [event.choices[0].delta.model_dump() for event in events if event.choices]
        assert "".join(delta.get("reasoning") or "" for delta in deltas) == "I look."
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "I look."
        assert len([delta for delta in deltas if delta.get("reasoning")]) > 1, "it comes as it is written"
        assert (message.content, reason, functions_of(message)) == ("Well. ", "tool_calls", EXPECTED[:1])
        assert events[-1].usage.completion_tokens_details.reasoning_tokens == num_reasoning
        hidden = server.chat(tools=[ADD], include_reasoning=False, **opened).json()["choices"][0]["message"]
        assert "reasoning" not in hidden
        assert hidden["content"] == "Well. "
        whole = server.chat(separate_reasoning=False, **opened).json()["choices"][0]["message"]
        assert whole["content"] == THOUGHT
        cut = server.chat(max_tokens=3, **opened).json()["choices"][0]
        assert (cut["message"]["content"], cut["finish_reason"]) == (None, "length")
        plain = server.chat().json()["choices"][0]["message"]  # the prompt opens no reasoning
        assert plain["content"].startswith("I look.")
    with live(says(f"<think>a</think>{CALL}"), chat_template=HERMES, reasoning_parser="qwen3") as server:
        assert server.chat().json()["choices"][0]["message"]["reasoning"] == "a"


def test_the_operator_may_say_what_a_template_does_not() -> None:
    call = "[add(a=1, b=3)]"
    with live(says(call), chat_template=BARE, tool_parser="pythonic") as server:
        (found,) = server.chat(tools=[ADD]).json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(found["function"]["arguments"]) == {"a": 1, "b": 3}
    with pytest.raises(UserError, match="--tool-parser is 'x': the formats it knows are"):
        ServerSettings(tool_parser="x")


MINIMAX = BARE + "{# <minimax:tool_call> </think> #}"


def test_minimax_calls_are_read_and_forced() -> None:
    call = '<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n'
    call = f"<minimax:tool_call>\n{call}</minimax:tool_call>"
    with live(says(f"hm</think>\n\n{call}"), chat_template=MINIMAX, reasoning_parser="minimax_m2") as server:
        message = server.chat(tools=[ADD]).json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("hm", None)
        assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    with live(says("x"), chat_template=MINIMAX) as server:
        forced = server.chat(tools=[ADD], tool_choice="required", max_tokens=200).json()["choices"][0]
    arguments = json.loads(forced["message"]["tool_calls"][0]["function"]["arguments"])
    assert arguments["a"] in {1, 2}
    assert arguments["b"] == 3


def test_a_forced_call_that_is_cut_off_leaves_no_marks_in_the_text() -> None:
    with live(says("no"), chat_template=HERMES) as server:
        for max_tokens in range(1, 25):
            choice = server.chat(tools=[ADD], tool_choice="required", max_tokens=max_tokens).json()["choices"][0]
            assert not choice["message"]["content"], choice
            assert choice["finish_reason"] == "length"


FORMATS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"json": {"enum": ["yes"]}}}, '"yes"'),
    ({"structured_outputs": {"choice": ["yes", "yes!"]}}, "yes"),
    ({"structured_outputs": {"regex": "(ab/)+"}}, "ab/"),
    ({"structured_outputs": {"grammar": 'start: "a" b\nb: "/"'}}, "a/"),
    ({"structured_outputs": {"json_object": True}}, "{"),
    ({"guided_json": '{"const": 7}'}, "7"),
    ({"guided_choice": ["x"]}, "x"),
    ({"guided_regex": "x{3}"}, "xxx"),
    ({"guided_grammar": 'root ::= "a" | "a"'}, "a"),
    ({"ebnf": 'root ::= "b"'}, "b"),
    ({"regex": "c"}, "c"),
    ({"json_schema": {"const": 1}}, "1"),
]


UNREADABLE_RULES = (
    "root ::= nothing",
    'a ::= "b"',
    'root ::= "a',
    "root ::= [a-z",
    "::=",
    'root ::= "a"{',
    'root ::= "\\x"',
    "root ::= " + "(" * 5000,
    'root ::= "a"{3,1}',
    'root ::= "a"{99999999999}',
    "root ::= root root",
)


@pytest.mark.parametrize("template", [HERMES, REASONS])
def test_formats_by_all_their_names(template: str) -> None:
    with live(says("?"), chat_template=template) as server:
        for body, expected in FORMATS:
            text = server.chat(max_tokens=40, **body).json()["choices"][0]["message"]
            if template == HERMES:
                assert (text["content"] or "").startswith(expected), body
            text = server.complete(max_tokens=40, **body).json()["choices"][0]["text"]
            assert text.startswith(expected), body
        same = {"guided_grammar": 'root ::= "b"', "structured_outputs": {"grammar": 'root ::= "b"'}}
        named = server.chat(guided_decoding_backend="guidance", max_completion_tokens=3, max_tokens=3, **same)
        assert named.status_code == 200, "clients of several servers say it by several names"
        for body, param in (
            ({"structured_outputs": {}}, "structured_outputs"),
            ({"max_completion_tokens": 3, "max_tokens": 4}, "max_tokens"),
            ({"guided_json": "no"}, "guided_json"),
            ({"regex": "(", "max_tokens": 3}, "regex"),
            ({"regex": "a", "ebnf": 'root ::= "b"'}, "ebnf"),
            ({"guided_grammar": "start: nothing"}, "guided_grammar"),
            *(({"guided_grammar": rules}, "guided_grammar") for rules in UNREADABLE_RULES),
            ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ):
            assert refusal(server, **body)[0] == param


def test_a_schema_of_a_tool_that_cannot_be_enforced_is_named_without_our_rules() -> None:
    wrong = {
        'Unimplemented keys: ["uniqueItems"]: leave them out': {"type": "array", "uniqueItems": True},
        "regex parse error: ^(?!a)b ^^^ error: look-around, including look-ahead and look-behind, is not supported": {
            "type": "string",
            "pattern": "^(?!a)b",
        },
        "oneOf constraints are not supported: use anyOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    }
    with live(says("?"), chat_template=HERMES) as server:
        for reason, schema in wrong.items():
            own = {"type": "object", "properties": {"a": schema}}
            tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": own}}
            param, message = refusal(server, tools=[tool], tool_choice="required")
            assert param == "tools"
            assert message == f"the grammar cannot be used: a JSON schema in it: {reason}"


def test_an_answer_that_follows_a_format_may_think_first() -> None:
    opened: Any = {"chat_template_kwargs": {"thinking": True}}
    with live(says("x"), chat_template=REASONS) as server:
        server.chat(guided_choice=["yes"], max_tokens=5, **opened)
        grammar = server.engine.submissions[-1].params.grammar
        assert grammar is not None
        matcher = small_grammars().matcher(grammar)
        assert all(map(matcher.accept, [*ids("a {thought}\n</think>\n\nyes"), eos_id()]))
        assert refusal(server, thinking_token_budget=5)[1].endswith("</think> is not one token of this model")
    with live(says("x"), chat_template=HERMES) as server:
        assert "marks no reasoning" in refusal(server, thinking_token_budget=5)[1]
