"""Effects measured here: each says where, and rows of the papers get that as their note."""

import pytest

from antiphon.base.errors import UserError
from antiphon.reproduce.claims import select
from antiphon.reproduce.measured_serving import measured_effect


def test_a_measured_row_says_where_it_was_measured() -> None:
    (claim,) = select(["msi-fig13-m2n"])
    effect = measured_effect("m2n-over-gloo")
    assert claim.kind == "measured"
    assert claim.ours() == effect.value
    for words in (effect.machine, effect.commit, effect.command, effect.differs):
        assert words in claim.note


def test_an_unknown_effect_is_named() -> None:
    with pytest.raises(UserError, match="has no effect 'm2n-over-glo': did you mean m2n-over-gloo"):
        measured_effect("m2n-over-glo")
