"""Texts of grammars: a client's JSON schema, expression, choices or rules, in the form that llguidance builds a grammar
from. Rules for calls of tools are written by `call_grammar`.

White space between JSON tokens is limited: a small model that may write white space without end will do so.
"""

import json
from collections.abc import Callable
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from antiphon.base.errors import UserError

_WHITE_SPACE = r"[ \n\r\t]{0,32}"
MAX_GRAMMAR_CHARACTERS = 256 * 1024


def _limited_json(schema: dict[str, Any], more: dict[str, Any] | None = None) -> str:
    """The text of a client's schema, with `more` beside its keywords; `UserError` if it is too long. Its length is
    estimated first: writing millions of characters holds up all threads."""
    num_characters, values = 0, [schema]
    while values and num_characters <= MAX_GRAMMAR_CHARACTERS:
        value: Any = values.pop()
        if isinstance(value, dict):
            num_characters += sum(map(len, value)) + 6 * len(value)
            values.extend(value.values())
        elif isinstance(value, list):
            num_characters += 2 * len(value)
            values.extend(value)
        else:
            num_characters += len(value) + 2 if isinstance(value, str) else 1
    if num_characters <= MAX_GRAMMAR_CHARACTERS:
        try:
            text = json.dumps(schema | (more or {}), ensure_ascii=False)
        except RecursionError as error:
            raise UserError("the JSON schema cannot be used: it is nested too deeply; use $defs and $ref") from error
        num_characters = len(text)
    if num_characters > MAX_GRAMMAR_CHARACTERS:
        raise UserError(f"the JSON schema is too long: at most {MAX_GRAMMAR_CHARACTERS} characters are allowed")
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
    if len(rules) > MAX_GRAMMAR_CHARACTERS:
        raise UserError(f"the grammar has {len(rules)} characters: at most {MAX_GRAMMAR_CHARACTERS} are allowed")
    try:
        grammar: str = llguidance.LLMatcher.grammar_from_lark(rules)
    except ValueError as error:
        raise UserError(f"the grammar cannot be used: {error}") from error
    return grammar


def schema_rule(schema: dict[str, Any]) -> str:
    """A schema inside rules, with the same limits as `json_grammar`: nothing that cannot be enforced, little white
    space."""
    return _limited_json(schema, {"x-guidance": {"lenient": False, "whitespace_pattern": _WHITE_SPACE}})


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
