"""Completions and chat through the official OpenAI client, against the real server and a fake engine."""

import dataclasses
import json
import math

import httpx
import numpy as np
import pytest

from antiphon.serve.engine_api import AsyncEngine
from antiphon.specs.plan import Predicted
from antiphon.specs.sampling import PackedLogprobs
from tests.serve.api_harness import END, Live, eos_id, fake_engine, ids, live, says, small_tokenizer
from tests.serve.fake_engine import FakeEngine

HELLO = [{"role": "user", "content": "hello"}]
PROMPT_TEXT = f"<|im_start|>user\nhello{END}\n<|im_start|>assistant\n"


def text_of(token_ids: list[int]) -> str:
    return small_tokenizer().decode(token_ids, skip_special_tokens=True)


def test_chat_answers_with_the_engines_text(server: Live) -> None:
    answer = server.openai.chat.completions.create(model="fake-moe", messages=HELLO, max_tokens=6, seed=3)
    submission = server.engine.submissions[0]
    assert submission.prompt_token_ids == ids(PROMPT_TEXT)
    expected = server.engine.script(submission.prompt_token_ids, submission.params)
    choice = answer.choices[0]
    assert choice.message.content == text_of(expected)
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids(PROMPT_TEXT))
    assert answer.usage.completion_tokens == 6
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == len(ids(PROMPT_TEXT)) // 2


def test_streamed_chat_is_the_same_text_and_ends_with_usage(server: Live) -> None:
    whole = server.openai.chat.completions.create(model="fake-moe", messages=HELLO, max_tokens=6)
    chunks = list(
        server.openai.chat.completions.create(
            model="fake-moe", messages=HELLO, max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]].count("length") == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_an_unlimited_chat_answer_may_fill_the_context(server: Live) -> None:
    server.openai.chat.completions.create(model="fake-moe", messages=HELLO)
    assert server.engine.submissions[0].params.max_tokens == 256 - len(ids(PROMPT_TEXT))


def test_every_parameter_reaches_the_engine(server: Live) -> None:
    response = server.complete(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=-1,
        stop_token_ids=[300],
        logit_bias={"5": -100, "6": 1.5},
        presence_penalty=-1,
        frequency_penalty=2,
        repetition_penalty=1.25,
        min_tokens=3,
        ignore_eos=True,
        user="somebody",
    )
    assert response.status_code == 200
    params = server.engine.submissions[0].params
    assert (params.max_tokens, params.min_tokens, params.ignore_eos) == (9, 3, True)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-1, 2, 1.25)
    assert params.logit_bias == {5: -100.0, 6: 1.5}
    assert params.stop_token_ids == (300,)
    assert params.seed == 2**63 - 1


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_have_seeds_of_their_own(server: Live, stream: bool) -> None:
    answers = {0: "", 1: ""}
    if stream:
        chunks = server.openai.completions.create(
            model="fake-moe", prompt="hello", n=2, seed=10, max_tokens=5, stream=True
        )
        for chunk in chunks:
            answers[chunk.choices[0].index] += chunk.choices[0].text
    else:
        whole = server.openai.completions.create(model="fake-moe", prompt="hello", n=2, seed=10, max_tokens=5)
        answers = {choice.index: choice.text for choice in whole.choices}
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids("hello")), 10)
    assert {submission.params.seed for submission in server.engine.submissions} == {10, 11}
    alone = server.openai.completions.create(model="fake-moe", prompt="hello", seed=11, max_tokens=5)
    assert answers[1] == alone.choices[0].text
    assert answers[0] != answers[1]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", [ids("hello")]),
        (["hello", "you"], [ids("hello"), ids("you")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_every_form_of_prompt(server: Live, prompt: object, expected: list[list[int]]) -> None:
    response = server.complete(prompt=prompt, max_tokens=2)
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(len(expected)))
    assert [submission.prompt_token_ids for submission in server.engine.submissions] == expected


def test_a_prompt_can_be_truncated_to_its_last_tokens(server: Live) -> None:
    body = server.complete(prompt=[5, 6, 7, 8], truncate_prompt_tokens=2, max_tokens=0, echo=True).json()
    assert server.engine.submissions[0].prompt_token_ids == [7, 8]
    assert body["choices"][0]["text"] == text_of([7, 8])


def test_the_end_token_is_counted_but_not_written() -> None:
    with live(says("good")) as server:
        body = server.complete(logprobs=0).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("good", "stop", None)
    assert body["usage"]["completion_tokens"] == len(ids("good")) + 1
    assert choice["logprobs"]["tokens"][-1] == END


def test_a_stop_token_of_the_request_is_its_stop_reason() -> None:
    with live(says("ab", ending=False)) as server:
        choice = server.complete(stop_token_ids=[ids("ab")[-1]]).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids("ab")[-1])


@pytest.mark.parametrize("tokens_per_output", [1, 4])
@pytest.mark.parametrize(
    ("stop", "text"), [("世界", "Grüße, "), (["zzz", "界!"], "Grüße, 世"), ("üß", "Gr"), ("!!!", "Grüße, 世界! more")]
)
def test_stop_strings_never_leak(stop: object, text: str, tokens_per_output: int) -> None:
    engine = says("Grüße, 世界! more")
    engine.tokens_per_output = tokens_per_output
    with live(engine) as server:
        choice = server.complete(stop=stop, max_tokens=60).json()["choices"][0]
        chunks = list(
            server.openai.completions.create(model="fake-moe", prompt="x", stop=stop, max_tokens=60, stream=True)
        )
    assert choice["text"] == text
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert all("\ufffd" not in chunk.choices[0].text for chunk in chunks)
    matched = text != "Grüße, 世界! more"
    assert choice["finish_reason"] == chunks[-1].choices[0].finish_reason == "stop"
    assert choice["stop_reason"] == ((stop if isinstance(stop, str) else "界!") if matched else None)
    assert [submission.aborted for submission in engine.submissions] == [matched, matched]


def test_stop_strings_wait_for_min_tokens() -> None:
    with live(says("aXbXcX", ending=False)) as server:
        num_first = len(ids("aXb"))
        choice = server.complete(stop="X", min_tokens=num_first, max_tokens=60).json()["choices"][0]
    assert choice["text"] == "aXb"


def test_one_answer_stops_while_another_goes_on() -> None:
    texts = {0: "left STOP", 1: "right side of it"}
    engine = fake_engine(script=lambda _prompt, params: [*ids(texts[params.seed or 0]), eos_id()])
    with live(engine) as server:
        choices = server.complete(n=2, seed=0, stop="STOP", max_tokens=60).json()["choices"]
    assert [choice["text"] for choice in choices] == ["left ", "right side of it"]
    assert [submission.aborted for submission in engine.submissions] == [True, False]


def test_completion_logprobs(server: Live) -> None:
    answer = server.openai.completions.create(model="fake-moe", prompt="hello", max_tokens=3, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs == [-0.25] * 3
    assert [max(top, key=lambda token: top[token]) for top in logprobs.top_logprobs] == logprobs.tokens
    assert logprobs.text_offset == [0, 1, 2]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs_scores_the_prompt(server: Live, max_tokens: int) -> None:
    """What lm-eval's local-completions asks for: token ids, echo, logprobs, 0 or 1 new tokens."""
    prompt = ids("hello world")
    body = server.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens).json()
    choice = body["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("hello world")
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == len(prompt) + max_tokens
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == [-0.25] * (len(prompt) - 1 + max_tokens)
    assert logprobs["text_offset"] == [len(text_of(prompt[:end])) for end in range(len(prompt) + max_tokens)]
    assert body["usage"]["completion_tokens"] == max_tokens
    assert server.engine.submissions[0].params.prompt_logprobs == 1


def test_echo_without_logprobs_streams_the_prompt_first(server: Live) -> None:
    chunks = list(
        server.openai.completions.create(model="fake-moe", prompt="hello", echo=True, max_tokens=2, stream=True)
    )
    assert chunks[0].choices[0].text.startswith("hello")
    assert server.engine.submissions[0].params.prompt_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(stream: bool) -> None:
    with live(says("né")) as server:
        options = {"model": "fake-moe", "messages": HELLO, "logprobs": True, "top_logprobs": 2}
        if stream:
            chunks = list(server.openai.chat.completions.create(**options, stream=True))
            entries = [entry for chunk in chunks for entry in getattr(chunk.choices[0].logprobs, "content", None) or []]
        else:
            entries = server.openai.chat.completions.create(**options).choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries) == f"né{END}".encode()
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert entries[1].token == "bytes:\\xc3" or entries[1].token == "é"


def test_impossible_tokens_have_a_finite_logprob() -> None:
    engine = says("a")
    packed = engine._packed

    def impossible(token_ids: list[int], num_top: int) -> PackedLogprobs:
        values = np.full((len(token_ids), 1 + num_top), -math.inf, dtype=np.float32)
        return dataclasses.replace(packed(token_ids, num_top), values=values.tobytes())

    engine._packed = impossible  # type: ignore[method-assign]
    with live(engine) as server:
        assert server.complete(logprobs=0).json()["choices"][0]["logprobs"]["token_logprobs"][0] == -9999.0


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"], "additionalProperties": False},
         {"ok": True}),
        ({"enum": [17]}, 17),
    ],
)  # fmt: skip
def test_json_schema_is_followed(server: Live, schema: dict[str, object], answer: object) -> None:
    response = server.openai.chat.completions.create(
        model="fake-moe",
        messages=HELLO,
        response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}},
    )
    assert json.loads(response.choices[0].message.content or "") == answer
    assert response.choices[0].finish_reason == "stop"


def test_json_object_sets_a_grammar_and_text_sets_none(server: Live) -> None:
    server.complete(response_format={"type": "json_object"}, max_tokens=4)
    server.complete(response_format={"type": "text"}, max_tokens=4)
    assert [submission.params.grammar is None for submission in server.engine.submissions] == [False, True]


def test_null_means_absent(server: Live) -> None:
    names = ["max_tokens", "temperature", "n", "stop", "logprobs", "stream", "best_of", "suffix", "response_format"]
    assert server.complete(**dict.fromkeys(names)).status_code == 200
    assert server.engine.submissions[0].params.max_tokens == 16
    assert server.chat(**dict.fromkeys(["tools", "tool_choice", "max_tokens", "user"])).status_code == 200
    echoed = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "audio": None}
    assert server.chat(messages=[*HELLO, echoed, *HELLO]).status_code == 200


def test_text_parts_are_joined(server: Live) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    server.chat(messages=[{"role": "user", "content": parts}])
    assert server.engine.submissions[0].prompt_token_ids == ids(PROMPT_TEXT.replace("hello", "hel\nlo"))


def test_developers_speak_as_the_system_where_the_template_knows_no_developer(server: Live) -> None:
    messages = [{"role": "developer", "content": "be kind"}, *HELLO]
    assert server.chat(messages=messages, max_tokens=1).status_code == 200
    expected = f"<|im_start|>system\nbe kind{END}\n{PROMPT_TEXT}"
    assert server.engine.submissions[0].prompt_token_ids == ids(expected)


def test_defaults_shrink_to_the_room_that_is_left(server: Live) -> None:
    assert server.complete(prompt=[7] * 250).status_code == 200
    assert server.engine.submissions[0].params.max_tokens == 6
    assert server.complete(prompt=[7] * 256).json()["error"]["code"] == "context_length_exceeded"


def test_tokenize_and_back(server: Live) -> None:
    body = server.http.post("/tokenize", json={"prompt": "hé 😀", "return_token_strs": True}).json()
    assert body["tokens"] == ids("hé 😀")
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), 256)
    assert len(body["token_strs"]) == body["count"]
    assert server.http.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "hé 😀"}
    chat = server.http.post("/tokenize", json={"messages": HELLO}).json()
    assert server.http.post("/detokenize", json={"tokens": chat["tokens"]}).json() == {"prompt": PROMPT_TEXT}


def test_models_health_version(server: Live) -> None:
    models = server.openai.models.list().data
    assert [model.id for model in models] == ["fake-moe"]
    assert server.openai.models.retrieve("fake-moe").id == "fake-moe"
    assert server.http.get("/health").json() == {"status": "ok", "missing": []}
    version = server.http.get("/version").json()
    assert (version["layout"], version["num_experts_workers"], version["num_micro_batches"]) == ("disaggregated", 2, 3)
    server.engine.healthy = False
    unhealthy = server.http.get("/health")
    server.engine.healthy = True
    assert (unhealthy.status_code, unhealthy.json()) == (
        503,
        {"status": "waiting for experts[1] (loading)", "missing": ["experts[1]"]},
    )


def test_the_served_name_can_differ_from_the_models() -> None:
    with live(fake_engine(), served_model_names=("org/moe", "moe")) as server:
        assert server.openai.models.retrieve("org/moe").id == "org/moe"
        assert server.complete(model="org/moe", max_tokens=1).json()["model"] == "org/moe"
        assert server.complete(model="moe", max_tokens=1).json()["model"] == "org/moe"
        assert server.complete(model="fake-moe", max_tokens=1).status_code == 404
        cards = server.http.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["max_model_len"]) for card in cards] == [
        ("org/moe", "fake-moe", 256),
        ("moe", "fake-moe", 256),
    ]


def sample(metrics: httpx.Response, name: str) -> float | None:
    lines = [line for line in metrics.text.splitlines() if line.startswith(f"{name} ")]
    return float(lines[0].split()[1]) if lines else None


def test_metrics_hold_everything_promised() -> None:
    with live(fake_engine(), predicted=Predicted(tpot_s=0.001)) as server:
        server.complete(max_tokens=5)
        metrics = server.http.get("/metrics")
    for name, value in {
        "num_requests_running": 0,
        "num_requests_waiting": 2,
        "kv_cache_usage_ratio": 0.25,
        "prefix_cache_hits_total": 30,
        "prefix_cache_queries_total": 60,
        "attention_idle_ratio": 0.125,
        "expert_idle_ratio": 0.5,
        "exposed_communication_seconds_total": 1.5,
        "dispatch_bytes_total": 4096,
        "placement_changes_total": 3,
        "expert_forecasts_total": 40,
        "expert_forecasts_corrected_total": 9,
        "experts_prefetched_total": 5,
        "experts_prefetched_late_total": 2,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 4,
        "e2e_request_latency_seconds_count": 1,
        "request_queue_time_seconds_count": 1,
        'expert_balancedness_ratio{layer="0"}': 0.75,
    }.items():
        assert sample(metrics, f"antiphon:{name}") == value, name
    assert (sample(metrics, "antiphon:prediction_error_ratio") or 0) > 0


def test_without_a_plan_there_is_no_prediction_error(server: Live) -> None:
    assert server.complete(max_tokens=5).status_code == 200
    metrics = server.http.get("/metrics")
    assert "# TYPE antiphon:prediction_error_ratio gauge" in metrics.text
    assert sample(metrics, "antiphon:prediction_error_ratio") is None


def test_the_fake_engine_is_an_engine() -> None:
    engine: AsyncEngine = fake_engine()
    assert isinstance(engine, FakeEngine)
