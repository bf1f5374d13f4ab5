"""Prompts that end in the middle of a character, repeated: prompt and answer read as one text."""

import json

import pytest

from tests.serve.api_harness import eos_id, fake_engine, ids, live

WHOLE = "a😀é"


@pytest.mark.parametrize("num_prompt", range(1, len(ids(WHOLE)) + 1))
@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_character_between_prompt_and_answer_is_whole(num_prompt: int, logprobs: int | None) -> None:
    tokens = ids(WHOLE)
    engine = fake_engine(script=lambda prompt, _params: [*tokens[len(prompt) :], eos_id()])
    body = {"prompt": tokens[:num_prompt], "echo": True, "logprobs": logprobs}
    with live(engine) as server:
        choice = server.complete(**body).json()["choices"][0]
        assert choice["text"] == WHOLE
        if logprobs is not None:
            assert choice["logprobs"]["text_offset"][-1] == len(WHOLE)
        lines = server.complete(**body, stream=True).text.split("\n\n")[:-2]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert "".join(event["choices"][0]["text"] for event in events) == WHOLE


def test_half_a_character_that_stays_half_is_one_replacement() -> None:
    half = ids("a😀")[:2]
    with live(fake_engine(script=lambda _prompt, params: ids("b")[: params.max_tokens])) as server:
        assert server.complete(prompt=half, echo=True, max_tokens=0).json()["choices"][0]["text"] == "a\ufffd"
        assert server.complete(prompt=half, echo=True).json()["choices"][0]["text"] == "a\ufffdb"
        assert server.complete(prompt="a\ufffd", echo=True).json()["choices"][0]["text"] == "a\ufffdb"
        assert server.complete(prompt=[*half, eos_id()], echo=True).json()["choices"][0]["text"] == "a\ufffdb"
