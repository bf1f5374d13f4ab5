"""How the command of a benchmark begins and ends: options read, their limits checked, rows shown."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_type_hints

import typer
from typer.models import OptionInfo

from antiphon.base.errors import UserError
from antiphon.base.system import cpu_name
from antiphon.bench.harness.contest import ContestColumns, Patience, UpTo
from antiphon.cli.commands import given_options
from antiphon.cli.options import check_count, check_one_of, check_timeout, words_of
from antiphon.cli.output import emit_json, provenance, show, table


def say(text: str) -> None:
    print(text, file=sys.stderr)


def check_limits(chosen: Any) -> None:
    """`UserError` for a field of a case that is beyond the limit in its annotation."""
    for name, hint in get_type_hints(type(chosen), include_extras=True).items():
        notes = getattr(hint, "__metadata__", ())
        named = [text for note in notes if isinstance(note, OptionInfo) for text in _names_of(note)]
        option, value = named[0] if named else f"--{name.replace('_', '-')}", getattr(chosen, name)
        for note in notes:
            if isinstance(note, UpTo):
                check_count(option, value, note.most)
            elif isinstance(note, tuple):
                check_one_of(option, value, note)
            elif isinstance(note, Patience):
                check_timeout(option, value)


def _names_of(option: OptionInfo) -> list[str]:
    """The names written in an annotation, where the first of them is in the place of the default."""
    return [name for name in (option.default, *(option.param_decls or ())) if isinstance(name, str)]


def list_of(option: str, text: str) -> list[str]:
    """What commas separate; `UserError` if that is nothing."""
    if not (words := words_of(text)):
        raise UserError(f"{option} is empty: name at least one")
    return words


def numbers_of(option: str, text: str, example: str) -> list[int]:
    """Whole numbers that commas separate; `UserError` for what is none."""
    words = list_of(option, text)
    if wrong := [word for word in words if not word.isdecimal()]:
        raise UserError(f"{option} has {wrong[0]!r}: write numbers, for example {example}")
    return list(map(int, words))


def refuse_alone(context: typer.Context, group: type[Any], needed: str, why: str) -> None:
    """`UserError` if an option of the group was written, and `needed` was not, without which none of them applies."""
    names = [field.name for field in fields(group) if field.name != needed]
    given = given_options(context, names)
    if named := [f"--{name.replace('_', '-')}" for name in names if name in given]:
        raise UserError(f"{', '.join(named)}: {why}")


def show_rows(
    bench: str,
    columns: ContestColumns,
    rows: Sequence[Mapping[str, Any]],
    json: str | None,
    *,
    about: Mapping[str, Any] | None = None,
    **machine: Any,
) -> None:
    """How every benchmark ends: a table for people; `rows` for machines, with their provenance and `about`."""
    show(table(columns.headings, columns.cells(rows), title=columns.title), json=json)
    emit_json(json, {"bench": bench, **provenance(cpu=cpu_name(), **machine), **(about or {}), "rows": rows})
