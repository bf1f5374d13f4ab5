"""The official client against a running server with attention and experts in separate processes."""

import json
from itertools import pairwise
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.serve.server_harness import ServerProcess

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "bada do"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["red", "green"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


def test_the_model_is_listed(live_server: ServerProcess) -> None:
    (model,) = live_server.openai.models.list().data
    assert model.id == live_server.model == "tiny"
    assert live_server.openai.models.retrieve("tiny").id == "tiny"


def test_completions_stream_what_they_answer_at_once(live_server: ServerProcess) -> None:
    create = live_server.openai.completions.create
    whole = create(model="tiny", prompt="bada do", max_tokens=24, temperature=0)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    events = list(create(model="tiny", prompt="bada do", max_tokens=24, temperature=0, stream=True))
    assert len(events) > 5
    assert "".join(event.choices[0].text for event in events) == whole.choices[0].text
    assert events[-1].choices[0].finish_reason == "length"


def test_chats_stream_what_they_answer_at_once(live_server: ServerProcess) -> None:
    create = live_server.openai.chat.completions.create
    whole = create(model="tiny", messages=HELLO, max_completion_tokens=24, temperature=0)
    assert whole.choices[0].message.role == "assistant"
    stream = create(
        model="tiny",
        messages=HELLO,
        max_completion_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    events = list(stream)
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == whole.choices[0].message.content
    assert events[-1].usage == whole.usage or events[-1].usage is not None


def test_a_chat_is_the_completion_of_its_rendered_template(live_server: ServerProcess) -> None:
    chat = live_server.openai.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=12, temperature=0
    )
    ids = live_server.http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    assert live_server.text(prompt=ids, max_tokens=12) == chat.choices[0].message.content


def test_text_and_its_token_ids_are_the_same_prompt(live_server: ServerProcess) -> None:
    ids = live_server.http.post("/tokenize", json={"prompt": "bada do ki"}).json()["tokens"]
    both = live_server.complete(prompt=[ids, ids], max_tokens=12).json()["choices"]
    assert [choice["text"] for choice in both] == [live_server.text(prompt="bada do ki", max_tokens=12)] * 2
    assert live_server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "bada do ki"


def test_logprobs_of_completions(live_server: ServerProcess) -> None:
    answer = live_server.openai.completions.create(model="tiny", prompt="bada", max_tokens=6, temperature=0, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    whole = [token for token in logprobs.tokens if not token.startswith("bytes:")]  # half a character is no text yet
    assert all(token in answer.choices[0].text for token in whole)
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert logprob is not None
        assert logprob < 0
        assert len(top) == 3
        assert max(top, key=lambda name: top[name]) == token, "greedy decoding takes the likeliest token"


def test_logprobs_of_chats(live_server: ServerProcess) -> None:
    answer = live_server.openai.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=5, temperature=0, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    for entry in logprobs.content:
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
        assert entry.token == entry.top_logprobs[0].token


def test_echo_scores_the_prompt(live_server: ServerProcess) -> None:
    choice = live_server.complete(prompt="bada do", echo=True, max_tokens=0, logprobs=1).json()["choices"][0]
    assert choice["text"] == "bada do"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(logprob < 0 for logprob in choice["logprobs"]["token_logprobs"][1:])


def test_two_answers_differ_and_a_seed_repeats_them(live_server: ServerProcess) -> None:
    def two(seed: int) -> list[str]:
        answer = live_server.openai.completions.create(
            model="tiny", prompt="bada", max_tokens=16, temperature=1.5, n=2, seed=seed
        )
        return [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]

    first = two(5)
    assert first[0] != first[1]
    assert two(5) == first
    assert two(6) != first


def test_a_seed_gives_the_same_text_beside_others(live_server: ServerProcess) -> None:
    alone = live_server.text(prompt="bada", temperature=1, seed=3, max_tokens=16)
    crowd = live_server.complete(prompt=["do", "bada", "ki"], temperature=1, seed=3, max_tokens=16).json()["choices"]
    assert [choice["text"] for choice in crowd][1] == alone


def test_stop_strings_cut_before_themselves(live_server: ServerProcess) -> None:
    text = live_server.text(max_tokens=40)
    middle = len(text) // 3
    stop = next(text[at : at + 3] for at in range(middle, len(text)) if text[at : at + 3].isascii())
    choice = live_server.complete(max_tokens=40, stop=[stop, "never in it"]).json()["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"
    with live_server.openai.completions.create(
        model="tiny", prompt="bada", temperature=0, max_tokens=40, stop=stop, stream=True
    ) as stream:
        assert "".join(event.choices[0].text for event in stream) == choice["text"]


def test_biases_and_penalties_are_obeyed(live_server: ServerProcess) -> None:
    favourite = live_server.http.post("/tokenize", json={"prompt": "do"}).json()["tokens"][0]
    assert live_server.text(logit_bias={str(favourite): 100}, max_tokens=5) == "do" * 5
    plain = live_server.text(max_tokens=60)
    assert live_server.text(max_tokens=60, presence_penalty=2, frequency_penalty=2) != plain
    assert live_server.text(max_tokens=60, repetition_penalty=5) != plain


def test_answers_follow_a_json_schema(live_server: ServerProcess) -> None:
    answer = live_server.openai.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_completion_tokens=400,
        temperature=1,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA}},
    )
    assert answer.choices[0].finish_reason == "stop"
    verdict = json.loads(answer.choices[0].message.content or "")
    assert isinstance(verdict["ok"], bool)
    assert verdict["kind"] in {"red", "green"}


def test_a_shared_prefix_is_computed_once(live_server: ServerProcess) -> None:
    prompt = [3 + index % 200 for index in range(200)]
    counts = [live_server.complete(prompt=prompt).json()["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert counts[1]["cached_tokens"] >= 192 - 16
    assert counts[0]["cached_tokens"] < counts[1]["cached_tokens"]


def test_many_at_once_are_as_good_as_one_by_one(live_server: ServerProcess) -> None:
    prompts = [f"{word} ba" for word in ("do", "ki", "bu", "da", "fe", "gi", "ho", "ja", "ko", "lu", "me", "no")]
    together = live_server.complete(prompt=prompts, max_tokens=20).json()["choices"]
    assert [choice["index"] for choice in together] == list(range(12))
    assert [choice["text"] for choice in together] == [live_server.text(prompt=p, max_tokens=20) for p in prompts]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": "gpt-x"}, openai.NotFoundError, "this server serves 'tiny'"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 100_000}, openai.BadRequestError, "context"),
        ({"prompt": [10_000]}, openai.BadRequestError, "ids must be below 512"),
        ({"prompt": ""}, openai.BadRequestError, "no tokens"),
        ({"suffix": "x"}, openai.BadRequestError, "insertion into text is not supported"),
        ({"extra_body": {"frobnicate": 1}}, openai.BadRequestError, "unknown parameter: frobnicate"),
    ],
)
def test_mistakes_become_the_clients_exceptions(
    live_server: ServerProcess, arguments: dict[str, Any], error: type[openai.APIStatusError], message: str
) -> None:
    with pytest.raises(error, match=message):
        live_server.openai.completions.create(**{"model": "tiny", "prompt": "bada", **arguments})


def test_streamed_tokens_come_one_by_one(live_server: ServerProcess) -> None:
    stream = live_server.openai.completions.create(
        model="tiny", prompt="bada", temperature=0, max_tokens=30, stream=True, logprobs=0
    )
    offsets = [event.choices[0].logprobs.text_offset or [] for event in stream if event.choices[0].logprobs]
    starts = [offset for part in offsets for offset in part]
    assert all(before <= after for before, after in pairwise(starts))
