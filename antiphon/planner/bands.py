"""How far a prediction may be off, and which layouts the model cannot tell apart.

1. Attention, experts and exchange are each off by the spread of their published tables (docs/calibration.md),
   independently, by their share of a layer.
2. What no part explains (even load of experts, schedulers, congestion) is off by the spread of whole deployments that
   chose nothing (docs/reproduction.md). It is common to all layouts of one model on one cluster.
3. A band holds 80% of normal errors: 1.28 times both together. Two layouts differ by their parts alone; closer than
   1.28 times those of both they are a tie, and the simpler one is recommended.

Rejected: a band by differentiating every constant. It needs a spread for each, which nobody has measured.
"""

import math

import numpy as np

from antiphon.planner.candidates import Candidates
from antiphon.planner.setting import Setting
from antiphon.planner.step_times import group_of, step_parts
from antiphon.planner.table import CandidateTable
from antiphon.specs.plan import LAYOUTS, Layout

PRODUCTS_SPREAD, ATTENTION_SPREAD, EXCHANGE_SPREAD, WHOLE_SPREAD = 0.12, 0.09, 0.13, 0.15
NORMAL_80_PERCENT = 1.28
BY_SIMPLICITY: tuple[Layout, ...] = ("tp_pp", "dp_ep", "hybrid", "disaggregated")


def parts_spread(setting: Setting, one: Candidates) -> float:
    """Relative spread of a single candidate's step by those of its parts."""
    parts = step_parts(setting, one, group_of(setting, one))
    apart = bool(one.is_disaggregated[0])
    exchange = parts.dispatch.total_s + parts.combine.total_s if apart else parts.exposed_s
    products = max(PRODUCTS_SPREAD, ATTENTION_SPREAD)  # an attention layer is mostly products
    pairs = [
        (parts.attention.moe_layer.total_s, products),
        (parts.experts.total_s, PRODUCTS_SPREAD),
        (exchange, EXCHANGE_SPREAD),
    ]
    times = [float(np.asarray(time).reshape(-1)[0]) for time, _ in pairs]
    total = sum(times) or 1.0
    return math.sqrt(sum((time / total * spread) ** 2 for time, (_, spread) in zip(times, pairs, strict=True)))


def band(setting: Setting, one: Candidates) -> float:
    """A single candidate's rate is expected within this fraction of the prediction, either way."""
    return NORMAL_80_PERCENT * math.hypot(parts_spread(setting, one), WHOLE_SPREAD)


def simplest_of_ties(setting: Setting, table: CandidateTable, best: int) -> tuple[int, str]:
    """The best candidate of the simplest layout that ties with `best`, and what there is to say about it."""
    scores = table.score(setting.objective)
    mine = _spread_of(setting, table, best)
    for layout in BY_SIMPLICITY[: BY_SIMPLICITY.index(table.candidates.layout_of(best))]:
        index = table.best(setting.objective, np.asarray(table.candidates.layout == LAYOUTS.index(layout)))
        if index is None:
            continue
        gain = float(scores[best] / scores[index]) - 1
        apart = NORMAL_80_PERCENT * math.hypot(mine, _spread_of(setting, table, index))
        if gain <= apart:
            better = table.candidates.layout_of(best)
            return index, (
                f"a tie: {better} is predicted {gain:.1%} better, less than the {apart:.0%} by which the model can "
                f"tell two layouts apart; {layout} is simpler, and recommended"
            )
    return best, ""


def _spread_of(setting: Setting, table: CandidateTable, index: int) -> float:
    return parts_spread(setting, table.one(index))
