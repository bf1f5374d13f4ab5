"""docs/models.md lists exactly the families and formats that run, and is what the command writes."""

import re

import pytest

from antiphon.models.families.readers import FAMILIES
from benchmarks.models_table import PAGE, PEOPLE_KNOW, PUBLISHED_IN, TOLERANCE, main, page, results
from tests.models.conftest import FAMILIES as COMPARABLE
from tests.models.float8_specimens import FORMATS

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_lists_exactly_the_families_that_run() -> None:
    rows = re.findall(r"^\| `(\w+)`", TEXT.partition("## Formats")[0], re.MULTILINE)
    assert rows == ["model_type", *sorted(FAMILIES)]
    assert PEOPLE_KNOW.keys() == FAMILIES.keys()


def test_every_family_and_format_that_can_be_compared_was() -> None:
    families, formats = results(TEXT)
    assert sorted(families) == COMPARABLE
    assert formats.keys() == PUBLISHED_IN.keys() == FORMATS.keys()
    for name, found in (families | formats).items():
        assert found.largest_error < TOLERANCE, name
        assert found.holds, name


def test_the_page_is_what_the_command_writes() -> None:
    made_with = re.search(r"with (transformers [\d.]+ and torch [\d.]+);", TEXT)
    assert made_with is not None
    assert page(TEXT, *results(TEXT), made_with[1]) == TEXT
    rows = re.sub(r"(?m)^\| `(dots1|aria|afmoe)` .*\n", "", TEXT)  # of tables of families and of what does not run
    assert page(rows, *results(TEXT), made_with[1]) == TEXT


def test_an_unknown_family_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--families", "mixtral,llama"])
    assert "--families llama: use some of dbrx, deepseek_v2" in capsys.readouterr().err
    assert PAGE.read_text(encoding="utf-8") == TEXT
