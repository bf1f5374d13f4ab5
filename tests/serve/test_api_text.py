"""Tokens to text: detokenizer against decoding at once, stop strings against a naive search, tokenizers on disk."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from antiphon.base.errors import CheckpointError, UserError
from antiphon.serve.text.stop_strings import StopStringMatcher
from antiphon.serve.text.structured import GrammarCompiler
from antiphon.serve.text.tokenizer import TokenBytes, byte_level_alphabet
from antiphon.serve.text.tokenizer_reading import load_tokenizer
from tests.serve.api_harness import eos_id, followed, ids, small_grammars, small_tokenizer


def streamed(token_ids: list[int]) -> str:
    detokenizer = small_tokenizer().detokenizer()
    return "".join(map(detokenizer.feed, token_ids)) + detokenizer.flush()


@settings(max_examples=200, deadline=None)
@given(st.text().filter(lambda text: "<|" not in text))  # the text of a special token says nothing when it streams
def test_text_survives_the_round_trip_one_token_at_a_time(text: str) -> None:
    token_ids = small_tokenizer().encode(text, add_special_tokens=False)
    assert streamed(token_ids) == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 399), max_size=40))
def test_any_tokens_stream_to_what_the_tokenizer_decodes(token_ids: list[int]) -> None:
    backend = small_tokenizer().backend
    assert streamed(token_ids) == backend.decode(token_ids, skip_special_tokens=True)


def test_no_character_is_ever_broken() -> None:
    detokenizer = small_tokenizer().detokenizer()
    pieces = [detokenizer.feed(token_id) for token_id in ids("a😀é")]
    assert "\ufffd" not in "".join(pieces)
    assert "" in pieces  # the emoji is several tokens: the first ones say nothing


def test_ids_without_a_token_and_special_tokens_say_nothing() -> None:
    assert streamed([*ids("a"), 511, eos_id(), *ids("b")]) == "ab"


def test_half_a_character_reads_as_bytes() -> None:
    half = ids("😀")[0]
    assert small_tokenizer().token_string(half).startswith("bytes:\\xf0")


def test_sentencepiece_tokens() -> None:
    backend = Tokenizer(models.BPE(vocab={"▁the": 0, "<0xE2>": 1, "<0x82>": 2, "<0xAC>": 3, "x": 4}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    token_bytes = TokenBytes(backend)
    assert b"".join(map(token_bytes.of, [0, 1, 2, 3, 4])).decode() == " the€x"


def test_byte_level_alphabet_is_the_tokenizers_own() -> None:
    assert sorted(byte_level_alphabet().values()) == list(range(256))
    backend = small_tokenizer().backend
    for byte in range(0x20, 0x7F):
        spelled = backend.id_to_token(ids(chr(byte))[0])
        assert byte_level_alphabet()[spelled] == byte


def naive_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The stop string that is complete first, longest among equals, by looking at every prefix."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.text(alphabet="ab", max_size=5), max_size=8),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_are_found_wherever_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStringMatcher(tuple(stops))
    text = ""
    for piece in pieces:
        text += matcher.feed(piece)
        if matcher.matched is not None:
            break
    else:
        text += matcher.flush()
    assert (text, matcher.matched) == naive_stop("".join(pieces), stops)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopStringMatcher(("</s>",))
    assert matcher.feed("hi <") == "hi "
    assert matcher.feed("b> </") == "<b> "
    assert matcher.flush() == "</"


def test_missing_and_damaged_tokenizers_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer: expected tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_spelled_in_a_way_we_cannot_read_is_refused() -> None:
    backend = Tokenizer(models.WordLevel(vocab={"a": 0}, unk_token="a"))
    with pytest.raises(CheckpointError, match="byte-level BPE and sentencepiece"):
        TokenBytes(backend)


def allowed(words: "np.typing.NDArray[np.int32]") -> set[int]:
    return {token_id for token_id in range(words.size * 32) if words[token_id // 32] >> (token_id % 32) & 1}


def test_a_grammar_allows_what_fits_and_ends_with_the_end_token() -> None:
    compiler = small_grammars()
    grammar = followed(compiler, {"enum": ["yes", "no"]})
    matcher = compiler.matcher(grammar)
    for token_id in ids('"yes"'):
        words = matcher.fill_bitmask()
        assert token_id in allowed(words)
        assert max(allowed(words)) < 400  # the model's vocabulary is larger than the tokenizer's
        assert matcher.accept(token_id)
    assert allowed(matcher.fill_bitmask()) == {eos_id()}
    assert matcher._matcher.is_accepting()
    assert matcher.accept(eos_id())
    assert matcher.error is None


def test_a_token_that_does_not_fit_is_an_error_for_good() -> None:
    compiler = small_grammars()
    for wrong in (ids("x")[0], 450, eos_id()):
        matcher = compiler.matcher(compiler.json_object())
        assert not matcher.accept(wrong)
        assert matcher.error is not None
        assert "\n" not in matcher.error


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "objekt"}, "Invalid type"),
        ({"type": "string", "pattern": "(("}, "unclosed group"),
        ({"$ref": "#/nope"}, "does not exist"),
        ({"not": {}, "x-guidance": {"lenient": True}}, "Unimplemented"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"description": "x" * 300_000}, "at most 262144"),
    ],
)
def test_schemas_that_cannot_be_followed_are_refused(schema: dict[str, object], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        followed(small_grammars(), schema)


def test_a_model_without_an_end_token_cannot_follow_schemas() -> None:
    with pytest.raises(UserError, match="end-of-sequence"):
        GrammarCompiler(small_tokenizer().backend, 512, ())
