"""What a model writes, in every format: the same fields wherever the text is cut, and nothing is lost."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.serve.text.answer_reader import AnswerReader, leaves_reasoning_open
from antiphon.serve.text.dialects import CALL_FORMATS, REASONING_FORMATS, Dialect, dialect_of
from tests.serve.written_calls import REASONERS, UNMARKED, WRITERS, Call, with_text

STRING: dict[str, Any] = {"type": "string"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": STRING,
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "tree": {"$ref": "#/$defs/tree"},
        "note": {"anyOf": [STRING, {"type": "null"}]},
    },
    "$defs": {"tree": {"type": "object"}},
}
TOOLS: dict[str, dict[str, Any]] = {"add": SCHEMA, "look.up": SCHEMA, "pythonic_name": SCHEMA}
Read = tuple[str, str, list[tuple[str, str]]]  # reasoning, text, calls as name and arguments


def dialect(calls: str = "none", reasoning: str = "none") -> Dialect:
    return dialect_of("", tool_parser=calls, reasoning_parser=reasoning)


def read(form: Dialect, pieces: list[str], prompt: str = "", **options: Any) -> Read:
    """All fields of an answer that comes in pieces."""
    reader = AnswerReader(form, TOOLS, prompt=prompt, **options)
    reasoning, text, calls = "", "", []
    for reading in [*map(reader.feed, pieces), reader.flush()]:
        reasoning += reading.reasoning
        text += reading.text
        for piece in reading.calls:
            if piece.id is not None:
                assert piece.name is not None
                assert piece.index == len(calls)
                calls.append((piece.name, ""))
            assert piece.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    assert reader.num_calls == len(calls)
    return reasoning, text, calls


def read_everywhere(form: Dialect, answer: str, prompt: str = "", **options: Any) -> Read:
    """As `read`, having looked at every cut into two pieces and the one into characters."""
    whole = read(form, [answer], prompt, **options)
    assert read(form, list(answer), prompt, **options) == whole
    for cut in range(1, len(answer)):
        assert read(form, [answer[:cut], answer[cut:]], prompt, **options) == whole, answer[:cut]
    return whole


WORDS = ["x", "", "Zürich 日本語 🙂", 'say "hi"\\n', "a\nb\n\tc", "it's", "{}", "</a> <b>", "12", "true", "C:\\dir"]


def some_value(chance: random.Random, kind: str) -> object:
    if kind == "text":
        return chance.choice(WORDS)
    if kind == "count":
        return chance.randint(-9, 10**12)
    if kind == "ratio":
        return chance.choice([0.5, -1e-9, 3])
    if kind == "flag":
        return chance.random() < 0.5
    if kind == "note":
        return chance.choice([None, "a note"])
    nested = {"k": chance.choice(WORDS), "l": [1, None, {"m": [chance.choice(WORDS)]}], "t": True}
    return [nested, chance.choice(WORDS)] if kind == "items" else nested


def some_calls(chance: random.Random) -> list[Call]:
    calls: list[Call] = []
    for _ in range(chance.randint(1, 3)):
        kinds = chance.sample(sorted(SCHEMA["properties"]), chance.randint(0, 4))
        calls.append((chance.choice(sorted(TOOLS)), {kind: some_value(chance, kind) for kind in kinds}))
    return calls


def parsed(calls: list[tuple[str, str]]) -> list[Call]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("form", sorted(WRITERS))
def test_calls_of_every_format_read_as_they_were_written(form: str) -> None:
    chance = random.Random(form)
    for _ in range(50):
        calls = some_calls(chance)
        text = "" if form in UNMARKED else chance.choice(["", "Sure. \n", "Let me look: <b>", "日本 "])
        answer = with_text(form, text, WRITERS[form](calls))
        pieces = [answer[at : at + 7] for at in range(0, len(answer), 7)]
        reasoning, said, found = read(dialect(form), [answer])
        assert (reasoning, said, parsed(found)) == ("", text, calls)
        assert read(dialect(form), pieces) == read(dialect(form), list(answer)) == (reasoning, said, found)


@pytest.mark.parametrize("form", sorted(WRITERS))
def test_a_call_reads_the_same_at_every_cut_and_every_end(form: str) -> None:
    calls: list[Call] = [("add", {"text": 'a "b"\n</x>é', "items": [{"k": "]"}], "count": 3}), ("look.up", {})]
    answer = with_text(form, "" if form in UNMARKED else "So.\n", WRITERS[form](calls))
    assert parsed(read_everywhere(dialect(form), answer)[2]) == calls
    complete = 0
    for end in range(len(answer)):  # cut off there
        _, said, found = read(dialect(form), [answer[:end]])
        assert (said, found) == read(dialect(form), list(answer[:end]))[1:]
        assert [name for name, _ in found] == [name for name, _ in calls][: len(found)]
        assert len(found) >= complete
        complete = len(found)
        if not found and form != "harmony":
            assert "".join(said.split()) in "".join(answer.split())
        forced = read(dialect(form), [answer[:end]], forced=True)
        assert forced[2] == found
        assert "So.\n".startswith(forced[1][:4]), "what was held back is no text"


@pytest.mark.parametrize("form", sorted(WRITERS))
def test_only_calls_of_tools_that_were_offered_are_calls(form: str) -> None:
    answer = WRITERS[form]([("other", {"text": "x", "count": 1})])
    assert read_everywhere(dialect(form), answer) == ("", answer, [])
    assert read(Dialect(), [answer]) == ("", answer, [])


@pytest.mark.parametrize("form", sorted(REASONERS))
@pytest.mark.parametrize("calls", ["hermes", "qwen3_coder", "kimi_k2"])
def test_reasoning_comes_first_and_holds_no_calls(form: str, calls: str) -> None:
    begin, end = REASONERS[form]
    calls = "harmony" if form == "harmony" else calls
    thought = 'hm\n\n<b> <tool_call>{"name": "add"}</tool_call> <think> <parameter=x> [TOOL_CALLS]é'
    call = WRITERS[calls]([("add", {"text": "y"})])
    answer = begin + thought + end + with_text(calls, "Well.\n", call)
    made = dialect(calls, form)
    assert read_everywhere(made, answer) == (thought, "Well.\n", [("add", '{"text": "y"}')])
    assert read(made, [begin + thought + end + call])[:2] == (thought, "")
    for end_at in range(len(begin), len(begin + thought)):
        kept = answer[len(begin) : end_at]
        assert read(made, [answer[:end_at]]) == (kept.lstrip("\n"), "", []), "no closing mark"


def test_a_prompt_may_open_the_reasoning() -> None:
    think = dialect("minimax_m2", "think")
    for prompt in ("<think>\n", "user <think> x</think> assistant <think>"):
        assert read_everywhere(think, "so\n</think>\n\n Yes ", prompt) == ("so", " Yes ", [])
        assert read(think, ["<think>so</think>Yes"], prompt) == ("so", "Yes", []), "said once more"
        assert read(think, ["so it goes"], prompt) == ("so it goes", "", [])
    for prompt in ("", "<think>\n\n</think>\n\n"):
        assert not leaves_reasoning_open(think, prompt)
        assert read_everywhere(think, "Yes, <think> is a mark </think>.", prompt) == (
            "",
            "Yes, <think> is a mark </think>.",
            [],
        )
        assert read(think, ["\n<think>a</think>b"], prompt) == ("a", "b", [])
    assert read(dialect("hermes", "deepseek_r1"), ["a</think>b"]) == ("a", "b", [])
    assert read(dialect("hermes", "deepseek_r1"), ["b"], "<think></think>") == ("", "b", [])
    assert read(dialect("hermes"), ["<think>a</think>b"]) == ("", "<think>a</think>b", [])


def test_an_answer_may_have_marks_of_its_own() -> None:
    ernie, prompt = dialect("hermes", "ernie45"), "<think>\n"
    assert read_everywhere(ernie, "a\n</think>\n\n<response>\nb <c>\n</response>\n", prompt) == ("a", "b <c>\n", [])
    assert read_everywhere(ernie, "a</think>\nb </response>", prompt) == ("a", "b </response>", [])
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n'
    assert read_everywhere(ernie, f"a</think>\n\n{call}", prompt) == ("a", "", [("add", "{}")])


def test_a_block_of_calls_ends_the_reasoning_where_its_mark_is_a_token() -> None:
    answer = "I look." + WRITERS["kimi_k2"]([("add", {"count": 1})])
    assert read_everywhere(dialect("kimi_k2", "think"), answer, "<think>") == ("I look.", "", [("add", '{"count": 1}')])


def test_messages_on_channels() -> None:
    gpt = dialect("harmony", "harmony")
    start = "<|start|>assistant"
    answer = (
        "<|channel|>analysis<|message|>first<|end|><|start|>assistant<|channel|>analysis<|message|>second<|end|>"
        f"{start}<|channel|>commentary<|message|>Let me look.<|end|>{start} to=functions.add<|channel|>commentary"
        f' <|constrain|>json<|message|>{{"count": 1}}<|call|>{start}<|channel|>final<|message|>Done.<|return|>'
    )
    fields = ("first\nsecond", "Let me look.\nDone.", [("add", '{"count": 1}')])
    assert read_everywhere(gpt, answer, start) == fields
    assert read_everywhere(gpt, answer.replace("<|end|>", ""), start) == fields, "messages may have no end"
    assert read(gpt, ['to=functions.add<|channel|>commentary<|message|>{"count"'], start)[2] == [("add", '{"count"')]
    assert read(gpt, ["Hel", "lo"], f"{start}<|channel|>final<|message|>") == ("", "Hello", [])
    assert read(gpt, ["so<|end|>"], f"{start}<|channel|>analysis<|message|>") == ("so", "", [])
    assert read_everywhere(gpt, "no channel at all ", start) == ("", "no channel at all ", [])
    other = "<|channel|>commentary to=python<|message|>1 + 1<|call|>"
    assert read_everywhere(gpt, other, start) == ("", other, [])


def test_ids_of_calls_are_as_the_templates_want_them() -> None:
    def first_id(form: str) -> str | None:
        return AnswerReader(dialect(form), TOOLS).feed(WRITERS[form]([("look.up", {})])).calls[0].id

    assert first_id("kimi_k2") == "functions.look.up:0"
    assert len(first_id("mistral") or "") == len(first_id("mistral_json") or "") == 9
    assert str(first_id("hermes")).startswith("call_")


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45", "minimax_m2", "seed_oss"])
def test_bare_values_have_the_types_of_their_schema(form: str) -> None:
    def argument(schema: dict[str, Any], written: str) -> object:
        answer = WRITERS[form]([("f", {"k": written})])
        reader = AnswerReader(dialect(form), {"f": {"properties": {"k": schema}}})
        return json.loads("".join(piece.arguments for piece in reader.feed(answer).calls))["k"]

    assert argument({"type": "string"}, "12") == "12"
    assert argument({"type": "integer"}, " 12 ") == 12
    assert argument({"type": "integer"}, "twelve") == "twelve"
    assert argument({"type": "number"}, "3") == 3
    assert argument({"type": ["string", "null"]}, "null") is None
    assert argument({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12") == 12
    assert argument({"type": ["string", "null"]}, "12") == "12"
    assert argument({"type": "boolean"}, "True") is True
    assert argument({"type": "object"}, "{'a': [None, (1, 'x')]}") == {"a": [None, [1, "x"]]}
    assert argument({"enum": ["1", "2"]}, "1") == "1"
    assert argument({"enum": [1, 2]}, "1") == 1
    assert argument({}, '{"a": 1}') == {"a": 1}
    assert argument({}, "NaN") == "NaN"
    assert argument({"$ref": "#/$defs/none"}, "x") == "x"
    assert argument({"type": "array"}, "[" * 100_000) == "[" * 100_000
    assert argument({"type": "integer"}, "1" * 10_000) == "1" * 10_000


def test_an_argument_is_streamed_as_it_is_written() -> None:
    reader = AnswerReader(dialect("minimax_m2"), TOOLS)
    assert not reader.feed('<minimax:tool_call><invoke name="ad').calls
    (first,) = reader.feed('d">').calls
    assert (first.index, first.name, first.arguments) == (0, "add", "")
    assert reader.feed('<parameter name="text">a ').calls[0].arguments == '{"text": "a '
    assert reader.feed("long\n").calls[0].arguments == "long\\n"


def test_after_one_call_a_reader_of_one_is_satisfied() -> None:
    for form, write in WRITERS.items():
        answer = write([("add", {"count": 1}), ("add", {"count": 2})])
        reader = AnswerReader(dialect(form), TOOLS, at_most_one=True)
        pieces = [piece for character in answer for piece in reader.feed(character).calls]
        assert reader.satisfied
        assert json.loads("".join(piece.arguments for piece in pieces)) == {"count": 1}
        assert not reader.flush().text


MARKS = {form.name: sorted(form.marks) for form in (*CALL_FORMATS, *REASONING_FORMATS)}


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(WRITERS)), st.sampled_from(sorted(REASONERS)), st.data())
def test_any_answer_reads_the_same_in_pieces_and_nothing_fails(form: str, reasoning: str, data: st.DataObject) -> None:
    reasoning = "harmony" if form == "harmony" else reasoning
    some = [*MARKS[form], *MARKS[reasoning], *"{}[]:,\" \n\\x'()=<>", "add", '"name"', '{"name": "add", "arguments": {']
    pieces = data.draw(st.lists(st.sampled_from([each for each in some if each])))
    prompt = data.draw(st.sampled_from(["", "<think>", "<|start|>assistant"]))
    forced = data.draw(st.booleans())
    made = dialect(form, reasoning)
    whole = read(made, ["".join(pieces)], prompt, forced=forced)
    assert (
        read(made, pieces, prompt, forced=forced) == read(made, list("".join(pieces)), prompt, forced=forced) == whole
    )


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(WRITERS)), st.text(alphabet="<tol_ca>{}[]\"\n x=/|'"))
def test_text_without_a_known_name_is_unchanged(form: str, answer: str) -> None:
    assert read(dialect(form), list(answer)) == ("", answer, [])


def test_a_long_call_takes_time_in_proportion() -> None:
    text = "x" * 50_000
    for form, write in WRITERS.items():
        assert parsed(read(dialect(form), list(write([("add", {"text": text})])))[2]) == [("add", {"text": text})]
    late = f'<tool_call>{{"arguments": {{"t": "{text}"}}, "name": "add"}}</tool_call>'
    assert read(dialect("hermes"), list(late))[2] == [("add", f'{{"t": "{text}"}}')]
    space = " " * 100_000  # copied for every character, this would take minutes
    call = '{"name": "add", "arguments": {}}'
    answer = f"<tool_call>{space}{call}{space}</tool_call>{space}"
    assert read(dialect("hermes"), list(answer)) == ("", "", [("add", "{}")])
    assert read(dialect("hermes"), list(f"a{space}b")) == ("", f"a{space}b", [])
    many = '<tool_call>{"id":' * 5_000
    assert read(dialect("hermes"), list(many)) == ("", many, [])
    many = "<minimax:tool_call>" * 5_000
    assert read(dialect("minimax_m2"), list(many)) == ("", many, [])


def test_templates_show_their_dialect() -> None:
    def names(template: str) -> tuple[str | None, str | None]:
        found = dialect_of(template)
        return found.reasoning and found.reasoning.name, found.calls and found.calls.name

    for form in WRITERS:
        if form not in {"pythonic"}:
            assert names(WRITERS[form]([("f", {"k": "v"})]))[1] == form
    assert names("[func_name1(params_name1=params_value1, params_name2=params_value2...)]") == (None, "pythonic")
    assert names("{{ tools }} <think> </think> <tool_call>") == ("think", "hermes")
    assert names("<think></think><response></response><tool_call>") == ("ernie45", "hermes")
    assert names("{{ tools | tojson }}") == (None, None)
    assert dialect_of("<tool_call>", tool_parser="qwen3_xml").calls == dialect("qwen3_coder").calls
    for option in ("tool_parser", "reasoning_parser"):
        with pytest.raises(
            UserError, match=f"--{option.replace('_', '-')} is 'x': the formats it knows are .*hermes|think"
        ):
            dialect_of("", **{option: "x"})
