"""The check of stock clients: what is skipped, what fails, and that a client's own report decides."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from antiphon.base.errors import UserError
from benchmarks import clients_check as check
from benchmarks.clients_check import Client, ServerTarget, run

TARGET = ServerTarget("http://127.0.0.1:9", "tiny", Path("tiny"), Path())


def fails(_environment: Path, _target: ServerTarget) -> None:
    raise UserError("it said no")


def passes(_environment: Path, _target: ServerTarget) -> None:
    return


def rows_of(client: Client, monkeypatch: pytest.MonkeyPatch, install: Callable[[Client], str]) -> list[check.Row]:
    monkeypatch.setattr(check, "install", install)
    return list(check.check_client(client, TARGET))


def test_a_client_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(Client("x", "x", (), {"one": fails, "two": passes}), monkeypatch, lambda _: "1.0")
    assert [(row["ran"], row["result"]) for row in rows] == [("one", "failed: it said no"), ("two", "passed")]
    assert check.exit_code(rows) == 1
    assert check.exit_code(rows[1:]) == 0
    assert "| x | 1.0 | one | failed: it said no |" in check.table(rows)


def test_a_client_that_cannot_be_installed_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(_client: Client) -> str:
        return run([sys.executable, "-c", "raise SystemExit('no such error package')"], 60)

    rows = rows_of(Client("x", "x", (), {"one": passes}), monkeypatch, cannot)
    assert [row["result"] for row in rows] == ["skipped: exit code 1: no such error package"]
    assert check.exit_code(rows) == 0


def test_commands_that_hang_are_ended() -> None:
    with pytest.raises(UserError, match="did not end within 1 s"):
        run([sys.executable, "-c", "import time; time.sleep(600)"], 1)


def test_commands_that_do_not_exist_are_named() -> None:
    with pytest.raises(UserError, match=r"cannot run /no/such/client: No such file"):
        run(["/no/such/client"], 1)


def test_an_unknown_client_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        check.main(["--clients", "litellm,curl"])
    assert caught.value.code == 2
    assert (
        "no client 'curl': choose from guidellm,vllm,lm-eval,langchain,openai,anthropic,litellm,pydantic-ai,instructor"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(("errored", "message"), [(0, None), (1, "its report says"), (None, "wrote no")])
def test_the_clients_report_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errored: int | None, message: str | None
) -> None:
    target = ServerTarget(TARGET.url, TARGET.model, TARGET.tokenizer, tmp_path)

    def pretend(_command: list[str | Path], _timeout_s: float) -> str:
        if errored is not None:
            totals = {"errored": errored, "successful": check.NUM_REQUESTS - errored}
            report = {"benchmarks": [{"metrics": {"request_totals": totals}}]}
            (tmp_path / "guidellm-v1-completions.json").write_text(json.dumps(report))
        return ""

    monkeypatch.setattr(check, "run", pretend)
    if message is None:
        check.guidellm("/v1/completions", tmp_path, target)
    else:
        with pytest.raises(UserError, match=message):
            check.guidellm("/v1/completions", tmp_path, target)
