"""What stock clients need beside answers: ids, several names, pages of other origins, probes, the tokenizer."""

import asyncio
import json
from datetime import datetime
from typing import Any

import httpx
import pytest
from openai.types import Completion, ErrorObject
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from antiphon.base.errors import UserError
from antiphon.serve.api.server import create_app
from antiphon.serve.api.settings import ServerSettings
from antiphon.serve.text.tokenizer import TextTokenizer
from tests.serve.api_harness import CHAT_TEMPLATE, Live, fake_engine, ids, live, says, small_tokenizer
from tests.serve.test_api_responses import CALL
from tests.serve.test_api_tools import HERMES

HELLO = [{"role": "user", "content": "hello"}]


def own_tokenizer() -> TextTokenizer:
    """One that a test may change."""
    return TextTokenizer(small_tokenizer().backend, CHAT_TEMPLATE, {"eos_token": "<|im_end|>"})


def test_a_request_has_one_id_for_client_answer_and_engine(server: Live) -> None:
    headers = {"x-request-id": "trace-7"}
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HELLO})):
        twice = [server.http.post(path, json={"max_tokens": 1, **body}, headers=headers) for _ in range(2)]
        assert [answer.headers["x-request-id"] for answer in twice] == ["trace-7"] * 2
        assert {answer.json()["id"].partition("-")[2] for answer in twice} == {"trace-7"}
    assert len({submission.request_id for submission in server.engine.submissions}) == 4
    given = server.complete(max_tokens=1)
    assert given.json()["id"] == f"cmpl-{given.headers['x-request-id']}"
    strange = server.http.get("/health", headers={"x-request-id": "a b"})
    assert strange.headers["x-request-id"] != "a b"
    assert server.complete(max_tokens=-1).headers["x-request-id"]  # refusals, too


def test_models_are_described_for_clients_of_both_vendors(server: Live) -> None:
    listed = server.http.get("/v1/models").json()
    (card,) = listed["data"]
    assert card == server.http.get("/v1/models/fake-moe").json()
    assert (card["object"], card["type"], card["display_name"]) == ("model", "model", "fake-moe")
    assert card["lifecycle"] == "active"
    assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]
    assert (card["max_input_tokens"], card["max_tokens"]) == (256, 256)
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "fake-moe", "fake-moe")


STRICT: list[tuple[str, dict[str, Any], Any, Any]] = [
    ("chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 2}, ChatCompletion, ChatCompletionChunk),
    ("completions", {"prompt": "a", "logprobs": 2}, Completion, None),  # it has no type for events of completions
    ("responses", {"input": "hello", "tools": [{"type": "function", "name": "look"}]}, Response, ResponseStreamEvent),
]


@pytest.mark.parametrize(("path", "body", "whole", "event"), STRICT, ids=[case[0] for case in STRICT])
@pytest.mark.parametrize("fails", [False, True])
def test_answers_have_the_types_of_openais_client(
    path: str, body: dict[str, Any], whole: Any, event: Any, fails: bool
) -> None:
    """The client itself takes them for granted."""
    engine = says(f"Well.{CALL}")
    engine.fail_after_tokens = 2 if fails else None
    with live(engine, chat_template=HERMES) as server:
        stream = server.http.post(f"/v1/{path}", json=body | {"stream": True}).text
        answer = server.http.post(f"/v1/{path}", json=body)
    texts = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    for text in texts:
        if text.startswith('{"error":'):
            TypeAdapter(ErrorObject).validate_python(json.loads(text)["error"], strict=True)
        elif event is not None:
            TypeAdapter(event).validate_json(text, strict=True)
    if fails:
        TypeAdapter(ErrorObject).validate_python(answer.json()["error"], strict=True)
        assert "lost experts[1]" in texts[-1]
    else:
        TypeAdapter(whole).validate_json(answer.content, strict=True)


def test_a_prompt_that_is_too_long_is_refused_in_words_that_clients_look_for(server: Live) -> None:
    refused = [
        server.complete(prompt=[7] * 257),
        server.complete(prompt="x" * 100_000),
        server.complete(max_tokens=256),
        server.chat(messages=[{"role": "user", "content": "x" * 3000}]),
    ]
    for response in refused:
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "this model's maximum context length is 256 tokens" in error["message"]


def test_pages_of_other_origins_may_use_the_server_when_they_are_named() -> None:
    page = "https://chat.example.com"
    asks = {"origin": page, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with live(fake_engine(), cors_origins=(page,), api_keys=("secret",)) as server:
        preflight = server.http.options("/v1/chat/completions", headers=asks | {"authorization": ""})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == page
        outside = asks | {"access-control-request-private-network": "true"}
        assert server.http.options("/v1/messages", headers=outside).status_code == 200
        forgets = asks | {"access-control-request-method": "DELETE"}
        assert server.http.options("/v1/responses/resp-1", headers=forgets).status_code == 200
        answer = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"origin": page})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, page)
        unknown = server.http.get("/v1/models", headers={"authorization": "", "origin": page})
        assert (unknown.status_code, unknown.headers["access-control-allow-origin"]) == (401, page)
        other = {"origin": "https://evil.example"}
        refused = server.http.post("/v1/completions", json={"prompt": "a"}, headers=other)
        assert (refused.status_code, refused.headers.get("access-control-allow-origin")) == (403, None)
        assert "--cors-origin" in refused.json()["error"]["message"]
    with pytest.raises(UserError, match=r"--cors-origin 'chat.example.com' is no origin"):
        ServerSettings(cors_origins=("chat.example.com",))


def test_probes_say_that_the_server_answers_and_how_much_it_does(server: Live) -> None:
    assert server.http.get("/ping").status_code == 200
    assert server.http.get("/load").json() == {"server_load": 0}
    server.engine.hold_after_tokens = 0
    with server.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}):
        assert server.http.get("/load").json() == {"server_load": 1}
        server.engine.release()


def test_the_tokenizer_describes_itself() -> None:
    with live(fake_engine(), tokenizer=own_tokenizer()) as server:
        info = server.http.get("/tokenizer_info").json()
    assert info["chat_template"] == CHAT_TEMPLATE
    assert info["special_tokens"] == {"eos_token": "<|im_end|>"}
    (end,) = ids("<|im_end|>")
    assert info["added_tokens_decoder"][str(end)]["content"] == "<|im_end|>"


def test_token_strings_are_those_of_the_vocabulary(server: Live) -> None:
    answer = server.http.post("/tokenize", json={"prompt": "a bü", "return_token_strs": True}).json()
    backend = small_tokenizer().backend
    assert answer["token_strs"] == [backend.id_to_token(token_id) for token_id in answer["tokens"]]
    assert any("Ġ" in token for token in answer["token_strs"])


def test_another_template_and_its_variables_may_be_given_at_the_start() -> None:
    template = "{{ mood }}{{ messages[-1]['content'] }}"
    settings: dict[str, Any] = {"own_chat_template": template, "chat_template_kwargs": {"mood": "calm "}}
    with live(fake_engine(), tokenizer=own_tokenizer(), **settings) as server:
        server.chat(max_tokens=1)
        server.chat(max_tokens=1, chat_template_kwargs={"mood": "wild "})
        prompts = [submission.prompt_token_ids for submission in server.engine.submissions]
    assert prompts == [ids("calm hello"), ids("wild hello")]
    with pytest.raises(UserError, match=r"--chat-template-kwargs sets 'mood'"):
        create_app(fake_engine(), own_tokenizer(), ServerSettings(chat_template_kwargs={"mood": "calm"}))


def test_an_operator_may_want_ids_and_usage_in_all_answers_behind_a_path() -> None:
    options = {"return_tokens_as_token_ids": True, "force_include_usage": True, "root_path": "/models/a"}
    with live(fake_engine(), api_keys=("secret",), **options) as server:
        for path in ("/v1/completions", "/models/a/v1/completions"):
            answer = server.http.post(path, json={"prompt": "a", "max_tokens": 2, "logprobs": 1})
            assert answer.json()["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
            assert server.http.post(path, json={"prompt": "a"}, headers={"authorization": ""}).status_code == 401
        plain = server.complete(max_tokens=2, logprobs=1, return_tokens_as_token_ids=False).json()
        assert not plain["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
        events = list(server.openai.completions.create(model="fake-moe", prompt="a", max_tokens=2, stream=True))
        assert all(event.usage is not None for event in events)
        assert not events[-1].choices
        description = server.http.get("/models/a/openapi.json").json()
        assert description["servers"] == [{"url": "/models/a"}]
        assert server.http.get("/models/ab/v1/models").status_code == 404
    for wrong in ("models", "/models/", "/a b"):
        with pytest.raises(UserError, match="--root-path"):
            ServerSettings(root_path=wrong)


def test_the_token_itself_is_the_first_of_its_alternatives(server: Live) -> None:
    choice = server.complete(max_tokens=3, logprobs=2, echo=True, return_tokens_as_token_ids=True).json()["choices"][0]
    tops = choice["logprobs"]["top_logprobs"][1:]
    assert [next(iter(top)) for top in tops] == choice["logprobs"]["tokens"][1:]


def test_a_message_that_is_gone_on_with_can_stand_before_the_answer() -> None:
    chat = {
        "messages": [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": 'I "think'}]}],
        "continue_final_message": True,
    }
    with live(says(" so")) as server:
        for echo, text in ((True, 'I "think so'), (None, " so")):
            whole = server.chat(**chat, echo=echo).json()["choices"][0]["message"]["content"]
            events = server.openai.chat.completions.create(
                model="fake-moe",
                messages=chat["messages"],  # type: ignore[arg-type]
                extra_body={"continue_final_message": True, "echo": echo},
                stream=True,
            )
            streamed = "".join(event.choices[0].delta.content or "" for event in events)
            assert whole == streamed == text


def test_prompt_logprobs_have_a_place_for_each_token_of_the_prompt(server: Live) -> None:
    chat = server.chat(max_tokens=1, prompt_logprobs=2).json()
    choice = server.complete(max_tokens=1, prompt_logprobs=2, n=2).json()["choices"][1]
    for logprobs, submission in (
        (chat["prompt_logprobs"], server.engine.submissions[0]),
        (choice["prompt_logprobs"], server.engine.submissions[1]),
    ):
        prompt = submission.prompt_token_ids
        assert len(logprobs) == len(prompt)
        assert logprobs[0] is None
        for token_id, entry in zip(prompt[1:], logprobs[1:], strict=True):
            own = entry[str(token_id)]
            assert (own["logprob"], own["rank"]) == (-0.25, 1)
            assert own["decoded_token"] == small_tokenizer().token_string(token_id)
    assert server.complete(prompt_logprobs=1, stream=True).json()["error"]["param"] == "stream"
    assert server.complete(prompt_logprobs=1, echo=True, logprobs=2).json()["error"]["param"] == "prompt_logprobs"
    assert server.complete(logprob_token_ids=[5]).json()["error"]["param"] == "logprob_token_ids"


@pytest.mark.slow
def test_a_thousand_chats_at_once_are_below_the_limits() -> None:
    async def ask(server: Live) -> list[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits, verify=False) as http:
            text = "hello " * 40
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
            answers = await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for _ in range(1000)))
        return [answer.status_code for answer in answers]

    with live(says("a"), max_connections=2000) as server:
        assert set(asyncio.run(ask(server))) == {200}


def test_a_batch_of_chats_is_answered_as_each_alone(server: Live) -> None:
    conversations = [HELLO, [{"role": "user", "content": "another one"}]]
    body: dict[str, Any] = {"max_tokens": 3, "return_token_ids": True, "seed": 4}
    batch = server.http.post("/v1/chat/completions/batch", json={"messages": conversations, **body}).json()
    assert [choice["index"] for choice in batch["choices"]] == [0, 1]
    for choice, messages in zip(batch["choices"], conversations, strict=True):
        alone = server.http.post("/v1/chat/completions", json={"messages": messages, **body}).json()
        assert choice["prompt_token_ids"] == alone["prompt_token_ids"]
        assert choice["message"] == alone["choices"][0]["message"]
    assert batch["usage"]["completion_tokens"] == 6
    for wrong, word in (({"messages": []}, "messages"), ({"messages": conversations, "stream": True}, "stream")):
        refused = server.http.post("/v1/chat/completions/batch", json=wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, word)
    long = server.http.post(
        "/v1/chat/completions/batch", json={"messages": [HELLO, [{"role": "user", "content": "a" * 9999}]]}
    )
    assert "conversation 1" in long.json()["error"]["message"]


def test_invocations_are_chats_or_completions(server: Live) -> None:
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HELLO})):
        asked = {"max_tokens": 2, **body}
        own, other = (server.http.post(each, json=asked).json() for each in (path, "/invocations"))
        assert (own["object"], own["choices"]) == (other["object"], other["choices"])
    refused = server.http.post("/invocations", json={"max_tokens": 2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


def test_a_prompt_is_cut_at_the_side_that_is_named(server: Live) -> None:
    for side, kept in (("left", slice(-2, None)), ("right", slice(0, 2))):
        server.http.post(
            "/v1/completions", json={"prompt": [5, 6, 7, 8], "truncate_prompt_tokens": 2, "truncation_side": side}
        )
        assert server.engine.submissions[-1].prompt_token_ids == [5, 6, 7, 8][kept]


def test_all_wrong_keys_of_a_bias_are_named(server: Live) -> None:
    refused = server.complete(logit_bias={"bad1": 1.0, "2": 1.0, "bad2": 1.0}).json()["error"]
    assert "'bad1', 'bad2'" in refused["message"]


SAID: dict[str, Any] = {"type": "text", "text": "hello", "prompt_cache_breakpoint": {"type": "ephemeral"}}
ASKED: dict[str, Any] = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
TOLD: dict[str, Any] = {"type": "function_call_output", "call_id": "1", "output": "blue"}
BY_MODEL: dict[str, Any] = {"defer_loading": False, "allowed_callers": ["direct"]}
OF_CLIENTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # path, a body, what its values of today add
    (
        "responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}, ASKED, TOLD]},
        {
            "input": [
                {"role": "user", "content": [SAID | {"type": "input_text"}]},
                ASKED | {"caller": {"type": "direct"}},
                TOLD | {"caller": {"type": "direct"}},
            ],
            "tools": [{"type": "function", "name": "look", **BY_MODEL}],
            "conversation": None,
            "prompt": None,
            "context_management": [],
        },
    ),
    (
        "messages",
        {"messages": HELLO, "max_tokens": 9},
        {"tools": [{"name": "look", "input_schema": {}, **BY_MODEL}], "container": None, "fallbacks": "default"},
    ),
    ("chat/completions", {"messages": HELLO}, {"messages": [{"role": "user", "content": [SAID]}]}),
]


@pytest.mark.parametrize(("path", "body", "more"), OF_CLIENTS, ids=[case[0] for case in OF_CLIENTS])
def test_what_clients_send_of_the_newest_api_changes_nothing(
    path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    tools = [{**tool} for tool in more.get("tools", [])]
    for tool in tools:
        for name in BY_MODEL:
            del tool[name]
    with live(says("Well."), chat_template=HERMES) as server:
        for sent in (body | ({"tools": tools} if tools else {}), body | more):
            answer = server.http.post(f"/v1/{path}", json=sent)
            assert answer.status_code == 200, answer.text
        assert len({tuple(each.prompt_token_ids) for each in server.engine.submissions}) == 1
        for tool in more.get("tools", [])[:1]:
            later = server.http.post(f"/v1/{path}", json=body | {"tools": [tool | {"defer_loading": True}]})
            assert (later.status_code, "defer_loading" in later.text) == (400, True)


@pytest.mark.parametrize(
    ("path", "more", "reason"),
    [
        ("responses", {"input": "a", "conversation": "conv_1"}, "conversations are not kept, but answers of"),
        ("responses", {"input": "a", "prompt": {"id": "pmpt_1"}}, "prompts are not stored"),
        ("messages", {"messages": HELLO, "max_tokens": 1, "container": "c"}, "this server runs no tools itself"),
        ("messages", {"messages": HELLO, "max_tokens": 1, "compaction": {}}, "conversations are not summarized"),
    ],
)
def test_what_only_the_vendors_do_is_refused_with_the_reason(
    server: Live, path: str, more: dict[str, Any], reason: str
) -> None:
    answer = server.http.post(f"/v1/{path}", json=more)
    assert (answer.status_code, reason in answer.json()["error"]["message"]) == (400, True)
