"""Values of a call's arguments that a model does not write as JSON: the JSON they stand for.

Formats of tags write a value as bare text; what type it has, the schema of its function says. Formats of Python calls
write literals. Both become JSON without an evaluator: a literal is rewritten character by character, so that neither
its length nor its depth matters, and a long one need not be waited for. Rejected: `ast.literal_eval`, which deep
nesting can end together with the process.
"""

import json
from collections.abc import Iterator
from typing import Any

JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_MAX_REFERENCES = 32  # that are followed from one to the next
_MAX_PARTS = 64  # of a schema that are looked at for one value: it may refer to itself, many times over
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", '"': '\\"', "\\": "\\\\", "'": "'", "\n": ""}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}


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
        schema = root if reference.startswith("#") else None
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
