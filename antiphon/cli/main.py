"""The `antiphon` command. One small file a command; imports happen when a command runs, so that `--help` is quick."""

import sys
from typing import Annotated

import typer

from antiphon import __version__
from antiphon.cli.bench import app as bench_app
from antiphon.cli.doctor import run_doctor
from antiphon.cli.generate import generate
from antiphon.cli.options import JsonOption
from antiphon.cli.output import run_command
from antiphon.cli.serve import serve

app = typer.Typer(
    name="antiphon",
    help="Serve Mixture-of-Experts models with attention and experts apart, and measure it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve)
app.command()(generate)
app.add_typer(bench_app, name="bench")


@app.command()
def doctor(json: JsonOption = None) -> None:
    """Show devices, libraries, transports and peers; what is missing and how to get it."""
    raise typer.Exit(run_doctor(json))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Serve Mixture-of-Experts models with attention and experts apart, and measure it."""


def main() -> None:
    sys.exit(run_command(app, debug="--debug" in sys.argv))


if __name__ == "__main__":
    main()
