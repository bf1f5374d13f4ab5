"""Options that belong together as one parameter: a frozen dataclass whose fields are declared as typer wants them.

    @takes_groups
    def serve(model: ModelFolder, workers: WorkerOptions, json: JsonOption = None) -> None: ...

On the command line the fields of `WorkerOptions` are options like any other, in the group's place; the command gets the
whole. Rejected: every command repeats the list of options and hands each of them on.
"""

import inspect
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

import typer


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with every parameter whose type is a dataclass spread into that dataclass's fields."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if is_dataclass(parameter.annotation) and isinstance(parameter.annotation, type):
            groups[name] = parameter.annotation
            parameters += _parameters_of(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def spread(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    spread.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread


def given_options(context: typer.Context, names: Collection[str]) -> frozenset[str]:
    """Those of the parameters `names` that were written on the command line, be it with their default's value."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")


def _parameters_of(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=hints[field.name]
        )
        for field in fields(group)
    ]


def _default(field: "Field[Any]") -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default
