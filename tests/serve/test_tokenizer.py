"""Streamed text against the tokenizer's own decode, for every kind of tokenizer, any tokens, behind any prompt."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from antiphon.base.errors import CheckpointError
from antiphon.serve.text.tokenizer import IncrementalDetokenizer, TextTokenizer, TokenBytes
from tests.serve.tokenizer_kinds import KINDS, TEXTS, small

ids = st.lists(st.integers(0, 520), max_size=30)  # more than there are


def token_bytes(kind: str, known: dict[str, TokenBytes] = {}) -> TokenBytes:  # noqa: B006
    if kind not in known:
        known[kind] = TokenBytes(small(kind))
    return known[kind]


def streamed(detokenizer: IncrementalDetokenizer, token_ids: list[int]) -> str:
    """Also checks that places of tokens lie in the text, in order."""
    text, places = "", []
    for token_id in token_ids:
        places.append(detokenizer.num_characters)
        text += detokenizer.feed(token_id)
    text += detokenizer.flush()
    assert all(0 <= place <= len(text) for place in places)
    return text


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(token_ids=ids)
@example(token_ids=[35, 466])  # a space as a byte, which is dropped at the start
def test_any_tokens_stream_to_what_the_tokenizer_decodes(kind: str, skip: bool, token_ids: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(token_bytes(kind), skip_special_tokens=skip)
    assert streamed(detokenizer, token_ids) == small(kind).decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_stream_to_what_the_tokenizer_decodes(kind: str) -> None:
    tokenizer = TextTokenizer(KINDS[kind]())
    for text in [*TEXTS, "x <|end|> y[L] z [R]  word a b é", " ".join(TEXTS)]:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        whole = tokenizer.decode(token_ids, skip_special_tokens=False)
        detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
        places = []
        read = ""
        for token_id in token_ids:
            places.append(detokenizer.num_characters)
            read += detokenizer.feed(token_id)
        assert read + detokenizer.flush() == whole
        assert places == sorted(places)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(prompt=ids, answer=ids)
def test_an_answer_is_the_whole_text_without_the_prompts(kind: str, prompt: list[int], answer: list[int]) -> None:
    before = small(kind).decode(prompt)
    whole = small(kind).decode([*prompt, *answer])
    detokenizer = IncrementalDetokenizer(token_bytes(kind))
    detokenizer.follow(prompt, echoed=False)
    text = streamed(detokenizer, answer)
    if whole.startswith(before):
        assert text == whole[len(before) :]
    echoing = IncrementalDetokenizer(token_bytes(kind))
    unfinished = echoing.follow(prompt, echoed=True)
    assert before.endswith(unfinished)
    text = before.removesuffix(unfinished) + streamed(echoing, answer)
    if not token_bytes(kind).has_runs or unfinished or whole.startswith(before):
        assert text == whole


LLAMA = "Llama, legacy"


def byte_ids(text: bytes) -> list[int]:
    return [small(LLAMA).token_to_id(f"<0x{byte:02X}>") for byte in text]


def test_a_run_of_bytes_waits_for_its_end_but_not_without_a_limit() -> None:
    detokenizer = IncrementalDetokenizer(token_bytes(LLAMA))
    pieces = [detokenizer.feed(token_id) for token_id in byte_ids("é🙂".encode() * 40)]
    assert pieces[:63] == [""] * 63
    assert pieces[63] == "é🙂" * 10 + "é"
    assert "".join(pieces) + detokenizer.flush() == "é🙂" * 40
    broken = byte_ids(b"ok\xf0\x9fx")
    assert streamed(IncrementalDetokenizer(token_bytes(LLAMA)), broken) == "\ufffd" * 5 == small(LLAMA).decode(broken)


def test_the_space_of_the_first_word_is_dropped_only_where_a_text_begins() -> None:
    hello = small(LLAMA).encode("Hello", add_special_tokens=False).ids
    start = small(LLAMA).token_to_id("<s>")
    for prompt, expected in [([], "Hello"), ([start], "Hello"), ([start, *hello], " Hello")]:
        detokenizer = IncrementalDetokenizer(token_bytes(LLAMA))
        detokenizer.follow(prompt, echoed=False)
        assert streamed(detokenizer, hello) == expected


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("ab", "c")]),
    ],
)
def test_decoders_that_would_be_read_otherwise_are_refused(decoder: decoders.Decoder | None) -> None:
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(CheckpointError, match=r"the tokenizer's decoder is .*: Antiphon reads byte-level BPE"):
        TokenBytes(backend)
