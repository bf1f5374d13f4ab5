"""The dashboard in a real browser, over a real server with traffic; and what it says when nobody answers."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.chromium import BINARY
from tests.serve.api_harness import fake_engine, live
from tests.serve.browser import Browser, browser
from tests.serve.server_harness import ServerProcess, serve

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason=f"no browser: {BINARY} is not installed")


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def text_of(window: Browser, name: str) -> str:
    return str(window.ask(f"document.getElementById('{name}').textContent"))


def test_real_traffic_is_drawn(window: Browser, live_server: ServerProcess) -> None:
    live_server.text(max_tokens=24)
    for dark, width in ((False, 1280), (True, 420)):
        window.open(f"{live_server.url}/dashboard", width=width, dark=dark)
        window.wait_for("document.querySelectorAll('#load rect[data-tip]').length > 0")
        assert window.ask("document.documentElement.scrollWidth <= innerWidth"), "wider than its window"
        back = window.ask("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", back))) < 3 * 64) == dark
        assert text_of(window, "title") == f"Antiphon: {live_server.model}"
        assert text_of(window, "status") == "Serving"
        assert "2 of 2 workers are ready" in text_of(window, "workers-words")
        tips = window.ask("[...document.querySelectorAll('#steps rect')].map(bar => bar.dataset.tip)")
        assert {re.split(r"[:,] ?", tip)[0] for tip in tips} == {"attention[0]", "experts[0]"}
        assert {"attention", "experts", "waiting"} <= {re.split(r"[:,] ?", tip)[1] for tip in tips}
        assert {match for tip in tips for match in re.findall(r"layer (\d+)", tip)} == {"0", "1"}
        assert window.ask("document.querySelectorAll('#tokens polyline').length") == 2
        assert window.ask("document.querySelectorAll('#idle polyline').length") == 3
        assert "experts[0]" in text_of(window, "events")
    assert window.console == []


def test_the_steps_can_be_seen_closer_and_farther(window: Browser, live_server: ServerProcess) -> None:
    live_server.text(max_tokens=24)
    window.open(f"{live_server.url}/dashboard")
    window.wait_for("document.querySelectorAll('#steps rect').length > 0")
    counts = {}
    for zoom in ("steps", "step", "layers"):
        counts[zoom] = window.ask(
            f"zoom = '{zoom}', draw(), document.querySelectorAll('#steps rect[data-tip*=layer]').length"
        )
    assert counts["steps"] > counts["step"] >= counts["layers"] > 0


def test_a_key_is_asked_for_and_a_silent_server_is_told_of(window: Browser) -> None:
    with live(fake_engine(), api_keys=("secret",)) as server:
        window.open(f"{server.url}/dashboard")
        window.wait_for("document.getElementById('login').hidden === false")
        submit = "document.getElementById('key').value = '{}', document.getElementById('login').requestSubmit(), true"
        window.ask(submit.format("wrong"))
        window.wait_for("document.getElementById('login-words').textContent.includes('does not know')")
        window.ask(submit.format("secret"))
        window.wait_for("document.getElementById('title').textContent === 'Antiphon: fake-moe'")
        assert "No step yet" in text_of(window, "steps-words")
        assert text_of(window, "alert") == ""
    window.wait_for("document.getElementById('alert').hidden === false")
    said = text_of(window, "alert")
    assert re.match(r"The server at 127\.0\.0\.1:\d+ has not answered since \d\d:\d\d:\d\d\.", said), said
    assert window.ask("document.body.classList.contains('stale')")


@pytest.mark.slow
def test_deaths_are_seen_as_they_happen(window: Browser, checkpoint: Path, tmp_path: Path) -> None:
    with serve(checkpoint, tmp_path, "--layout", "disaggregated", "--experts", "2") as server:
        server.text()
        window.open(f"{server.url}/dashboard")
        window.wait_for("document.querySelectorAll('#steps rect').length > 0")
        os.kill(server.worker_pid("experts[1]"), signal.SIGKILL)
        for words in ("lost: killed by", "the step is given up", "ready: has loaded", "step together"):
            window.wait_for(f"document.getElementById('events').textContent.includes('{words}')")
        window.wait_for("document.getElementById('workers-words').textContent.startsWith('3 of 3 workers are ready')")
        assert window.ask("document.querySelectorAll('#tokens line[data-tip*=lost]').length") == 1
        server.text()
        window.wait_for("document.getElementById('status').textContent === 'Serving'")
        os.kill(server.process.pid, signal.SIGSTOP)
        window.wait_for("document.getElementById('alert').textContent.includes('has not answered since')")
        os.kill(server.process.pid, signal.SIGCONT)
        window.wait_for("document.getElementById('alert').hidden")
