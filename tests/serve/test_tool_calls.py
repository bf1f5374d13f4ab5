"""Calls of tools in generated text: what is a call and what is text, wherever the text was cut."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer

from antiphon.base.errors import UserError
from antiphon.serve.text.grammar_text import tool_grammar
from antiphon.serve.text.structured import GrammarCompiler
from antiphon.serve.text.tokenizer import TextTokenizer
from antiphon.serve.text.tool_calls import (
    HERMES,
    MISTRAL,
    PLAIN_JSON,
    ToolCallReader,
    ToolFormat,
    tool_format,
)
from tests.serve.api_harness import MODEL_VOCAB_SIZE, eos_id, ids, small_grammars, write_tokenizer

NAMES = frozenset({"add", "look-up"})
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}'
ADD_ARGUMENTS = '{"a": 1, "b": [2, {"c": "}"}]}'
LOOK = '{"parameters": {"key": "x \\"y\\" }"}, "name": "look-up"}'
LOOK_ARGUMENTS = '{"key": "x \\"y\\" }"}'
OTHER = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'

Calls = list[tuple[str, str]]


def read(form: ToolFormat, pieces: list[str], *, at_most_one: bool = False) -> tuple[str, Calls]:
    """(text, calls as name and arguments) of an answer that comes in pieces."""
    reader = ToolCallReader(form, NAMES, at_most_one=at_most_one)
    text, calls = "", []
    for reading in [*map(reader.feed, pieces), reader.flush()]:
        text += reading.text
        for piece in reading.calls:
            if piece.id is not None:
                assert piece.name is not None
                assert piece.index == len(calls)
                calls.append((piece.name, ""))
            assert piece.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    assert reader.num_calls == len(calls)
    return text, calls


ANSWERS: list[tuple[ToolFormat, str, str, Calls]] = [
    (HERMES, "no call at all \n", "no call at all \n", []),
    (HERMES, f"<tool_call>\n{ADD}\n</tool_call>", "", [("add", ADD_ARGUMENTS)]),
    (HERMES, f"Sure. \n<tool_call>{ADD}</tool_call>\n", "Sure.", [("add", ADD_ARGUMENTS)]),
    (
        HERMES,
        f"<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{LOOK}\n</tool_call> done ",
        " done ",
        [("add", ADD_ARGUMENTS), ("look-up", LOOK_ARGUMENTS)],
    ),
    (HERMES, f"<tool_call>[{ADD}, {LOOK}]</tool_call>", "", [("add", ADD_ARGUMENTS), ("look-up", LOOK_ARGUMENTS)]),
    (HERMES, OTHER, OTHER, []),
    (
        HERMES,
        f"<tool_call>{ADD}<tool_call>{LOOK}</tool_call>",
        "",
        [("add", ADD_ARGUMENTS), ("look-up", LOOK_ARGUMENTS)],
    ),
    (HERMES, f"<tool_call> <tool_call>{ADD}</tool_call>", "<tool_call>", [("add", ADD_ARGUMENTS)]),
    (HERMES, "a <tool_call> b", "a <tool_call> b", []),
    (HERMES, "a <tool_cal", "a <tool_cal", []),
    (HERMES, 'x <tool_call>\n{"name": "ad', 'x <tool_call>\n{"name": "ad', []),
    (HERMES, '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "", [("add", "[1]")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": ', "", [("add", '{"a": ')]),
    (HERMES, f"<tool_call>{ADD}</tool_", "", [("add", ADD_ARGUMENTS)]),
    (HERMES, f"{ADD}", ADD, []),
    (HERMES, "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    (HERMES, '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    (HERMES, '<tool_call>{"name"]</tool_call>', '<tool_call>{"name"]</tool_call>', []),
    (MISTRAL, f"[TOOL_CALLS][{ADD}, {LOOK}]", "", [("add", ADD_ARGUMENTS), ("look-up", LOOK_ARGUMENTS)]),
    (MISTRAL, f"well [TOOL_CALLS] {ADD}", "well", [("add", ADD_ARGUMENTS)]),
    (
        MISTRAL,
        f"[TOOL_CALLS][{ADD}]\n[TOOL_CALLS][{LOOK}] ok",
        " ok",
        [("add", ADD_ARGUMENTS), ("look-up", LOOK_ARGUMENTS)],
    ),
    (MISTRAL, "[TOOL", "[TOOL", []),
    (PLAIN_JSON, LOOK, "", [("look-up", LOOK_ARGUMENTS)]),
    (PLAIN_JSON, f"{ADD}; {LOOK}", "", [("add", ADD_ARGUMENTS), ("look-up", LOOK_ARGUMENTS)]),
    (PLAIN_JSON, f"\n[{ADD}]\n", "", [("add", ADD_ARGUMENTS)]),
    (PLAIN_JSON, f"{ADD} That is it.", " That is it.", [("add", ADD_ARGUMENTS)]),
    (PLAIN_JSON, f"I say {ADD}", f"I say {ADD}", []),
    (PLAIN_JSON, '{"city": {"name": "add"}}', '{"city": {"name": "add"}}', []),
    (PLAIN_JSON, "[1, 2]", "[1, 2]", []),
]


@pytest.mark.parametrize(("form", "answer", "text", "calls"), ANSWERS)
def test_calls_and_text_are_told_apart_wherever_the_answer_is_cut(
    form: ToolFormat, answer: str, text: str, calls: Calls
) -> None:
    assert read(form, [answer]) == (text, calls)
    assert read(form, list(answer)) == (text, calls)
    for cut in range(len(answer)):
        assert read(form, [answer[:cut], answer[cut:]]) == (text, calls)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([HERMES, MISTRAL, PLAIN_JSON]),
    st.lists(
        st.sampled_from([*'{}[]:," \n\\x', "<tool_call>", "</tool_call>", "[TOOL_CALLS]", '"name"', '"add"', ADD])
    ),
)
def test_any_answer_reads_the_same_in_pieces(form: ToolFormat, pieces: list[str]) -> None:
    assert read(form, pieces) == read(form, ["".join(pieces)]) == read(form, list("".join(pieces)))


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet='<tol_ca>{}"\n x'))
def test_text_without_a_known_name_is_unchanged(answer: str) -> None:
    assert read(HERMES, list(answer)) == (answer, [])


def test_arguments_come_as_they_are_written() -> None:
    reader = ToolCallReader(HERMES, NAMES)
    assert not reader.feed('<tool_call>{"name": "ad').calls
    (first,) = reader.feed('d",').calls
    assert (first.index, first.name, first.arguments) == (0, "add", "")
    assert first.id is not None
    (second,) = reader.feed(' "arguments": {"a"').calls
    assert (second.index, second.id, second.name, second.arguments) == (0, None, None, '{"a"')


def test_after_one_call_a_reader_of_one_is_satisfied() -> None:
    reader = ToolCallReader(HERMES, NAMES, at_most_one=True)
    reading = reader.feed(f"<tool_call>{ADD}")
    assert reader.satisfied
    assert len(reading.calls) == 1
    assert read(HERMES, [f"<tool_call>{ADD}</tool_call><tool_call>{ADD}</tool_call> x"], at_most_one=True) == (
        "",
        [("add", ADD_ARGUMENTS)],
    )


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("...<tool_call>\n{{ call | tojson }}\n</tool_call>", HERMES),
        ("[AVAILABLE_TOOLS]...[TOOL_CALLS] [", MISTRAL),
        ("{% if tools %}Respond with JSON", PLAIN_JSON),
        ("<tool_call>\n<function=name>", None),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function", None),
    ],
)
def test_the_template_tells_the_format(template: str, form: ToolFormat | None) -> None:
    assert tool_format(template) is form


def test_mistral_ids_have_nine_letters_or_digits() -> None:
    assert len(MISTRAL.new_call_id()) == 9
    assert MISTRAL.new_call_id().isalnum()
    assert HERMES.new_call_id() != HERMES.new_call_id()


SCHEMA = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/number"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "integer"}},
}
GOOD = '{"name": "add", "KEY": {"a": 1}}'
WRONG = '{"name": "add", "KEY": {"a": "x"}}'
WRAPPED = {
    HERMES.name: "<tool_call>\n%s\n</tool_call>",
    MISTRAL.name: "[TOOL_CALLS][%s]",
    PLAIN_JSON.name: "%s",
}


def fits(rules: str, text: str) -> bool:
    """Whether the grammar takes `text` as a whole answer."""
    matcher = small_grammars().matcher(small_grammars().lark(rules))
    return all(matcher.accept(token_id) for token_id in [*ids(text), eos_id()])


def written(form: ToolFormat, call: str) -> str:
    return WRAPPED[form.name] % call.replace("KEY", form.arguments_key)


@pytest.mark.parametrize("form", [HERMES, MISTRAL, PLAIN_JSON])
def test_a_forced_answer_is_a_call_that_fits(form: ToolFormat) -> None:
    rules = tool_grammar(form, {"look-up": {}, "add": SCHEMA}, forced=True, at_most_one=False)
    assert fits(rules, written(form, GOOD))
    assert fits(rules, written(form, '{"name": "look-up", "KEY": {"any": []}}'))
    for wrong in (written(form, WRONG), written(form, GOOD.replace("add", "sub")), "text", ""):
        assert not fits(rules, wrong)
    assert read(form, [written(form, GOOD)]) == ("", [("add", '{"a": 1}')])


@pytest.mark.parametrize(
    ("form", "two"),
    [
        (HERMES, f"<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>"),
        (MISTRAL, f"[TOOL_CALLS][{ADD}, {ADD}]"),
        (PLAIN_JSON, f"{ADD}; {ADD}".replace("arguments", "parameters")),
    ],
)
def test_several_calls_only_where_they_are_allowed(form: ToolFormat, two: str) -> None:
    assert fits(tool_grammar(form, {"add": {}}, forced=True, at_most_one=False), two)
    assert not fits(tool_grammar(form, {"add": {}}, forced=True, at_most_one=True), two)


@pytest.mark.parametrize("form", [HERMES, MISTRAL, PLAIN_JSON])
def test_an_answer_may_be_a_call_or_fit_its_schema(form: ToolFormat) -> None:
    answer: dict[str, Any] = {"enum": ["yes", "no"]}
    rules = tool_grammar(form, {"add": SCHEMA}, forced=False, at_most_one=True, answer_schema=answer)
    assert fits(rules, '"yes"')
    assert fits(rules, written(form, GOOD))
    assert not fits(rules, "yes")
    assert not fits(rules, written(form, WRONG))


@pytest.mark.parametrize("form", [HERMES, MISTRAL, PLAIN_JSON])
def test_strict_tools_leave_text_free_and_calls_right(form: ToolFormat) -> None:
    rules = tool_grammar(form, {"add": SCHEMA}, forced=False, at_most_one=False)
    assert fits(rules, "any text, even a < b")
    assert fits(rules, "")
    assert fits(rules, written(form, GOOD))
    assert not fits(rules, written(form, WRONG))
    if form.begin:
        assert fits(rules, "Sure.\n" + written(form, GOOD) + "\nand " + written(form, GOOD))
        assert not fits(rules, "Sure.\n" + written(form, WRONG))


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("forced", [True, False])
def test_marks_that_are_tokens_of_their_own_stay_that(special: bool, forced: bool, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    pretrained = AutoTokenizer.from_pretrained(str(tmp_path))
    marks = [HERMES.begin, HERMES.end, MISTRAL.begin]
    pretrained.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    tokenizer = TextTokenizer(pretrained.backend_tokenizer)
    compiler = GrammarCompiler(tokenizer.backend, MODEL_VOCAB_SIZE, (eos_id(),))
    added_id = tokenizer.token_bytes.added_id
    for form, answer in ((HERMES, f"<tool_call>\n{ADD}\n</tool_call>"), (MISTRAL, f"[TOOL_CALLS][{ADD}]")):
        mark_ids = (added_id(form.begin), added_id(form.end))
        rules = tool_grammar(form, {"add": {}}, forced=forced, at_most_one=False, mark_ids=mark_ids)
        token_ids = tokenizer.encode(answer, add_special_tokens=False)
        assert token_ids[0] == mark_ids[0]
        matcher = compiler.matcher(compiler.lark(rules))
        assert all(map(matcher.accept, [*token_ids, eos_id()]))
        reader = ToolCallReader(form, NAMES)
        detokenizer = tokenizer.detokenizer(shown=reader.mark)
        reader.feed("".join(map(detokenizer.feed, token_ids)))
        assert reader.num_calls == 1


def test_schemas_that_cannot_be_followed_are_refused() -> None:
    for schema in ({"properties": {"a": {"not": {}}}}, {"type": "objekt"}, {"description": "x" * 300_000}):
        with pytest.raises(UserError):
            small_grammars().lark(tool_grammar(HERMES, {"add": schema}, forced=True, at_most_one=False))


def test_a_long_call_takes_time_in_proportion() -> None:
    text = json.dumps("x" * 50_000)
    answer = f'<tool_call>{{"arguments": {{"t": {text}}}, "name": "add"}}</tool_call>'
    assert read(HERMES, list(answer)) == ("", [("add", f'{{"t": {text}}}')])
    space = " " * 100_000  # copied for every character, this would take minutes
    assert read(HERMES, list(f"<tool_call>{space}{ADD}{space}</tool_call>{space}")) == ("", [("add", ADD_ARGUMENTS)])
    assert read(HERMES, list(f"a{space}b")) == (f"a{space}b", [])
