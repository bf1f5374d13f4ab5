"""What commands share: JSON that arrives whole, tables, one-line errors, exit codes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from antiphon.base.errors import CheckpointError, PeerTimeout, UserError
from antiphon.cli.output import emit_json, emit_json_beside, run_command, show, table


def raiser(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


def test_json_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    emit_json("-", {"name": "µ", "path": Path("a/b")})
    assert json.loads(capsys.readouterr().out) == {"name": "µ", "path": "a/b"}


def test_json_goes_to_a_file_and_leaves_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    emit_json(str(tmp_path / "rows.json"), {"rows": [1]})
    assert json.loads((tmp_path / "rows.json").read_text()) == {"rows": [1]}
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]
    assert capsys.readouterr().out == ""


def test_a_pipes_reader_is_not_waited_for_by_a_server(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    emit_json_beside(str(pipe), {"rows": [1]})
    assert json.loads(pipe.read_text()) == {"rows": [1]}


def test_no_destination_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    emit_json(None, {"rows": []})
    assert capsys.readouterr().out == ""


def test_a_file_that_cannot_be_written_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write --json .*No such file or directory; name a file in a folder"):
        emit_json(str(tmp_path / "missing" / "rows.json"), {})


@pytest.mark.parametrize(("payload", "error"), [({"x": float("nan")}, ValueError), ({"x": object()}, TypeError)])
def test_what_json_cannot_say_is_a_bug(payload: object, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error):
        emit_json(str(tmp_path / "rows.json"), payload)
    assert list(tmp_path.iterdir()) == []


def test_a_table_shows_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    show(table(("name", "tokens", "note"), [("a", 12345, None), ("[b]", 0.125, "x")], title="Rates"))
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("Rates", "tokens", "12,345", "0.125", "[b]"))
    assert "None" not in printed


def test_an_empty_table_has_its_header(capsys: pytest.CaptureFixture[str]) -> None:
    show(table(("name", "tokens"), []))
    assert "tokens" in capsys.readouterr().out


def test_nothing_is_shown_beside_json_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    show("ready", json="-")
    show("ready", json="file.json")
    assert capsys.readouterr().out == "ready\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("--port is 99999: use 1 to 65535"), 2, "error: --port is 99999: use 1 to 65535"),
        (CheckpointError("config.json\n  is missing"), 1, "error: config.json is missing"),
        (PeerTimeout("dispatch", ["experts[1]"], 2.0), 1, "error: dispatch: nothing from experts[1] within 2.0 s"),
        (KeyError("x"), 1, "error: KeyError: 'x'; --debug shows where"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
    ],
)
def test_errors_are_one_line_and_a_code(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(raiser(error)) == code
    assert capsys.readouterr().err == line + "\n"


def test_debug_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(raiser(UserError("no")), debug=True) == 2
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert printed.endswith("error: no\n")


@pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (1, 1), (True, 0), ("text", 0)])
def test_a_number_that_a_command_returns_is_its_exit_code(result: object, code: int) -> None:
    assert run_command(lambda: result) == code


@pytest.mark.parametrize(("request_code", "code"), [(None, 0), (3, 3), ("text", 1)])
def test_exit_requests_keep_their_code(request_code: object, code: int) -> None:
    assert run_command(raiser(SystemExit(request_code))) == code


def test_a_closed_pipe_ends_quietly() -> None:
    source = (
        "import sys\n"
        "from antiphon.cli.output import run_command\n"
        "def command():\n"
        "    for _ in range(100000): print('line')\n"
        "sys.exit(run_command(command))\n"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1
