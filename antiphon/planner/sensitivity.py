"""What the best of each layout gives when one thing changes: the promise, the prompts' length, the network's speed.

1. The table of the plan is cut to candidates that matter: of each layout the best by score, the fastest ones, the
   front.
2. For each value these are evaluated anew in a changed setting: memory, batch, promise, rate.

Rejected: a whole search for each value. It takes a second each and moves the curves by less than a line's width.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from antiphon.base.errors import UserError
from antiphon.planner.candidates import IntArray
from antiphon.planner.room import batch_limits, instances_that_fit
from antiphon.planner.search import table_of
from antiphon.planner.setting import Setting
from antiphon.planner.space import Space
from antiphon.planner.table import CandidateTable
from antiphon.specs.cluster import ClusterSpec
from antiphon.specs.plan import LAYOUTS, Layout
from antiphon.specs.workload import LengthSpec, WorkloadSpec

Over = Literal["slo", "context", "network"]
FACTORS: dict[Over, tuple[float, ...]] = {
    "slo": (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0),
    "context": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
    "network": (0.125, 0.25, 0.5, 1.0, 2.0, 4.0),
}
KEPT_OF_EACH = 300


@dataclass(frozen=True, kw_only=True)
class SensitivityPoint:
    """`value`: seconds of the promise, tokens of the median prompt, or the factor on all links between nodes. `best`:
    the objective's score by layout that was searched; None where it cannot run."""

    value: float
    best: dict[Layout, float | None]


def sensitivity(
    setting: Setting, table: CandidateTable, *, over: Over, values: tuple[float, ...] | None = None
) -> list[SensitivityPoint]:
    """The best score of each layout of `table` at each value. `values` None: `FACTORS` times the setting's own
    value."""
    if over not in FACTORS:
        raise UserError(f"over is {over!r}: use one of {', '.join(FACTORS)}")
    kept = _shortlist(setting, table)
    layouts = [layout for code, layout in enumerate(LAYOUTS) if table.num_considered[code]]
    base = base_value(setting, table, over)
    points = []
    for value in [base * factor for factor in FACTORS[over]] if values is None else values:
        changed = _changed(setting, over, value)
        scored = _evaluated(changed, table, kept)
        points.append(
            SensitivityPoint(value=value, best={layout: _best(changed, scored, layout) for layout in layouts})
        )
    return points


def base_value(setting: Setting, table: CandidateTable, over: Over) -> float:
    """The setting's own value; where no promise is made, the latency of the best candidate."""
    if over == "network":
        return 1.0
    if over == "context":
        return setting.workload.input_tokens.median
    slo = setting.workload.slo
    promised = slo.tpot_s if setting.decodes else slo.ttft_s
    if promised is not None:
        return promised
    best = table.best(setting.objective)
    if best is None:
        raise UserError("there is no promise and no feasible candidate: give the values")
    return float((table.tpot_s if setting.decodes else table.ttft_s)[best])


def _best(setting: Setting, table: CandidateTable, layout: Layout) -> float | None:
    index = table.best(setting.objective, np.asarray(table.candidates.layout == LAYOUTS.index(layout)))
    return None if index is None else float(table.score(setting.objective)[index])


def _shortlist(setting: Setting, table: CandidateTable) -> IntArray:
    scores = np.nan_to_num(table.score(setting.objective))
    found: list[IntArray] = [np.zeros(0, dtype=np.int64)]
    for code, layout in enumerate(LAYOUTS):
        index = np.flatnonzero(table.candidates.layout == code)
        for key in (-scores, table.outcome.step_s, -scores / table.outcome.step_s, -scores * table.feasible):
            found.append(index[np.argsort(key[index], kind="stable")[:KEPT_OF_EACH]])
        found.append(table.pareto(setting.objective, layout))
    return np.unique(np.concatenate(found))


def _evaluated(setting: Setting, table: CandidateTable, kept: IntArray) -> CandidateTable:
    candidates = table.candidates.take(kept)
    limits = batch_limits(setting, candidates)
    fit = limits > 0
    candidates, limits = candidates.take(fit), limits[fit]
    space = Space(
        candidates=candidates,
        limits=limits,
        instances=instances_that_fit(setting.cluster, candidates),
        num_considered=table.num_considered,
        num_without_devices=table.num_without_devices,
        num_without_memory=table.num_without_memory,
        least_missing_bytes=table.least_missing_bytes,
    )
    return table_of(setting, space)


def _changed(setting: Setting, over: Over, value: float) -> Setting:
    if not value > 0:
        raise UserError(f"sensitivity over {over}: the value is {value}: it must be above 0")
    if over == "network":
        return replace(setting, cluster=with_network(setting.cluster, value))
    workload = setting.workload
    if over == "context":
        return replace(setting, workload=with_prompts(workload, value))
    key = "tpot_s" if setting.decodes else "ttft_s"
    changes: dict[str, float] = {key: value}
    return replace(setting, workload=replace(workload, slo=replace(workload.slo, **changes)))


def with_prompts(workload: WorkloadSpec, median: float) -> WorkloadSpec:
    """The same requests with prompts of another median; a trace's are stretched, rounded up to whole tokens."""
    prompts = workload.input_tokens
    factor = median / prompts.median
    trace = tuple(max(1, round(length * factor)) for length in prompts.trace)
    stretched = LengthSpec(median=max(median, 1.0), sigma=prompts.sigma, trace=trace)
    return replace(workload, input_tokens=stretched)


def with_network(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """The same cluster with NICs `factor` times as fast."""
    groups = tuple(
        replace(group, node_scale_out_bytes_per_s=group.node_scale_out_bytes_per_s * factor) for group in cluster.groups
    )
    return replace(cluster, groups=groups)
