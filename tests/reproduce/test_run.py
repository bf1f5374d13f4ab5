"""Which rows an argument means."""

import pytest

from antiphon.base.errors import UserError
from antiphon.reproduce.claims import all_claims, reproduce, select


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
