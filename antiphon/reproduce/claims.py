"""All rows of all papers, in the order in which they are shown."""

from functools import cache

from antiphon.reproduce import (
    lina_counted,
    lina_step,
    mix_counted,
    mix_figure_10_910b,
    mix_figure_10_h20,
    mix_figures,
    msi_counted,
    msi_pipeline,
    msi_systems,
    msm_counted,
    msm_figures,
    msm_printed,
    msm_training,
)
from antiphon.reproduce.claim import Claim

SOURCES = (
    msi_counted,
    msi_pipeline,
    msi_systems,
    mix_counted,
    mix_figure_10_910b,
    mix_figure_10_h20,
    mix_figures,
    msm_counted,
    msm_printed,
    msm_training,
    msm_figures,
    lina_counted,
    lina_step,
)


@cache
def all_claims() -> tuple[Claim, ...]:
    """Every claim once; ids are unique."""
    found = tuple(claim for source in SOURCES for claim in source.claims())
    ids = [claim.id for claim in found]
    assert len(set(ids)) == len(ids), f"ids repeat: {sorted({one for one in ids if ids.count(one) > 1})}"
    return found
