"""MegaScale-Infer against colocated systems, by the planner: Figure 8 (Ampere GPUs), Figure 9 (H20 and L40S).

Figure 8 chose the Ampere cluster's calibration, together with Figures 12 and 13; Figure 9's cluster has the same and
is a check of it.
"""

from functools import cache

from antiphon.reproduce.msi_plans import (
    MIXED,
    MODELS,
    Found,
    best,
    colocated,
    score,
)


def _over_colocated(model: str) -> float:
    return score(best(model, "disaggregated")) / score(colocated(model))


@cache
def _mixed(model: str) -> Found | None:
    return best(model, "disaggregated", MIXED, "per-cost")


def _pair(model: str) -> str:
    found = _mixed(model)
    if found is None:
        return "no plan"
    attention, experts = found.devices()
    return f"{attention} for attention, {experts} for experts"


def _over_h20(model: str) -> float:
    return score(_mixed(model), "per-cost") / score(colocated(model, MIXED, "per-cost", "H20"), "per-cost")


def _better_alone(model: str) -> str:
    scores = {kind: score(colocated(model, MIXED, "per-cost", kind), "per-cost") for kind in ("H20", "L40S")}
    return " > ".join(sorted(scores, key=lambda kind: -scores[kind]))


OURS = {
    "over colocated": _over_colocated,
    "best pair": _pair,
    "better alone": _better_alone,
    "best over H20": lambda: max(_over_h20(model) for model in MODELS),
}
