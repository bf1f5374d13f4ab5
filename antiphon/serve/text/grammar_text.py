"""Texts of grammars: a client's JSON schema, or rules for calls of tools, in the form that llguidance builds a grammar
from.

Rules make a model call tools in its own format, with arguments that fit their schemas. They have three uses: a call is
wanted whatever the model thinks (`forced`); it may call or answer, and the answer must fit a schema; it may call or
answer freely, but some tools are strict. The last one lets text pass until the mark that begins a call, and follows the
schema from there on. Each function's schema is a grammar of its own, so that references inside it (`#/$defs/...`) keep
their root.

White space between JSON tokens is limited: a small model that may write white space without end will do so.
"""

import json
from collections.abc import Callable
from typing import Any

import llguidance

from antiphon.base.errors import UserError
from antiphon.serve.text.tool_calls import ToolFormat

_WHITE_SPACE = r"[ \n\r\t]{0,32}"
_MAX_SCHEMA_CHARACTERS = 256 * 1024
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def _limited_json(schema: dict[str, Any], more: dict[str, Any] | None = None) -> str:
    """The text of a client's schema, with `more` beside its keywords; `UserError` if it is too long. Its length is
    estimated first: writing millions of characters holds up all threads."""
    num_characters, values = 0, [schema]
    while values and num_characters <= _MAX_SCHEMA_CHARACTERS:
        value: Any = values.pop()
        if isinstance(value, dict):
            num_characters += sum(map(len, value)) + 6 * len(value)
            values.extend(value.values())
        elif isinstance(value, list):
            num_characters += 2 * len(value)
            values.extend(value)
        else:
            num_characters += len(value) + 2 if isinstance(value, str) else 1
    if num_characters <= _MAX_SCHEMA_CHARACTERS:
        try:
            text = json.dumps(schema | (more or {}), ensure_ascii=False)
        except RecursionError as error:
            raise UserError("the JSON schema cannot be used: it is nested too deeply; use $defs and $ref") from error
        num_characters = len(text)
    if num_characters > _MAX_SCHEMA_CHARACTERS:
        raise UserError(f"the JSON schema is too long: at most {_MAX_SCHEMA_CHARACTERS} characters are allowed")
    return text


def json_grammar(schema: dict[str, Any]) -> str:
    """llguidance's grammar of JSON that fits `schema`; `UserError` for what shows without building it."""
    text = _limited_json(schema)
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
    if len(rules) > _MAX_SCHEMA_CHARACTERS:
        raise UserError(f"the grammar has {len(rules)} characters: at most {_MAX_SCHEMA_CHARACTERS} are allowed")
    try:
        grammar: str = llguidance.LLMatcher.grammar_from_lark(rules)
    except ValueError as error:
        raise UserError(f"the grammar cannot be used: {error}") from error
    return grammar


# --- rules for calls of tools -----------------------------------------------------------------------------------------


def tool_grammar(
    form: ToolFormat,
    schemas: dict[str, dict[str, Any]],
    *,
    forced: bool,
    at_most_one: bool,
    answer_schema: dict[str, Any] | None = None,
    mark_ids: tuple[int | None, int | None] = (None, None),
) -> str:
    """The grammar of answers that call functions, by name with the schema of their arguments.

    `forced`: nothing but calls. Else `answer_schema` is what an answer without calls must fit; None: any text.
    `mark_ids`: of the marks around a call, where they are tokens added to the vocabulary. Such a token stands for
    itself in a grammar; the same text in quotes would not allow it.
    """
    names = [f"call_{number}" for number in range(len(schemas))]
    rules = [f"call: {' | '.join(names)}", *_call_rules(form, schemas)]
    begin_id, end_id = mark_ids
    begin = json.dumps(form.begin) if begin_id is None else f"<[{begin_id}]>"
    end = json.dumps(form.end) if end_id is None else f"<[{end_id}]>"
    one, more = _blocks(form, end, at_most_one)
    if forced or answer_schema is not None:
        rules.append(f"calls: {begin if form.begin else ''} {one} {more.format(begin=begin)}")
        if forced:
            return _joined("start: calls", rules)
        return _joined("start: calls | answer", [*rules, f"answer: %json {_schema(answer_schema or {})}"])
    if not form.begin:
        free = [r"free: /([^{\[ \n\r\t](.|\n)*)?/", f"calls: {one} {more.format(begin='')}"]
        return _joined("start: calls | free", rules + free)
    head = f"head[lazy]: TEXT {begin}" if begin_id is None else f"head: TEXT {begin}"
    return _joined(f"start: (head {one})* TEXT", [*rules, head, r"TEXT: /(.|\n)*/"])


def _blocks(form: ToolFormat, end: str, at_most_one: bool) -> tuple[str, str]:
    """What follows the mark of the first call, and the further calls; `{begin}` is the mark."""
    if form.end:
        one = f'"\\n" call "\\n" {end}'
        return one, "" if at_most_one else f'("\\n" {{begin}} {one})*'
    if form.begin:
        return ('"[" call "]"', "") if at_most_one else ('"[" call (", " call)* "]"', "")
    return "call", "" if at_most_one else '("; " call)*'


def _call_rules(form: ToolFormat, schemas: dict[str, dict[str, Any]]) -> list[str]:
    rules = []
    for number, (name, schema) in enumerate(schemas.items()):
        opening = json.dumps(f'{{"name": {json.dumps(name)}, "{form.arguments_key}": ')
        rules.append(f'call_{number}: {opening} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {_schema(_ANY_OBJECT | schema)}")
    return rules


def _schema(schema: dict[str, Any]) -> str:
    """With the same limits as `json_grammar`: nothing that cannot be enforced, little white space."""
    return _limited_json(schema, {"x-guidance": {"lenient": False, "whitespace_pattern": _WHITE_SPACE}})


def _joined(start: str, rules: list[str]) -> str:
    return "\n".join([start, *rules]) + "\n"
