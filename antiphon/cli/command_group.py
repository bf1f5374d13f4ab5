"""A typer group that knows its commands by name and imports one only when it is called.

`antiphon --help` then needs neither torch nor a web server, and `antiphon doctor` can report a torch that does not
import. Help is click's plain text, one line an option: rich's boxes wrap every second line on 80 columns.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperGroup

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
    app.command(context_settings=CONTEXT_SETTINGS)(function)
    return app


def lazy_group(places: Mapping[str, CommandPlace]) -> type[TyperGroup]:
    """A group class for `new_app(cls=...)` whose commands are `places`, listed in that order."""

    class LazyGroup(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(places)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name not in places:
                return None
            command = typer.main.get_command(places[cmd_name].load())
            command.name = cmd_name
            return command

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            with formatter.section("Commands"):
                formatter.write_dl([(name, place.summary) for name, place in places.items()])

    return LazyGroup
