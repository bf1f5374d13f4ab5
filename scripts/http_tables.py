"""Write the tables of docs/http.md anew from the request models, or say whether they are up to date.

Usage: `python scripts/http_tables.py [--check]`. A test does the check.
"""

import json
import sys
from pathlib import Path
from typing import Any

from antiphon.serve.api.chat_messages import RequestModel
from antiphon.serve.api.guard.harmless import HARMLESS
from antiphon.serve.api.requests import ChatCompletionRequest, CompletionRequest, StreamOptions

PAGE = Path(__file__).resolve().parents[1] / "docs" / "http.md"
BEGIN, END = "<!-- written by scripts/http_tables.py -->", "<!-- end of what scripts/http_tables.py writes -->"
ENDPOINTS: dict[str, type[RequestModel]] = {"completions": CompletionRequest, "chats": ChatCompletionRequest}
LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
LENGTHS = {"maxLength": "characters", "maxItems": "items", "maxProperties": "items"}


def values(schema: dict[str, Any]) -> str:
    """What a JSON schema accepts, in a few words; null is left out, it always means absent."""
    if "$ref" in schema:
        return "an object"
    if "anyOf" in schema or "oneOf" in schema:
        parts = [values(part) for part in schema.get("anyOf") or schema["oneOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(parts))
    if "enum" in schema or "const" in schema:
        return ", ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    words = {"boolean": "true, false", "object": "an object", "array": "a list", "string": "text"}.get(
        schema["type"], schema["type"]
    )
    if schema["type"] == "array" and "items" in schema:
        item = schema["items"].get("type", "object")
        words += " of " + {"string": "texts", "integer": "integers", "array": "lists of integers"}.get(item, "objects")
    limits = [f"{word} {schema[key]:,}" for key, word in LIMITS.items() if abs(schema.get(key, 2**31)) < 2**31 - 1]
    limits += [f"at most {schema[key]:,} {word}" for key, word in LENGTHS.items() if key in schema]
    return ", ".join([words, *limits])


def parameter_rows() -> list[str]:
    """One row for each parameter that is obeyed: where, what it accepts, what it does."""
    described: dict[str, dict[str, Any]] = {}
    for endpoint, model in (*ENDPOINTS.items(), ("stream_options", StreamOptions)):
        for name, schema in model.model_json_schema()["properties"].items():
            key = f"stream_options.{name}" if endpoint == "stream_options" else name
            row = (values(schema), schema.get("description", ""))
            described.setdefault(key, {}).setdefault(row, []).append(endpoint)
    rows = []
    for name, variants in sorted(described.items()):
        for (accepted, effect), endpoints in variants.items():
            where = "both" if len(endpoints) == 2 or "stream_options" in endpoints else endpoints[0]
            rows.append(f"| `{name}` | {where} | {accepted} | {effect} |")
    return rows


def harmless_rows() -> list[str]:
    """One row for each parameter of other servers: where it is not obeyed, what is accepted, why nothing else is."""
    rows = []
    for name, entry in sorted(HARMLESS.items()):
        missing = [endpoint for endpoint, model in ENDPOINTS.items() if name not in model.model_fields]
        if missing:
            where = "both" if len(missing) == 2 else missing[0]
            rows.append(f"| `{name}` | {where} | {entry.accepted} | {entry.reason} |")
    return rows


def tables() -> str:
    lines = [BEGIN, "", "### Obeyed", "", "| parameter | endpoint | values | effect |", "|---|---|---|---|"]
    lines += parameter_rows()
    lines += ["", "### Accepted with a value that changes nothing", ""]
    lines += ["| parameter | endpoint | accepted | other values are refused |", "|---|---|---|---|"]
    return "\n".join([*lines, *harmless_rows(), "", END])


def written_anew(page: str) -> str:
    """`page` with the tables between the marks replaced."""
    before, _, rest = page.partition(BEGIN)
    return before + tables() + rest.partition(END)[2]


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    anew = written_anew(page)
    if "--check" in sys.argv[1:]:
        print("docs/http.md is up to date" if anew == page else "docs/http.md: run python scripts/http_tables.py")
        return int(anew != page)
    PAGE.write_text(anew, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
