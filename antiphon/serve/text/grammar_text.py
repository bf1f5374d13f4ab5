"""Texts that llguidance builds grammars from: a client's JSON schema, expression, choices or rules; and rules, in its
form of Lark, that answers of one dialect follow: reasoning as the model likes, then calls of tools in its own format
with arguments that fit their schemas, or an answer that follows a grammar of its own.

Three wishes lead to rules: a call whatever the model thinks (`forced`); a call, or an answer that fits (`answer`); a
call or any text, but some tools are strict. The last lets text pass to the mark that begins a call, and follows the
schema from there on. Each schema is a grammar of its own, so that references inside it (`#/$defs/...`) keep their root.

A token that was added to the vocabulary stands for itself in a grammar; the same text in quotes would not allow it, and
neither would "any text". So what passes freely are tokens where the mark behind it is one, else characters. White space
between JSON tokens is limited: a small model that may write white space without end will do so.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from antiphon.base.errors import UserError
from antiphon.serve.text.call_values import property_types, resolved
from antiphon.serve.text.client_schema import MAX_CHARACTERS, schema_text, whole
from antiphon.serve.text.dialects import CHANNEL, CONSTRAIN, MESSAGE, START, CallFormat, Dialect

_WHITE_SPACE = r"[ \n\r\t]{0,32}"
ANSWER = "answer"  # the grammar of an answer without calls, beside these rules
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_KEY = "/[A-Za-z0-9_.-]{1,128}/"
_ANY_TEXT = r"(.|\n)*"
_NO_CALL = r"/([^{\[ \n\r\t](.|\n)*)?/"  # text that begins as none of the formats without marks


def json_grammar(schema: dict[str, Any]) -> str:
    """llguidance's grammar of JSON that fits `schema`; `UserError` for what shows without building it."""
    text = schema_text(schema)
    try:
        grammar: str = llguidance.LLMatcher.grammar_from_json_schema(
            text, defaults={"whitespace_pattern": _WHITE_SPACE}, overrides={"lenient": False}
        )
    except ValueError as error:
        raise UserError(f"the JSON schema cannot be used: {error}") from error
    return grammar


def lark_grammar(make_rules: Callable[[], str]) -> str:
    """llguidance's grammar of rules in its form of Lark; `UserError` for what shows without building it."""
    rules = make_rules()
    if len(rules) > MAX_CHARACTERS:
        raise UserError(f"the grammar has {len(rules)} characters: at most {MAX_CHARACTERS} are allowed")
    try:
        grammar: str = llguidance.LLMatcher.grammar_from_lark(rules)
    except ValueError as error:
        raise UserError(f"the grammar cannot be used: {error}") from error
    return grammar


def regex_grammar(pattern: str) -> str:
    """llguidance's grammar of texts that fit a regular expression as a whole."""
    grammar: str = llguidance.LLMatcher.grammar_from_regex(pattern)
    return grammar


def choice_grammar(choices: list[str]) -> str:
    """llguidance's grammar of one of `choices`."""
    return lark_grammar(lambda: f"start: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)}\n")


def written_grammar(rules: str) -> str:
    """llguidance's grammar of a client's rules, in the form of Lark or in that of llama.cpp (`root ::= ...`)."""
    return lark_grammar(lambda: _lark_rules(rules) if "::=" in rules else rules)


def _lark_rules(rules: str) -> str:
    """A client's rules in the form of llama.cpp, rewritten in that of Lark; `UserError` for what cannot be read."""
    try:
        return str(any_to_lark(rules))
    except RecursionError:
        raise UserError("the grammar cannot be used: its brackets lie too deep in one another") from None
    except Exception as error:  # the library has no class of its own for an unknown rule or a missing `root`
        raise UserError(f"the grammar cannot be used: {error}") from error


def composed_grammar(rules: str, answer: str, name: str) -> str:
    """llguidance's grammar of `rules` that lead to the grammar `answer` by its name."""
    inner = json.loads(answer)["grammars"][0] if answer.startswith("{") else {"lark_grammar": answer}
    return json.dumps({"grammars": [{"lark_grammar": rules}, inner | {"name": name}]})


# --- rules for answers of one dialect ---------------------------------------------------------------------------------


class Spelling:
    """How rules name the texts of one vocabulary. `added`: the ids of tokens that were added to it; `end_ids`: the
    tokens that end an answer."""

    def __init__(self, added: Mapping[str, int], end_ids: tuple[int, ...]) -> None:
        self._added = added
        self._end_ids = end_ids

    def text(self, text: str) -> str:
        """Exactly `text`."""
        return " ".join(self._parts(text))

    def is_token(self, text: str) -> bool:
        """Whether `text` begins with a token of its own."""
        return self._parts(text)[0].startswith("<[")

    def anything_but(self, mark: str) -> str:
        """One token: any but the first of `mark`, and those that end the answer."""
        first = self._parts(mark)[0].strip("<[]>") if mark else ""
        return f"<[^{','.join(filter(None, [first, *map(str, self._end_ids)]))}]>"

    def _parts(self, text: str) -> list[str]:
        tokens = sorted((token for token in self._added if token in text), key=len, reverse=True)
        if not tokens:
            return [json.dumps(text, ensure_ascii=False)]
        pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", text)
        return [
            f"<[{self._added[piece]}]>" if piece in self._added else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        ]


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What an answer is to be. `schemas`: of the functions that may be called, by name. `has_answer`: one without calls
    follows the grammar `ANSWER`; else it is any text, unless `forced` leaves no such answers.

    `starts_reasoning`: the answer begins inside the reasoning, of at most `max_reasoning` tokens (None: any number)."""

    schemas: Mapping[str, dict[str, Any]]
    forced: bool = False
    at_most_one: bool = False
    has_answer: bool = False
    starts_reasoning: bool = False
    max_reasoning: int | None = None


def answer_rules(dialect: Dialect, spelling: Spelling, wish: Wish) -> str:
    """The rules; `UserError` for what they cannot promise."""
    writer = _RuleWriter(spelling)
    if dialect.has_channels:
        start = _messages(writer, dialect, wish)
    else:
        start = _reasoning(writer, dialect, wish) + _after_reasoning(writer, dialect.calls, wish)
    return "\n".join([f"start: {start}", *writer.rules]) + "\n"


class _RuleWriter:
    """Collects rules; `spell` names texts in them."""

    def __init__(self, spelling: Spelling) -> None:
        self.spelling = spelling
        self.spell = spelling.text
        self.rules: list[str] = []
        self._num_left = MAX_CHARACTERS

    def rule(self, body: str, *, options: str = "") -> str:
        """The name of a new rule."""
        self._num_left -= len(body)
        if self._num_left < 0:  # before more of them take memory
            raise UserError(f"the JSON schemas of the tools are too long: at most {MAX_CHARACTERS} characters of rules")
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def until(self, mark: str, body: str = _ANY_TEXT, *, most: int | None = None) -> str:
        """Text, with its mark: any tokens, at most `most`, or characters of the pattern `body`."""
        if self.spelling.is_token(mark):
            count = "*" if most is None else f"{{0,{most}}}"
            if body == _ANY_TEXT:
                text = "" if most == 0 else f"{self.spelling.anything_but(mark)}{count} "  # {0,0} is no count
                return text + self.spell(mark)
            return f"{self.rule(f'/{body}/')} {self.spell(mark)}"
        if most is not None:
            raise UserError(f"the reasoning cannot be limited: {mark} is not one token of this model")
        return self.rule(f"/({body}){re.escape(mark).replace('/', chr(92) + '/')}/", options="[lazy]")


def _reasoning(writer: _RuleWriter, dialect: Dialect, wish: Wish) -> str:
    form = dialect.reasoning
    if form is None:
        return ""
    thought = writer.rule(writer.until(form.end, most=wish.max_reasoning) + r" /\n{0,2}/")
    return f"{thought} " if wish.starts_reasoning else f"({writer.spell(form.begin)} {thought})? "


def _after_reasoning(writer: _RuleWriter, form: CallFormat | None, wish: Wish) -> str:
    if form is None or not wish.schemas:
        return f"@{ANSWER}" if wish.has_answer else f"{writer.spelling.anything_but('')}*"
    block = writer.rule(_block(writer, form, wish))
    blocks = block
    if not wish.at_most_one and (form.one_a_block or not form.begin) and not form.is_list:
        separator = writer.spell(form.separator or "\n")
        blocks = f"{block} ({separator if form.begin or form.separator else ''} {block})*"
    if wish.forced:
        return blocks
    if wish.has_answer:
        return f"({blocks} | @{ANSWER})"
    mark = form.begin or form.call_begin
    if not mark:
        return f"({blocks} | {writer.rule(_NO_CALL)})"
    behind = writer.rule(_block(writer, form, wish, is_open=True))
    rest = f"{writer.spelling.anything_but(mark)}*" if writer.spelling.is_token(mark) else r"/(.|\n)*/"
    return f"({writer.until(mark)} {behind})* {rest}"


def _block(writer: _RuleWriter, form: CallFormat, wish: Wish, *, is_open: bool = False) -> str:
    """Calls with the marks around them; `is_open`: but for the first mark."""
    breaks = '"\\n"?' if form.line_breaks else ""
    calls = [_call(writer, form, name, schema) for name, schema in wish.schemas.items()]
    call = writer.rule(" | ".join(calls))
    if form.structure in ("sections", "tags"):
        first = call
        opening = writer.spell(form.call_begin)
        if not form.begin:
            return first if is_open else f"{opening} {first}"
        more = "" if wish.at_most_one or form.one_a_block else f"({_spelled(writer, form.separator)} {opening} {call})*"
        inside = f"{breaks} {opening} {first} {more} {breaks}"
    else:
        more = "" if wish.at_most_one or form.one_a_block else f"({_spelled(writer, form.separator)} {call})*"
        inside = f'"[" {call} {more} "]"' if form.is_list else f"{breaks} {call} {more if form.begin else ''} {breaks}"
    begin = "" if is_open else _spelled(writer, form.begin)
    return f"{begin} {inside} {_spelled(writer, form.end) if form.begin else ''}"


def _spelled(writer: _RuleWriter, text: str) -> str:
    return writer.spell(text) if text else ""


def _call(writer: _RuleWriter, form: CallFormat, name: str, schema: dict[str, Any]) -> str:
    """The rule of one function's call, behind `call_begin`."""
    spell = writer.spell
    if form.structure == "json":
        opening = json.dumps(f'{{"name": {json.dumps(name)}, "{form.arguments_key}": ')
        return writer.rule(f'{opening} {_json(writer, _ANY_OBJECT | schema)} "}}"')
    if form.structure == "sections":
        named = f"{spell(f'functions.{name}:')} /[0-9]{{1,4}}/" if form.own_ids else spell(name)
        close = _spelled(writer, form.call_end)
        return writer.rule(f"{named} {spell(form.name_end)} {_json(writer, _ANY_OBJECT | schema)} {close}")
    breaks = '"\\n"?' if form.line_breaks else ""
    values = [(key, _value(writer, form, key, part, schema)) for key, part in _properties(schema).items()]
    stated = schema.get("required")
    required = {key for key in stated if isinstance(key, str)} if isinstance(stated, list) else set()
    if form.structure == "python":
        parameters = _separated(writer, [(f"{spell(key + '=')} {value}", key in required) for key, value in values])
        return writer.rule(f'{spell(name + "(")} {parameters} ")"')
    parts = []
    for key, value in values:
        part = writer.rule(f"{spell(form.key_begin + key)} {value} {breaks}")
        parts.append(part if key in required else f"{part}?")
    if not values and schema.get("additionalProperties") is not False:
        any_value = _value(writer, form, "", {"type": "string"}, {})
        parts.append(f"{writer.rule(f'{spell(form.key_begin)} {_KEY} {any_value} {breaks}')}*")
    return writer.rule(f"{spell(name + form.name_end)} {breaks} {' '.join(parts)} {spell(form.call_end)} {breaks}")


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _separated(writer: _RuleWriter, parts: list[tuple[str, bool]]) -> str:
    """Parts in their order with commas between them; those that are not required may be missing."""
    first, rest = '""', '""'
    for part, is_required in reversed(parts):
        behind = writer.rule(f"{part} {rest}")
        first = writer.rule(behind if is_required else f"{behind} | {first}")
        rest = writer.rule(f'", " {behind}' if is_required else f'", " {behind} | {rest}')
    return first


def _value(writer: _RuleWriter, form: CallFormat, key: str, part: Any, schema: dict[str, Any]) -> str:
    """What follows a parameter's name, to the end of its value."""
    root = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    found = resolved(part, schema)
    found = found if isinstance(found, dict) else {}
    if form.structure == "python":
        return _json(writer, found | root)
    types = property_types(schema, key) if key else frozenset(("string",))
    is_text = not types or "string" in types
    said = f'" string="{"true" if is_text else "false"}' if form.says_strings else ""
    breaks = ' "\\n"?' if form.key_close and form.line_breaks else ""
    closing = _spelled(writer, said + form.key_close) if said + form.key_close else ""
    opening = f"{closing}{breaks} {writer.spell(form.key_end)}"
    line = '"\\n"?' if form.trims_lines else ""
    choices = found.get("enum", [found["const"]] if "const" in found else None)
    if is_text and isinstance(choices, list) and choices:
        texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in choices]
        chosen = " | ".join(writer.spell(text) if text else '""' for text in texts)
        return f"{opening} {line} ({chosen}) {line} {writer.spell(form.value_end)}"
    if is_text:
        body = _pattern(found) if types else _ANY_TEXT
        ending = r"\n?" if form.trims_lines and body != _ANY_TEXT else ""
        return f"{opening} {line} {writer.until(form.value_end, body + ending)}"
    return f"{opening} {line} {_json(writer, found | root)} {line} {writer.spell(form.value_end)}"


def _pattern(schema: dict[str, Any]) -> str:
    """The pattern of a bare text that fits the schema of a string. `UserError` for two wishes at once."""
    pattern, least, most = schema.get("pattern"), whole(schema.get("minLength")), whole(schema.get("maxLength"))
    if pattern is None and least is None and most is None:
        return _ANY_TEXT
    if pattern is None:
        if not isinstance(least or 0, int) or not isinstance(most or 0, int):
            raise UserError("the JSON schema cannot be used: minLength and maxLength are integers")
        return rf"(.|\n){{{least or 0},{'' if most is None else most}}}"
    if least is not None or most is not None:
        raise UserError("the JSON schema cannot be used: a string has both pattern and a length; keep one of them")
    pattern = str(pattern).replace("\n", r"\n")
    head = "" if pattern.startswith("^") else r"(.|\n)*"
    tail = "" if pattern.endswith("$") else r"(.|\n)*"
    inner = re.sub(r"(?<!\\)/", r"\/", pattern.removeprefix("^").removesuffix("$"))
    return f"{head}({inner}){tail}"


def _json(writer: _RuleWriter, schema: dict[str, Any]) -> str:
    """A schema inside rules, with the same limits as `json_grammar`: nothing that cannot be enforced, little white
    space."""
    limits = {"lenient": False, "whitespace_pattern": _WHITE_SPACE}
    return writer.rule(f"%json {schema_text(schema, {'x-guidance': limits})}")


# --- messages on channels ---------------------------------------------------------------------------------------------


def _messages(writer: _RuleWriter, dialect: Dialect, wish: Wish) -> str:
    spell = writer.spell
    end = "<|end|>"
    thought = writer.until(end, most=wish.max_reasoning)
    again = spell(f"{START}assistant")
    if dialect.reasoning is None and not wish.starts_reasoning:
        thoughts = ""
    elif wish.starts_reasoning:
        thoughts = f"{thought} {again} "
    else:
        thoughts = f"({spell(f'{CHANNEL}analysis{MESSAGE}')} {thought} {again})* "
    calls = [
        f"{spell(f'{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}')}"
        f" {_json(writer, _ANY_OBJECT | schema)}"
        for name, schema in wish.schemas.items()
    ]
    if wish.forced:
        return f"{thoughts}({' | '.join(calls)})"
    final = spell(f"{CHANNEL}final{MESSAGE}")
    answer = f"@{ANSWER}" if wish.has_answer else f"{writer.spelling.anything_but('')}*"
    return f"{thoughts}({' | '.join([*calls, f'{final} {answer}'])})"
