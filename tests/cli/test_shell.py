"""What a shell may do to the command: closed and narrow outputs, other encodings, ``~``, Ctrl-C at any time."""

import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from antiphon.base.errors import UserError
from antiphon.cli import main as cli
from antiphon.cli.commands import CommandPlace, lazy_group, new_app
from antiphon.cli.output import check_output_file, check_output_folder, emit_json, whole_file
from tests.serve.fork_server import HEARS_INTERRUPTS, PROGRAMS

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "antiphon.cli.main")


def run(*arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [*COMMAND, *map(str, arguments)]
    return PROGRAMS.run(command, cwd=ROOT, env={**os.environ, **environment}, text=True, timeout=200)


# --- targets that cannot be written ----------------------------------------------------------------------------------

NO_PLACE = Path("/proc/antiphon.json")  # a folder where nobody can make a file, not even root


@pytest.mark.parametrize(
    "arguments",
    [
        ("doctor", "--json"),
        ("plan", "dbrx", "--cluster", "msi-ampere", "--json"),
        ("plan", "dbrx", "--cluster", "msi-ampere", "--html"),
        ("simulate", "none.json", "--perfetto"),
        ("simulate", "none.json", "--json"),
        ("reproduce", "--markdown"),
        ("reproduce", "--json"),
        ("serve", "none", "--timeline"),
        ("serve", "none", "--json"),
        ("generate", "none", "--token-ids", "1", "--timeline"),
        ("generate", "none", "--token-ids", "1", "--json"),
        ("bench", "serve", "none", "--json"),
        ("bench", "m2n", "--timeline"),
        ("bench", "m2n", "--json"),
    ],
)
def test_a_target_is_checked_before_any_work(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["antiphon", *arguments, str(NO_PLACE)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    printed = capsys.readouterr()
    assert printed.err == (
        f"error: cannot write {arguments[-1]} {NO_PLACE}: No such file or directory; "
        "name a file in a folder you can write to\n"
    )
    assert (caught.value.code, printed.out) == (2, "")


def test_a_folder_to_fill_is_made_before_any_work(tmp_path: Path) -> None:
    ended = run("profile", ROOT / "examples" / "demo-moe", "--folder", "/proc/antiphon")
    assert ended.returncode == 2
    assert ended.stderr == (
        "error: --folder /proc/antiphon cannot be written: No such file or directory; name one that you can write to\n"
    )


def test_a_folder_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder: name a file in it"):
        check_output_file("--html", tmp_path)
    check_output_file("--html", tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_full_is_found_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write --json /dev/full: No space left on device: the file system is"):
        check_output_file("--json", Path("/dev/full"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # as on a full disk: a file can be made, not written
    try:
        with pytest.raises(UserError, match="File too large"):
            check_output_file("--json", tmp_path / "rows.json")
        with pytest.raises(UserError, match="File too large"):
            check_output_folder("--folder", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_links_that_lead_to_each_other_are_no_target(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UserError, match=r"cannot write --json .*loop"):
        check_output_file("--json", tmp_path / "a")


@pytest.mark.parametrize("arguments", [("simulate", "{}", "--json={}"), ("reproduce", "--json={}", "--markdown={}")])
def test_json_takes_the_place_of_no_other_file(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    file.write_text("old")
    monkeypatch.setattr(sys, "argv", ["antiphon", *(each.format(file) for each in arguments)])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert f"name the same file, {file}: give --json another one" in capsys.readouterr().err
    assert file.read_text() == "old"


def test_pipes_and_links_are_written_as_they_are(tmp_path: Path) -> None:
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    link.symlink_to(file)
    check_output_file("--json", pipe)
    check_output_file("--json", link)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        emit_json(str(pipe), {"rows": 1})
        assert json.loads(reader.communicate(timeout=60)[0]) == {"rows": 1}
    emit_json(str(link), {"rows": 2})
    assert json.loads(file.read_text()) == {"rows": 2}
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "link", "file"}


def write_half(file: Path) -> None:
    with whole_file("--json", file) as path:
        path.write_text("half")
        raise ZeroDivisionError


def test_what_fails_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text("old")
    with pytest.raises(ZeroDivisionError):
        write_half(file)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
    link = tmp_path / "link"
    link.symlink_to(file)
    with pytest.raises(ZeroDivisionError):
        write_half(link)
    assert file.read_text() == "old"


# --- outputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", ["plan --list", "--version", "--help", "serve --help"])
def test_a_reader_that_leaves_ends_the_command_quietly(arguments: str) -> None:
    start = PROGRAMS.Popen if arguments.startswith("serve") else subprocess.Popen
    with start([*COMMAND, *arguments.split()], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # long before the first line
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1


def test_a_closed_output_is_no_error() -> None:
    command = f"{' '.join(COMMAND)} plan --list >&-"
    ended = subprocess.run(command, shell=True, cwd=ROOT, stderr=subprocess.PIPE, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("streams", ["2>&-", "2>/dev/full", "<&- 2>&-"])
def test_a_standard_error_that_takes_nothing_changes_nothing(streams: str) -> None:
    for arguments, code in (("plan --list", 0), ("plan no-such-model", 2)):
        command = f"{' '.join(COMMAND)} {arguments} {streams}"
        ended = subprocess.run(command, shell=True, cwd=ROOT, stdout=subprocess.PIPE, check=False, timeout=60)
        assert (ended.returncode, bool(ended.stdout)) == (code, code == 0)


def test_a_full_standard_output_is_said_once_by_a_command_that_goes_on() -> None:
    program = (
        "from antiphon.cli.output import run_command, tell\n"
        "raise SystemExit(run_command(lambda: [tell('ready'), tell('still here')] and 7))"
    )
    command = [sys.executable, "-c", program]
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, check=False, timeout=60)
    assert ended.returncode == 7
    assert ended.stderr.count(b"standard output cannot be written (No space left on device)") == 1


@pytest.mark.parametrize("arguments", ["plan --list", "--version", "--help"])
def test_a_full_standard_output_is_a_line(arguments: str) -> None:
    line = b"error: standard output cannot be written (No space left on device): make room, or let it go elsewhere\n"
    for unbuffered in ("", "1"):
        with Path("/dev/full").open("wb") as full:
            ended = subprocess.run(
                [*COMMAND, *arguments.split()],
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
                stdout=full,
                stderr=subprocess.PIPE,
                check=False,
                timeout=60,
            )
        assert (ended.returncode, ended.stderr) == (1, line)


def test_letters_that_the_terminal_does_not_have() -> None:
    """The sign for "times" in a plan, and ASCII."""
    ascii_only = {"PYTHONIOENCODING": "ascii", "ANTIPHON_LOG": "error"}
    ended = run("plan", "dbrx", "--cluster", "msi-ampere", **ascii_only)
    assert ended.returncode == 0, ended.stderr
    assert "?" in ended.stdout


def test_json_stays_whole_where_letters_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", errors="replace"))
    emit_json("-", {"unit": "µs"})
    assert json.loads(written.getvalue()) == {"unit": "µs"}


@pytest.mark.parametrize("columns", ["20", "0", "1", "x", "-3"])
def test_narrow_terminals(columns: str) -> None:
    for arguments in (("plan", "--list"), ("serve", "--help")):
        ended = run(*arguments, COLUMNS=columns)
        assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("command", ["doctor", "bench", "plan"])
def test_a_log_level_that_does_not_exist_is_a_warning(command: str) -> None:
    arguments = [sys.executable, "-m", "antiphon.cli.main", command, "--help"]
    environment = {**os.environ, "ANTIPHON_LOG": "loud"}
    ended = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0
    line = "antiphon: ANTIPHON_LOG is 'loud': use one of debug, info, warning, error; info is taken\n"
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.endswith(line)


# --- names -----------------------------------------------------------------------------------------------------------


def test_home_is_meant_where_no_shell_put_it(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "ANTIPHON_LOG": "error"}
    (tmp_path / "mine.toml").write_text((ROOT / "antiphon/specs/data/clusters/msi-ampere.toml").read_text())
    ended = run("plan", "dbrx", "--cluster=~/mine.toml", "--json=~/plan.json", **home)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "plan.json").read_text())
    missing = run("serve", "~/none", **home)
    assert missing.stderr == (f"error: {tmp_path}/none is missing: give a checkpoint folder in Hugging Face format\n")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("quantize", "model", ""), "OUT"),
        (("export", "", "exported"), "CHECKPOINT"),
        (("plan", "dbrx", "--cluster="), "--cluster"),
        (("plan", "--compare", "plan.json", ""), "--compare"),
    ],
)
def test_an_empty_name_is_not_the_working_folder(
    arguments: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `"$OUT"` is where the variable is not set."""
    monkeypatch.setattr(sys, "argv", ["antiphon", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == UserError.exit_code
    assert capsys.readouterr().err == f"error: {name} is empty: name a file or folder; '.' is the working folder\n"


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_an_interrupt_while_modules_load_is_not_swallowed(tmp_path: Path) -> None:
    """Many a library catches everything around an optional import; the command must not go on then."""
    (tmp_path / "swallows.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    sum(range(1000))\n"
        "except BaseException:\n"
        "    pass\n"
        "def command():\n"
        "    print('went on')\n"
    )
    source = (
        "from antiphon.cli.commands import CommandPlace, lazy_group, new_app\n"
        "app = new_app('x', cls=lazy_group({'go': CommandPlace('swallows', 'command', 'x')}))\n"
        "app.callback()(lambda: None)\n"
        "app(['go'], standalone_mode=False)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "error: interrupted\n")


def test_an_interrupt_at_the_end_shows_no_library(tmp_path: Path) -> None:
    """Libraries take themselves apart at the end; an impatient second Ctrl-C is not their traceback."""
    program = (
        "import atexit, os, signal, sys, time\n"
        "from antiphon.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(9)))\n"
        "sys.argv = ['antiphon', '--version']\n"
        "main.main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, b"")


def test_interrupts_are_back_to_normal_once_a_command_is_loaded(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    group: Any = lazy_group({"go": CommandPlace("antiphon.cli.doctor", "doctor", "x")})
    app = new_app("x", cls=group)
    app.callback()(lambda: None)
    app(["go", "--help"], standalone_mode=False)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_an_interrupt_while_workers_load_leaves_nobody_behind(checkpoint: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = ("serve", str(checkpoint), "--layout", "disaggregated", "--port", "0")
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", HEARS_INTERRUPTS, *COMMAND, *arguments],
            cwd=ROOT,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    deadline = time.monotonic() + 120
    while "started experts[0]" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert log.read_text().endswith("error: interrupted\n")
    assert "Traceback" not in log.read_text()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # workers are of the same group
