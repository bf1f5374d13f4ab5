"""A client's JSON schema, as the text that llguidance reads.

Libraries write keywords that llguidance refuses although they ask for nothing, or for what another keyword says: zod's
records have `propertyNames` and its float32 bounds of 3e38, pydantic's paths a `format` of their own, LiteLLM writes
`/$defs/a` for `#/$defs/a`, others 3.0 for a count or null for a keyword that was not set. They are left out or said in
its words. All others are its own to obey or to refuse. Rejected: its lenient mode, which ignores whatever it does not
know.
"""

import json
import sys
from typing import Any

from antiphon.base.errors import UserError
from antiphon.serve.text.call_values import resolved

MAX_CHARACTERS = 256 * 1024
_SCHEMAS = {"items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems", "items"}
_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
# Any other format is a remark, as JSON Schema has it.
_FORMATS = {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
_NOTHING: dict[str, tuple[object, ...]] = {  # values that ask for nothing
    "uniqueItems": (False,),
    "propertyNames": (True, {}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}
_COUNTS = {f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Properties")}
_MOST_COUNTED = 2**31  # more than any answer has
_LOWER, _UPPER = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
_LARGEST_BOUND = 2**63 - 1024  # of llguidance, which counts in 64 bits and reads bounds as floats
_REMARKS = {"title", "description", "default", "examples", "deprecated", "$comment", "type"}


def schema_text(schema: dict[str, Any], more: dict[str, Any] | None = None) -> str:
    """The schema's text, with `more` beside its keywords; `UserError` if it is too long. Its length is estimated first:
    writing millions of characters holds up all threads."""
    num_characters, values = 0, [schema]
    while values and num_characters <= MAX_CHARACTERS:
        value: Any = values.pop()
        if isinstance(value, dict):
            num_characters += sum(map(len, value)) + 6 * len(value)
            values.extend(value.values())
        elif isinstance(value, list):
            num_characters += 2 * len(value)
            values.extend(value)
        else:
            num_characters += len(value) + 2 if isinstance(value, str) else 1
    if num_characters <= MAX_CHARACTERS:
        try:
            text = json.dumps(_Rewriting(schema).whole() | (more or {}), ensure_ascii=False)
        except RecursionError as error:
            raise UserError("the JSON schema cannot be used: it is nested too deeply; use $defs and $ref") from error
        num_characters = len(text)
    if num_characters > MAX_CHARACTERS:
        raise UserError(f"the JSON schema is too long: at most {MAX_CHARACTERS} characters are allowed")
    return text


class _Rewriting:
    """A copy of one schema, the `root`, in which nothing is refused that asks for nothing."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._shared: dict[str, Any] = {}  # schemas that several names have

    def whole(self) -> dict[str, Any]:
        made: dict[str, Any] = self._part(self._root)
        if self._shared:
            own = made.get("$defs")
            made["$defs"] = (own if isinstance(own, dict) else {}) | self._shared
        return made

    def _part(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        made: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in _MAPS and isinstance(value, dict):
                value = {name: self._part(each) for name, each in value.items()}
            elif keyword in _LISTS and isinstance(value, list):
                value = [self._part(each) for each in value]
            elif keyword in _SCHEMAS:
                value = self._part(value)
            elif keyword == "$ref" and isinstance(value, str) and value.startswith("/"):
                value = f"#{value}"
            value = _plain_number(keyword, value)
            is_remark = keyword == "format" and isinstance(value, str) and value not in _FORMATS
            is_unset = value is None and keyword != "const"
            if not (is_remark or is_unset or value in _NOTHING.get(keyword, ())):
                made[keyword] = value
        if "propertyNames" in made and "patternProperties" not in made:
            self._obey_names(made)
        return made

    def _obey_names(self, made: dict[str, Any]) -> None:
        """Say `propertyNames` by other keywords, if they can. Names that are listed become properties: behind the last
        one that fits a pattern the library allows a comma, after which nothing can follow."""
        own, names = made.get("properties") or {}, resolved(made["propertyNames"], self._root)
        if (listed := _listed(names)) is not None and isinstance(own, dict):
            others = self._once(made.get("additionalProperties", True))
            made |= {"properties": {name: own.get(name, others) for name in listed}, "additionalProperties": False}
        elif (pattern := _pattern_of(names)) is None or (pattern and own):
            return
        elif pattern:
            values = made.get("additionalProperties", True)
            made |= {"patternProperties": {pattern: values}, "additionalProperties": False}
        del made["propertyNames"]

    def _once(self, schema: Any) -> Any:
        """A reference to the schema, for a place where it may stand many times."""
        if not isinstance(schema, dict):
            return schema
        name = f"antiphon-{len(self._shared)}"
        self._shared[name] = schema
        return {"$ref": f"#/$defs/{name}"}


def whole(value: Any) -> Any:
    """A count that was written as 3.0 is 3."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plain_number(keyword: str, value: Any) -> Any:
    """A count or a bound as llguidance takes it; None where every answer keeps it. One that is out of its reach becomes
    the last within, so what it allows is still within both."""
    if keyword in _COUNTS:
        value = whole(value)
        return None if keyword.startswith("max") and isinstance(value, int) and value >= _MOST_COUNTED else value
    if keyword not in _LOWER | _UPPER or not isinstance(value, int | float):
        return value
    outwards = -value if keyword in _LOWER else value
    if outwards >= sys.float_info.max:  # no JSON number is beyond
        return None
    return value if outwards <= _LARGEST_BOUND else _LARGEST_BOUND if keyword in _UPPER else -_LARGEST_BOUND


def _asked(names: Any) -> dict[str, Any] | None:
    """The keywords of `propertyNames` that ask for something; None where it is no schema of texts."""
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return None
    return {key: value for key, value in names.items() if key not in _REMARKS}


def _listed(names: Any) -> list[str] | None:
    """The names that `propertyNames` lists; None where it does not."""
    asked = _asked(names)
    if asked is None or asked.keys() not in ({"enum"}, {"const"}):
        return None
    (stated,) = asked.values()
    listed = stated if "enum" in asked else [stated]
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else None


def _pattern_of(names: Any) -> str | None:
    """What `propertyNames` says, as a pattern: "" for any name, None where no pattern says it."""
    asked = _asked(names)
    if asked is None:
        return None
    if asked.keys() == {"pattern"}:
        return str(asked["pattern"])
    least, most = whole(asked.get("minLength", 0)), whole(asked.get("maxLength", ""))
    if asked.keys() <= {"minLength", "maxLength"} and type(least) is int and (most == "" or type(most) is int):
        return f"^(?s:.){{{least},{most}}}$" if asked else ""
    return None
