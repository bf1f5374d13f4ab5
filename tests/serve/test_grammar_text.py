"""Grammars of answers: what a dialect's model may write when a call is wanted, a format is, or a tool is strict."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from antiphon.base.errors import UserError
from antiphon.serve.text.answer_reader import AnswerReader
from antiphon.serve.text.dialects import CALL_FORMATS, REASONING_FORMATS, Dialect, dialect_of
from antiphon.serve.text.grammar_text import (
    ANSWER,
    Spelling,
    Wish,
    answer_rules,
    composed_grammar,
    json_grammar,
    lark_grammar,
)
from antiphon.serve.text.structured import GrammarCompiler
from antiphon.serve.text.tokenizer import TextTokenizer
from tests.serve.api_harness import MODEL_VOCAB_SIZE, eos_id, write_tokenizer
from tests.serve.written_calls import REASONERS, UNMARKED, WRITERS, Call

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"$ref": "#/$defs/number"},
        "text": {"type": "string"},
        "kind": {"enum": ["x y", "z"]},
        "list": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "integer"}},
}
GOOD: list[Call] = [("add", {"a": 1})]
FULL: list[Call] = [("add", {"a": 1, "text": 'a\n"b" <c> é', "kind": "x y", "list": [True, False]})]
WRONG: list[Call] = [("add", {"a": "x"})]


@cache
def vocabulary(with_tokens: bool) -> tuple[TextTokenizer, GrammarCompiler]:
    """A small tokenizer, with the marks of all formats as tokens of their own or without."""
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        pretrained = AutoTokenizer.from_pretrained(folder)
        marks = {mark for form in (*CALL_FORMATS, *REASONING_FORMATS) for mark in form.marks} if with_tokens else set()
        marks |= {"<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"} if with_tokens else set()
        tokens = [mark for mark in marks if "\n" not in mark and (mark[-1] in ">]") and mark not in ('">', ">")]
        added = [
            AddedToken(mark, special="|" in mark, normalized=False)
            for mark in sorted(tokens)
            if not mark.startswith("<｜tool▁call▁begin｜>f")
        ]
        pretrained.add_tokens(added)
        tokenizer = TextTokenizer(pretrained.backend_tokenizer)
    return tokenizer, GrammarCompiler(tokenizer.backend, MODEL_VOCAB_SIZE, (eos_id(),))


def fits(form: Dialect, answer: str, *, with_tokens: bool = True, schema: Any = None, **wish: Any) -> bool:
    """Whether the grammar takes `answer` as a whole; `schema`: of an answer without calls."""
    tokenizer, compiler = vocabulary(with_tokens)
    spelling = Spelling(tokenizer.token_bytes.added_ids, (eos_id(),))
    wanted = Wish(**({"schemas": {"add": SCHEMA, "look-up": {}}, "has_answer": schema is not None} | wish))
    grammar = lark_grammar(lambda: answer_rules(form, spelling, wanted))
    if schema is not None:
        grammar = composed_grammar(grammar, json_grammar(schema), ANSWER)
    matcher = compiler.matcher(compiler.compile(lambda: grammar).result(60))
    return all(map(matcher.accept, [*tokenizer.encode(answer, add_special_tokens=False), eos_id()]))


def dialect(calls: str, reasoning: str = "none") -> Dialect:
    return dialect_of("", tool_parser=calls, reasoning_parser=reasoning)


def in_form(form: str, calls: list[Call]) -> str:
    """As the end token of a message on a channel ends the answer."""
    return WRITERS[form](calls).removesuffix("<|call|>")


@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("form", sorted(WRITERS))
def test_a_forced_answer_is_a_call_that_fits(form: str, with_tokens: bool) -> None:
    made = dialect(form)
    for calls in (GOOD, [("look-up", {"any": "thing"})]):
        if form in {"pythonic", "lfm2", "olmo3"} and calls is not GOOD:
            continue  # Python's names have no hyphen
        assert fits(made, in_form(form, calls), with_tokens=with_tokens, forced=True)
    for wrong in (in_form(form, WRONG), in_form(form, [("sub", {"a": 1})]), "text", ""):
        assert not fits(made, wrong, with_tokens=with_tokens, forced=True)
    if form not in {"pythonic", "lfm2", "olmo3"}:
        assert fits(made, in_form(form, FULL), with_tokens=with_tokens, forced=True)
        assert not fits(made, in_form(form, [("add", {"a": 1, "kind": "y"})]), with_tokens=with_tokens, forced=True)
    missing = in_form(form, [("add", {"text": "x"})])
    assert not fits(made, missing, with_tokens=with_tokens, forced=True)


@pytest.mark.parametrize("form", sorted(set(WRITERS) - {"harmony"}))
def test_several_calls_only_where_they_are_allowed(form: str) -> None:
    assert fits(dialect(form), WRITERS[form]([*GOOD, *GOOD]), forced=True)
    assert not fits(dialect(form), WRITERS[form]([*GOOD, *GOOD]), forced=True, at_most_one=True)


@pytest.mark.parametrize("form", sorted(WRITERS))
def test_an_answer_may_be_a_call_or_fit_its_schema(form: str) -> None:
    made, schema = dialect(form), {"enum": ["yes", "no"]}
    head = "<|channel|>final<|message|>" if form == "harmony" else ""
    assert fits(made, head + '"yes"', schema=schema)
    assert not fits(made, head + "yes", schema=schema)
    assert fits(made, in_form(form, GOOD), schema=schema)
    assert not fits(made, in_form(form, WRONG), schema=schema)


@pytest.mark.parametrize("form", sorted(WRITERS))
def test_strict_tools_leave_text_free_and_calls_right(form: str) -> None:
    made, head = dialect(form), "<|channel|>final<|message|>" if form == "harmony" else ""
    assert fits(made, f"{head}any text, even a < b")
    assert fits(made, head)
    assert fits(made, in_form(form, GOOD))
    assert not fits(made, in_form(form, WRONG))
    if form not in UNMARKED and form != "harmony":
        assert fits(made, "Sure.\n" + WRITERS[form](GOOD) + "\nand " + WRITERS[form](GOOD) + " so")
        assert not fits(made, "Sure.\n" + WRITERS[form](WRONG))


@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("form", sorted(REASONERS))
def test_reasoning_stays_free_and_comes_first(form: str, with_tokens: bool) -> None:
    begin, end = REASONERS[form]
    calls = "harmony" if form == "harmony" else "hermes"
    made = dialect(calls, form)
    call = in_form(calls, GOOD)
    for thought in ("", "so {\n\n é <b>"):
        assert fits(made, begin + thought + end + call, with_tokens=with_tokens, forced=True)
    assert fits(made, call, with_tokens=with_tokens, forced=True)
    assert not fits(made, begin + "so" + end + "text", with_tokens=with_tokens, forced=True)
    assert not fits(made, begin + "so", with_tokens=with_tokens, forced=True), "it has to end"
    assert fits(made, "so" + end + call, with_tokens=with_tokens, forced=True, starts_reasoning=True)
    assert not fits(made, "so", with_tokens=with_tokens, forced=True, starts_reasoning=True)
    head = "<|channel|>final<|message|>" if form == "harmony" else ""
    answer = {"schema": {"enum": [1]}, "schemas": {}, "with_tokens": with_tokens}
    assert fits(made, f"{begin}so{end}{head}1", **answer)
    assert not fits(made, f"{begin}so{end}{head}2", **answer)


def test_reasoning_can_be_limited() -> None:
    made = dialect("hermes", "think")
    limits = {"max_reasoning": 3, "starts_reasoning": True, "schemas": {}}
    tokenizer, _ = vocabulary(True)
    assert len(tokenizer.encode("abc", add_special_tokens=False)) <= 3
    assert fits(made, "abc</think>any <tool_call> text", **limits)
    assert not fits(made, "a b c d e f g h</think>any", **limits)
    none = {"max_reasoning": 0, "starts_reasoning": True, "schemas": {}}
    for model, head in ((made, "</think>"), (dialect("harmony", "harmony"), "<|end|>")):
        text = "any" if model is made else "<|start|>assistant<|channel|>final<|message|>any"
        assert fits(model, f"{head}{text}", **none)
        assert not fits(model, f"a{head}{text}", **none)
    with pytest.raises(UserError, match="</think> is not one token"):
        fits(made, "x", with_tokens=False, **limits)


@pytest.mark.parametrize("form", ["minimax_m2", "qwen3_coder", "glm45"])
@pytest.mark.parametrize("with_tokens", [True, False])
def test_bare_strings_follow_their_schema(form: str, with_tokens: bool) -> None:
    def fit(schema: dict[str, Any], value: object) -> bool:
        schemas = {"f": {"properties": {"k": schema}, "required": ["k"]}}
        answer = WRITERS[form]([("f", {"k": value})])
        return fits(dialect(form), answer, with_tokens=with_tokens, forced=True, schemas=schemas)

    assert fit({"type": "string", "pattern": "^[a-z/]+$"}, "a/b")
    assert not fit({"type": "string", "pattern": "^[a-z/]+$"}, "a1b")
    assert fit({"type": "string", "pattern": "[0-9]"}, "a1b")
    assert fit({"type": "string", "minLength": 2.0}, "abc")
    if with_tokens and form != "minimax_m2":
        assert not fit({"type": "string", "maxLength": 2}, "abc")
    assert fit({"type": "string", "format": "date"}, "any")
    assert fit({"const": "a</b>"}, "a</b>")
    assert fit({"type": ["string", "null"]}, None)
    with pytest.raises(UserError, match="both pattern and a length"):
        fit({"type": "string", "pattern": "a", "minLength": 2}, "ab")


def test_what_grammars_allow_readers_read() -> None:
    for form, write in WRITERS.items():
        reader = AnswerReader(dialect(form), {"add": SCHEMA})
        pieces = reader.feed(write(FULL)).calls
        assert json.loads("".join(piece.arguments for piece in pieces)) == FULL[0][1]


BOOLEANS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "boolean"}}
OF_LIBRARIES: list[tuple[dict[str, Any], str, str]] = [  # a schema, a text that fits, one that does not
    (BOOLEANS | {"propertyNames": {"type": "string"}}, '{"x":true}', '{"x":1}'),  # zod's record
    (BOOLEANS | {"propertyNames": {"enum": ["a.b", "c"]}, "required": ["c"]}, '{"a.b":true,"c":true}', '{"a.b":true}'),
    (BOOLEANS | {"propertyNames": {"enum": ["a", "b"]}, "required": ["a", "b"]}, '{"a":true,"b":true}', "{}"),
    (BOOLEANS | {"propertyNames": {"enum": ["a"]}, "properties": {"a": {"const": 1}}}, '{"a":1}', '{"a":true}'),
    (BOOLEANS | {"propertyNames": {"const": "\u00fc \n-"}}, '{"\u00fc \\n-":true}', '{"u":true}'),
    (BOOLEANS | {"propertyNames": {"$ref": "#/$defs/C"}, "$defs": {"C": {"enum": ["r"]}}}, '{"r":true}', '{"g":true}'),
    (BOOLEANS | {"propertyNames": {"pattern": "^[0-9]+$"}}, '{"12":true}', '{"a":true}'),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, '{"rr":1}', '{"rrr":1}'),
    ({"type": "array", "uniqueItems": False, "items": {"type": "string", "format": "path"}}, '["x"]', "[1]"),
    ({"type": "array", "prefixItems": [{"type": "string", "format": "cuid"}], "minItems": 1}, '["x"]', "[1]"),
    (
        {"properties": {"a": {"$ref": "/$defs/C"}}, "required": ["a"], "$defs": {"C": {"const": 1}}},
        '{"a":1}',
        '{"a":2}',
    ),
    (
        {"properties": {"format": {"const": "path"}, "a": {"unevaluatedProperties": {}}}, "required": ["format"]},
        '{"format":"path","a":{"b":1}}',
        '{"format":"x"}',
    ),
    ({"enum": [{"format": "path"}]}, '{"format":"path"}', "{}"),
    ({"type": "string", "format": "date"}, '"2026-01-02"', '"today"'),
    ({"type": "string", "minLength": 2.0, "maxLength": 2**63 - 1}, '"ab"', '"a"'),  # of a library that has only floats
    ({"type": "object", "propertyNames": {"maxLength": 2.0}}, '{"rr":1}', '{"rrr":1}'),
    ({"type": "array", "minItems": 1.0, "maxItems": 2.0, "items": {"type": "integer"}}, "[1]", "[1,2,3]"),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "-9223372036854774784", "-9300000000000000000"),
    ({"type": "number", "minimum": -3.4e38, "exclusiveMaximum": 3.4e38}, "-1.5", "1e400"),  # zod's float32
    ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, "6.02e23", "true"),
    ({"type": "number", "minimum": 1, "maximum": None, "enum": None, "$defs": None}, "2", "0"),  # what was not set
    ({"properties": {"a": {"items": None, "const": None}}, "required": ["a"], "anyOf": None}, '{"a":null}', '{"a":1}'),
]


@pytest.mark.parametrize(("schema", "good", "bad"), OF_LIBRARIES)
def test_keywords_that_libraries_write_are_obeyed_or_ask_for_nothing(
    schema: dict[str, Any], good: str, bad: str
) -> None:
    before = json.dumps(schema)
    assert fits(dialect("hermes"), good, schema=schema)
    assert not fits(dialect("hermes"), bad, schema=schema)
    assert json.dumps(schema) == before, "a request's own schema is given back in answers"


@pytest.mark.parametrize("form", ["minimax_m2", "hermes"])
def test_tools_may_have_such_keywords_too(form: str) -> None:
    parameters: dict[str, Any] = {"map": BOOLEANS | {"propertyNames": {"enum": ["k"]}}, "n": {"$ref": "/$defs/N"}}
    schema = {"type": "object", "properties": parameters, "required": ["map", "n"], "$defs": {"N": {"type": "integer"}}}
    for key, is_good in (("k", True), ("l", False)):
        written = WRITERS[form]([("add", {"map": {key: True}, "n": 5})])
        assert fits(dialect(form), written, forced=True, schemas={"add": schema}) == is_good
    wrong = WRITERS[form]([("add", {"map": {"k": True}, "n": "x"})])
    assert not fits(dialect(form), wrong, forced=True, schemas={"add": schema})


def test_schemas_that_cannot_be_followed_are_refused() -> None:
    for schema in (
        {"properties": {"a": {"not": {}}}},
        {"type": "objekt"},
        {"properties": {"a": {"type": "array", "uniqueItems": True}}},
        {"properties": {"a": {"properties": {"b": {}}, "propertyNames": {"pattern": "^c"}}}},
        {"properties": {"a": {"type": "object", "propertyNames": {"format": "uuid"}}}},
        {"description": "x" * 300_000},
    ):
        with pytest.raises(UserError) as raised:
            fits(dialect("hermes"), "x", forced=True, schemas={"add": schema})
        assert "too many things" not in str(raised.value)


@pytest.mark.parametrize("form", ["minimax_m2", "lfm2"])
def test_schemas_made_to_be_costly_are_refused_at_once(form: str) -> None:
    shared = {"$defs": {"a": {"type": "array", "description": "x" * 20_000}}}
    many = {"properties": {f"p{number}": {"$ref": "#/$defs/a"} for number in range(10_000)}, **shared}
    with pytest.raises(UserError, match="too long: at most"):
        fits(dialect(form), "x", forced=True, schemas={"add": many})
    itself: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/a"}] * 32}
    reader = AnswerReader(dialect(form), {"add": {"properties": {"k": itself}, "$defs": {"a": itself}}})
    assert reader.feed(WRITERS[form]([("add", {"k": 1})])).calls[0].arguments == '{"k": 1}'
    for wrong in ({"minLength": "x"}, {"maxLength": 1.5}):
        if form == "minimax_m2":
            with pytest.raises(UserError, match="are integers"):
                fits(dialect(form), "x", forced=True, schemas={"f": {"properties": {"k": {"type": "string", **wrong}}}})
    fits(dialect(form), "x", forced=True, schemas={"f": {"required": [{}], "properties": {"k": True}}})


@pytest.mark.parametrize("form", sorted(WRITERS))
def test_marks_that_are_special_tokens_reach_the_reader(form: str) -> None:
    tokenizer, _ = vocabulary(True)
    reader = AnswerReader(dialect(form), {"add": SCHEMA})
    detokenizer = tokenizer.detokenizer(marks=reader.marks)
    token_ids = tokenizer.encode(WRITERS[form](FULL), add_special_tokens=False)
    pieces = [piece for token_id in token_ids for piece in reader.feed(detokenizer.feed(token_id)).calls]
    assert json.loads("".join(piece.arguments for piece in pieces)) == FULL[0][1]
    assert not AnswerReader(dialect(form), {}).marks or form == "harmony", (
        "marks of calls that are not read stay hidden"
    )
