"""A checkpoint's tokenizer is read in a limited process: whatever it holds costs one line of error at most."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from antiphon.base.errors import CheckpointError, UserError
from antiphon.serve.api import server
from antiphon.serve.text import tokenizer_reading
from antiphon.serve.text.tokenizer_reading import TokenizerReader, read_tokenizer
from tests.serve.api_harness import fake_engine, small_tokenizer, write_tokenizer
from tests.serve.fork_server import HEARS_INTERRUPTS, PROGRAMS
from tests.waiting import wait_until

DEMO = Path(__file__).parents[2] / "examples" / "demo-moe"


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def added(num_tokens: int, first: int = 400) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    return [
        {"id": first + number, "content": f"<x{number}>", "normalized": True, **flags} for number in range(num_tokens)
    ]


# Parts of tokenizer.json, and what reading it says; None where it can be read.
HOSTILE: dict[str, tuple[dict[str, Any], str | None]] = {
    "a pattern that cannot be compiled": ({"pre_tokenizer": split("([")}, "premature end of char-class"),
    "a pattern of 20,000 groups": ({"pre_tokenizer": split("(" * 20_000 + "a" + ")" * 20_000)}, "parse depth limit"),
    "a table that the library panics at": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "Cannot parse precompiled_charsmap",
    ),
    "a type that does not exist": ({"pre_tokenizer": {"type": "Nothing"}}, "cannot"),
    "a vocabulary that is a list": ({"model": {"type": "BPE", "vocab": [], "merges": []}}, "cannot"),
    "5,000 added tokens": ({"added_tokens": added(5_000)}, None),
    "a pattern that backtracks without an end": ({"pre_tokenizer": split("(a+)+$")}, None),
}


def write(folder: Path, parts: dict[str, Any]) -> None:
    write_tokenizer(folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))


def demo(folder: Path, parts: dict[str, Any]) -> None:
    """The demo checkpoint with these parts of its tokenizer.json."""
    for file in DEMO.iterdir():
        if file.is_file() and file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file)
    whole = json.loads((DEMO / "tokenizer.json").read_text()) | parts
    (folder / "tokenizer.json").write_text(json.dumps(whole))


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[TokenizerReader]:
    """It reads what a test has written there."""
    write_tokenizer(tmp_path)
    with TokenizerReader(tmp_path) as running:
        yield running


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tokenizer_costs_one_line(name: str, reader: TokenizerReader, tmp_path: Path) -> None:
    parts, reason = HOSTILE[name]
    write(tmp_path, parts)
    if reason is None:
        assert reader.read().vocab_size >= 400
        return
    with pytest.raises(CheckpointError, match=reason) as caught:
        reader.read()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_what_is_read_is_what_the_files_say(reader: TokenizerReader) -> None:
    tokenizer, expected = reader.read(), small_tokenizer()
    assert tokenizer.backend.to_str() == expected.backend.to_str()
    assert tokenizer.template_sources == expected.template_sources
    assert tokenizer.special_tokens == expected.special_tokens
    assert reader.encode("hello, 中文") == expected.encode("hello, 中文", add_special_tokens=True)


def test_a_pattern_without_an_end_ends_one_text_and_not_the_process(reader: TokenizerReader, tmp_path: Path) -> None:
    write(tmp_path, HOSTILE["a pattern that backtracks without an end"][0])
    reader.read()
    process = reader._jobs._process
    with pytest.raises(UserError, match=r"the tokenizer cannot do this: .*retry-limit-in-match over"):
        reader.encode("a" * 40 + " hello")
    assert reader.encode("hello")
    assert process is not None
    assert reader._jobs._process is process


@pytest.mark.parametrize(
    ("limit", "value", "reason"),
    [
        ("_READ_TIMEOUT_S", 0.01, r"reading the tokenizer in .* took longer than 0.01 s, the limit: copy its files"),
        ("_READ_MEMORY_BYTES", 1024 * 1024, r"memory"),
    ],
)
def test_the_limits_of_reading_name_themselves(
    limit: str, value: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"added_tokens": added(40_000)})
    monkeypatch.setattr(tokenizer_reading, limit, value)
    with pytest.raises(CheckpointError, match=reason):
        read_tokenizer(tmp_path, 512)


def test_a_tokenizer_that_grammars_take_too_long_with_serves_without_them(
    reader: TokenizerReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library takes time with the square of the added tokens: 17 s for 40,000."""
    tokenizer = reader.read()
    assert reader.grammar_problem(512) is None
    write(tmp_path, {"added_tokens": added(12_000)})
    monkeypatch.setattr(tokenizer_reading, "_GRAMMARS_TIMEOUT_S", 0.05)
    tokenizer = read_tokenizer(tmp_path, 512)
    assert tokenizer.grammar_problem is not None
    assert tokenizer.grammar_problem.startswith("making grammars took longer than 0.05 s")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "GrammarCompiler", None)
        assert server.build_grammars(fake_engine().info, tokenizer) is None


@pytest.mark.slow
def test_an_interrupt_while_a_tokenizer_is_read_ends_the_command(tmp_path: Path) -> None:
    """Not forked: the process that reads is known by its command line."""
    demo(tmp_path, {"added_tokens": added(40_000, first=4096)})
    command = [
        sys.executable,
        "-c",
        HEARS_INTERRUPTS,
        sys.executable,
        "-m",
        "antiphon.cli.main",
        "serve",
        str(tmp_path),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            served = psutil.Process(process.pid)
            wait_until(
                lambda: any("tokenizer_reading" in " ".join(child.cmdline()) for child in served.children()), "it reads"
            )
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode in (130, -signal.SIGINT), error


def test_nothing_is_left_running(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with TokenizerReader(tmp_path) as reader:
        reader.read()
        process = reader._jobs._process
        assert process is not None
        assert psutil.pid_exists(process.pid)
    assert not psutil.pid_exists(process.pid)


@pytest.mark.parametrize("command", [["serve"], ["generate", "--prompt", "x"]])
def test_a_command_says_in_one_line_what_is_wrong_with_the_tokenizer(command: list[str], tmp_path: Path) -> None:
    demo(tmp_path, {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}})
    ended = PROGRAMS.run(
        [sys.executable, "-m", "antiphon.cli.main", command[0], str(tmp_path), *command[1:]], timeout=120, text=True
    )
    assert isinstance(ended, subprocess.CompletedProcess)
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert "Cannot parse precompiled_charsmap" in line
    assert "panicked" not in ended.stderr
