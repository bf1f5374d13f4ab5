"""What every command does the same way: tables for people, JSON for machines, one-line errors, exit codes.

Exit codes: 0 done, 1 could not do it, 2 asked wrongly, 130 interrupted. Results go to standard output, everything else
(progress, logs, errors) to standard error, so that `--json -` can be piped.

Commands run for long with standard streams that are closed, full or without Unicode (`ready_standard_streams`).
Rejected: to catch errors wherever something is printed, because libraries print as well.
"""

import errno
import io
import json as jsonlib
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from antiphon.base.allowance import allowance
from antiphon.base.errors import PeerLost, PeerTimeout, Refused, UserError, shortened, shortened_message, with_fix
from antiphon.base.logging import get_logger
from antiphon.base.system import cpu_generation, cpu_name
from antiphon.bench.harness.columns import ContestColumns

_log = get_logger("cli")

DEBUG = "--debug"
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_TRIAL_BYTES = 65_536
PIPE_WIDTH = 160  # columns of a table that no terminal limits


def check_json(destination: str | None) -> str | None:
    """For an option `--json`: `destination` unless it cannot be written, which is a `UserError` before any work."""
    if destination not in (None, "-"):
        check_output_file("--json", Path(str(destination)))
    return destination


JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", callback=check_json, help="Write JSON to FILE; '-': standard output."),
]
_UsageError: Any = typer.BadParameter.__mro__[1]  # click's; typer carries it without a public name


def emit_json(destination: str | None, payload: object) -> None:
    """Write `payload` as JSON to a file, to standard output for ``"-"``, nowhere for None.

    A file appears whole or not at all. Paths are written as text; anything else that JSON does not know is a
    `TypeError`, NaN and infinity a `ValueError`.
    """
    if destination is None:
        return
    plain = destination == "-" and not (sys.stdout.encoding or "").lower().startswith("utf")  # not every letter exists
    text = jsonlib.dumps(payload, indent=2, ensure_ascii=plain, allow_nan=False, default=_plain) + "\n"
    if destination == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    write_whole("--json", Path(destination), text)


def emit_json_beside(destination: str | None, payload: object) -> None:
    """`emit_json` for a thread that must not wait: to open a pipe waits for its reader."""
    if destination in (None, "-") or not Path(str(destination)).is_fifo():
        emit_json(destination, payload)
    else:
        threading.Thread(target=_emit_json_to_pipe, args=(destination, payload), name="json", daemon=True).start()


def _emit_json_to_pipe(destination: str, payload: object) -> None:
    try:
        emit_json(destination, payload)
    except UserError as error:  # the reader is gone again
        _log.error("%s", error)


@contextmanager
def whole_file(option: str, path: Path) -> Iterator[Path]:
    """Yields the path to write; afterwards `path` has it, whole or not at all. `UserError` if that cannot be.

    Pipes and devices are written as they are: a new file in the place of `/dev/null` would be of no use. Where a link
    leads to, the file there is replaced."""
    is_stream = path.is_symlink() and str(path).startswith(("/dev/", "/proc/"))  # like /dev/stdout, may lead to a file
    special = is_stream or (path.exists() and not path.is_file())
    real = path if special else path.resolve()
    partial = real if special else real.with_name(f".{real.name[:50]}.{os.getpid()}.partial")
    try:
        yield partial
        if not special:
            partial.replace(real)
    except OSError as error:
        raise _cannot_write(option, path, error) from error
    finally:
        if not special:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


def write_whole(option: str, path: Path, text: str) -> None:
    """A text as `whole_file` writes it."""
    with whole_file(option, path) as partial:
        partial.write_text(text, encoding="utf-8")


def check_output_file(option: str, path: Path | None) -> None:
    """`UserError` now, not after minutes of work, if `path` cannot be written at the end."""
    if path is None:
        return
    try:
        real = path.resolve()
        if not real.parent.is_dir():
            wrong = "is a file; name another" if real.parent.exists() else "does not exist; create it"
            raise UserError(f"{option} {path}: the folder {real.parent} {wrong}")
        if real.is_dir():
            raise UserError(f"{option} {path} is a folder: name a file in it")
        if not path.exists() or path.is_file():
            _try_to_write(real.parent)
        elif path.is_fifo():  # opening one waits for its reader
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:  # a device like /dev/full refuses nothing, too
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                os.write(descriptor, b"")
            finally:
                os.close(descriptor)
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to each other
        raise _cannot_write(option, path, error) from error


def check_output_folder(option: str, folder: Path | None) -> None:
    """The same for a folder that files are written to, which is made where there is none."""
    if folder is None:
        return
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{option} {folder} is a file: name a folder, it is made if it does not exist")
        folder.mkdir(parents=True, exist_ok=True)
        _try_to_write(folder)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{option} {folder} cannot be written: {reason}; name one that you can write to") from error


def _try_to_write(folder: Path) -> None:
    """`OSError` unless a file can be made there. Permissions do not tell of file systems that are read-only, and room
    for a name is no room for what is written: only trying tells."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as trial:
        trial.write(bytes(_TRIAL_BYTES))


def _cannot_write(option: str, path: Path, error: OSError | RuntimeError) -> UserError:
    reason = getattr(error, "strerror", None) or str(error)
    return UserError(f"cannot write {option} {path}: {with_fix(reason)}; name a file in a folder you can write to")


def _plain(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> Table:
    """A plain table: numbers to the right, text to the left, None as an empty cell. Print it with `show`."""
    cells = [tuple(row) for row in rows]
    result = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        numeric = bool(cells) and all(isinstance(row[index], (int, float, type(None))) for row in cells)
        result.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        result.add_row(*(_cell(value) for value in row))
    return result


def _cell(value: object) -> Text:
    if value is None:
        return Text("")
    if isinstance(value, Text):
        return value
    if isinstance(value, float):
        return Text(f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}")
    return Text(f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))


def show(renderable: RenderableType, *, json: str | None = None) -> None:
    """Print for people, on standard output; silent when `json` is ``"-"``: standard output is then the machine's."""
    if json == "-":
        return
    columns = os.environ.get("COLUMNS", "")  # rich prints nothing on 0 of them
    is_known = (columns.isdecimal() and int(columns) > 0) or (not columns and sys.stdout.isatty())
    width = None if is_known else PIPE_WIDTH
    console = Console(highlight=False, width=width, soft_wrap=isinstance(renderable, str))
    console.print(renderable, markup=False)


def tell(renderable: RenderableType, *, json: str | None = None) -> None:
    """`show` for a command that goes on afterwards, and does so where standard output cannot be written."""
    try:
        show(renderable, json=json)
    except OSError as error:
        _log.warning("standard output cannot be written (%s): the command goes on without it", error.strerror)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def provenance(**machine: Any) -> dict[str, Any]:
    """Where figures come from: commit, command, machine. Nothing here depends on how fast the machine is."""
    commit = b""
    with suppress(OSError):  # there is no git here
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, check=False).stdout.strip()
    allowed = allowance()  # of a machine of 64 cores a container may have two
    about = {"cpus": allowed.num_cores, "device": "cpu", "memory_bytes": allowed.memory.most_bytes}
    return {
        "commit": commit.decode(errors="replace") or "unknown",
        "command": " ".join(["antiphon", *sys.argv[1:]]),
        "machine": about | machine,
    }


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
    made_on = provenance(cpu=cpu_name(), cpu_generation=cpu_generation(), **machine)
    emit_json(json, {"bench": bench, **made_on, **(about or {}), "rows": rows})


def run_command(command: Callable[[], object], *, debug: bool = False) -> int:
    """Call `command` and return the exit code: its own if it returns or exits with a number, else 0.

    What goes wrong becomes one line on standard error; `debug` adds the traceback.
    """
    ready_standard_streams()
    try:
        result = _result_of(command)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output is gone, for example `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OutputError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would try again at its end
        reason = error.strerror
        _print_error(f"standard output cannot be written ({reason}): make room, or let it go elsewhere", debug)
        return EXIT_FAILED
    except (Exception, KeyboardInterrupt) as error:
        code, message = _explain(error, debug)
        _print_error(message, debug)
        return code
    if result == EXIT_INTERRUPTED:  # how typer tells of Ctrl-C
        _print_error("interrupted", debug)
    return result if type(result) is int else 0


def _result_of(command: Callable[[], object]) -> object:
    """What `command` returns, or the code it exits with."""
    try:
        return command()
    except SystemExit as exit_request:
        return _exit_code(exit_request.code)
    except typer.Exit as exit_request:
        return exit_request.exit_code


def _explain(error: BaseException, debug: bool) -> tuple[int, str]:
    """(exit code, what to tell the user)."""
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return EXIT_INTERRUPTED, "interrupted"
    if isinstance(error, _UsageError):
        return EXIT_USAGE, _usage_message(error)
    if isinstance(error, (UserError, PeerLost, PeerTimeout, Refused)):
        return error.exit_code if isinstance(error, UserError) else EXIT_FAILED, _one_line(error)
    hint = "" if debug else "; --debug shows where"
    return EXIT_FAILED, with_fix(f"{type(error).__name__}: {_one_line(error)}") + hint


def _usage_message(error: Any) -> str:
    """What the argument parser refuses, in one line, in the words of the project's own checks."""
    path = error.ctx.command_path if error.ctx is not None else "antiphon"
    options: list[str] = getattr(getattr(error, "param", None), "opts", [])
    value = _value_of(options, sys.argv)
    if value is None or not error.message:
        return f"{' '.join(error.format_message().split()).rstrip('.')}; see '{path} --help'"
    if choices := error.message.partition(" is not one of ")[2]:
        written = shortened(value) or "''"
        return f"{options[0]} is {written}: it must be one of {choices.rstrip('.').replace(chr(39), '')}"
    for bound, words in (("greater than or equal to ", "at least "), ("less than or equal to ", "at most ")):
        if limit := error.message.partition(bound)[2]:
            return f"{options[0]} is {shortened(value)}: it must be {words}{limit}"
    if limits := error.message.partition(" is not in the range ")[2]:
        return f"{options[0]} is {shortened(value)}: it must be in the range {limits.rstrip('.')}"
    reason = error.message.partition(",")[0].removeprefix("Input should be ").rstrip(".")
    return f"{options[0]} is {shortened(value)!r}: it must be {reason}; see '{path} --help'"


def _value_of(options: Sequence[str], arguments: Sequence[str]) -> str | None:
    """What was written behind one of `options`, the last time; the parser's errors leave it out."""
    for position, argument in reversed(list(enumerate(arguments))):
        name, equals, value = argument.partition("=")
        if name in options:
            return value if equals else next(iter(arguments[position + 1 :]), None)
    return None


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return int(code or 0)
    print(code, file=sys.stderr)
    return EXIT_FAILED


def _one_line(error: BaseException) -> str:
    message = " ".join(str(error).split()) or "no further message"
    return with_fix(message) if isinstance(error, OSError) else message


def _print_error(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"error: {shortened_message(message)}", file=sys.stderr, flush=True)


def ready_standard_streams() -> None:
    """A terminal that is not one of Unicode shows ``?`` for what it does not have; that must not end a command. A
    standard stream that was closed takes everything and shows nothing, and so does a standard error that is full, or
    whose terminal is gone."""
    _open_closed_descriptors()
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    elif isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        before, output = sys.stdout, io.BufferedWriter(_OutputFile(1, "wb", closefd=False))
        before.flush()
        sys.stdout = io.TextIOWrapper(
            output, before.encoding, "replace", line_buffering=before.line_buffering, write_through=before.write_through
        )
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if sys.stderr is None or sys.stderr is sys.__stderr__:  # not what a test put there
        encoding = sys.stderr.encoding if sys.stderr is not None and os.isatty(2) else "utf-8"
        writer = io.BufferedWriter(_LossyFile(2, "wb", closefd=False))
        sys.stderr = io.TextIOWrapper(writer, encoding=encoding, errors="backslashreplace", line_buffering=True)


def _open_closed_descriptors() -> None:
    """Else the next file or socket would get the number of a standard stream, and what is written to that stream."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, number)
            if opened != number:
                os.close(opened)


class OutputError(OSError):
    """Standard output does not take what is printed, and the reader is not just gone."""


class _OutputFile(io.FileIO):
    """Standard output, whose errors are told from those of other files."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from error


class _LossyFile(io.FileIO):
    """Drops what cannot be written: a log on a full disk must not end what is being logged."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            return super().write(data) or 0
        return len(data)
