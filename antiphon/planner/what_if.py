"""What would change if something else did: a promise, the prompts' length, the network's speed, the number of nodes,
the load.

The best of each layout when one thing changes (`sensitivity`):

1. The table of the plan is cut to candidates that matter: of each layout the best by score, the fastest ones, the
   front.
2. For each value these are evaluated anew in a changed setting: memory, batch, promise, rate.

Rejected: a whole search for each value. It takes a second each and moves the curves by less than a line's width.

The smallest cluster for a rate: all candidates are evaluated once, on a cluster large enough; how many instances a rate
takes does not depend on the cluster's size. The most promising few are packed, exactly, into ever fewer nodes of each
kind; the cheapest set of whole nodes by the objective's weights wins, and is planned again as the cluster that it is.

One more node: the most tokens per second of any candidate, with and without the node. It may be nothing, where no
further instance fits; then the next node's worth is in the one after it.

Weights in another format: the same, on the same nodes.

Rejected: searching over numbers of nodes. It repeats the same search for every number and kind.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np

from antiphon.base.errors import UserError
from antiphon.planner.candidate_table import CandidateTable
from antiphon.planner.candidates import Candidates, IntArray
from antiphon.planner.explain import NoPlan, in_other_formats, no_plan, total_weight_bytes
from antiphon.planner.predict import resource_weights
from antiphon.planner.rate_match import pools_fit
from antiphon.planner.search import (
    POOLS,
    SERVERS,
    PlanResult,
    Progress,
    again,
    evaluate_phase,
    evaluate_phases,
    make_plan,
)
from antiphon.planner.setting import Setting
from antiphon.specs.cluster import ClusterSpec
from antiphon.specs.plan import LAYOUTS, Layout, PhaseName
from antiphon.specs.workload import LengthSpec, WorkloadSpec

Over = Literal["slo", "context", "network"]
FACTORS: dict[Over, tuple[float, ...]] = {
    "slo": (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0),
    "context": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
    "network": (0.125, 0.25, 0.5, 1.0, 2.0, 4.0),
}
KEPT_OF_EACH = 300
GROWTH = (1, 2, 4, 8)
"""Multiples of the given cluster that are tried, if it is itself too small."""
SHORTLIST = 40

Pool = tuple[Candidates, int, int]


def sensitivity(
    setting: Setting, table: CandidateTable, *, over: Over, values: tuple[float, ...] | None = None
) -> dict[float, dict[Layout, float | None]]:
    """At each value the objective's best score by layout that was searched; None where it cannot run. A value is
    seconds of the promise, tokens of the median prompt, or the factor on all links between nodes. `values` None:
    `FACTORS` times the setting's own value."""
    if over not in FACTORS:
        raise UserError(f"over is {over!r}: use one of {', '.join(FACTORS)}")
    kept = _shortlist(setting, table)
    layouts = [layout for code, layout in enumerate(LAYOUTS) if table.space.num_considered[code]]
    base = base_value(setting, table, over)
    found = {}
    for value in [base * factor for factor in FACTORS[over]] if values is None else values:
        changed = _changed(setting, over, value)
        scored = again(changed, table, kept)
        found[value] = {layout: _best(changed, scored, layout) for layout in layouts}
    return found


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
    return float((table.outcome.tpot_s if setting.decodes else table.outcome.ttft_s)[best])


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


def smallest_cluster(
    asked: dict[PhaseName, Setting],
    *,
    model_name: str,
    layouts: tuple[Layout, ...] = LAYOUTS,
    on_progress: Progress | None = None,
) -> PlanResult:
    """The plan on the cheapest whole nodes of the cluster's kinds that keep the promises at the workload's rate.

    As `make_plan`. The cluster's own numbers of nodes only say where to start looking."""
    one = next(iter(asked.values()))
    workload, cluster = one.workload, one.cluster
    if workload.requests_per_s is None:
        raise UserError(
            f"workload {workload.name} has no rate: give requests_per_s, the smallest cluster depends on it"
        )
    for factor in GROWTH:
        larger = with_nodes(cluster, tuple(factor * group.num_nodes for group in cluster.groups))
        settings = _on(larger, asked)
        tables = evaluate_phases(settings, layouts, on_progress)
        nodes = _fewest_nodes(settings, tables)
        if nodes is not None:
            fewest = _on(with_nodes(larger, nodes), asked)
            return make_plan(fewest, model_name=model_name, layouts=layouts, on_progress=on_progress)
    for name, table in tables.items():
        if not table.feasible.any():
            raise no_plan(settings[name], table)
    most = {group.device.name: group.num_nodes for group in larger.groups}
    raise NoPlan(f"{workload.requests_per_s:g} requests/s need more than {most} nodes: lower the rate", {})


def _on(cluster: ClusterSpec, settings: dict[PhaseName, Setting]) -> dict[PhaseName, Setting]:
    return {name: replace(setting, cluster=cluster) for name, setting in settings.items()}


def with_nodes(cluster: ClusterSpec, nodes: tuple[int, ...]) -> ClusterSpec:
    """The cluster with this many nodes of each kind; kinds with none are left out."""
    groups = tuple(
        replace(group, num_nodes=count) for group, count in zip(cluster.groups, nodes, strict=True) if count > 0
    )
    return replace(cluster, groups=groups)


def _fewest_nodes(
    settings: dict[PhaseName, Setting], tables: dict[PhaseName, CandidateTable]
) -> tuple[int, ...] | None:
    setting = next(iter(settings.values()))
    weights = resource_weights(setting)
    node_weight = [weight * group.devices_per_node for weight, group in zip(weights, setting.groups, strict=True)]
    best: tuple[float, tuple[int, ...]] | None = None
    for pools in _sets_of_pools(settings, tables):
        nodes = nodes_for(setting.cluster, list(pools))
        if nodes is None:
            continue
        weight = sum(count * each for count, each in zip(nodes, node_weight, strict=True))
        if best is None or weight < best[0]:
            best = weight, nodes
    return None if best is None else best[1]


def _sets_of_pools(
    settings: dict[PhaseName, Setting], tables: dict[PhaseName, CandidateTable]
) -> Iterator[tuple[Pool, ...]]:
    """What may run side by side: one of every phase; servers that do both, or a pool for each."""
    kinds = (SERVERS, POOLS) if set(tables) == {*SERVERS, *POOLS} else (tuple(tables),)
    for names in kinds:
        if all(tables[name].feasible.any() for name in names):
            yield from itertools.product(*(_cheapest(settings[name], tables[name]) for name in names))


def _cheapest(setting: Setting, table: CandidateTable) -> list[Pool]:
    """The feasible candidates that take least of the resource, over all and by pairing of devices."""
    chosen, instances = table.candidates, table.outcome.num_instances
    weight = table.weighted(resource_weights(setting))
    pairing = chosen.attention_kind * len(setting.groups) + chosen.expert_kind
    found = []
    for code in np.unique(pairing[table.feasible]):
        index = np.flatnonzero((pairing == code) & table.feasible)
        found.append(
            index[np.lexsort((table.outcome.step_s[index], weight[index]))[: SHORTLIST // len(setting.groups)]]
        )
    return [(chosen, int(index), int(instances[index])) for index in np.unique(np.concatenate(found))]


def nodes_for(cluster: ClusterSpec, pools: list[Pool]) -> tuple[int, ...] | None:
    """The fewest nodes of each kind that hold all pools; None if the cluster's do not."""
    if not pools_fit(cluster, pools):
        return None
    counts = [group.num_nodes for group in cluster.groups]
    used = {int(kinds[place]) for one, place, _ in pools for kinds in (one.attention_kind, one.expert_kind)}
    for kind in range(len(counts)):
        if kind not in used:
            counts[kind] = 0
            continue
        low, high = 0, counts[kind]
        while high - low > 1:
            middle = (low + high) // 2
            fewer = (middle if place == kind else group.num_nodes for place, group in enumerate(cluster.groups))
            low, high = (low, middle) if pools_fit(with_nodes(cluster, tuple(fewer)), pools) else (middle, high)
        counts[kind] = high
    return tuple(counts)


def most_tokens_per_s(setting: Setting, layouts: tuple[Layout, ...] = LAYOUTS) -> float:
    """The most tokens/s that any feasible candidate reaches on the whole cluster, whatever the rate; 0: none can
    run."""
    offline = replace(setting, workload=replace(setting.workload, requests_per_s=None))
    table = evaluate_phase(offline, layouts)
    return float(np.max(table.outcome.tokens_per_s, where=table.feasible, initial=0.0))


def one_more_node(setting: Setting, layouts: tuple[Layout, ...] = LAYOUTS) -> list[tuple[str, float, float]]:
    """What one more node of each kind of device would bring, for the setting's phase: the device, the most tokens/s of
    the cluster with it, and that over the most without it."""
    now = most_tokens_per_s(setting, layouts)
    found = []
    for kind, group in enumerate(setting.groups):
        nodes = tuple(other.num_nodes + (place == kind) for place, other in enumerate(setting.groups))
        then = most_tokens_per_s(replace(setting, cluster=with_nodes(setting.cluster, nodes)), layouts)
        found.append((group.device.name, then, then / now if now > 0 else float("inf")))
    return found


def other_formats(setting: Setting, layouts: tuple[Layout, ...] = LAYOUTS) -> list[tuple[str, float, float, float]]:
    """What weights in another format would bring, for the setting's phase: the format as `--precision` names it, the
    bytes of all weights, the most tokens/s of the cluster (0: they do not fit), and that over the most now. Nothing
    with a profile, whose times are of the formats that were measured."""
    if setting.profile is not None:
        return []
    now = most_tokens_per_s(setting, layouts)
    found = []
    for name, other in in_other_formats(setting):
        then = most_tokens_per_s(other, layouts)
        found.append((name, total_weight_bytes(other), then, then / now if now > 0 else float("inf")))
    return found
