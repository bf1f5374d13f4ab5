"""docs/reproduction.md is what the command writes, and says what the code computes."""

import re
from dataclasses import replace
from pathlib import Path

from antiphon.reproduce.claims import Row
from antiphon.reproduce.markdown import page, tolerance_text, value_text

PAGE = Path(__file__).parents[2] / "docs" / "reproduction.md"
LINE = re.compile(r"^\| `(?P<id>[^`]+)` \| .* \| (?P<theirs>[^|]+) \| [^|]+ \| [^|]+ \| [^|]+ \| (?P<holds>[^|]+) \|$")
AGAIN = "run: antiphon reproduce --markdown docs/reproduction.md"


def stated(text: str) -> dict[str, tuple[str, bool]]:
    """By id: what the paper has, and whether the page says that it holds."""
    found = {}
    for line in text.splitlines():
        if match := LINE.match(line):
            found[match["id"]] = (match["theirs"], match["holds"] == "yes")
    return found


def test_the_page_in_the_repository_is_up_to_date(rows: dict[str, Row]) -> None:
    """Ids, what the papers have, and what holds; not our values to the last digit."""
    text = PAGE.read_text(encoding="utf-8")
    ours = stated(page(list(rows.values())))
    assert len(ours) == len(rows)
    assert stated(text) == ours, AGAIN
    holding = sum(row.holds for row in rows.values())
    assert f"All together: {holding} of {len(rows)} rows hold." in text, AGAIN


def test_reasons_and_calibrations_are_in_the_page(rows: dict[str, Row]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for row in rows.values():
        assert row.reason in text, f"{row.id}: {AGAIN}"
    for name in ("msi-ampere", "msi-hetero", "mix-ascend", "mix-h20", "msm-h800", "lina-a100"):
        assert f"- **{name}** (" in text


def test_values_and_tolerances_in_words(rows: dict[str, Row]) -> None:
    assert [value_text(value) for value in (196_608.0, 0.27891, 1.41e11, 1e-6, "H20", 1.0)] == [
        "196,608",
        "0.2789",
        "1.41e+11",
        "1.000e-06",
        "H20",
        "1",
    ]
    row = rows["msi-m2n-bytes"]
    assert tolerance_text(row) == "exact"
    assert tolerance_text(replace(row, tolerance=0.15)) == "±15%"
    assert tolerance_text(replace(row, tolerance=0.005, relation="at_least")) == "at least, −0.5%"
    assert tolerance_text(replace(row, relation="at_most")) == "at most"
    assert tolerance_text(rows["msi-fig12-order"]) == "exact"


def test_a_page_of_few_rows_has_no_empty_parts(rows: dict[str, Row]) -> None:
    text = page([rows["msi-m2n-bytes"]])
    assert "All together: 1 of 1 rows hold." in text
    assert "does not hold, and why" not in text
    assert "## Calibrations" not in text
    assert "LINA" not in text
