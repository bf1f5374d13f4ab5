"""Paths in a run's file: relative to it, with `~` and environment variables."""

import os
import sysconfig
from pathlib import Path
from string import Template
from typing import Any

from antiphon.base.errors import UserError

_PATHS = {
    "model": ("path",),
    "data": ("files", "exclude", "tokenizer", "cache"),
    "output": ("folder",),
    "overlap": ("schedule",),
    "memory": ("offload_folder",),
}
_PATHS_OF_SOURCE = ("files", "exclude")


def absolute_paths(mapping: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Paths made absolute, their variables replaced; what is not a path is left for `read` to judge."""
    variables = {**os.environ, "PYTHON_LIBRARY": sysconfig.get_path("stdlib")}

    def whole(text: Any) -> Any:
        if not isinstance(text, str) or not text:
            return text
        try:
            text = Template(text).substitute(variables)
        except (KeyError, ValueError) as error:
            raise UserError(f"{text}: {error} is not set: set it, or write the path out") from error
        return str(folder / Path(text).expanduser())

    tables = [(mapping.get(table), keys) for table, keys in _PATHS.items()]
    data = mapping.get("data")
    for key in ("sources", "evaluation"):
        sources = data.get(key) if isinstance(data, dict) else None
        tables += [(each, _PATHS_OF_SOURCE) for each in (sources if isinstance(sources, list) else ())]
    for entries, keys in tables:
        if isinstance(entries, dict):
            for key in keys:
                value = entries.get(key)
                if value is not None:
                    entries[key] = [whole(each) for each in value] if isinstance(value, list) else whole(value)
    return mapping
