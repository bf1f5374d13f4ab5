"""Which claims are asked for, and their rows."""

from collections.abc import Sequence

from antiphon.base.errors import UserError
from antiphon.base.progress import Report
from antiphon.reproduce.claim import PAPERS, Claim, Paper, Row, evaluate
from antiphon.reproduce.claims import all_claims
from antiphon.specs.nearest import nearest_names


def select(ids: Sequence[str] = (), paper: str | None = None) -> list[Claim]:
    """Claims by id, or by the beginning of one (``msi-fig12``, ``lina-fig7``: all of that figure), in the order of the
    papers; without ids all of them. `UserError` for what matches nothing, with the nearest ids."""
    claims = all_claims()
    if paper is not None:
        wanted = checked_paper(paper)
        claims = tuple(claim for claim in claims if claim.paper == wanted)
    if not ids:
        return list(claims)
    chosen: set[str] = set()
    for name in ids:
        matching = [claim.id for claim in claims if _is_of(claim.id, name)]
        if not matching:
            raise UserError(_unknown(name, [claim.id for claim in claims], paper))
        chosen.update(matching)
    return [claim for claim in claims if claim.id in chosen]


def _is_of(id: str, name: str) -> bool:
    """Whether `name` is the id or names its group: what follows is a dash, or a letter behind a number."""
    if not name or not id.startswith(name):
        return False
    rest = id[len(name) :]
    return rest == "" or rest[0] == "-" or (name[-1].isdigit() and rest[0].isalpha())


def checked_paper(name: str) -> Paper:
    for paper in PAPERS:
        if paper.lower() == name.lower():
            return paper
    raise UserError(f"--paper is {name!r}: it must be one of {', '.join(PAPERS)}")


def reproduce(claims: Sequence[Claim], report: Report) -> list[Row]:
    """One row for each claim, in their order."""
    rows = []
    for number, claim in enumerate(claims):
        report(number, len(claims))
        rows.append(evaluate(claim))
    report(len(claims), len(claims))
    return rows


def _unknown(name: str, known: list[str], paper: str | None) -> str:
    groups = {"-".join(one.split("-")[:2]) for one in known}
    near = nearest_names(name, [*known, *sorted(groups)])
    among = "" if paper is None else f" of {checked_paper(paper)}"
    hint = f"did you mean {', '.join(near)}?" if near else "--list shows all"
    return f"no row{among} is called {name!r}: {hint}"
