"""How many instances fit on the nodes: workers stay inside a scale-up domain, devices are never counted twice.

1. A group of nodes is a few sizes of domains, each a number of times (a node of 7 devices with domains of 4: 4 and 3).
2. Workers of the wider kind are packed first, as many to a domain as fit; narrower ones into what is left.
3. More instances need more room, so the largest number that fits is found by bisection, for all candidates at once.

Rejected: dividing device counts. Three workers of 3 devices do not fit on a node of 8 and one device more.
"""

import numpy as np

from antiphon.planner.candidates import BoolArray, Candidates, IntArray
from antiphon.specs.cluster import ClusterSpec, NodeGroup

Domains = tuple[tuple[int, int], ...]
"""(devices, how many such domains), widest first."""


def domains_of(group: NodeGroup) -> Domains:
    """The scale-up domains of a group of nodes."""
    if group.scale_up_domain <= group.devices_per_node:
        full, rest = divmod(group.devices_per_node, group.scale_up_domain)
        sizes = [(group.scale_up_domain, full * group.num_nodes), (rest, group.num_nodes)]
    else:
        full, rest = divmod(group.num_devices, group.scale_up_domain)
        sizes = [(group.scale_up_domain, full), (rest, 1)]
    return tuple((size, count) for size, count in sizes if size > 0 and count > 0)


def widest_domain(group: NodeGroup) -> int:
    return domains_of(group)[0][0]


def num_workers_that_fit(domains: Domains, tp: IntArray) -> IntArray:
    """Workers of `tp` devices."""
    total = np.zeros(np.shape(tp), dtype=np.int64)
    for size, count in domains:
        total += count * (size // tp)
    return total


def both_fit(domains: Domains, wide_tp: IntArray, num_wide: IntArray, tp: IntArray, num: IntArray) -> BoolArray:
    """Whether `num_wide` workers of `wide_tp` devices and `num` of `tp` <= `wide_tp` fit side by side."""
    left_wide = np.array(num_wide)
    room = np.zeros(np.shape(left_wide), dtype=np.int64)
    for size, count in domains:
        each = size // wide_tp
        placed = np.minimum(left_wide, each * count)
        full = np.where(each > 0, placed // np.maximum(each, 1), 0)
        rest = placed - full * each
        room += full * ((size - each * wide_tp) // tp)
        room += np.where(rest > 0, (size - rest * wide_tp) // tp, 0)
        room += (count - full - (rest > 0)) * (size // tp)
        left_wide -= placed
    return np.asarray((left_wide == 0) & (room >= num))


def instances_that_fit(cluster: ClusterSpec, candidates: Candidates) -> IntArray:
    """The largest number of instances of each candidate that the cluster has room for; 0: not even one."""
    result = np.zeros(len(candidates), dtype=np.int64)
    all_domains = [domains_of(group) for group in cluster.groups]
    apart = candidates.is_disaggregated
    for kind, domains in enumerate(all_domains):
        for expert_kind, expert_domains in enumerate(all_domains):
            where = apart & (candidates.attention_kind == kind) & (candidates.expert_kind == expert_kind)
            chosen = candidates.take(where)
            if len(chosen) and kind == expert_kind:
                result[where] = _same_kind(domains, chosen)
            elif len(chosen):
                attention = num_workers_that_fit(domains, chosen.attention_tp) // chosen.attention_dp
                experts = num_workers_that_fit(expert_domains, chosen.expert_tp) // chosen.expert_ep
                result[where] = np.minimum(attention, experts)
        where = ~apart & (candidates.attention_kind == kind)
        result[where] = _colocated(domains, candidates.take(where))
    return result


def _same_kind(domains: Domains, chosen: Candidates) -> IntArray:
    attention_wide = chosen.attention_tp >= chosen.expert_tp
    wide_tp = np.where(attention_wide, chosen.attention_tp, chosen.expert_tp)
    narrow_tp = np.where(attention_wide, chosen.expert_tp, chosen.attention_tp)
    num_wide = np.where(attention_wide, chosen.attention_dp, chosen.expert_ep)
    num_narrow = np.where(attention_wide, chosen.expert_ep, chosen.attention_dp)
    devices = sum(size * count for size, count in domains)
    low = np.zeros(len(chosen), dtype=np.int64)
    high = devices // (chosen.attention_devices + chosen.expert_devices) + 1  # this many do not fit
    while np.any(high - low > 1):
        middle = (low + high) // 2
        fits = both_fit(domains, wide_tp, middle * num_wide, narrow_tp, middle * num_narrow) & (middle > low)
        low = np.where(fits, middle, low)
        high = np.where(fits, high, np.maximum(middle, low + 1))
    return low


def _colocated(domains: Domains, chosen: Candidates) -> IntArray:
    """Stages in pieces of `piece_devices`, the pieces of one stage in different domains."""
    piece = np.maximum(chosen.piece_devices, 1)
    num_pieces = chosen.attention_tp * chosen.attention_dp // piece
    each = num_pieces * chosen.pp
    fit = num_workers_that_fit(domains, piece) // each
    while True:
        # a domain takes at most one piece of each stage, hence `fit * pp` pieces
        room = sum(count * np.minimum(size // piece, fit * chosen.pp) for size, count in domains)
        fewer = np.minimum(fit, room // each)
        if np.array_equal(fewer, fit):
            return fit
        fit = fewer
