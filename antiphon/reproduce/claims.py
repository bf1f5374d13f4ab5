"""All rows of all papers, in the order in which they are shown.

What a paper prints is data. ``data/msi_counted.toml`` has rows whose values ``msi_counted.py`` computes: each names
an entry of the module's `OURS` and its arguments, ``ours = ["per price", "H20", "memory"]``. A ``[[claim]]`` is one
row, or has several under ``rows`` that share its other keys. ``last_digit`` of a printed number gives its tolerance.
Rejected: rows as code. They hide the few lines that compute among the many that state.
"""

import tomllib
from collections.abc import Iterator
from functools import cache, partial
from importlib.resources import files
from types import ModuleType
from typing import Any

from antiphon.reproduce import (
    lina_counted,
    lina_step,
    mix_counted,
    mix_figures,
    msi_counted,
    msi_pipeline,
    msi_systems,
    msm_counted,
    msm_figures,
    msm_training,
)
from antiphon.reproduce.claim import Claim, digit

MODULES: tuple[ModuleType, ...] = (
    msi_counted,
    msi_pipeline,
    msi_systems,
    mix_counted,
    mix_figures,
    msm_counted,
    msm_training,
    msm_figures,
    lina_counted,
    lina_step,
)


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
            yield _claim(module, name.partition("_")[0], {**group, **row})


def _claim(module: ModuleType, paper: str, row: dict[str, Any]) -> Claim:
    function, *arguments = row["ours"]
    row |= {"id": f"{paper}-{row['id']}", "paper": paper.upper(), "ours": partial(module.OURS[function], *arguments)}
    if "last_digit" in row:
        row["tolerance"] = digit(row["theirs"], row.pop("last_digit"))
    return Claim(**row)
