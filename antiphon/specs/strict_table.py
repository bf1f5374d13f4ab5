"""A table of a TOML or JSON file, read key by key with errors that name the file, the path of the key and the mend.

    table = Table(mapping, "cluster.toml")
    num_nodes = table.whole("num_nodes")
    table.finish()                        # refuses keys that nobody asked for, offering the nearest known one

Rejected: pydantic models beside the frozen dataclasses (every field twice, and errors in its words, not ours).
"""

import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from antiphon.base.errors import UserError
from antiphon.specs.nearest import nearest_names

Choice = TypeVar("Choice", bound=str)
Item = TypeVar("Item")


class Table:
    """One mapping and where it stands, for example ``cluster.toml: groups[1]``. Reading a key marks it as known."""

    def __init__(self, mapping: Mapping[str, Any], where: str) -> None:
        self._mapping = mapping
        self._asked: list[str] = []
        self.where = where

    def has(self, key: str) -> bool:
        """Whether the key is there and is not null."""
        self._ask(key)
        return self._mapping.get(key) is not None

    def text(self, key: str, default: str | None = None) -> str:
        if default is not None and not self.has(key):
            return default
        value = self._required(key)
        if not isinstance(value, str) or not value:
            raise self.error(key, "a text that is not empty is needed")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = -math.inf) -> float:
        """A finite number greater than `above`."""
        if default is not None and not self.has(key):
            return default
        value = self._required(key)
        if not is_number(value):
            raise self.error(key, "a number is needed")
        if not value > above:
            raise self.error(key, f"it must be above {above:g}")
        return float(value)

    def optional_number(self, key: str, *, above: float = -math.inf) -> float | None:
        return self.number(key, above=above) if self.has(key) else None

    def whole(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        """A whole number; 96e9 is one too."""
        if default is not None and not self.has(key):
            return default
        value = self.number(key)
        if not value.is_integer():
            raise self.error(key, "a whole number is needed")
        if value < at_least:
            raise self.error(key, f"it must be at least {at_least}")
        written = self._mapping[key]
        return written if isinstance(written, int) else int(value)

    def optional_whole(self, key: str, *, at_least: int = 1) -> int | None:
        return self.whole(key, at_least=at_least) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        if not self.has(key):
            return default
        value = self._required(key)
        if not isinstance(value, bool):
            raise self.error(key, "true or false is needed")
        return value

    def choice(self, key: str, choices: Sequence[Choice], default: Choice | None = None) -> Choice:
        if default is not None and not self.has(key):
            return default
        value = self._required(key)
        for known in choices:
            if value == known:
                return known
        raise self.error(key, f"use one of {', '.join(choices)}")

    def table(self, key: str) -> "Table":
        return Table(self._typed(key, Mapping, "a table is needed"), f"{self.where}: {key}")

    def optional_table(self, key: str) -> "Table":
        """The table, or an empty one if it is not there."""
        return self.table(key) if self.has(key) else Table({}, f"{self.where}: {key}")

    def mapping(self, key: str) -> dict[str, Any]:
        """The table as it is written, whatever its keys and values are; empty if it is not there."""
        return dict(self._typed(key, Mapping, "a table is needed")) if self.has(key) else {}

    def tables(self, key: str) -> list["Table"]:
        entries = self.items(key, "a list of tables is needed")
        for number, entry in enumerate(entries):
            if not isinstance(entry, Mapping):
                raise UserError(f"{self.where}: {key}[{number}] is {entry!r}: a table is needed")
        return [Table(entry, f"{self.where}: {key}[{number}]") for number, entry in enumerate(entries)]

    def items(self, key: str, needed: str = "a list is needed") -> Sequence[Any]:
        value = self._required(key)
        if not isinstance(value, (list, tuple)):
            raise self.error(key, needed)
        return value

    def names(self) -> list[str]:
        """Every key, marked as known: for tables whose keys are names."""
        for key in self._mapping:
            self._ask(key)
        return list(self._mapping)

    def raw(self, key: str) -> Any:
        return self._required(key)

    def error(self, key: str, mend: str) -> UserError:
        return UserError(f"{self.where}: {key} is {self._mapping.get(key)!r}: {mend}")

    def build(self, make: Callable[..., Item], **values: Any) -> Item:
        """`make(**values)`, whose own `UserError` is put behind this table's place."""
        try:
            return make(**values)
        except UserError as error:
            raise UserError(f"{self.where}: {error}") from error

    def finish(self) -> None:
        """Refuse what was not asked for."""
        for key in self._mapping:
            if key not in self._asked:
                near = nearest_names(key, self._asked)
                mend = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(self._asked)}"
                raise UserError(f"{self.where}: unknown key {key}: {mend}")

    def _ask(self, key: str) -> None:
        if key not in self._asked:
            self._asked.append(key)

    def _required(self, key: str) -> Any:
        if not self.has(key):
            raise UserError(f"{self.where}: {key} is missing: add it")
        return self._mapping[key]

    def _typed(self, key: str, kind: type, needed: str) -> Any:
        value = self._required(key)
        if not isinstance(value, kind):
            raise self.error(key, needed)
        return value


def is_number(value: object) -> bool:
    """Whether `value` is a finite number that a float can hold; true and false are not numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def read_table(path: Path) -> Table:
    """A JSON file if it is named like one, else TOML."""
    return read_json(path) if path.suffix.lower() == ".json" else read_toml(path)


def read_toml(path: Path) -> Table:
    """A whole TOML file; `UserError` if it cannot be read."""
    try:
        return Table(tomllib.loads(read_text(path)), str(path))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from error


def read_json(path: Path) -> Table:
    """A whole JSON file that holds an object; `UserError` if it cannot be read."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a {type(value).__name__}: an object is needed")
    return Table(value, str(path))


def write_json(value: Mapping[str, Any], path: Path) -> None:
    """Replaces the file at `path`; no NaN or infinity goes into it."""
    text = json.dumps(value, indent=1, allow_nan=False)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}): choose another place") from error


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): give another file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason}): save it as UTF-8") from error
