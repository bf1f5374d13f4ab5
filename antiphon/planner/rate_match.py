"""Prefill and decode pools on one cluster: how many instances of each, so that one keeps the other busy.

1. The best candidates of either phase, by layout and pairing of devices, are paired, and beside them the best of each
   size: a smaller instance that is a little worse may leave the other pool the devices it needs.
2. With a rate, each has the instances that the rate needs; without, decode instances are counted up and prefill
   instances follow from the two rates of requests per second, rounded both ways.
3. A pair must fit on the devices of each kind, and, checked for the pair that is taken, into the scale-up domains.
4. The objective counts both pools: requests per second by device, price or watt. Without a rate, of the pairs within
   `NEARLY_BEST` of the best the one that takes the largest rate.

Rejected: planning one phase, then the other on what is left. The phase that is planned first takes the devices that
both want.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from antiphon.base.units import number
from antiphon.cost.roofline import FloatArray
from antiphon.planner.candidate_table import CandidateTable, front
from antiphon.planner.candidates import Candidates, IntArray
from antiphon.planner.explain import NoPlan
from antiphon.planner.predict import resource_weights
from antiphon.planner.room import Domains, domains_of
from antiphon.planner.setting import Setting
from antiphon.specs.cluster import ClusterSpec
from antiphon.specs.plan import LAYOUTS, Layout, PhaseName

BEST_OF_EACH = 12
NEARLY_BEST = 0.98
FULL = 0.995  # of what a pool can take
_MOST_TRIED = 200


@dataclass(frozen=True, kw_only=True)
class Match:
    """By phase: place in its table, instances, what to say about it, and the best pair with each layout in that phase,
    its score as a share of this one's (layouts without a pair that fits are left out). `score`: requests/s by unit of
    the objective's resource."""

    index: dict[PhaseName, int]
    num_instances: dict[PhaseName, int]
    notes: dict[PhaseName, tuple[str, ...]]
    share_of_layout: dict[PhaseName, dict[Layout, float]]
    score: float


@dataclass(frozen=True)
class _Side:
    """A phase's shortlist: places in its table, instances at the given rate, requests/s of one instance, devices of one
    instance by kind [candidates, kinds]."""

    index: IntArray
    instances: IntArray
    requests_per_s: FloatArray
    devices: IntArray


def rate_match(settings: dict[PhaseName, Setting], tables: dict[PhaseName, CandidateTable]) -> Match:
    """The best pair of pools; `NoPlan` if no pair fits."""
    prefill, decode = (_shortlist(settings[name], tables[name]) for name in ("prefill", "decode"))
    setting = settings["decode"]
    available = np.array([group.num_devices for group in setting.groups])
    weights = np.array(resource_weights(setting))
    pairs = _Pairs.of(prefill, decode, setting.workload.requests_per_s, available, weights)
    fitting = np.flatnonzero(pairs.fits)
    scores = pairs.requests_per_s / pairs.weight
    order = fitting[np.argsort(-scores[fitting], kind="stable")]
    if setting.workload.requests_per_s is None and order.size:
        near = order[scores[order] >= NEARLY_BEST * scores[order[0]]]
        near = near[np.argsort(-pairs.requests_per_s[near], kind="stable")]
        order = np.concatenate([near, order[near.size :]])
    for place in order[:_MOST_TRIED]:
        pools = [
            (tables["prefill"].candidates, int(prefill.index[pairs.first[place]]), int(pairs.num_first[place])),
            (tables["decode"].candidates, int(decode.index[pairs.second[place]]), int(pairs.num_second[place])),
        ]
        if pools_fit(setting.cluster, pools):
            best: dict[PhaseName, dict[Layout, float]] = {
                "prefill": _by_layout(tables["prefill"], prefill.index[pairs.first[fitting]], scores[fitting]),
                "decode": _by_layout(tables["decode"], decode.index[pairs.second[fitting]], scores[fitting]),
            }
            return _match(pools, pairs, int(place), prefill, decode, best)
    raise _too_small(setting, prefill, decode)


@dataclass(frozen=True)
class _Pairs:
    """Columns over pairs of shortlisted candidates and numbers of instances."""

    first: IntArray
    second: IntArray
    num_first: IntArray
    num_second: IntArray
    requests_per_s: FloatArray
    weight: FloatArray
    fits: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

    @staticmethod
    def of(prefill: _Side, decode: _Side, rate: float | None, available: IntArray, weights: FloatArray) -> "_Pairs":
        if rate is None:
            first, second, num_first, num_second = _counted(prefill, decode, available)
        else:
            grid = np.meshgrid(np.arange(prefill.index.size), np.arange(decode.index.size), indexing="ij")
            first, second = (axis.reshape(-1) for axis in grid)
            num_first, num_second = prefill.instances[first], decode.instances[second]
        used = prefill.devices[first] * num_first[:, None] + decode.devices[second] * num_second[:, None]
        taken = np.minimum(num_first * prefill.requests_per_s[first], num_second * decode.requests_per_s[second])
        return _Pairs(
            first=first,
            second=second,
            num_first=num_first,
            num_second=num_second,
            requests_per_s=taken if rate is None else np.full(first.size, rate),
            weight=np.asarray(used @ weights),
            fits=np.asarray((used <= available).all(axis=1) & (num_first > 0) & (num_second > 0)),
        )


def _counted(prefill: _Side, decode: _Side, available: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Without a rate: decode instances from 1 up, as many as there are devices for, and prefill instances that match
    them, rounded down and up, or as many as there is room for."""
    most = int(max(available.sum() // max(int(decode.devices.sum(axis=1).min()), 1), 1))
    counts = np.unique(np.geomspace(1, most, max(48, 8 * most.bit_length())).astype(np.int64))
    of_decode, of_count = np.nonzero((decode.devices[:, None, :] * counts[:, None] <= available).all(axis=2))
    first, place, up = (
        axis.reshape(-1)
        for axis in np.meshgrid(
            np.arange(prefill.index.size), np.arange(of_decode.size), np.array([0, 1]), indexing="ij"
        )
    )
    second, num_second = of_decode[place], counts[of_count[place]]
    exact = num_second * decode.requests_per_s[second] / prefill.requests_per_s[first]
    each = prefill.devices[first]
    left = np.maximum(available - decode.devices[second] * num_second[:, None], 0)
    room = np.where(each > 0, left // np.maximum(each, 1), np.iinfo(np.int64).max).min(axis=1)
    return first, second, np.minimum(np.floor(np.minimum(exact, 2.0**40)).astype(np.int64) + up, room), num_second


def _shortlist(setting: Setting, table: CandidateTable) -> _Side:
    scores = np.where(table.feasible, table.score(setting.objective), -np.inf)
    chosen = table.candidates
    kinds = chosen.layout * 10_000 + chosen.attention_kind * 100 + chosen.expert_kind
    found: list[IntArray] = []
    for code in np.unique(kinds[table.feasible]):
        index = np.flatnonzero((kinds == code) & table.feasible)
        found.append(index[np.argsort(-scores[index], kind="stable")[:BEST_OF_EACH]])
        sizes = (chosen.attention_devices + chosen.expert_devices)[index]
        found.append(index[best_by_size(sizes, scores[index], BEST_OF_EACH)])
    index = np.unique(np.concatenate(found))
    one = chosen.take(index)
    devices = np.zeros((index.size, len(setting.groups)), dtype=np.int64)
    rows = np.arange(index.size)
    np.add.at(devices, (rows, one.attention_kind), one.attention_devices)
    np.add.at(devices, (rows, one.expert_kind), one.expert_devices)
    tokens = setting.tokens_of_request
    instances = table.outcome.num_instances[index]
    each = table.outcome.tokens_per_s[index] / instances
    if setting.workload.requests_per_s is not None:
        each = table.outcome.capacity[index]
    return _Side(index, instances, each / tokens, devices)


def best_by_size(sizes: IntArray, scores: FloatArray, most: int) -> IntArray:
    """Places of the candidates that no smaller or equally small one beats, by size; at most `most`, evenly chosen, the
    smallest and the best among them."""
    best = front(sizes, scores)
    return np.asarray(best[np.unique(np.linspace(0, best.size - 1, min(most, best.size)).astype(np.int64))])


def pools_fit(cluster: ClusterSpec, pools: list[tuple[Candidates, int, int]]) -> bool:
    """Whether all workers of (candidates, place, instances) fit into scale-up domains: widest first, each into the
    fullest domain that still has room."""
    workers: list[list[tuple[int, int]]] = [[] for _ in cluster.groups]
    for candidates, place, instances in pools:
        one = candidates.take(np.array([place]))
        kind, expert_kind = int(one.attention_kind[0]), int(one.expert_kind[0])
        if one.layout_of(0) == "disaggregated":
            workers[kind].append((int(one.attention_tp[0]), instances * int(one.attention_dp[0])))
            workers[expert_kind].append((int(one.expert_tp[0]), instances * int(one.expert_ep[0])))
        else:
            piece = int(one.piece_devices[0])
            workers[kind].append((piece, instances * int(one.attention_devices[0]) // piece))
    return all(_packed(domains_of(group), asked) for group, asked in zip(cluster.groups, workers, strict=True))


def _packed(domains: Domains, asked: list[tuple[int, int]]) -> bool:
    """`asked`: (devices, how many such workers). Domains with the same room are a count, so that a million of them are
    packed as quickly as ten."""
    free = Counter(dict(domains))
    for width, count in sorted(asked, reverse=True):
        left = count
        for room in sorted(size for size in free if size >= width):  # the fullest that still have room come first
            each = room // width
            full, rest = divmod(min(left, free[room] * each), each)
            left -= full * each + rest
            free[room] -= full + (rest > 0)
            free[room - each * width] += full
            if rest:
                free[room - rest * width] += 1
            if not left:
                break
        if left:
            return False
        free = Counter({size: number for size, number in free.items() if number and size})
    return True


def _by_layout(table: CandidateTable, index: IntArray, scores: FloatArray) -> dict[Layout, float]:
    """The best score of the pairs with each layout; `index`: of each pair the place in `table`."""
    layouts = table.candidates.layout[index]
    return {LAYOUTS[int(code)]: float(scores[layouts == code].max()) for code in np.unique(layouts)}


def _match(
    pools: list[tuple[Candidates, int, int]],
    pairs: _Pairs,
    place: int,
    prefill: _Side,
    decode: _Side,
    best: dict[PhaseName, dict[Layout, float]],
) -> Match:
    rates = (
        float(pairs.num_first[place] * prefill.requests_per_s[pairs.first[place]]),
        float(pairs.num_second[place] * decode.requests_per_s[pairs.second[place]]),
    )
    taken = float(pairs.requests_per_s[place])
    both = f"the two pools together take {number(taken)} requests/s"
    score = taken / float(pairs.weight[place])
    parts = [min(taken / rate, 1.0) for rate in rates]
    notes = [
        () if part >= FULL else (f"this pool is used to {part:.0%}: the other one sets the rate",) for part in parts
    ]
    return Match(
        index={"prefill": pools[0][1], "decode": pools[1][1]},
        num_instances={"prefill": pools[0][2], "decode": pools[1][2]},
        notes={"prefill": (both, *notes[0]), "decode": notes[1]},
        share_of_layout={
            name: {layout: value / score for layout, value in by_layout.items()} for name, by_layout in best.items()
        },
        score=score,
    )


def _too_small(setting: Setting, prefill: _Side, decode: _Side) -> NoPlan:
    smallest = int(prefill.devices.sum(axis=1).min() + decode.devices.sum(axis=1).min())
    counts = (prefill.instances, decode.instances)
    sides = (prefill, decode)
    if setting.workload.requests_per_s is not None:
        smallest = sum(int((side.devices.sum(axis=1) * count).min()) for side, count in zip(sides, counts, strict=True))
    return NoPlan(
        f"prefill and decode each fit on {setting.cluster.name}, but not side by side: they need about {smallest} "
        f"devices of {setting.cluster.num_devices}, in whole workers: add nodes, lower the rate, or plan one phase",
        {"num_devices": max(smallest, setting.cluster.num_devices + 1)},
    )
