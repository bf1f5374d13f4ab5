"""All rows of all papers, in the order in which they are shown, and those that are asked for.

What a paper prints is data. ``data/msi.toml`` has rows whose values ``msi.py`` computes: each names an entry of the
module's `OURS` and its arguments, ``ours = ["per price", "H20", "memory"]``. A ``[[claim]]`` is one
row, or has several under ``rows`` that share its other keys. ``last_digit`` of a printed number gives its tolerance.
Rejected: rows as code. They hide the few lines that compute among the many that state.
"""

import tomllib
from collections.abc import Iterator, Sequence
from functools import cache, partial
from importlib.resources import files
from types import ModuleType
from typing import Any

from antiphon.base.errors import UserError
from antiphon.base.progress import Report
from antiphon.reproduce import lina, mix, msi, msm
from antiphon.reproduce.claim import PAPERS, Claim, Paper, Row, digit, evaluate
from antiphon.reproduce.measured_serving import measured_effect
from antiphon.reproduce.measured_training import origin
from antiphon.specs.checked import nearest_names

MEASURED = "measured here"  # of `ours`: names an effect of `data/measured_serving.toml`
LOSS_OVER = "loss over"  # names two runs of `data/measured_training.toml`
MODULES: tuple[ModuleType, ...] = (msi, mix, msm, lina)


@cache
def all_claims() -> tuple[Claim, ...]:
    """Every claim once; ids are unique."""
    found = tuple(claim for module in MODULES for claim in _claims_of(module))
    ids = [claim.id for claim in found]
    assert len(set(ids)) == len(ids), f"ids repeat: {sorted({one for one in ids if ids.count(one) > 1})}"
    return found


def _claims_of(module: ModuleType) -> Iterator[Claim]:
    name = module.__name__.rpartition(".")[2]
    text = files("antiphon.reproduce").joinpath("data", f"{name}.toml").read_text(encoding="utf-8")
    for group in tomllib.loads(text)["claim"]:
        for row in group.pop("rows", [{}]):
            yield _claim(module, name, {**group, **row})


def _claim(module: ModuleType, paper: str, row: dict[str, Any]) -> Claim:
    function, *arguments = row["ours"]
    if function == MEASURED:
        effect = measured_effect(*arguments)
        row |= {"kind": "measured", "ours": lambda: effect.value, "note": effect.note}
        row.setdefault("reason", effect.differs)
    else:
        if function == LOSS_OVER:
            row["note"] = f"{row['note']}; {origin(*arguments)}"
        row["ours"] = partial(module.OURS[function], *arguments)
    row |= {"id": f"{paper}-{row['id']}", "paper": paper.upper()}
    if "last_digit" in row:
        row["tolerance"] = digit(row["theirs"], row.pop("last_digit"))
    return Claim(**row)


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
