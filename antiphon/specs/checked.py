"""Frozen dataclasses whose fields state their limits, built in code or read from a file; one sentence for a mistake.

    @checked("device")
    @dataclass(frozen=True, kw_only=True)
    class DeviceSpec:
        memory_bytes: Count
        sustained: Annotated[Positive, Field(le=1)] = 1.0

    device = read(DeviceSpec, read_mapping(path), str(path))

1. pydantic compares every field with its annotation: of a mapping in `read`, of a call's arguments under `checked`.
   Rules between fields stand in `__post_init__` and raise `UserError`.
2. Numbers are not guessed: "3" and true are none, 96e9 is a whole one. Unknown keys are refused, and the nearest known
   one is offered. So is a key that stands twice.
3. `first_mistake` says what pydantic found in one sentence with key, value and limit; request bodies use it too.

Rejected: a table reader of our own, and checks by hand behind it: five places then say what a number may be. pydantic's
own dataclasses: their errors escape from a constructor as a list of types.
"""

import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_args, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs, ErrorDetails, SchemaValidator

from antiphon.base.errors import UserError, shortened

Item = TypeVar("Item")


def _whole(value: object) -> object:
    """96e9 is a whole number too, and so are numpy's."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


Whole = Annotated[int, BeforeValidator(_whole), Strict()]  # for those with both limits of their own
MOST = 2**53  # a float has every whole number up to here
Count = Annotated[Whole, Field(ge=1, le=MOST)]
CountFromZero = Annotated[Whole, Field(ge=0, le=MOST)]
LARGEST = 1e30  # beyond any quantity; squares and products of a few such numbers are still numbers
SMALLEST = 1e-30  # below any; so are quotients
Number = Annotated[float, Strict(), Field(allow_inf_nan=False, ge=-LARGEST, le=LARGEST)]
Positive = Annotated[Number, Field(gt=SMALLEST)]
Reckoned = Annotated[float, Strict(), Field(allow_inf_nan=False, ge=0)]  # of several of them
NotNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[NotNegative, Field(le=1)]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Field(min_length=1)]

_MAX_PATH_CHARACTERS = 200  # of a client's own names in an answer
_MAX_SUGGESTIONS = 3
_MOST_DIGITS = 4000
TYPE_NAMES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "an integer"}
_OBJECT, _ARRAY = TYPE_NAMES[dict], TYPE_NAMES[list]
_DETAILS = {  # by pydantic's name of a mistake, where its words are Python's
    "dataclass_type": _OBJECT,
    "dict_type": _OBJECT,
    "list_type": _ARRAY,
    "model_attributes_type": _OBJECT,
    "model_type": _OBJECT,
    "none_required": "null",
    "tuple_type": _ARRAY,
}
_LITERALS = {"True": "true", "False": "false", "None": "null"}  # of Python, and of JSON; TOML has the first two
_LITERAL = re.compile("(?<!')\\b(True|False|None)\\b(?!')")
_LIMITS = {"too_short": "min_length", "too_long": "max_length"}  # of arrays; of strings with a prefix
_QUOTE = "'"
_MAX_MEMBERS = 8  # of a union whose mistakes are one sentence
_BOUNDS = ("greater_than_equal", "greater_than", "less_than_equal", "less_than")
_SHORTER = {
    "greater than or equal to": "at least",
    "greater than": "above",
    "less than or equal to": "at most",
    "less than": "below",
}
_ALSO_CALLED = {  # what other programs call a key of ours
    "lr": "learning_rate",
    "max_lr": "learning_rate",
    "max_steps": "steps",
    "num_steps": "steps",
    "train_iters": "steps",
    "seq_len": "sequence_length",
    "seq_length": "sequence_length",
    "max_seq_length": "sequence_length",
    "max_length": "sequence_length",
    "batch_size": "batch",
    "global_batch_size": "batch",
    "micro_batch_size": "micro_batch",
    "grad_clip": "clip",
    "max_grad_norm": "clip",
    "lr_scheduler_type": "schedule",
    "save_steps": "checkpoint_every",
    "eval_steps": "evaluate_every",
    "logging_steps": "log_every",
    "output_dir": "folder",
}
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


class Mistake(NamedTuple):
    """What is wrong with a value: the `path` of the key, such as ``groups[1].num_nodes``, and a `sentence` that names
    it, the value and the limit. `is_unknown`: there is no such key; `is_missing`: it has to be given."""

    path: str
    sentence: str
    is_unknown: bool = False
    is_missing: bool = False


def _own_name(field: str, _values: Mapping[str, Any]) -> str:
    return field


def checked(
    what: str, name_of: Callable[[str, Mapping[str, Any]], str] = _own_name
) -> Callable[[type[Item]], type[Item]]:
    """A decorator of a frozen dataclass: its constructor raises `UserError` for an argument that its field does not
    allow. `what` stands before the message; `name_of` gives what users call a field of a call with these
    values, where that is not its name."""

    def decorate(kind: type[Item]) -> type[Item]:
        @wraps(kind.__init__)
        def construct(self: Item, *arguments: Any, **values: Any) -> None:
            try:
                _validator(cast(Any, kind)).validate_python(ArgsKwargs(arguments, values), self_instance=self)
            except ValidationError as error:
                if isinstance(broken := error.errors()[0].get("ctx", {}).get("error"), UserError):
                    raise broken from None
                path, sentence, *_ = first_mistake(error, values)
                sentence = name_of(path, values) + sentence.removeprefix(path)
                raise UserError(f"{what}: {sentence}" if what else sentence) from None

        kind.__init__ = construct  # type: ignore[method-assign, assignment]
        return kind

    return decorate


def read(kind: type[Item], mapping: Mapping[str, Any], where: str) -> Item:
    """An instance of the dataclass `kind`, with those inside it; a value may be an instance already. `UserError` names
    `where`, the key, its value and the fix."""
    try:
        item: Item = _validator(cast(Any, kind)).validate_python(dict(mapping))
    except ValidationError as error:
        mistake = first_mistake(error, mapping)
        if mistake.is_missing:
            raise UserError(f"{where}: {mistake.sentence}: add it") from error
        if mistake.is_unknown:
            *location, key = error.errors()[0]["loc"]
            known = _keys_at(kind, location)
            also = _ALSO_CALLED.get(str(key))
            near = [also] if also in known else nearest_names(str(key), known)
            fix = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(known)}"
            raise UserError(f"{where}: {mistake.sentence}: {fix}") from error
        raise UserError(f"{where}: {mistake.sentence}") from error
    return item


def first_mistake(error: ValidationError, value: object) -> Mistake:
    """The first of pydantic's errors about `value`."""
    first, *others = islice(error.errors(include_url=False), _MAX_MEMBERS)
    path = _path(first["loc"], value, is_missing=first["type"] == "missing")
    if (found := _in_words(first, path)) is not None:
        return found
    detail = _allowed(first)
    if detail is None:
        return Mistake(path, f"{path}: {first['msg']}")
    if first["loc"][-1:] == ("[key]",):
        return Mistake(path, f"unknown key {path}: it must be {detail}")
    same = (_allowed(each) for each in others if _path(each["loc"], value) == path)
    members = dict.fromkeys([detail, *filter(None, same)])
    return Mistake(path, f"{path} is {describe(first['input'])}: it must be {_either(members)}")


def _in_words(first: ErrorDetails, path: str) -> Mistake | None:
    """A mistake that is about more than what a value may be: a key, a length, a pattern, the kind of an object."""
    kind, given, context = first["type"], first["input"], first.get("ctx", {})
    sentence, is_unknown, is_missing = "", kind in _UNKNOWN, kind in ("missing", "union_tag_not_found")
    if is_unknown:
        sentence = f"unknown key {path}"
    elif is_missing:
        path += f".{context['discriminator'].strip(_QUOTE)}" if context else ""
        sentence = f"{path} is missing"
    elif isinstance(broken := context.get("error"), UserError):
        sentence = f"{path}: {broken}" if path else str(broken)
    elif (limit := _LIMITS.get(kind.removeprefix("string_"))) is not None:
        sentence = f"{path} {_wrong_length(given, context[limit], 'at least' if limit == 'min_length' else 'at most')}"
    elif kind == "string_pattern_mismatch":
        sentence = f"{path} is {describe(given)}: it must match the pattern {context['pattern']}"
    elif kind == "union_tag_invalid":
        key, known = context["discriminator"].strip(_QUOTE), context["expected_tags"].split(", ")
        sentence = f"{path} has the {key} {describe(context['tag'])}: it must be {_either(known)}"
    return Mistake(path, sentence, is_unknown, is_missing) if sentence else None


def _wrong_length(given: Any, limit: int, bound: str) -> str:
    what = "character" if isinstance(given, str) else "item"
    allowed = f"it must have {bound} {limit:,} {what}{'s' * (limit != 1)}"
    if isinstance(given, str):
        return f"is {describe(given)}: {allowed}" + (f", not {len(given):,}" if given else "")
    return f"has {len(given) or 'no'} {what}{'s' * (len(given) != 1)}: {allowed}"


def _allowed(mistake: ErrorDetails) -> str | None:
    """What the value of a key must be, behind "it must be"; None: pydantic says it in a sentence of its own."""
    detail = _DETAILS.get(mistake["type"], mistake["msg"].removeprefix("Input should be "))
    if mistake.get("ctx", {}).get("gt") == SMALLEST:
        detail = "above 0" if mistake["input"] <= 0 else f"above {SMALLEST:g}"
    if mistake["type"] in _BOUNDS:
        for long, short in _SHORTER.items():
            detail = detail.replace(long, short)
    if mistake["type"] == "literal_error":
        detail = _LITERAL.sub(lambda found: _LITERALS[found[0]], detail)
    return None if detail == mistake["msg"] else detail


def _either(names: Iterable[str]) -> str:
    """``a, b or c``"""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _path(location: Sequence[int | str], value: Any, *, is_missing: bool = False) -> str:
    """``("messages", 0, "user", "content")`` -> ``messages[0].content``: steps that are not in `value` are pydantic's
    names for the members of a union, except for the last step to something missing."""
    path = ""
    for number, step in enumerate(location):
        if isinstance(value, (list, tuple)) and isinstance(step, int):
            value = value[step] if step < len(value) else None
            path += f"[{step}]"
        elif (isinstance(value, Mapping) and step in value) or (is_missing and number == len(location) - 1):
            value = value.get(step) if isinstance(value, Mapping) else None
            path += f".{step}" if path else str(step)
    return shortened(path, _MAX_PATH_CHARACTERS)


def describe(value: object) -> str:
    """A value for an error message, as JSON and TOML write it: short, and with its type when that is not obvious."""
    if isinstance(value, (dict, list)):
        return TYPE_NAMES[type(value)]
    if value is None or isinstance(value, bool):
        return _LITERALS[str(value)]
    if isinstance(value, int) and abs(value) >= 10**_MOST_DIGITS:  # Python refuses to write thousands of them
        return f"a number of more than {_MOST_DIGITS:,} digits"
    return repr(shortened(value)) if isinstance(value, str) else shortened(repr(value))


@cache
def _validator(kind: type) -> SchemaValidator:
    """What pydantic compares with: built at the first use, because a command needs few of all kinds."""
    if "__pydantic_config__" not in vars(kind):
        kind.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    return TypeAdapter(kind).validator  # type: ignore[return-value]


def _keys_at(kind: Any, location: Iterable[int | str]) -> list[str]:
    """The fields of the dataclass at a place inside the dataclass `kind`."""
    for step in location:
        if step in (hints := get_type_hints(kind)):
            kind = next(part for part in _parts(hints[str(step)]) if is_dataclass(part))
    return [field.name for field in fields(kind)]


def _parts(hint: Any) -> Iterator[Any]:
    """A type and those it is made of, outside in."""
    yield hint
    for inner in get_args(hint):
        yield from _parts(inner)


def parse_json(data: bytes | str, *, unique_keys: bool = False) -> Any:
    """The value of a JSON text. `ValueError` also for what Python's parser takes or trips over: NaN, infinity, numbers
    too large for a float, texts nested too deeply, and with `unique_keys` a key that an object has twice."""
    try:
        return json.loads(
            data,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_unique if unique_keys else None,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"it holds {name}, which is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key[:200]!r} stands there twice")
        result[key] = value
    return result


def read_mapping(path: Path) -> dict[str, Any]:
    """The table of a whole TOML file, or the object of a JSON file if it is named like one; `UserError` if it cannot
    be read."""
    text, kind = read_text(path), "JSON" if path.suffix.lower() == ".json" else "TOML"
    try:
        value = parse_json(text, unique_keys=True) if kind == "JSON" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of both parsers
        raise UserError(f"{path}: not valid {kind}: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a {type(value).__name__}: an object is needed")
    return value


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        if path.is_char_device():
            raise UserError(f"{path}: a device, which may have no end: give a file")
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): give another file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason}): save it as UTF-8") from error


def read_bytes(path: Path) -> bytes:
    """`UserError` for a file that cannot be read."""
    path = Path(path)  # a text is taken, too
    with _readable(path):
        return path.read_bytes()


def read_text(path: Path) -> str:
    """The same, and for one that is no text."""
    path = Path(path)
    with _readable(path):
        return path.read_text(encoding="utf-8-sig")  # some editors put a mark of byte order in front


def check_version(mapping: Mapping[str, Any], version: int, where: str, again: str) -> None:
    """`UserError` for a file of another version; `again`: the command that makes a new one."""
    if "version" not in mapping:
        raise UserError(f"{where}: version is missing: add it")
    if mapping["version"] != version:
        raise UserError(
            f"{where}: version is {describe(mapping['version'])}: this program reads version {version}: {again}"
        )


def plain(value: Any) -> Any:
    """Plain JSON values, which `read` reads back: a dataclass as a mapping without the fields that have no value."""
    if is_dataclass(value):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        return {name: plain(each) for name, each in named.items() if each is not None}
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


@contextmanager
def placed(where: str) -> Iterator[None]:
    """Puts a `UserError` behind the place it is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def is_number(value: object) -> bool:
    """Whether `value` is a finite number that a float can hold; true and false are not numbers."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def canonical(name: str) -> str:
    """``"H100-SXM"`` and ``"h100 sxm"`` are the same name: lower case, only letters and digits."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """At most three of `known` that a mistyped name may mean, the best match first; none if nothing is similar."""
    by_canonical = {canonical(candidate): candidate for candidate in known}
    wanted = canonical(name)
    contains = [key for key in by_canonical if wanted and (wanted in key or key in wanted)]
    similar = difflib.get_close_matches(wanted, by_canonical, n=_MAX_SUGGESTIONS, cutoff=0.5)
    keys = list(dict.fromkeys([*similar, *contains]))[:_MAX_SUGGESTIONS]
    return [by_canonical[key] for key in keys]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"did you mean H20, H200?"``, or all that is known if nothing is similar."""
    known = list(known)
    near = nearest_names(name, known)
    return f"did you mean {', '.join(near)}?" if near else f"use one of {', '.join(known)}"
