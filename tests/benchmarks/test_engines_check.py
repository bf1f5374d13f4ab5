"""`make engines-check`: commands that no plan gave are no success."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "engines_check.py"


def test_no_command_at_all_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("engines_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "emitted_commands", lambda: {"vllm": [], "sglang": []})
    monkeypatch.setattr(sys, "argv", ["engines_check.py", "--wheels", str(tmp_path)])
    assert script.main() == 1
    assert "no command was emitted" in capsys.readouterr().out
