"""When two values agree."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.reproduce.claims import NOT_ANALYSED, Claim, digit, evaluate, holds

CLAIM = Claim(id="x-1", paper="MSI", source="Table 1", what="x", theirs=2.0, ours=lambda: 2.0, kind="counted")


@pytest.mark.parametrize(
    ("theirs", "ours", "tolerance", "relation", "fits"),
    [
        (2.0, 2.0, 0.0, "within", True),
        (2.0, 2.0 + 1e-12, 0.0, "within", True),
        (2.0, 2.001, 0.0, "within", False),
        (2.0, 2.2, 0.1, "within", True),
        (2.0, 1.79, 0.1, "within", False),
        (-2.0, -2.1, 0.1, "within", True),
        (1.0, 5.0, 0.0, "at_least", True),
        (1.0, 0.99, 0.0, "at_least", False),
        (1.0, 0.99, 0.01, "at_least", True),
        (1.0, 1.02, 0.01, "at_most", False),
        (1.0, math.inf, 0.5, "within", False),
        (1.0, math.nan, 0.5, "at_least", False),
        ("A > B", "A > B", 0.0, "within", True),
        ("A > B", "B > A", 0.0, "within", False),
        ("A > B", 1.0, 0.0, "within", False),
    ],
)
def test_agreement(theirs: object, ours: object, tolerance: float, relation: str, fits: bool) -> None:
    assert holds(theirs, ours, tolerance, relation) is fits  # type: ignore[arg-type]


@given(st.floats(0.01, 1e9), st.floats(0, 0.9), st.floats(-1, 1))
@settings(max_examples=50, deadline=None)
def test_a_wider_tolerance_never_refuses_more(theirs: float, tolerance: float, off: float) -> None:
    ours = theirs * (1 + off)
    assert not holds(theirs, ours, tolerance) or holds(theirs, ours, tolerance + 0.05)


def test_half_of_the_last_digit() -> None:
    """15.15 rounds to 15.2; 15.1 does not."""
    assert digit(15.2, 0.1) == pytest.approx(0.05 / 15.2)
    assert holds(15.2, 80 / 5.28, digit(15.2, 0.1))
    assert not holds(15.2, 15.1, digit(15.2, 0.1))


def test_a_row_says_why_it_does_not_hold() -> None:
    assert evaluate(replace(CLAIM, reason="because")).reason == ""
    assert evaluate(replace(CLAIM, ours=lambda: 3.0, reason="because")).reason == "because"
    assert evaluate(replace(CLAIM, ours=lambda: 3.0)).reason == NOT_ANALYSED
    loose = replace(CLAIM, kind="modelled", unit="", theirs=1.2, ours=lambda: 1.1, tolerance=0.1, reason="because")
    assert evaluate(loose).holds
    assert evaluate(loose).reason == "because"


def test_json_has_no_infinity() -> None:
    row = evaluate(replace(CLAIM, ours=lambda: math.inf, reason="no plan"))
    assert row.to_json()["ours"] is None
    assert row.to_json()["holds"] is False


def test_claims_that_cannot_be_meant() -> None:
    with pytest.raises(UserError, match=r"tolerance is 1.5"):
        replace(CLAIM, tolerance=1.5)
    with pytest.raises(UserError, match=r"'a' is text"):
        replace(CLAIM, theirs="a", tolerance=0.1)
