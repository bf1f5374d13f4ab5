"""Latency against rate over all layouts: the search's candidates, and what the good ones would do at other batches.

The search keeps one batch per candidate, the largest under the target, so its own points crowd below it. Here the best
candidates of each layout are taken again with batches from what memory allows down to one; a front is what is left
when everything that something else beats in both is gone. Rejected: all candidates at all batches, 10^6 evaluations.
"""

from dataclasses import fields, replace

import numpy as np

from antiphon.planner.batch_limits import batch_limits
from antiphon.planner.candidates import BoolArray, IntArray, joined
from antiphon.planner.decode import outcome_at as decode_at
from antiphon.planner.prefill import outcome_at as prefill_at
from antiphon.planner.setting import Setting
from antiphon.planner.table import CandidateTable, Outcome, front
from antiphon.report.contents import Points
from antiphon.report.words import devices_text, plural, short_degrees
from antiphon.specs.plan import LAYOUTS, Layout, Objective

NUM_SWEPT = 200
"""Candidates of each layout that are tried at other batches: the best half by rate, the rest spread over the others."""
NUM_BATCHES = 12


def frontier(setting: Setting, table: CandidateTable) -> tuple[Points, ...]:
    """The front of each layout that has a candidate."""
    fronts = []
    for layout in LAYOUTS:
        points = swept(setting, table, layout)
        index = np.flatnonzero(_is_shown(points, setting.objective))
        if index.size:
            best = front(points.latency_s[index], points.score(setting.objective)[index])
            fronts.append(_points(points, layout, index[best], setting.objective))
    return tuple(fronts)


def swept(setting: Setting, table: CandidateTable, layout: Layout) -> CandidateTable:
    """Candidates of `layout` at the search's batch, and some of them at others."""
    all_of_it = np.flatnonzero(table.candidates.layout == LAYOUTS.index(layout))
    chosen = _worth_sweeping(table, all_of_it, setting.objective)
    base = table.candidates.take(chosen)
    limits, instances = batch_limits(setting, base), table.outcome.num_instances[chosen]
    parts = [(table.candidates.take(all_of_it), table.outcome.take(all_of_it))]
    at = decode_at if setting.phase == "decode" else prefill_at
    for step in range(NUM_BATCHES):
        batch = np.maximum(limits // 2**step, 1)
        if step and not np.any(limits >= 2**step):
            break
        candidates = base.with_batch(batch)
        parts.append((candidates, at(setting, candidates, instances)))
    columns = {
        column.name: np.concatenate([getattr(outcome, column.name) for _, outcome in parts])
        for column in fields(Outcome)
    }
    return replace(table, candidates=joined([candidates for candidates, _ in parts]), outcome=Outcome(**columns))


def _worth_sweeping(table: CandidateTable, index: IntArray, objective: Objective) -> IntArray:
    scores = np.nan_to_num(table.score(objective)[index], nan=-np.inf)
    order = index[np.argsort(-scores, kind="stable")]
    if order.size <= NUM_SWEPT:
        return order
    rest = order[NUM_SWEPT // 2 :]
    spread = rest[np.linspace(0, rest.size - 1, NUM_SWEPT - NUM_SWEPT // 2).astype(np.int64)]
    return np.unique(np.concatenate([order[: NUM_SWEPT // 2], spread]))


def _is_shown(table: CandidateTable, objective: Objective) -> BoolArray:
    latency_s = table.latency_s
    return np.asarray(np.isfinite(latency_s) & (latency_s > 0) & (np.nan_to_num(table.score(objective)) > 0))


def _points(table: CandidateTable, layout: Layout, index: IntArray, objective: Objective) -> Points:
    latency_s, scores, batch = table.latency_s, table.score(objective), table.batch
    return Points(
        layout=layout,
        latency_s=tuple(float(value) for value in latency_s[index]),
        scores=tuple(float(value) for value in scores[index]),
        labels=tuple(
            f"{short_degrees(layout, table.parallel(int(row)))}, "
            f"{plural(int(table.micro_batches[row]), 'micro-batch', 'micro-batches')}, batch {int(batch[row]):,}; "
            f"{devices_text(table.devices(int(row)))}"
            for row in index
        ),
    )
