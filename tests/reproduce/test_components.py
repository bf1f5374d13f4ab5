"""Published tables of exchanges and kernels: how near the parts of the cost model come, and the page that says so."""

from pathlib import Path

import pytest

from antiphon.reproduce.components import WITHIN, calibration_page, compared
from antiphon.specs.measured import Measured, measured

PAGE = Path(__file__).parents[2] / "docs" / "calibration.md"
BOUND = ("rows sent direct", "rows sent once per node")


@pytest.mark.parametrize("table", measured(), ids=lambda table: table.name)
def test_every_table_says_where_it_is_from(table: Measured) -> None:
    assert "https://" in table.source
    assert len(table.summary) > 20


@pytest.mark.parametrize("table", [table for table in measured() if table.kind in BOUND], ids=lambda table: table.name)
def test_each_row_is_met(table: Measured) -> None:
    far = {row.what: f"{row.error:+.0%}" for row in compared(table) if abs(row.error) > WITHIN}
    assert not far


def test_the_page_in_the_repository_is_up_to_date() -> None:
    again = "run: antiphon reproduce --calibration docs/calibration.md"
    assert PAGE.read_text(encoding="utf-8") == calibration_page(), again
