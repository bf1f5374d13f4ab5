"""docs/models.md lists exactly the families and formats that run, and is what the command writes."""

import re

import pytest

from antiphon.models.families.config_readers import FAMILIES
from benchmarks.models_table import LAYOUTS, PAGE, RESULT_ROW, TOLERANCE, ModelComparison, main, page
from tests.models.conftest import FAMILIES as COMPARABLE
from tests.models.float8_specimens import FORMATS

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_lists_exactly_the_families_that_run() -> None:
    rows = re.findall(r"^\| `(\w+)`", TEXT.partition("## Formats")[0], re.MULTILINE)
    assert rows == ["model_type", *sorted(FAMILIES)]


def results(text: str) -> dict[str, ModelComparison]:
    """What a page says was found."""
    rows = [row for row in RESULT_ROW.finditer(text) if row["error"] != "see below"]
    counts = {row["name"]: [int(number) for number in re.findall(r"\d+", row["texts"])] for row in rows}
    return {
        row["name"]: ModelComparison(
            float(row["error"]), dict(zip(LAYOUTS, counts[row["name"]][::2], strict=True)), counts[row["name"]][1]
        )
        for row in rows
    }


def test_every_family_and_format_that_can_be_compared_was() -> None:
    found = results(TEXT)
    assert sorted(found) == sorted([*COMPARABLE, *FORMATS])
    for name, comparison in found.items():
        assert comparison.largest_error < TOLERANCE, name
        assert comparison.holds, name


def test_the_page_is_what_the_command_writes() -> None:
    made_with = re.search(r"with (transformers [\d.]+ and torch [\d.]+);", TEXT)
    assert made_with is not None
    assert page(TEXT, results(TEXT), made_with[1]) == TEXT
    former = re.sub(r"\| [\d.e-]+ \| 12 of 12 \| 12 of 12 \|", "| see below | – | – |", TEXT)
    former = re.sub(r"(?m)^\| `(aria|afmoe)` .*\n", "", former)  # of what does not run
    assert former.count("see below") == TEXT.count("see below") + len(results(TEXT))
    assert page(former, results(TEXT), made_with[1]) == TEXT


def test_an_unknown_family_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--families", "mixtral,llama"])
    assert "--families llama: use some of dbrx, deepseek_v2" in capsys.readouterr().err
    assert PAGE.read_text(encoding="utf-8") == TEXT
