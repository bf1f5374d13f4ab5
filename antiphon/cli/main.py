"""The `antiphon` command: the list of its commands, and the two options that all share.

One small file a command, or for a few that begin alike. `--debug` may stand anywhere; it is taken out before the rest
is read.
"""

import atexit
import gc
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from antiphon import __version__
from antiphon.base.errors import UserError
from antiphon.base.system import end_when_asked
from antiphon.cli.commands import CommandPlace, lazy_group, new_app
from antiphon.cli.output import DEBUG, run_command

COMMANDS = {
    "doctor": CommandPlace("antiphon.cli.doctor", "doctor", "What this machine offers, what is missing, how to get it"),
    "serve": CommandPlace("antiphon.cli.serve", "serve", "Serve a model over HTTP, with OpenAI's API"),
    "top": CommandPlace("antiphon.cli.top", "top", "What a running server does, in a terminal"),
    "drain": CommandPlace("antiphon.cli.drain", "drain", "Take a worker of a running server out of service"),
    "generate": CommandPlace("antiphon.cli.generate", "generate", "Complete a prompt, without a server"),
    "batch": CommandPlace("antiphon.cli.serve", "batch", "Answer a file of requests, without a server"),
    "worker": CommandPlace("antiphon.cli.worker", "worker", "One worker on this machine for an engine on another"),
    "quantize": CommandPlace("antiphon.cli.quantize", "quantize", "Write a checkpoint in 4 or 8 bits"),
    "profile": CommandPlace("antiphon.cli.profile", "profile", "Measure this machine, for plan and predictions"),
    "tune": CommandPlace("antiphon.cli.tune", "tune", "Find the quickest tiles of a model's experts on this GPU"),
    "plan": CommandPlace(
        "antiphon.cli.plan", "plan", "Which layout, how many of what, at what cost, before renting it"
    ),
    "placement": CommandPlace(
        "antiphon.cli.placement", "placement", "Which experts to copy and where, from recorded routing"
    ),
    "simulate": CommandPlace("antiphon.cli.simulate", "simulate", "A plan against requests, failures and all"),
    "reproduce": CommandPlace(
        "antiphon.cli.reproduce", "reproduce", "The papers' figures and tables, theirs beside ours"
    ),
    "train": CommandPlace("antiphon.cli.train", "train", "Train a model, as a TOML file says"),
    "export": CommandPlace("antiphon.cli.train", "export", "A training checkpoint in Hugging Face format"),
    "bench": CommandPlace("antiphon.cli.bench", "app", "Measure Antiphon beside other engines"),
}

atexit.register(gc.freeze)  # Python's last search for garbage takes half a second where torch is loaded

app = new_app(
    "Plan, train and serve Mixture-of-Experts models, and measure it.",
    name="antiphon",
    cls=lazy_group(COMMANDS),
    invoke_without_command=True,
    epilog="'antiphon COMMAND --help' shows a command's options.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option(DEBUG, help="Show tracebacks; also after the command.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan, train and serve Mixture-of-Experts models, and measure it."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Run the command line and exit with its code."""
    end_when_asked()
    arguments = [argument for argument in sys.argv[1:] if argument != DEBUG]

    def run() -> object:
        _check_working_folder()
        return app(arguments, prog_name="antiphon", standalone_mode=False)

    code = run_command(run, debug=DEBUG in sys.argv[1:])
    atexit.register(_let_interrupts_end)
    sys.exit(code)


def _let_interrupts_end() -> None:
    """All is done. Ctrl-C ends what is left, which libraries do at the end, without their tracebacks."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _check_working_folder() -> None:
    """Where there is none, torch ends the process, with words about one of its own files."""
    try:
        Path.cwd()
    except OSError as error:
        raise UserError(f"the working folder cannot be used ({error.strerror}): change to one that exists") from error


if __name__ == "__main__":
    main()
