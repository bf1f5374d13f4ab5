"""A `Profile` as JSON, and back, strictly: an unknown, missing or impossible entry is an error that names its place.

The file mirrors the dataclasses of `cost.profile` and `cost.curves` key by key; tuples are lists.

Rejected: reading leniently. A misspelt table would be taken for one that was never measured, and the roofline would
answer in its place without anybody noticing.
"""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

from antiphon.base.errors import UserError
from antiphon.cost.profile import PROFILE_VERSION, Profile


def write_profile(profile: Profile, path: Path) -> None:
    """Write it as indented JSON, replacing what is there."""
    path.write_text(json.dumps(dataclasses.asdict(profile), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_profile(path: Path) -> Profile:
    """Read a file of `antiphon profile`. `UserError` names the file and the entry that is wrong."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the profile {path}: {error.strerror}; make it with antiphon profile") from None
    except ValueError as error:
        raise UserError(f"the profile {path} is not JSON: {error}; make it anew with antiphon profile") from None
    try:
        return profile_from_json(content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def profile_from_json(content: object) -> Profile:
    """From what `json.load` gives."""
    if isinstance(content, dict) and content.get("version") != PROFILE_VERSION:
        raise UserError(f"profile: version is {content.get('version')}: this program reads version {PROFILE_VERSION}")
    profile = _read(Profile, content, "profile")
    assert isinstance(profile, Profile)
    return profile


def _read(kind: Any, value: object, where: str) -> object:
    """`value` as an instance of the annotated type `kind`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return _read(inner, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise UserError(f"{where} is {value!r}: it must be a list")
        return tuple(_read(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is typing.Literal:
        if value not in arguments:
            raise UserError(f"{where} is {value!r}: use one of {', '.join(map(str, arguments))}")
        return value
    return _read_plain(origin or kind, value, where)


def _read_dataclass(kind: Any, value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise UserError(f"{where} is {value!r}: it must be an object")
    hints = typing.get_type_hints(kind)
    if unknown := sorted(value.keys() - hints.keys()):
        raise UserError(f"{where} has unknown entries {', '.join(unknown)}: it has {', '.join(hints)}")
    needed = {
        entry.name
        for entry in dataclasses.fields(kind)
        if entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
    }
    if missing := sorted(needed - value.keys()):
        raise UserError(f"{where} lacks {', '.join(missing)}")
    read = {name: _read(hints[name], value[name], f"{where}.{name}") for name in value}
    try:
        return kind(**read)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _read_plain(kind: Any, value: object, where: str) -> object:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{where} is {value!r}: it must be a {kind.__name__}")
    return value
