"""The size rule, on a small made-up tree."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def line_counts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).parents[1] / "scripts" / "line_counts.py"
    spec = importlib.util.spec_from_file_location("line_counts", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "line_counts", module)
    spec.loader.exec_module(module)
    return module


def test_long_files_need_a_reason_and_tests_do_not(line_counts: ModuleType, tmp_path: Path) -> None:
    for name, num_lines, first in [
        ("antiphon/serve/short.py", 450, "x"),
        ("antiphon/serve/long.py", 451, "x"),
        ("antiphon/serve/reasoned.py", 451, '"""A table. Long because the standard is."""'),
        ("csrc/kernels/native.cpp", 500, "// x"),
        ("tests/serve/test_long.py", 900, "x"),
    ]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([first] + ["x"] * (num_lines - 1)) + "\n")
    files = line_counts.measure(tmp_path)
    assert [str(file.path) for file in files if file.offends] == ["antiphon/serve/long.py"]
    printed = line_counts.report(files)
    assert "too long: antiphon/serve/long.py has 451 lines, the limit is 450" in printed
    assert "antiphon/serve         1,352     3" in printed
