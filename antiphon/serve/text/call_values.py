"""What a model writes of a call, as JSON: objects with a name and arguments, and values that it does not write as JSON.

Objects are read a character at a time; their arguments are passed on as the model wrote them: only a grammar promises
that they are JSON. Formats of tags write a value as bare text; what type it has, the schema of its function says.
Formats of Python calls write literals. Both become JSON without an evaluator: a literal is rewritten character by
character, so that neither its length nor its depth matters, and a long one need not be waited for. Rejected:
`ast.literal_eval`, which deep nesting can end together with the process.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

import msgspec

JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_ARGUMENTS = {"arguments", "parameters"}
_LONGEST_WHOLE = 20  # characters of 64 bits
_MAX_REFERENCES = 32  # that are followed from one to the next
_MAX_PARTS = 64  # of a schema that are looked at for one value: it may refer to itself, many times over
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", '"': '\\"', "\\": "\\\\", "'": "'", "\n": ""}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}


def call_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call that is written out, {} for none; None where they are no JSON object, by the rules that
    requests are read by. Integers beyond 64 bits become floats: nothing that they are handed to holds them."""
    try:
        value: object = json.loads(
            text or "{}", parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole_number
        )
        msgspec.json.encode(value)  # half a pair of surrogates is no text
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


def _whole_number(text: str) -> int | float:
    number = int(text) if len(text) <= _LONGEST_WHOLE else None
    return number if number is not None and -(2**63) <= number < 2**64 else _finite(text)


class BalancedJson:
    """Where a JSON value that begins with a bracket ends. `depth`: brackets that are open; `in_string`: a quote is."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self._escaped = False

    def feed(self, character: str) -> bool:
        """Whether `character` is its last bracket."""
        if self.in_string:
            self.in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            return False
        self.in_string = character == '"'
        self.depth += (character in "{[") - (character in "}]")
        return character in "}]" and self.depth <= 0


class CallObject:
    """One JSON object, a character at a time: its name, its arguments, whether it can be a call and where it ends."""

    def __init__(self, names: frozenset[str]) -> None:
        self.name: str | None = None
        self.is_call: bool | None = None  # None: not known yet
        self.finished = False
        self.has_arguments = False
        self._names = names
        self._brackets = BalancedJson()
        self._key: str | None = None
        self._literal: list[str] = []  # the key or value of the outer object that is being read
        self._arguments: list[str] = []
        self._in_arguments = False

    def take_arguments(self) -> str:
        """The arguments read since the last time, to be asked for once it is known to be a call."""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def feed(self, character: str) -> None:
        was_in_string, depth = self._brackets.in_string, self._brackets.depth
        if not was_in_string and depth == 1 and character in ":,}]":
            self._end_part(character)
        elif was_in_string or depth > 1 or not character.isspace():
            self._brackets.feed(character)
            if was_in_string or self._brackets.depth > 1 or character not in "{[":
                self._keep(character)

    def _keep(self, character: str) -> None:
        if self._key in _ARGUMENTS and character == "{" and not (self._literal or self.has_arguments):
            self.has_arguments = self._in_arguments = True
        if self._in_arguments:
            self._arguments.append(character)
        else:
            self._literal.append(character)

    def _end_part(self, character: str) -> None:
        literal, self._literal, self._in_arguments = "".join(self._literal), [], False
        if character == ":" and self._key is None:
            self._key = str(_decoded(literal))
            if self.is_call is None and self._key not in {"name", "type", "id", *_ARGUMENTS}:
                self.is_call = False
        elif self._key is not None:
            self._end_value(self._key, literal)
            self._key = None
        if character in "}]":
            self.finished = True
            self.is_call = bool(self.is_call)

    def _end_value(self, key: str, literal: str) -> None:
        if key == "name" and self.is_call is None:
            name = _decoded(literal)
            self.is_call = isinstance(name, str) and name in self._names
            self.name = str(name)
        elif key in _ARGUMENTS and not self.has_arguments:
            value = _decoded(literal)  # some models write the object as a text, or null for none
            self.has_arguments = value is not None
            self._arguments.append("" if value is None else value if isinstance(value, str) else literal)


def _decoded(literal: str) -> object:
    try:
        value: object = json.loads(literal)
    except (ValueError, RecursionError):
        return literal
    return value


def property_types(schema: dict[str, Any], key: str) -> frozenset[str]:
    """The JSON types that a function's schema allows for parameter `key`; empty when it does not say."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, dict) else None
    if found is None:
        found = schema.get("additionalProperties")
    return _types(found, schema, [_MAX_PARTS])


def resolved(schema: Any, root: dict[str, Any]) -> Any:
    """What a `$ref` into `root` leads to; the schema itself when it has none, None when it leads nowhere."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
            return schema
        schema = root if reference.startswith(("#", "/")) else None  # LiteLLM leaves the # out
        for step in reference.removeprefix("#").split("/")[1:]:
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return None


def _types(schema: Any, root: dict[str, Any], left: list[int]) -> frozenset[str]:
    """`left`: how many parts may still be looked at, in all."""
    left[0] -= 1
    schema = resolved(schema, root) if left[0] >= 0 else None
    if not isinstance(schema, dict):
        return frozenset()
    stated = schema.get("type")
    if isinstance(stated, str | list):
        names = [stated] if isinstance(stated, str) else stated
        return JSON_TYPES & {name for name in names if isinstance(name, str)}
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list):
        return frozenset(map(type_of, choices))
    for keyword in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(keyword)
        if isinstance(parts, list):
            each = [_types(part, root, left) for part in parts[:_MAX_PARTS]]
            return frozenset().union(*each) if all(each) or keyword == "allOf" else frozenset()
    return frozenset()


def type_of(value: object) -> str:
    """The JSON type of what a JSON parser made."""
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def value_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that a model wrote as bare text. What fits no type that the schema allows stays a string."""
    for candidate in (text.strip(), "".join(LiteralRewriter().rewrite(text.strip()))):
        try:
            value = json.loads(candidate, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            continue
        kind = type_of(value)
        fits = not types or kind in types or (kind == "integer" and "number" in types)
        if fits and (kind != "string" or types == {"string"}):
            return candidate
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def string_json(text: str) -> str:
    """`text` as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class LiteralRewriter:
    """One Python literal, in pieces, as JSON. `depth`: brackets that are open; `in_string`: a quote is."""

    def __init__(self) -> None:
        self.depth = 0
        self._quote = ""
        self._word = ""
        self._escape: str | None = None  # what followed a backslash so far

    @property
    def in_string(self) -> bool:
        return bool(self._quote)

    def rewrite(self, text: str) -> Iterator[str]:
        """A whole literal."""
        for character in text:
            yield self.feed(character)
        yield self.flush()

    def feed(self, character: str) -> str:
        """The JSON that is known once `character` has come."""
        if self._escape is not None:
            return self._in_escape(self._escape + character)
        if self._quote:
            return self._in_string(character)
        if character.isalnum() or character in "_.+-":
            self._word += character
            return ""
        word = self.flush()
        if character in "'\"":
            self._quote = character
            return word + '"'
        self.depth += (character in "([{") - (character in ")]}")
        return word + {"(": "[", ")": "]"}.get(character, character)

    def flush(self) -> str:
        """The word that ends here."""
        word, self._word = self._word, ""
        return _WORDS.get(word, word)

    def _in_string(self, character: str) -> str:
        if character == self._quote:
            self._quote = ""
            return '"'
        if character == "\\":
            self._escape = ""
            return ""
        return string_json(character)

    def _in_escape(self, escape: str) -> str:
        num_digits = _HEX_ESCAPES.get(escape[0])
        if num_digits is None:
            self._escape = None
            return _ESCAPES.get(escape, string_json("\\" + escape))
        self._escape = escape
        if len(escape) <= num_digits:
            return ""
        self._escape = None
        try:
            return json.dumps(chr(int(escape[1:], 16)))[1:-1]  # half a pair stays an escape
        except (ValueError, OverflowError):
            return string_json("\\" + escape)
