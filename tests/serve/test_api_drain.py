"""`PUT /drain/WORKER` and `antiphon drain`: taken, refused with the reason, and for those who have a key."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from antiphon.base.errors import UserError
from antiphon.cli.drain import drain
from antiphon.serve.engine_api import ShuttingDown
from tests.serve.api_harness import Live, fake_engine, live

KEY = "a-key-of-forty-characters-or-nearly-so-12"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(fake_engine(), api_keys=(KEY,)) as running:
        yield running


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(KEY + "\n")
    file.chmod(0o600)
    return file


def test_a_worker_is_drained_and_serves_again(server: Live, key_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"prefill/replica.* after 0 s .*3 requests left"):
        drain("prefill/replica[0]", server.url, wait=0.0, api_key_file=key_file)
    assert server.engine.drained_workers == {"prefill/replica[0]"}
    drain("prefill/replica[0]", server.url, undo=True, api_key_file=key_file)
    assert server.engine.drained_workers == set()
    assert "ready" in capsys.readouterr().out


def test_a_server_that_ends_meanwhile_says_so(server: Live, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(worker: str, *, undo: bool) -> str:
        raise ShuttingDown("the server is shutting down: send the request to another one")

    monkeypatch.setattr(server.engine, "drain_worker", end)
    with pytest.raises(UserError, match="the server is shutting down"):
        drain("attention[0]", server.url, api_key_file=key_file)


def test_what_takes_the_place_of_a_worker_that_ended_is_not_drained(
    server: Live, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = []

    def end_soon(worker: str, *, undo: bool) -> str:
        orders.append(worker)
        return "draining, 3 requests left"  # then its process ends, and the next one is ready

    monkeypatch.setattr(server.engine, "drain_worker", end_soon)
    with pytest.raises(UserError, match=r"attention\[0\] is not drained \(ready\): its process ended"):
        drain("attention[0]", server.url, api_key_file=key_file)
    assert orders == ["attention[0]"]


def test_it_needs_a_key_and_a_worker(server: Live, key_file: Path) -> None:
    assert httpx.put(f"{server.url}/drain/attention[0]").status_code == 401
    assert httpx.get(f"{server.url}/drain/attention[0]").status_code == 401
    with pytest.raises(UserError, match="API key"):
        drain("attention[0]", server.url)
    with pytest.raises(UserError, match="drain one of"):
        drain("experts[0]", server.url, api_key_file=key_file)
    with pytest.raises(UserError, match="no server answers"):
        drain("attention[0]", "http://127.0.0.1:9", api_key_file=key_file)
