"""OpenAI's Responses API: with its own client, what requests mean to the model, and what is kept."""

import json
import time
from typing import Any

import pytest

from antiphon.serve.api.context import ResponseStore
from antiphon.serve.api.errors import ApiError, bad_request, in_client_words
from tests.serve.api_harness import Live, fake_engine, ids, live, small_tokenizer
from tests.serve.test_api_tools import HERMES, says

LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "parameters": {
        "type": "object",
        "properties": {"at": {"type": "string"}},
        "required": ["at"],
        "additionalProperties": False,
    },
    "strict": False,
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sky"}}\n</tool_call>'


def send(server: Live, **body: Any) -> Any:
    return server.http.post("/v1/responses", json={"input": "hello", "max_output_tokens": 150, **body})


def prompt_of(server: Live, number: int = -1) -> str:
    token_ids = server.engine.submissions[number].prompt_token_ids
    return small_tokenizer().decode(token_ids, skip_special_tokens=False)


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """What two answers to one question share."""
    items = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]]
    return response | {"output": items, "id": "", "created_at": 0}


def test_a_text_is_answered_and_streamed_alike() -> None:
    with live(says("Grüß Gott")) as server:
        whole = server.openai.responses.create(model="fake-moe", input="hello", instructions="be kind")
        events = list(
            server.openai.responses.create(model="fake-moe", input="hello", instructions="be kind", stream=True)
        )
        assert prompt_of(server, 0).startswith("<|im_start|>system\nbe kind")
        num_prompt = len(server.engine.submissions[0].prompt_token_ids)
    assert whole.output_text == "Grüß Gott"
    assert (whole.status, whole.object, whole.error) == ("completed", "response", None)
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (num_prompt, len(ids("Grüß Gott")) + 1)
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Grüß Gott"
    assert events[-1].type == "response.completed"
    assert without_ids(events[-1].response.model_dump()) == without_ids(whole.model_dump())


def test_the_clients_own_reading_of_a_stream_agrees() -> None:
    with live(says(f"Well.{CALL}"), chat_template=HERMES) as server:
        with server.openai.responses.stream(model="fake-moe", input="hello", tools=[LOOK]) as stream:  # type: ignore[list-item]
            for _ in stream:
                pass
            final = stream.get_final_response()
        whole = server.openai.responses.create(model="fake-moe", input="hello", tools=[LOOK])  # type: ignore[list-item]
    for response in (final, whole):
        text, call = response.output
        assert text.type == "message"
        assert response.output_text == "Well."
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments), call.status) == ("look", {"at": "the sky"}, "completed")


def test_an_agent_sends_everything_back() -> None:
    with live(says(f"Well.{CALL}"), chat_template=HERMES) as server:
        first = send(server, tools=[LOOK], store=False).json()
        call = first["output"][-1]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "blue"}
        turns = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}, *first["output"], output]
        assert send(server, input=turns, tools=[LOOK], store=False).status_code == 200
        prompt = prompt_of(server)
    assert "Looks." in prompt
    assert prompt.index("hello") < prompt.index("Well.") < prompt.index('"at": "the sky"') < prompt.index("blue")
    assert prompt.count("<|im_start|>assistant") == 2


def test_an_answer_is_gone_on_from_until_it_is_forgotten() -> None:
    with live(says("yes"), chat_template=HERMES) as server:
        first = send(server, instructions="be kind").json()
        second = send(server, input="and then?", previous_response_id=first["id"]).json()
        assert prompt_of(server).count("<|im_end|>") == 3
        assert "be kind" not in prompt_of(server)
        assert second["previous_response_id"] == first["id"]
        with server.openai.responses.create(
            model="fake-moe", input="so?", previous_response_id=second["id"], stream=True
        ) as stream:
            third = next(event.response for event in stream if event.type == "response.completed")
        assert prompt_of(server).count("<|im_end|>") == 5
        assert server.openai.responses.retrieve(third.id).output_text == "yes"
        server.openai.responses.delete(third.id)
        gone = send(server, previous_response_id=third.id)
        assert (gone.status_code, gone.json()["error"]["code"]) == (400, "previous_response_not_found")
        assert server.http.get(f"/v1/responses/{third.id}").status_code == 404
        unkept = send(server, store=False).json()
        assert send(server, previous_response_id=unkept["id"]).status_code == 400


def test_items_of_kept_answers_are_referred_to() -> None:
    with live(says(f"Well.{CALL}"), chat_template=HERMES, api_keys=("one", "two")) as server:
        first = send(server, tools=[LOOK]).json()
        text, call = ({"type": "item_reference", "id": item["id"]} for item in first["output"])
        user = {"role": "user", "content": "hello"}
        output = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "blue"}
        assert send(server, input=[user, text, call, output], tools=[LOOK]).status_code == 200
        referred = prompt_of(server)
        assert send(server, input=[user, *first["output"], output], tools=[LOOK]).status_code == 200
        assert referred == prompt_of(server)
        assert "Well." in referred
        again = send(server, input=[user, text, text]).json()["error"]
        assert (again["param"], "send it once" in again["message"]) == ("input[2]", True)
        other = {"authorization": "Bearer two"}
        body = {"input": [user, text], "max_output_tokens": 1}
        assert server.http.post("/v1/responses", json=body, headers=other).status_code == 400
        server.openai.responses.delete(first["id"])
        gone = send(server, input=[user, text]).json()["error"]
        assert (gone["param"], "send the item itself" in gone["message"]) == ("input[1]", True)


def test_an_answer_in_the_background_is_asked_for_later() -> None:
    with live(says("yes")) as server:
        server.engine.hold_after_tokens = 1
        queued = send(server, background=True).json()
        assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
        assert server.openai.responses.retrieve(queued["id"]).status == "in_progress"
        early = send(server, previous_response_id=queued["id"])
        assert (early.status_code, early.json()["error"]["param"]) == (400, "previous_response_id")
        server.engine.release()
        answer = finished(server, queued["id"])
        assert (answer["status"], answer["output"][0]["content"][0]["text"]) == ("completed", "yes")
        assert server.openai.responses.cancel(queued["id"]).status == "completed"  # there is nothing to end
        assert send(server, input="so?", previous_response_id=queued["id"]).status_code == 200
        assert server.http.get("/load").json() == {"server_load": 0}


def test_an_answer_in_the_background_is_cancelled_or_fails() -> None:
    with live(says("yes and no")) as server:
        server.engine.hold_after_tokens = 2
        queued, deleted = (send(server, background=True).json()["id"] for _ in range(2))
        assert server.openai.responses.cancel(queued).status == "cancelled"
        assert server.openai.responses.retrieve(queued).status == "cancelled"
        server.openai.responses.delete(deleted)
        assert server.http.get(f"/v1/responses/{deleted}").status_code == 404
        assert all(submission.aborted for submission in server.engine.submissions)
        server.engine.hold_after_tokens, server.engine.fail_after_tokens = None, 1
        failed = finished(server, send(server, background=True).json()["id"])
        assert failed["status"] == "failed"
        assert "lost experts[1]" in failed["error"]["message"]
        server.engine.fail_after_tokens = None
        waited_for = send(server).json()["id"]
        refused = server.http.post(f"/v1/responses/{waited_for}/cancel")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_id")
        assert server.http.post("/v1/responses/resp-0/cancel").status_code == 404
        assert server.http.get("/load").json() == {"server_load": 0}


def finished(server: Live, response_id: str) -> dict[str, Any]:
    """The answer once it is no longer made."""
    deadline_s = time.monotonic() + 30
    while True:
        answer: dict[str, Any] = server.http.get(f"/v1/responses/{response_id}").json()
        if answer["status"] not in ("queued", "in_progress"):
            return answer
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_prompt_and_answer_are_reported_as_the_model_has_them() -> None:
    with live(says("yes")) as server:
        answer = send(server, enable_response_messages=True).json()
        (read,), (written,) = answer["input_messages"], answer["output_messages"]
        assert (read["message"], read["tokens"]) == (prompt_of(server), server.engine.submissions[0].prompt_token_ids)
        assert (written["type"], written["message"]) == ("raw_message_tokens", "yes<|im_end|>")
        assert written["tokens"][:-1] == ids("yes")
        assert "input_messages" not in send(server).json()


def test_functions_of_a_namespace_have_two_names() -> None:
    look = {"type": "namespace", "name": "eyes", "tools": [LOOK]}
    call = CALL.replace('"look"', '"eyes__look"')
    with live(says(f"Well.{call}"), chat_template=HERMES) as server:
        answer = send(server, tools=[look]).json()
        assert '"name": "eyes__look"' in prompt_of(server)
        item = answer["output"][1]
        assert (item["name"], item["namespace"], item["arguments"]) == ("look", "eyes", '{"at": "the sky"}')
        with server.openai.responses.stream(model="fake-moe", input="hello", tools=[look]) as stream:  # type: ignore[list-item]
            added = next(
                event.item for event in stream if event.type == "response.output_item.added" and event.output_index
            )
        assert (added.name, added.namespace) == ("look", "eyes")  # type: ignore[union-attr]
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "blue"}
        send(server, input=[{"role": "user", "content": "hello"}, *answer["output"], result], tools=[look])
        assert prompt_of(server).count("eyes__look") == 2
        send(server, input=[result], previous_response_id=answer["id"], tools=[look])
        assert prompt_of(server).count("eyes__look") == 2
        nested = send(server, tools=[look | {"tools": [{"type": "web_search"}]}]).json()["error"]
        assert (nested["param"], "no built-in tools" in nested["message"]) == ("tools[0].tools[0]", True)


def test_one_client_does_not_see_anothers_answers() -> None:
    with live(fake_engine(), api_keys=("one", "two")) as server:
        kept = send(server, max_output_tokens=1).json()
        other = {"authorization": "Bearer two"}
        assert server.http.get(f"/v1/responses/{kept['id']}").status_code == 200
        assert server.http.get(f"/v1/responses/{kept['id']}", headers=other).status_code == 404


def test_the_store_keeps_the_newest_within_its_limit() -> None:
    store = ResponseStore(max_bytes=1000)
    for number in range(10):
        store.add("a", [], {"id": f"r{number}", "text": "x" * 200})
    kept = [number for number in range(10) if store.get("a", f"r{number}")]
    assert kept == [6, 7, 8, 9]
    store.add("a", [], {"id": "large", "text": "x" * 2000})
    assert store.get("a", "large") is None
    assert store.get("a", "r9") is not None
    assert store.get("b", "r9") is None
    assert not store.remove("b", "r9")
    store.add("b", [], {"id": "r9", "text": "of another"})  # a client may choose its ids
    assert store.get("a", "r9").response["text"] == "x" * 200  # type: ignore[union-attr]


def test_output_follows_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    with live(fake_engine()) as server:
        answer = send(server, text={"format": form}).json()
    assert json.loads(answer["output"][0]["content"][0]["text"]) == {"a": 1}
    assert answer["text"]["format"] == form


def test_what_was_cut_off_is_incomplete_and_logprobs_come_when_they_are_included() -> None:
    with live(says("one two three")) as server:
        body = {"max_output_tokens": 2, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
        answer = send(server, **body).json()
        assert server.engine.submissions[0].params.logprobs == 2
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    (part,) = answer["output"][0]["content"]
    assert len(part["logprobs"]) == 2
    assert len(part["logprobs"][0]["top_logprobs"]) == 2


def test_the_oldest_turns_are_left_out_when_asked_for(server: Live) -> None:
    turns = [
        {"role": role, "content": f"{number} " + "long words here " * 6}
        for number in range(5)
        for role in ("user", "assistant")
    ]
    turns.append({"role": "user", "content": "last"})
    refused = send(server, input=turns, max_output_tokens=50)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    answer = send(server, input=turns, max_output_tokens=50, truncation="auto", instructions="be kind")
    assert answer.status_code == 200
    assert "be kind" in prompt_of(server)
    assert "last" in prompt_of(server)
    assert "0 long" not in prompt_of(server)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "of type 'web_search': this server has no built-in tools"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0]", "it is of type 'computer_call'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]",
         "it is of type 'input_image': this server reads text only"),
        ({"include": ["file_search_call.results"]}, "include[0]", "reasoning.encrypted_content"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": ""}] * 129}, "input", "128"),
        ({"background": True, "store": False}, "background", "only be used when `store` is true"),
        ({"background": True, "stream": True}, "background", "not streamed"),
        ({"tool_choice": "required"}, "tool_choice", "send tools"),
        ({"tool_choice": {"named": "x"}}, "tool_choice.type", "tool_choice.type is missing"),
        ({"tool_choice": {"type": "allowed_tools", "allowed": 1}}, "tool_choice.mode", "tool_choice.mode is missing"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id", "input[0].id is missing"),
        ({"input": [{"message": 1}]}, "input[0].role", "input[0].role is missing"),
        ({"input": "x" * 100_000}, "input", "shorten it"),
        ({"messages": []}, "messages", "unknown parameter"),
    ],
)  # fmt: skip
def test_mistakes_are_named(server: Live, body: dict[str, Any], param: str, message: str) -> None:
    response = send(server, **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def call_item(number: int, **changes: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}", **changes}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [{"role": "user", "content": "x"}, call_item(0), call_item(1, arguments="[1]")]},
         "input[2].arguments"),
        ({"input": [{"role": "user", "content": "x"}, call_item(0, arguments="[1]")], "instructions": "be kind"},
         "input[1].arguments"),
        ({"tools": [{"type": "function", "name": "f"}, {"type": "namespace", "name": "n", "tools": [
            {"type": "function", "name": "x" * 100}, {"type": "function", "name": "x" * 128}]}]},
         "tools[1].tools[1].name"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}}, "text.format"),
    ],
)  # fmt: skip
def test_refusals_of_the_chat_name_what_the_client_sent(body: dict[str, Any], param: str) -> None:
    with live(says("yes"), chat_template=HERMES) as server:
        response = send(server, **body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        words = ("messages", "tool_calls", ".function", "max_tokens", "response_format")
        assert not any(word in error["message"] for word in words)


def test_refusals_of_kept_turns_name_the_answer_they_are_of() -> None:
    names: dict[str, str] = {"messages[0]": "previous_response_id", "messages[1]": "input[0]"}
    with pytest.raises(ApiError) as caught, in_client_words(names):
        raise bad_request("messages[0].content has 3 messages in 'messages[1]'", param="messages[0].content")
    assert caught.value.param == "previous_response_id.content"
    assert caught.value.message == "previous_response_id.content has 3 messages in 'messages[1]'"


def test_an_answer_that_was_cut_within_a_call_cannot_be_gone_on_from() -> None:
    with live(says(CALL), chat_template=HERMES) as server:
        cut = send(server, tools=[LOOK], max_output_tokens=len(ids(CALL)) - 20).json()
        assert (cut["status"], cut["output"][-1]["type"]) == ("incomplete", "function_call")
        error = send(server, tools=[LOOK], previous_response_id=cut["id"]).json()["error"]
        assert error["param"] == "previous_response_id"
        assert "has a call of look whose arguments are no JSON object" in error["message"]
        whole = send(server, tools=[LOOK]).json()
        assert send(server, tools=[LOOK], previous_response_id=whole["id"]).status_code == 200


def test_tokens_are_counted_as_they_are_sent() -> None:
    with live(says("x"), chat_template=HERMES) as server:
        first = send(server, input="a", tools=[LOOK]).json()["id"]
        asked = {"input": "b", "previous_response_id": first, "tools": [LOOK], "instructions": "be kind"}
        counted = server.openai.responses.input_tokens.count(model="fake-moe", **asked)
        send(server, **asked)
        assert counted.input_tokens == len(server.engine.submissions[-1].prompt_token_ids)
        long = server.http.post("/v1/responses/input_tokens", json={"input": "x" * 100_000})
    assert (long.status_code, long.json()["error"]["param"]) == (400, "input")


def test_a_kept_answer_is_not_streamed(server: Live) -> None:
    path = f"/v1/responses/{send(server).json()['id']}"
    assert server.http.get(path, params={"stream": "false"}).status_code == 200
    refused = server.http.get(path, params={"stream": "true"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")


def test_nulls_in_items_mean_nothing(server: Live) -> None:
    """As clients write out the objects that they hold."""
    part = {"type": "output_text", "text": "b", "annotations": None, "logprobs": None, "refusal": None, "parsed": {}}
    items = [
        {"type": None, "id": None, "role": "user", "content": "a", "status": None, "phase": None},
        {"type": "reasoning", "summary": None, "content": None, "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": [part | {"new": None}], "new": None},
        {"role": "user", "content": "c"},
    ]
    assert send(server, input=items).status_code == 200


def test_a_failure_on_the_way_is_an_event() -> None:
    engine = fake_engine()
    engine.fail_after_tokens = 2
    with live(engine) as server:
        events = list(server.openai.responses.create(model="fake-moe", input="x", stream=True, max_output_tokens=5))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert "lost experts[1]" in events[-1].response.error.message


def test_reasoning_is_an_item_and_comes_back() -> None:
    template = HERMES.replace("{{ message['content'] }}", "{{ message.reasoning_content }}{{ message['content'] }}")
    template += "{# <think> </think> #}"
    with live(says("<think>hm</think>yes"), chat_template=template) as server:
        whole = server.openai.responses.create(
            model="fake-moe", input="hello", store=False, include=["reasoning.encrypted_content"]
        )
        events = [event.type for event in server.openai.responses.create(model="fake-moe", input="hello", stream=True)]
        reasoning, message = (item.model_dump(exclude_none=True) for item in whole.output)
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
        assert message["content"][0]["text"] == "yes"
        for form in (reasoning, {key: item for key, item in reasoning.items() if key != "content"}):
            turns = [{"role": "user", "content": "hello"}, form, message, {"role": "user", "content": "so?"}]
            assert send(server, input=turns).status_code == 200
            assert "hmyes" in prompt_of(server)
    assert [kind for kind in events if kind.startswith("response.reasoning_text")][-1] == "response.reasoning_text.done"
    assert events.count("response.output_item.done") == 2
