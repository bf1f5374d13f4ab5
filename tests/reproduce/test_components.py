"""Published tables of exchanges and kernels: how near the parts of the cost model come, and the page that says so."""

from pathlib import Path

import pytest

from antiphon.reproduce.components import WITHIN, calibration_page, compared
from antiphon.reproduce.deployments import deployments
from antiphon.specs.measured import Measured, measured

PAGE = Path(__file__).parents[2] / "docs" / "calibration.md"
LOOSE = {"deepgemm-dense"}  # 2112 outputs fill no whole wave; its spread is in the page and in the bands


@pytest.mark.parametrize("table", measured(), ids=lambda table: table.name)
def test_every_table_says_where_it_is_from(table: Measured) -> None:
    assert "https://" in table.source
    assert len(table.summary) > 20


@pytest.mark.parametrize(
    "table", [table for table in measured() if table.name not in LOOSE], ids=lambda table: table.name
)
def test_each_row_is_met(table: Measured) -> None:
    far = {row.what: f"{row.error:+.0%}" for row in compared(table) if abs(row.error) > WITHIN}
    assert not far


def test_the_page_in_the_repository_is_up_to_date() -> None:
    again = "run: antiphon reproduce --calibration docs/calibration.md"
    assert PAGE.read_text(encoding="utf-8") == calibration_page(), again


def test_deployments_that_chose_nothing_are_met_or_explained() -> None:
    """Four of five within a quarter; what is farther off says why."""
    rows = deployments()
    far = [one for one, ours in rows if abs(ours / one.theirs - 1) > 0.25]
    assert len(rows) >= 5
    assert len(far) <= len(rows) / 5
    assert all(one.reason for one in far)
    assert all("https://" in one.source for one, _ in rows)
