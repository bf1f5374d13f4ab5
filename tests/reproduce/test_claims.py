"""When two values agree; which rows an argument means; what rows that were measured here say of it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.reproduce import claims
from antiphon.reproduce.claims import (
    NOT_ANALYSED,
    Claim,
    MeasuredEffect,
    all_claims,
    digit,
    evaluate,
    holds,
    measured_effect,
    reproduce,
    select,
)

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


def test_everything_without_arguments() -> None:
    assert [claim.id for claim in select()] == [claim.id for claim in all_claims()]


def test_by_id_by_group_and_by_paper() -> None:
    assert [claim.id for claim in select(["msi-m2n-bytes"])] == ["msi-m2n-bytes"]
    group = [claim.id for claim in select(["lina-fig7d", "lina-eq1"])]
    assert group == [
        "lina-eq1-expert0",
        "lina-eq1-expert1",
        "lina-eq1-expert2",
        "lina-eq1-expert3",
        "lina-fig7d-compute",
        "lina-fig7d-all-reduce",
    ]
    assert {claim.paper for claim in select(paper="mix")} == {"MIX"}


def test_a_group_ends_at_a_dash_or_between_a_number_and_a_letter() -> None:
    """``msi-eq4`` is both bounds; ``lina-fig7`` all four parts; ``mix-eq1`` is not eq. 12."""
    assert {claim.id for claim in select(["msi-eq4"])} == {"msi-eq4-low", "msi-eq4-high"}
    parts = {claim.id.split("-")[1] for claim in select(["lina-fig7"])}
    assert parts == {"fig7a", "fig7b", "fig7c", "fig7d"}
    with pytest.raises(UserError, match=r"no row is called 'mix-eq1'"):
        select(["mix-eq1"])


@pytest.mark.parametrize(
    ("ids", "paper", "message"),
    [
        (["msi-m2n-byte"], None, r"no row is called 'msi-m2n-byte': did you mean msi-m2n-bytes"),
        (["msi-m2n-bytes"], "LINA", r"no row of LINA is called 'msi-m2n-bytes'"),
        (["zzzzzzzz"], None, r"no row is called 'zzzzzzzz': --list shows all"),
        ([], "NATURE", r"--paper is 'NATURE': it must be one of MSI, MIX, MSM, LINA"),
    ],
)
def test_unknown(ids: list[str], paper: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        select(ids, paper)
    assert caught.value.exit_code == 2


def test_progress_ends_at_the_total() -> None:
    told: list[tuple[float, float | None]] = []
    rows = reproduce(select(["msi-table3-l20"]), lambda done, total: told.append((done, total)))
    assert len(rows) == 3
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_measured_row_says_where_it_was_measured() -> None:
    (claim,) = select(["msi-fig13-m2n"])
    effect = measured_effect("m2n-over-gloo")
    assert claim.kind == "measured"
    assert claim.ours() == effect.value
    for words in (effect.machine, effect.commit, effect.command, effect.differs):
        assert words in claim.note


@pytest.mark.parametrize("key", ["machine", "differs"])
def test_a_measured_row_needs_a_machine_and_what_differs(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stated = {"machine": "two cores", "differs": "a smaller model"} | {key: ""}
    effect = MeasuredEffect(value=1.0, commit="abc", command="true", **stated)
    monkeypatch.setattr(claims, "measured_effect", lambda name: effect)
    row = {"id": "fig1", "ours": [claims.MEASURED, "gain"], "source": "Figure 1", "what": "gain", "theirs": 1.0}
    with pytest.raises(UserError, match=f"measured.toml: gain has no {key}, which a measured row says: add it"):
        claims._claim(claims.msi, "msi", row)


def test_a_measured_loss_says_what_was_run_at_which_commit() -> None:
    rows, products = select(["msm-fig19-loss-rows", "msm-fig19-loss-products"])
    assert "measured at commit 53892e2: python benchmarks/compression_curves.py" in rows.note
    assert "products=float8" in products.note
    assert rows.ours() == pytest.approx(4.1604 / 4.1535)  # both with gradients in BF16


def test_steps_of_lina_are_over_its_baseline_not_over_nothing_beside() -> None:
    claims = select(["lina-fig14-priority", "lina-fig14-partition"])
    assert [round(claim.ours(), 2) for claim in claims] == [0.97, 1.04]
    assert all("baseline" in claim.note for claim in claims)


def test_utilization_follows_from_the_waits_of_its_table() -> None:
    (claim,) = select(["lina-table4-utilization"])
    assert claim.ours() == pytest.approx((1.20 - 0.84) / 1.20 / ((1.57 - 1.09) / 1.57), abs=5e-4)


def test_estimates_of_one_layer_are_not_shown_as_a_mean_or_the_worst() -> None:
    claims = select(["lina-table5-accuracy-3", "lina-fig19-accuracy", "lina-table6-accuracy"])
    assert len({claim.ours() for claim in claims}) == 3


def test_an_unknown_effect_is_named() -> None:
    with pytest.raises(UserError, match="has no effect 'm2n-over-glo': did you mean m2n-over-gloo"):
        measured_effect("m2n-over-glo")
