"""Tables of TOML and JSON files as frozen dataclasses; errors name the file, the path of the key and the fix.

    device = Table(mapping, "device.toml").read(DeviceSpec)

1. `read` takes every field of a dataclass by its annotated type: text, number, whole number, true or false, one of a
   `Literal`, a tuple, a table of names, another dataclass. `Annotated` types such as `Positive` limit a number; a whole
   number is at least 1 unless its annotation says otherwise. Null means left out, where the field has a default.
2. What a file spells unlike the dataclass is read key by key (`number`, `table`, ...) and handed to `read`.
3. Unknown keys are refused, and the nearest known one is offered.

Rejected: msgspec or pydantic on the same dataclasses. Neither refuses unknown keys of a dataclass, and their errors
name types of Python, not what to write.
"""

import json
import math
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from antiphon.base.errors import UserError
from antiphon.specs.nearest import nearest_names

Choice = TypeVar("Choice", bound=str)
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What a number must be: greater than `above`, not below `at_least`."""

    above: float = -math.inf
    at_least: float = -math.inf


Positive = Annotated[float, Limit(above=0)]
NotNegative = Annotated[float, Limit(at_least=0)]
CountFromZero = Annotated[int, Limit(at_least=0)]


class Table:
    """One mapping and where it stands, for example ``cluster.toml: groups[1]``. Reading a key marks it as known."""

    def __init__(self, mapping: Mapping[str, Any], where: str) -> None:
        self._mapping = mapping
        self._asked: list[str] = []
        self.where = where

    def read(self, kind: type[Item], **ready: Any) -> Item:
        """An instance of the dataclass `kind`: its fields from this table, but for those in `ready`. Nothing else may
        be in the table that was not asked for. What `kind` itself refuses is put behind this table's place."""
        assert is_dataclass(kind)
        hints = get_type_hints(kind, include_extras=True)
        for entry in fields(kind):
            if entry.name not in ready:
                may_miss = entry.default is not MISSING or entry.default_factory is not MISSING
                if self.has(entry.name) or not may_miss:
                    ready[entry.name] = self._value(entry.name, hints[entry.name])
        item = self.build(kind, **ready)
        self.finish()
        return item

    def _value(self, key: str, hint: Any) -> Any:
        """The value of `key`, which is needed, as the type that `hint` names."""
        limit = Limit(at_least=1)
        if get_origin(hint) in {Union, types.UnionType}:  # of something and None
            hint = next(kind for kind in get_args(hint) if kind is not type(None))
        if get_origin(hint) is Annotated:
            hint, limit = get_args(hint)
        elif hint is float:
            limit = Limit()
        readers: dict[Any, Callable[[], Any]] = {
            Literal: lambda: self.choice(key, get_args(hint)),
            tuple: lambda: self._list(key, get_args(hint)[0]),
            dict: lambda: self._by_name(key, *get_args(hint)),
            str: lambda: self.text(key),
            bool: lambda: self.flag(key),
            int: lambda: self.whole(key, at_least=int(limit.at_least)),
            float: lambda: self.number(key, above=limit.above, at_least=limit.at_least),
        }
        if isinstance(hint, type) and is_dataclass(hint):
            return self.table(key).read(hint)
        return readers[get_origin(hint) or hint]()

    def _list(self, key: str, inner: Any) -> tuple[Any, ...]:
        if isinstance(inner, type) and is_dataclass(inner):
            return tuple(entry.read(inner) for entry in self.tables(key))
        values = self.items(key)
        if inner is str and not all(isinstance(value, str) for value in values):
            raise self.error(key, "a list of texts is needed")
        if inner is int and any(isinstance(value, bool) or not isinstance(value, int) for value in values):
            raise self.error(key, "a list of whole numbers is needed")
        if inner is float:
            if not all(map(is_number, values)):
                raise self.error(key, "a list of numbers is needed")
            return tuple(float(value) for value in values)
        if get_origin(inner) is tuple:
            rows = Table({str(number): value for number, value in enumerate(values)}, f"{self.where}: {key}")
            return tuple(rows._list(name, get_args(inner)[0]) for name in rows.names())
        return tuple(values)

    def _by_name(self, key: str, names: Any, inner: Any) -> dict[Any, Any]:
        """A table whose keys are names: any, whole numbers, or those of a `Literal`."""
        if inner in (object, Any):
            return self.mapping(key)
        table = self.table(key)
        known = table.names() if names in (str, int) else [name for name in get_args(names) if table.has(name)]
        if names is int and (wrong := [name for name in known if not name.isdecimal()]):
            raise self.error(key, f"its keys are whole numbers, not {wrong[0]}")
        values = {int(name) if names is int else name: table._value(name, inner) for name in known}
        table.finish()
        return values

    def has(self, key: str) -> bool:
        """Whether the key is there and is not null."""
        self._ask(key)
        return self._mapping.get(key) is not None

    @property
    def is_empty(self) -> bool:
        return not self._mapping

    def text(self, key: str, default: str | None = None) -> str:
        if default is not None and not self.has(key):
            return default
        value = self._required(key)
        if not isinstance(value, str) or not value:
            raise self.error(key, "a text that is not empty is needed")
        return value

    def number(
        self, key: str, default: float | None = None, *, above: float = -math.inf, at_least: float = -math.inf
    ) -> float:
        """A finite number greater than `above` and not below `at_least`."""
        if default is not None and not self.has(key):
            return default
        value = self._required(key)
        if not is_number(value):
            raise self.error(key, "a number is needed")
        if not value > above:
            raise self.error(key, f"it must be above {above:g}")
        if not value >= at_least:
            raise self.error(key, f"it must be at least {at_least:g}")
        return float(value)

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

    def flag(self, key: str) -> bool:
        """False where it is not there."""
        if not self.has(key):
            return False
        value = self._required(key)
        if not isinstance(value, bool):
            raise self.error(key, "true or false is needed")
        return value

    def choice(self, key: str, choices: Sequence[Choice]) -> Choice:
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

    def error(self, key: str, fix: str) -> UserError:
        return UserError(f"{self.where}: {key} is {self._mapping.get(key)!r}: {fix}")

    def build(self, make: Callable[..., Item], **values: Any) -> Item:
        """`make(**values)`, whose own `UserError` is put behind this table's place."""
        try:
            return make(**values)
        except UserError as error:
            place = self.where.rpartition(": ")[2]
            raise UserError(f"{self.where}: {str(error).removeprefix(place + ': ')}") from error

    def finish(self) -> None:
        """Refuse what was not asked for."""
        for key in self._mapping:
            if key not in self._asked:
                near = nearest_names(key, self._asked)
                fix = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(self._asked)}"
                raise UserError(f"{self.where}: unknown key {key}: {fix}")

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


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): give another file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason}): save it as UTF-8") from error
