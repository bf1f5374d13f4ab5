"""`antiphon bench m2n`: help, what it refuses, and a small run whose JSON keeps the names others rely on."""

import json
import sys
from pathlib import Path

import pytest

from antiphon.cli import main as cli


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["antiphon", "bench", "m2n", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_help_fits_a_screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(monkeypatch, "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 36
    assert max(map(len, lines)) <= 80
    for name in ("senders", "receivers", "bytes", "transport", "against", "timeline", "json"):
        assert any(f"--{name} " in line for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--senders 0", "--senders is 0: use 1 to 128"),
        ("--bytes many", "--bytes 'many' is not a size in bytes: write for example 4GiB, 500MB or 1000000"),
        ("--transport shm,pigeon", "--transport pigeon does not exist: use some of shm, tcp, libfabric"),
        (
            "--against nccl",
            "--against nccl is not known: use some of gloo, gloo-all-to-all, memcpy, mpi, ucx",
        ),
        ("--rounds -1", "--rounds is -1: it must be 1 to 1000000"),
        ("--rounds 0", "--rounds is 0: it must be 1 to 1000000"),
        ("--repetitions 0", "--repetitions is 0: it must be 1 to 1000"),
        ("--timeout 0", "--timeout is 0: it must be above 0 s and at most 1000000"),
        ("--timeout inf", "--timeout is inf: it must be above 0 s and at most 1000000"),
        ("--figure sizes --senders 2", "--figure sizes brings its own sizes: leave out --senders"),
        ("--figure 13", "--figure 13 does not exist: use one of one-to-n, sizes, m-equals-n"),
    ],
)
def test_what_cannot_be_is_refused(
    options: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *options.split()) == 2
    printed = capsys.readouterr()
    assert printed.err == f"error: {message}\n"
    assert printed.out == ""


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "250")  # on a busy machine the table is wider
    report, trace = tmp_path / "m2n.json", tmp_path / "trace.json"
    options = "--senders 1 --receivers 2 --bytes 4KiB --transport shm --against memcpy --rounds 5 --repetitions 1"
    assert run(monkeypatch, *options.split(), "--in-place", "--json", str(report), "--timeline", str(trace)) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[0] == "transport"
    assert [line.split("  ")[0] for line in table[1:]] == ["shm", "shm in place", "memcpy"]
    found = json.loads(report.read_text())
    assert found["bench"] == "m2n"
    assert found["machine"]["device"] == "cpu"
    promised = {
        *("transport", "senders", "receivers", "message_bytes", "median_s", "p99_s"),
        *("throughput_bytes_per_s", "iterations", "ratio_to_gloo_median"),
    }
    assert all(promised <= row.keys() for row in found["rows"])
    assert [row["in_place"] for row in found["rows"]] == [False, True, False]
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.slow
def test_a_touched_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "250")  # on a busy machine the table is wider
    report = tmp_path / "m2n.json"
    options = "--touch --senders 1 --receivers 2 --bytes 4KiB --transport shm --against memcpy --rounds 5"
    assert run(monkeypatch, *options.split(), "--repetitions", "1", "--json", str(report)) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in table[1:]] == ["shm", "memcpy"]
    assert all("4.0 KiB touched" in line for line in table[1:])
    assert [row["touched"] for row in json.loads(report.read_text())["rows"]] == [True] * 2
