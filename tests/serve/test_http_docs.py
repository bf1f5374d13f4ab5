"""The page about HTTP says what the code does."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "http_tables.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("http_tables", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_code(script: ModuleType) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.written_anew(page) == page, "run python scripts/http_tables.py"


def test_every_parameter_has_a_row_with_an_effect(script: ModuleType) -> None:
    rows = script.parameter_rows()
    assert len(rows) > 40
    assert not [row for row in rows if row.endswith("|  |")]


def test_a_changed_table_is_noticed(script: ModuleType) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.written_anew(page.replace("| `temperature` |", "| `warmth` |")) == page
