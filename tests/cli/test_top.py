"""`antiphon top` over an engine without a model, and what it says when it cannot look."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from antiphon.base.errors import UserError
from antiphon.cli import main as cli
from antiphon.cli.top import frame, read
from antiphon.serve.api.dashboard import DashboardReading
from antiphon.serve.worker.spans import ATTENTION, COMBINE, DISPATCH, EXPERTS, STEP
from tests.serve.api_harness import Live, fake_engine, live
from tests.serve.span_examples import recorded

TEN_MS = 10_000_000


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    engine = fake_engine()
    engine.spans = {
        "attention[0]": recorded(
            (ATTENTION, 0, 4 * TEN_MS, 8), (DISPATCH, 4 * TEN_MS, 5 * TEN_MS, 8),
            (COMBINE, 5 * TEN_MS, 9 * TEN_MS, 8), (STEP, 0, 10 * TEN_MS, 8)),
        "experts[0]": recorded((EXPERTS, 5 * TEN_MS, 8 * TEN_MS, 11)),
    }  # fmt: skip
    engine.statistics.note_event("lost", "killed by SIGKILL", "experts[1]")
    with live(engine) as running:
        yield running


def top(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["antiphon", "top", *arguments])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code, *capsys.readouterr()


def test_one_frame(server: Live, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, said, errors = top(capsys, monkeypatch, server.url, "--once")
    assert (code, errors) == (0, "")
    lines = said.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "Antiphon: fake-moe"
    assert "attention waits             12.5%  experts wait                50.0%" in said
    assert "Step 7 took 100.00 ms" in said
    (attention,) = [line for line in lines if line.startswith("attention[0]")]
    (experts,) = [line for line in lines if line.startswith("experts[0]")]
    shares = r"2{22,23}>{5,6}·{22,23} +"  # 40%, 10%, 40% and 10% of 56 characters
    assert re.fullmatch(rf"attention\[0\] +{shares}", attention)
    assert re.fullmatch(r"experts\[0\] +2{16,18} +", experts)
    assert "not drawn: experts[1]" in said
    assert re.search(r"0 +0\.75 +1\.50 +0\.50", said)
    assert re.search(r"\d\d:\d\d:\d\d experts\[1\] lost: killed by SIGKILL", said)


def test_json_is_the_reading(
    server: Live, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, said, _ = top(capsys, monkeypatch, server.url, "--json", "-")
    assert code == 0
    assert DashboardReading.model_validate(json.loads(said)).model == "fake-moe"
    assert top(capsys, monkeypatch, server.url + "/", "--json", str(tmp_path / "reading.json"))[0] == 0
    assert json.loads((tmp_path / "reading.json").read_text())["layout"] == "disaggregated"


def test_an_old_reading_says_so_and_an_empty_one_is_drawn() -> None:
    with live(fake_engine()) as server, httpx.Client() as client:
        reading = read(client, server.url)
    reading.load, reading.workers = [], []
    console = Console(width=80)
    with console.capture() as captured:
        console.print(frame(reading, "no server answers"))
    said = captured.get()
    assert "no server answers" in said
    assert "No step yet." in said
    assert "No rows yet." in said


def test_what_cannot_be_looked_at(server: Live, tmp_path: Path) -> None:
    with httpx.Client() as client:
        with pytest.raises(UserError, match=r"no server answers at http://127\.0\.0\.1:1 .*antiphon serve"):
            read(client, "http://127.0.0.1:1")
        for url in ("", "localhost", "ftp://localhost", "http://127.0.0.1:99999"):
            with pytest.raises(UserError, match="is not a server's address: write for example http://"):
                read(client, url)
        with pytest.raises(UserError, match=r"nothing is at .*/v1/dashboard/data: give the address of"):
            read(client, f"{server.url}/v1")
        with live(fake_engine(), api_keys=("secret",)) as locked, pytest.raises(UserError, match="--api-key-file"):
            read(client, locked.url)


def test_a_server_that_does_not_know_its_name_is_quoted() -> None:
    with live(fake_engine(), allowed_hosts=()) as server:
        url = server.url.replace("127.0.0.1", "antiphon.localhost")

        def tunnel(asked: httpx.Request) -> httpx.Response:
            answer = server.http.get(asked.url.path, headers={"host": asked.url.host})
            return httpx.Response(answer.status_code, content=answer.content)

        transport = httpx.MockTransport(tunnel)
        with httpx.Client(transport=transport) as client, pytest.raises(UserError) as caught:
            read(client, url)
    assert "refuses this: Host is 'antiphon.localhost'" in str(caught.value)
    assert "--allowed-hosts antiphon.localhost" in str(caught.value)


def test_a_key_from_a_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    with live(fake_engine(), api_keys=("secret",)) as locked:
        assert top(capsys, monkeypatch, locked.url, "--once", "--api-key-file", str(tmp_path / "keys"))[0] == 0
    code, _, errors = top(capsys, monkeypatch, "--interval", "0")
    assert (code, errors) == (2, "error: --interval is 0: it must be at least 0.1\n")


def test_live_until_interrupted(server: Live) -> None:
    """In a terminal of its own: frames come anew, Ctrl-C ends it without an error."""
    ours, theirs = pty.openpty()
    # A shell's background jobs ignore SIGINT, and so would what they start.
    hears = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{hears}; runpy.run_module('antiphon.cli.main', run_name='__main__')"
    command = [sys.executable, "-c", code, "top", server.url, "--interval", "0.1"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    try:
        os.close(theirs)
        seen, deadline = b"", time.monotonic() + 60.0
        while seen.count(b"Antiphon: ") < 3:
            assert select.select([ours], [], [], 60)[0], seen
            seen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        while process.poll() is None and time.monotonic() < deadline:  # it may still be writing
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    seen += os.read(ours, 65536)
                except OSError:  # the other end is closed
                    break
        assert process.wait(60) == 0, seen
    finally:
        process.kill()
        process.wait(60)
    os.close(ours)
    assert b"error" not in seen
