"""Answers that are large: limited before they are made, made in turns with other requests, sent in pieces."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from antiphon.serve.api.answer_json import LogprobsJson, TokenJson, chat_logprobs, completion_logprobs
from antiphon.serve.api.choice import TokenEntry
from antiphon.serve.api.context import Pace
from antiphon.specs.sampling import TokenLogprob
from tests.serve.api_harness import END, Live, eos_id, fake_engine, ids, live, says, small_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
ECHO = {"prompt": [ids("hello ") * 30] * 8, "echo": True, "logprobs": 20, "max_tokens": 2}


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Live]:
    with live(fake_engine(max_model_len=4096), max_answer_bytes=4_000_000) as running:
        yield running


def streamed(server: Live, path: str, **body: Any) -> list[dict[str, Any]]:
    text = server.http.post(path, json={"stream": True, **body}).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


# ---- size ----------------------------------------------------------------------------------------------------------

TOO_LARGE: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": [[5]] * 16, "n": 16, "max_tokens": 100, "logprobs": 20}),
    (COMPLETIONS, {"prompt": [[5] * 1000] * 8, "echo": True, "logprobs": 20, "max_tokens": 0}),
    (COMPLETIONS, {"prompt": [[5] * 1000] * 8, "echo": True, "logprobs": 20, "max_tokens": 0, "stream": True}),
    (COMPLETIONS, {"prompt": [[5] * 3000] * 16, "n": 16, "max_tokens": 1, "return_token_ids": True}),
    (CHAT, {"messages": HELLO, "n": 16, "max_tokens": 500, "logprobs": True, "top_logprobs": 20}),
]


@pytest.mark.parametrize(("path", "body"), TOO_LARGE)
def test_an_answer_that_would_be_too_large_is_refused_before_it_is_made(
    server: Live, path: str, body: dict[str, Any]
) -> None:
    error = server.http.post(path, json=body).json()["error"]
    assert (error["code"], error["param"]) == ("answer_too_large", "max_tokens")
    assert "at most 4000000" in error["message"]
    assert "lower max_tokens, n or the number of logprobs" in error["message"]
    assert server.engine.submissions == []


def test_the_advice_is_good(server: Live) -> None:
    for path, body in TOO_LARGE[:2]:
        less = body | {"max_tokens": 2, "logprobs": 1, "n": 2}
        assert server.http.post(path, json=less).status_code == 200


def test_the_estimate_is_near(server: Live) -> None:
    """Refused at half of the size, made at three times it: the fake engine's tokens are shorter than the average."""
    chat = {"messages": HELLO, "logprobs": True, "top_logprobs": 20, "max_tokens": 300}
    for path, body in ((COMPLETIONS, ECHO), (CHAT, chat)):
        num_bytes = len(server.http.post(path, json=body).content)
        for limit, status in ((num_bytes // 2, 400), (num_bytes * 3, 200)):
            with live(fake_engine(max_model_len=4096), max_answer_bytes=limit) as other:
                assert other.http.post(path, json=body).status_code == status


def test_a_chat_without_max_tokens_gets_what_an_answer_may_have(server: Live) -> None:
    many = {"n": 4, "logprobs": True, "top_logprobs": 20}
    assert server.chat(**many).status_code == 200
    assert server.engine.submissions[0].params.max_tokens < 1000
    assert server.chat(n=4).status_code == 200
    assert server.engine.submissions[-1].params.max_tokens > 4000


def test_an_answer_that_grows_beyond_the_estimate_is_given_up() -> None:
    engine = fake_engine(script=lambda _prompt, _params: ids("hello") * 4000)  # as if its tokens were long
    with live(engine, max_answer_bytes=2000) as server:
        assert server.complete(max_tokens=100).json()["error"]["code"] == "answer_too_large"
        assert server.engine.submissions[0].ended.wait(10)


# ---- making --------------------------------------------------------------------------------------------------------


def test_large_answers_are_whole_and_what_streams_say(server: Live) -> None:
    whole = server.http.post(COMPLETIONS, json=ECHO)
    assert int(whole.headers["content-length"]) == len(whole.content) > 200_000
    choices = whole.json()["choices"]
    events = streamed(server, COMPLETIONS, **ECHO)
    assert max(len(event["choices"][0]["logprobs"]["tokens"]) for event in events) <= 34
    for choice in choices:
        parts = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for column, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][column]] == values
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]


def test_a_long_answer_is_made_in_many_turns(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: each turn is given at most as much as it may encode."""
    sizes: list[int] = []
    waited = Pace.wait

    async def wait(self: Pace) -> None:
        sizes.append(0)
        self._spent_s = 1.0  # as if every piece had taken too long
        await waited(self)

    add = LogprobsJson.add

    def counted(self: LogprobsJson, entry: TokenEntry) -> None:
        sizes[-1] += 1
        add(self, entry)

    monkeypatch.setattr(Pace, "wait", wait)
    monkeypatch.setattr(LogprobsJson, "add", counted)
    for body in (ECHO, ECHO | {"stream": True}, {"prompt": [[5]] * 8, "n": 8, "logprobs": 20, "max_tokens": 5}):
        sizes.clear()
        assert server.http.post(COMPLETIONS, json=body).status_code == 200
        assert sum(sizes) >= 8 * 8 * 5
        assert max(sizes) <= 32


def test_requests_that_work_for_long_share_one_turn_of_the_loop() -> None:
    """A small request waits for one piece of one of them each time, whatever their number."""

    async def run() -> tuple[int, int]:
        turns, done, pieces = asyncio.Lock(), asyncio.Event(), 0

        async def large() -> None:
            nonlocal pieces
            pace = Pace(turns)
            while not done.is_set():
                await pace.wait()
                pieces += 1
                pace._spent_s += 1.0

        tasks = [asyncio.create_task(large()) for _ in range(20)]
        await asyncio.sleep(0)
        before = pieces
        small = Pace(turns)
        for _ in range(50):
            await small.wait()
            small._spent_s += 1e-6
            await asyncio.sleep(0)
        made = pieces - before
        done.set()
        await asyncio.gather(*tasks)
        return made, len(tasks)

    made, num_large = asyncio.run(run())
    assert made <= 50 + num_large


@pytest.mark.parametrize("make", [completion_logprobs, chat_logprobs])
def test_logprobs_are_json_whatever_the_tokens(make: Any) -> None:
    """Quotes, control characters, halves of characters, ids without a token, numbers that JSON does not have."""
    tokens = TokenJson(small_tokenizer())
    written: LogprobsJson = make(tokens)
    numbers = [-0.0, -1e-9, -1234.5, float("-inf"), float("nan")]
    for token_id in range(0, 512, 7):
        top = tuple(((token_id + k) % 512, number) for k, number in enumerate(numbers))
        written.add(TokenEntry(token_id, TokenLogprob(token_id, -0.5, 1, top), 3))
    assert len(written) > 0
    read = json.loads(written.take().joined())
    assert json.loads(written.take().joined()) in ({"content": [], "refusal": None}, {key: [] for key in read})
    texts = read["tokens"] if "tokens" in read else [entry["token"] for entry in read["content"]]
    assert texts == [small_tokenizer().token_string(token_id) for token_id in range(0, 512, 7)]


# ---- stop strings that name special tokens -------------------------------------------------------------------------

START = "<|im_start|>"
STOPS: list[tuple[str, list[str], dict[str, Any], str, str | None]] = [
    (f"ab{START}cd", [START], {}, "ab", START),
    (f"ab{START}cd", [f"b{START}"], {}, "a", f"b{START}"),
    (f"ab{START}cd", [f"b{START}c"], {}, "a", f"b{START}c"),
    (f"ab{START}{START}cd", [START * 2], {}, "ab", START * 2),
    (f"ab{START}cd", [f"{START}d"], {}, "abcd", None),
    (f"ab{START}cd", ["bc"], {}, "a", "bc"),  # as the client reads it
    (f"ab{START}cd", ["bc", f"x{START}"], {}, "a", "bc"),
    (f"ab{START}cd", ["d", f"{START}cx"], {}, "abc", "d"),
    (f"ab{START}cd", [START], {"skip_special_tokens": False}, "ab", START),
    (f"ab{START}cd", [START], {"include_stop_str_in_output": True}, f"ab{START}", START),
    (f"ab{START}cd{START}ef", [START], {"min_tokens": len(ids("ab")) + 1}, "abcd", START),
    ("ab", [END], {}, "ab", END),
    ("ab", [END], {"include_stop_str_in_output": True}, f"ab{END}", END),
    (f"ab{END}cd", [END], {"ignore_eos": True}, "ab", END),
    ("ab", ["x"], {}, "ab", None),
]


@pytest.mark.parametrize(("said", "stop", "body", "text", "reason"), STOPS)
def test_stop_strings_see_special_tokens(
    server: Live,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    stop: list[str],
    body: dict[str, Any],
    text: str,
    reason: str | None,
) -> None:
    monkeypatch.setattr(server.engine, "script", says(said).script)
    choice = server.complete(stop=stop, **body).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"], choice["finish_reason"]) == (text, reason, "stop")
    message = server.chat(stop=stop, max_tokens=50, **body).json()["choices"][0]
    assert (message["message"]["content"], message["stop_reason"]) == (text, reason)
    events = streamed(server, COMPLETIONS, prompt="x", stop=stop, logprobs=1, **body)
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert events[-1]["choices"][0]["stop_reason"] == reason


# ---- token ids -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_completions_report_token_ids(stream: bool) -> None:
    with live(says("ab")) as server:
        body = {"prompt": [[5, 6], [7]], "n": 2, "return_token_ids": True}
        if stream:
            parts = [event["choices"][0] for event in streamed(server, COMPLETIONS, **body)]
        else:
            parts = server.http.post(COMPLETIONS, json=body).json()["choices"]
        for index, prompt in enumerate(([5, 6], [5, 6], [7], [7])):
            own = [part for part in parts if part["index"] == index]
            assert [part["prompt_token_ids"] for part in own] == [prompt, *[None] * (len(own) - 1)]
            assert [token_id for part in own for token_id in part["token_ids"]] == [*ids("ab"), eos_id()]


def test_chats_report_token_ids_where_vllm_does() -> None:
    with live(says("ab")) as server:
        answer = server.chat(return_token_ids=True).json()
        prompt = server.engine.submissions[0].prompt_token_ids
        assert answer["prompt_token_ids"] == prompt
        assert answer["choices"][0]["token_ids"] == [*ids("ab"), eos_id()]
        events = streamed(server, CHAT, messages=HELLO, return_token_ids=True)
        assert events[0]["prompt_token_ids"] == prompt
        assert all(event.get("prompt_token_ids") is None for event in events[1:])
        assert [i for event in events for i in event["choices"][0]["token_ids"]] == [*ids("ab"), eos_id()]


def test_tokens_of_logprobs_as_ids() -> None:
    with live(says("ab")) as server:
        body = {"logprobs": 2, "return_tokens_as_token_ids": True}
        logprobs = server.complete(**body).json()["choices"][0]["logprobs"]
        assert logprobs["tokens"] == [f"token_id:{token_id}" for token_id in [*ids("ab"), eos_id()]]
        assert all(name.startswith("token_id:") for top in logprobs["top_logprobs"] for name in top)
        content = server.chat(**body | {"logprobs": True, "top_logprobs": 1}).json()["choices"][0]["logprobs"][
            "content"
        ]
        assert bytes(content[0]["bytes"]).decode() == "ab"[: len(content[0]["bytes"])]
        assert content[0]["token"].startswith("token_id:")
