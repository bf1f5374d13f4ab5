"""The smallest cluster for a rate, and what one more node of each kind would bring.

Smallest: all candidates are evaluated once, on a cluster large enough; how many instances a rate takes does not depend
on the cluster's size. The most promising few are packed, exactly, into ever fewer nodes of each kind; the cheapest set
of whole nodes by the objective's weights wins, and is planned again as the cluster that it is.

One more: the most tokens per second of any candidate, with and without the node. It may be nothing, where no further
instance fits; then the next node's worth is in the one after it.

Rejected: searching over numbers of nodes. It repeats the same search for every number and kind.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from antiphon.base.errors import UserError
from antiphon.planner.candidates import Candidates
from antiphon.planner.no_plan import NoPlan, no_plan
from antiphon.planner.predict import resource_weights
from antiphon.planner.rate_match import pools_fit
from antiphon.planner.search import POOLS, SERVERS, PlanResult, evaluate_phase, evaluate_phases, make_plan, settings_of
from antiphon.planner.setting import Setting
from antiphon.planner.table import CandidateTable
from antiphon.specs.cluster import ClusterSpec
from antiphon.specs.model import ModelSpec
from antiphon.specs.plan import LAYOUTS, Layout, PhaseName
from antiphon.specs.workload import WorkloadSpec

GROWTH = (1, 2, 4, 8)
"""Multiples of the given cluster that are tried, if it is itself too small."""
SHORTLIST = 40

Pool = tuple[Candidates, int, int]


@dataclass(frozen=True, kw_only=True)
class SmallestCluster:
    """`num_nodes` by device; kinds without any are left out. `result`: the plan on exactly those nodes."""

    num_nodes: dict[str, int]
    cluster: ClusterSpec
    result: PlanResult


@dataclass(frozen=True, kw_only=True)
class OneMoreNode:
    """The most tokens/s of the cluster with one more node of `device`. `gain`: over that without it, as a ratio."""

    device: str
    tokens_per_s: float
    gain: float


def smallest_cluster(
    model: ModelSpec,
    *,
    model_name: str,
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    phases: tuple[PhaseName, ...] = ("decode",),
    layouts: tuple[Layout, ...] = LAYOUTS,
    **options: Any,
) -> SmallestCluster:
    """The cheapest whole nodes of the cluster's kinds that keep the promises at the workload's rate.

    `options` as `make_plan`. The cluster's own numbers of nodes only say where to start looking."""
    if workload.requests_per_s is None:
        raise UserError(
            f"workload {workload.name} has no rate: give requests_per_s, the smallest cluster depends on it"
        )
    progress = options.pop("on_progress", None)
    for factor in GROWTH:
        larger = scaled(cluster, factor)
        settings = settings_of(model, larger, workload, phases=phases, **options)
        tables = evaluate_phases(settings, layouts, progress)
        nodes = _fewest_nodes(settings, tables)
        if nodes is not None:
            chosen = with_nodes(larger, nodes)
            result = make_plan(
                model,
                model_name=model_name,
                cluster=chosen,
                workload=workload,
                phases=phases,
                layouts=layouts,
                on_progress=progress,
                **options,
            )
            names = {group.device.name: group.num_nodes for group in chosen.groups}
            return SmallestCluster(num_nodes=names, cluster=chosen, result=result)
    for name, table in tables.items():
        if not table.feasible.any():
            raise no_plan(settings[name], table)
    most = {group.device.name: group.num_nodes for group in larger.groups}
    raise NoPlan(f"{workload.requests_per_s:g} requests/s need more than {most} nodes: lower the rate", {})


def scaled(cluster: ClusterSpec, factor: int) -> ClusterSpec:
    return replace(
        cluster, groups=tuple(replace(group, num_nodes=group.num_nodes * factor) for group in cluster.groups)
    )


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
    chosen, weights = table.candidates, np.array(resource_weights(setting))
    instances = table.outcome.num_instances
    weight = instances * (
        weights[chosen.attention_kind] * chosen.attention_devices + weights[chosen.expert_kind] * chosen.expert_devices
    )
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
            groups = tuple(
                replace(group, num_nodes=middle if place == kind else group.num_nodes)
                for place, group in enumerate(cluster.groups)
            )
            low, high = (low, middle) if pools_fit(replace(cluster, groups=groups), pools) else (middle, high)
        counts[kind] = high
    return tuple(counts)


def most_tokens_per_s(setting: Setting, layouts: tuple[Layout, ...] = LAYOUTS) -> float:
    """The most tokens/s that any feasible candidate reaches on the whole cluster, whatever the rate; 0: none can
    run."""
    offline = replace(setting, workload=replace(setting.workload, requests_per_s=None))
    table = evaluate_phase(offline, layouts)
    return float(np.max(table.tokens_per_s, where=table.feasible, initial=0.0))


def one_more_node(setting: Setting, layouts: tuple[Layout, ...] = LAYOUTS) -> list[OneMoreNode]:
    """What one more node of each kind would bring, for the setting's phase."""
    now = most_tokens_per_s(setting, layouts)
    found = []
    for kind, group in enumerate(setting.groups):
        groups = tuple(
            replace(other, num_nodes=other.num_nodes + (place == kind)) for place, other in enumerate(setting.groups)
        )
        then = most_tokens_per_s(replace(setting, cluster=replace(setting.cluster, groups=groups)), layouts)
        found.append(
            OneMoreNode(
                device=group.device.name,
                tokens_per_s=then,
                gain=then / now if now > 0 else float("inf"),
            )
        )
    return found
