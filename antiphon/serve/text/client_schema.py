"""A client's JSON schema, as the text that llguidance reads.

Libraries write keywords that llguidance refuses although they ask for nothing, or for what another keyword says: zod's
records have `propertyNames`, pydantic's paths a `format` of their own, LiteLLM writes `/$defs/a` for `#/$defs/a`. They
are left out or said in its words. All others are its own to obey or to refuse. Rejected: its lenient mode, which
ignores whatever it does not know.
"""

import json
import re
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
_REMARKS = {"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$defs"}


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
            text = json.dumps(_in_known_words(schema, schema) | (more or {}), ensure_ascii=False)
        except RecursionError as error:
            raise UserError("the JSON schema cannot be used: it is nested too deeply; use $defs and $ref") from error
        num_characters = len(text)
    if num_characters > MAX_CHARACTERS:
        raise UserError(f"the JSON schema is too long: at most {MAX_CHARACTERS} characters are allowed")
    return text


def _in_known_words(schema: Any, root: dict[str, Any]) -> Any:
    """A copy of a part of the schema `root` in which nothing is refused that asks for nothing."""
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            value = {name: _in_known_words(each, root) for name, each in value.items()}
        elif keyword in _LISTS and isinstance(value, list):
            value = [_in_known_words(each, root) for each in value]
        elif keyword in _SCHEMAS:
            value = _in_known_words(value, root)
        elif keyword == "$ref" and isinstance(value, str) and value.startswith("/"):
            value = f"#{value}"
        is_remark = keyword == "format" and isinstance(value, str) and value not in _FORMATS
        if not is_remark and value not in _NOTHING.get(keyword, ()):
            made[keyword] = value
    pattern = _pattern_of_names(resolved(made.get("propertyNames"), root))
    if pattern is not None and not (pattern and (made.get("properties") or "patternProperties" in made)):
        del made["propertyNames"]
        if pattern:
            values = made.get("additionalProperties", True)
            made |= {"patternProperties": {pattern: values}, "additionalProperties": False}
    return made


def _pattern_of_names(names: Any) -> str | None:
    """What `propertyNames` says, as a pattern: "" for any name, None where it is absent or no pattern says it."""
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return None
    asked = {key: value for key, value in names.items() if key not in _REMARKS | {"type"}}
    if not asked:
        return ""
    if asked.keys() <= {"enum", "const"} and len(asked) == 1:
        chosen = asked.get("enum", [asked.get("const")])
        texts = [re.escape(each) for each in chosen if isinstance(each, str)] if isinstance(chosen, list) else []
        return f"^(?:{'|'.join(texts)})$" if texts else None
    if asked.keys() == {"pattern"}:
        return str(asked["pattern"])
    least, most = asked.get("minLength", 0), asked.get("maxLength", "")
    if asked.keys() <= {"minLength", "maxLength"} and type(least) is int and (most == "" or type(most) is int):
        return f"^(?s:.){{{least},{most}}}$"
    return None
