"""Grammars that make a model call tools in its own format, with arguments that fit their schemas.

Three uses: a call is wanted whatever the model thinks (`forced`); it may call or answer, and the answer must fit a
schema; it may call or answer freely, but some tools are strict. The last one lets text pass until the mark that begins
a call, and follows the schema from there on.

The text is llguidance's form of Lark. Each function's schema is a grammar of its own, so that references inside it
(`#/$defs/...`) keep their root.
"""

import json
from typing import Any

from antiphon.serve.text.grammar_text import WHITE_SPACE, limited_json
from antiphon.serve.text.tool_calls import ToolFormat

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


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
            return _lark("start: calls", rules)
        return _lark("start: calls | answer", [*rules, f"answer: %json {_schema(answer_schema or {})}"])
    if not form.begin:
        free = [r"free: /([^{\[ \n\r\t](.|\n)*)?/", f"calls: {one} {more.format(begin='')}"]
        return _lark("start: calls | free", rules + free)
    head = f"head[lazy]: TEXT {begin}" if begin_id is None else f"head: TEXT {begin}"
    return _lark(f"start: (head {one})* TEXT", [*rules, head, r"TEXT: /(.|\n)*/"])


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
    return limited_json(schema, {"x-guidance": {"lenient": False, "whitespace_pattern": WHITE_SPACE}})


def _lark(start: str, rules: list[str]) -> str:
    return "\n".join([start, *rules]) + "\n"
