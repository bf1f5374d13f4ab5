"""Help fits a screen of 80 columns, says what matters, and comes quickly."""

import subprocess
import sys
from pathlib import Path

import pytest

from antiphon import __version__
from antiphon.cli import main as cli

ROOT = Path(__file__).parents[2]
COMMANDS = (
    (),
    ("serve",),
    ("top",),
    ("generate",),
    ("worker",),
    ("doctor",),
    ("plan",),
    ("profile",),
    ("placement",),
    ("simulate",),
    ("reproduce",),
    ("bench",),
    ("bench", "serve"),
    ("bench", "m2n"),
)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["antiphon", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_fits_a_screen(
    command: tuple[str, ...], option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(monkeypatch, *command, option) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 42
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"Usage: {' '.join(['antiphon', *command])} [OPTIONS]")


@pytest.mark.parametrize("command", [(), ("bench",)])
def test_a_group_alone_shows_its_help(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *command) == 0
    assert "Commands:" in capsys.readouterr().out


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("arguments", ['["--help"]', '["doctor", "--help"]', '["top", "--help"]'])
def test_help_doctor_and_top_do_not_need_torch(arguments: str) -> None:
    source = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        f"sys.argv = ['antiphon', *{arguments}]\n"
        "from antiphon.cli.main import main\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_all_options_of_serve_are_in_a_help_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "serve", "--help") == 0
    few = capsys.readouterr().out
    assert run(monkeypatch, "serve", "--help-all") == 0
    many = capsys.readouterr().out
    for name in ("pp", "instances", "max-waiting", "max-body-bytes", "drain-timeout", "record-routing", "stepping"):
        assert f"--{name} " in many
        assert f"--{name} " not in few


@pytest.mark.parametrize(("command", "rare"), [("plan", "in-flight"), ("generate", "pp"), ("batch", "instances")])
def test_each_command_with_rare_options_can_show_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, rare: str
) -> None:
    assert run(monkeypatch, command, "--help") == 0
    few = capsys.readouterr().out
    assert run(monkeypatch, command, "--help-all") == 0
    many = capsys.readouterr().out
    assert "--help-all " in few
    assert f"--{rare} " not in few
    assert f"--{rare} " in many


def test_every_option_of_serve_that_scripts_use_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "serve", "--help")
    text = capsys.readouterr().out
    workers = {"layout", "attention", "experts", "micro-batches", "device", "dtype", "max-model-len", "kv-bytes"}
    for name in workers | {"host", "port", "api-key-file", "timeline", "json"}:
        assert f"--{name} " in text
