"""Prompts repeated, for every kind of tokenizer: prompt and answer read as one text, and every token has its place."""

import json

import pytest

from antiphon.serve.text.tokenizer import TextTokenizer
from tests.serve.api_harness import MODEL_VOCAB_SIZE, Live, eos_id, fake_engine, ids, live
from tests.serve.fake_engine import FakeEngine
from tests.serve.tokenizer_kinds import KINDS

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


def streamed_text(server: Live, **body: object) -> str:
    lines = server.complete(**body, stream=True).text.split("\n\n")[:-2]
    return "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines)


@pytest.mark.parametrize(
    "kind", ["byte-level, prefix space", "Llama, legacy", "Llama, prepend never", "two spaces dropped", "Metaspace"]
)
def test_texts_are_the_tokenizers_own(kind: str) -> None:
    tokenizer = TextTokenizer(KINDS[kind]())
    end = tokenizer.backend.token_to_id("<|end|>")
    answer = tokenizer.encode("Hello 🙂 world", add_special_tokens=False)
    engine = FakeEngine(vocab_size=MODEL_VOCAB_SIZE, eos_token_id=end, script=lambda _prompt, _params: [*answer, end])
    with live(engine, tokenizer=tokenizer) as server:
        for text in (" lead", "a\n \u65e5\u672c \U0001f642", "x <|end|> y[L] z [R]  word a b"):
            prompt = tokenizer.encode(text, add_special_tokens=False)
            whole = tokenizer.backend.decode([*prompt, *answer])
            assert server.http.post("/detokenize", json={"tokens": prompt}).json()["prompt"] == (
                tokenizer.backend.decode(prompt, skip_special_tokens=False)
            )
            body = {"prompt": prompt, "echo": True, "max_tokens": 64}
            assert server.complete(**body).json()["choices"][0]["text"] == whole
            assert streamed_text(server, **body) == whole
            alone = {"prompt": prompt, "max_tokens": 64}
            assert (
                server.complete(**alone).json()["choices"][0]["text"] == whole[len(tokenizer.backend.decode(prompt)) :]
            )
            for given in (prompt, text):
                choice = server.complete(prompt=given, echo=True, max_tokens=64, logprobs=1).json()["choices"][0]
                skips = choice["text"] == whole
                places = choice["logprobs"]["text_offset"][:-1]
                assert len(places) == len(prompt) + len(answer)
                for number, place in enumerate(places):
                    before = tokenizer.backend.decode([*prompt, *answer][:number], skip_special_tokens=skips)
                    assert choice["text"][:place].rstrip("\ufffd") == before.rstrip("\ufffd")


def test_special_tokens_that_a_client_wrote_come_back() -> None:
    with live(fake_engine(script=lambda _prompt, _params: [*ids("b"), eos_id()])) as server:
        for logprobs in (None, 1):
            choice = server.complete(prompt="a<|im_end|>", echo=True, logprobs=logprobs).json()["choices"][0]
            assert choice["text"] == "a<|im_end|>b"
        assert choice["logprobs"]["text_offset"] == [0, 1, 11, 12]
