"""`antiphon reproduce` as people and scripts call it."""

import json
import sys
from pathlib import Path

import pytest

from antiphon.cli.main import app
from antiphon.cli.output import run_command

FIELDS = {"id", "paper", "source", "theirs", "ours", "unit", "tolerance", "holds", "kind", "reason", "note"}


def call(*arguments: str) -> int:
    return run_command(lambda: app(["reproduce", *arguments], prog_name="antiphon", standalone_mode=False))


def test_json_keeps_the_contract(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["antiphon", "reproduce", "msi-m2n-bytes", "msm-table2", "--json", "-"])
    assert call("msi-m2n-bytes", "msm-table2", "--json", "-") == 0, "rows that do not hold are reported, not failed"
    payload = json.loads(capsys.readouterr().out)
    assert payload["bench"] == "reproduce"
    assert payload["command"] == "antiphon reproduce msi-m2n-bytes msm-table2 --json -"
    assert payload["commit"]
    assert {"cpus", "device"} <= payload["machine"].keys()
    assert [row["id"] for row in payload["rows"]] == [
        "msi-m2n-bytes",
        "msm-table2-352b-as-printed",
        "msm-table2-352b",
    ]
    for row in payload["rows"]:
        assert row.keys() >= FIELDS
        assert row["kind"] == "counted"
        assert bool(row["reason"]) is not row["holds"]
    assert payload["rows"][0]["ours"] == 196_608
    assert [row["holds"] for row in payload["rows"]] == [True, False, True]


def test_the_table_ends_with_the_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("msm-table2", "--paper", "MSM") == 0
    printed = capsys.readouterr().out
    assert "MSM: MegaScale-MoE" in printed
    assert "msm-table2-352b-as-printed: The printed row adds up to 341.3 billion" in printed
    assert printed.rstrip().endswith("all together: 1 of 2 rows hold")


def test_list_computes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--list", "--paper", "LINA", "--json", "-") == 0
    listed = json.loads(capsys.readouterr().out)["rows"]
    assert {row["paper"] for row in listed} == {"LINA"}
    assert all("ours" not in row for row in listed)
    assert call("lina-fig7a", "--list") == 0
    assert "lina-fig7a-compute" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["msi-m2n-bites"], "did you mean msi-m2n-bytes"),
        (["--paper", "Nature"], "--paper is 'Nature': it must be one of MSI, MIX, MSM, LINA"),
        (["--list", "--markdown", "x.md"], "leave out --list"),
    ],
)
def test_mistakes_exit_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_the_page_is_written_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("msi-table3-l20", "--markdown", str(tmp_path / "page.md")) == 0
    assert (tmp_path / "page.md").read_text(encoding="utf-8").startswith("# Reproduction\n")
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]
    assert call("msi-table3-l20", "--markdown", str(tmp_path / "missing" / "page.md")) == 2
    assert "missing does not exist" in capsys.readouterr().err
