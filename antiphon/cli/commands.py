"""How commands and their options are declared, over typer.

A group knows its commands by name and imports one only when it is called. `antiphon --help` then needs neither torch
nor a web server, and `antiphon doctor` can report a torch that does not import. Help is click's plain text, one line an
option: rich's boxes wrap every second line on 80 columns.

Options that belong together are one parameter: a frozen dataclass whose fields are declared as typer wants them.

    @takes_groups
    def serve(model: ModelFolder, workers: WorkerOptions, json: JsonOption = None) -> None: ...

On the command line the fields of `WorkerOptions` are options like any other, in the group's place; the command gets the
whole. Rejected: every command repeats the list of options and hands each of them on.
"""

import importlib
import inspect
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup
from typer.models import OptionInfo

from antiphon.base.allowance import allowance, share_of_threads
from antiphon.base.errors import UserError
from antiphon.cli.output import EXIT_INTERRUPTED

# of parameters that are a path, or may be one
FILE_METAVARS = re.compile(r"\b(CHECKPOINT|DIR|FILE|FOLDER|IN|MODEL|OUT|PLAN|TRACE)\b|^A B$")
CONTEXT_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@dataclass(frozen=True)
class CommandPlace:
    """Where a command is defined, and its line in the list. `attribute` is a function, or a typer app with commands."""

    module: str
    attribute: str
    summary: str

    def load(self) -> typer.Typer:
        """Import it, as an app of its own."""
        found = getattr(importlib.import_module(self.module), self.attribute)
        return found if isinstance(found, typer.Typer) else single_command(found)


def new_app(summary: str, **options: Any) -> typer.Typer:
    """An empty app in the house style."""
    return typer.Typer(
        help=summary,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings=CONTEXT_SETTINGS,
        **options,
    )


def single_command(function: Any) -> typer.Typer:
    """An app that is just this function."""
    app = new_app("")
    app.command(context_settings=CONTEXT_SETTINGS)(_with_full_help(function))
    return app


def _with_full_help(function: Callable[..., None]) -> Callable[..., None]:
    """`function`, with the option `--help-all` if it has options that `--help` leaves out, because it fits a screen."""
    signature = inspect.signature(function, eval_str=True)
    options = [
        each
        for parameter in signature.parameters.values()
        for each in getattr(parameter.annotation, "__metadata__", ())
        if isinstance(each, OptionInfo)
    ]
    if not any(option.hidden for option in options):
        return function
    shown = typer.Option("--help-all", callback=_show_all_options, is_eager=True, help="Show rarer options, too.")
    added = inspect.Parameter(
        "help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, shown]
    )
    parameters = [*signature.parameters.values(), added]

    @wraps(function)
    def command(help_all: bool, **values: Any) -> None:
        function(**values)

    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _show_all_options(context: typer.Context, wanted: bool) -> None:
    if wanted:
        for option in context.command.params:
            option.hidden = False  # type: ignore[attr-defined]
        print(context.get_help())
        raise typer.Exit


@contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """While modules load, Ctrl-C ends the process at once: nothing is begun yet, and `KeyboardInterrupt` is swallowed
    by any library that tries an optional import and catches everything. The command would then go on."""

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, b"error: interrupted\n")
        os._exit(EXIT_INTERRUPTED)

    if threading.current_thread() is not threading.main_thread():  # handlers belong to the main one
        yield
        return
    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _ready_for_paths(command: Any) -> None:
    """Where a parameter names a file, let ``~`` mean the home folder, since no shell expands it in
    ``--cluster=~/my.toml``, and refuse an empty name, which Python takes for the working folder, and one that `--json`
    would overwrite."""
    for inner in getattr(command, "commands", {}).values():
        _ready_for_paths(inner)
    for parameter in command.params:
        if FILE_METAVARS.search(str(parameter.metavar)):
            parameter.callback = partial(_expanded, parameter.callback)
            parameter.consume_value = partial(_usable, parameter, parameter.consume_value)


def _usable(parameter: Any, consume: Callable[..., Any], context: Any, *arguments: Any) -> Any:
    value, source = consume(context, *arguments)
    if source.name == "COMMANDLINE":
        name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.metavar
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if each == "":
                raise UserError(f"{name} is empty: name a file or folder; '.' is the working folder")
            if each not in (None, "-"):
                _refuse_overwriting(context, name, str(each))
    return value, source


def _refuse_overwriting(context: Any, name: str, path: str) -> None:
    """`UserError` where `--json` names the file that another parameter names: it would take its place."""
    named: dict[str, str] = context.meta.setdefault(__name__, {})
    path = os.path.realpath(os.path.expanduser(path))  # noqa: PTH111
    others = [other for other, same in named.items() if same == path and other != name]
    if others and "--json" in (name, *others) and not path.startswith("/dev/"):
        raise UserError(f"{name} and {others[0]} name the same file, {path}: give --json another one")
    named[name] = path


def _expanded(callback: Callable[..., Any] | None, context: Any, parameter: Any, value: Any) -> Any:
    if isinstance(value, (str, Path)):
        value = type(value)(os.path.expanduser(value))  # noqa: PTH111
    return value if callback is None else callback(context, parameter, value)


def lazy_group(places: Mapping[str, CommandPlace]) -> type[TyperGroup]:
    """A group class for `new_app(cls=...)` whose commands are `places`, listed in that order."""

    class LazyGroup(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(places)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name not in places:
                return None
            with _ended_by_interrupt():
                command = typer.main.get_command(places[cmd_name].load())
            _share_quota()
            command.name = cmd_name
            _ready_for_paths(command)
            return command

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            with formatter.section("Commands"):
                formatter.write_dl([(name, place.summary) for name, place in places.items()])

    return LazyGroup


def _share_quota() -> None:
    """Let torch compute with as many threads as a quota of processor time has cores for; it counts the machine's."""
    torch: Any = sys.modules.get("torch")  # for a command that uses it
    if torch is not None and allowance().quota is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(min(torch.get_num_threads(), share_of_threads()))


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


def positive_option(metavar: str, unit: str, text: str) -> Any:
    """An option of `unit` without a default: `UserError` unless its value is a finite number above 0. typer's own `min`
    would let 0 pass. `text` is its line in the help."""

    def check(parameter: typer.CallbackParam, value: float | None) -> float | None:
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{parameter.opts[0]} is {value:g}: it must be above 0 {unit}")
        return value

    return typer.Option(metavar=metavar, show_default=False, callback=check, help=text)


def _parameters_of(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    required, keyword = inspect.Parameter.empty, inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(
            field.name,
            keyword,
            default=required if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
