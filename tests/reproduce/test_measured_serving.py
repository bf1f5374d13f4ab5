"""Effects measured here: each says where, and rows of the papers get that as their note."""

import pytest

from antiphon.base.errors import UserError
from antiphon.reproduce.claims import measured_effect, select


def test_a_measured_row_says_where_it_was_measured() -> None:
    (claim,) = select(["msi-fig13-m2n"])
    effect = measured_effect("m2n-over-gloo")
    assert claim.kind == "measured"
    assert claim.ours() == effect.value
    for words in (effect.machine, effect.commit, effect.command, effect.differs):
        assert words in claim.note


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
