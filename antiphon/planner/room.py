"""What there is room for: instances on the nodes, and sequences (tokens of a pass) in memory, before any latency.

Workers stay inside a scale-up domain, devices are never counted twice:

1. A group of nodes is a few sizes of domains, each a number of times (a node of 7 devices with domains of 4: 4 and 3).
2. Workers of the wider kind are packed first, as many to a domain as fit; narrower ones into what is left.
3. More instances need more room, so the largest number that fits is found by bisection, for all candidates at once.

Rejected: dividing device counts. Three workers of 3 devices do not fit on a node of 8 and one device more.

Memory, by the serving engine's own admission:

1. Weights by role; what they and the reserve leave becomes KV blocks (`cost.memory`, `specs.counts`).
2. Sequences are admitted as the engine admits them, at the length they grow to; a micro-batch gets an m-th of them.
3. The activations of one micro-batch must fit into the reserve, on the attention side, on the experts', or,
   colocated, both.
4. The workload's own limit on requests in flight, rounded up where all of them must have a place.

Rejected: filling all memory with KV. No engine does, and throughput predicted that way was several times too high.
"""

import numpy as np

from antiphon.cost.memory import (
    attention_activation_bytes,
    attention_weight_bytes,
    expert_activation_bytes,
    expert_weight_bytes,
    kv_blocks,
    max_sequences,
    tokens_of_state,
)
from antiphon.cost.roofline import FloatArray
from antiphon.planner.candidates import BoolArray, Candidates, IntArray, largest_that, real
from antiphon.planner.setting import STEP_TOKENS, Setting
from antiphon.specs.cluster import ClusterSpec, NodeGroup
from antiphon.specs.plan import MAX_DEGREE, MAX_INSTANCES

Domains = tuple[tuple[int, int], ...]
"""(devices, how many such domains), widest first."""
BLOCK_SIZE = 16
"""Tokens of a KV block, as the engine's default."""
FED = 1.25
"""Room for prompts in a step over what they take on average: without it they queue ever longer."""


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


def usable_instances(setting: Setting, candidates: Candidates) -> IntArray:
    """`instances_that_fit`, as far as the search's limits allow: 0 where there is no room for as many as are fixed."""
    fit, wanted = instances_that_fit(setting.cluster, candidates), setting.limits.num_instances
    fit = np.minimum(fit, MAX_INSTANCES if setting.limits.servable else MAX_DEGREE)  # as many as a plan may have
    return fit if wanted is None else np.where(fit >= wanted, wanted, 0)


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
    most = devices // (chosen.attention_devices + chosen.expert_devices) + 1  # this many do not fit

    def fits(count: IntArray) -> BoolArray:
        return both_fit(domains, wide_tp, count * num_wide, narrow_tp, count * num_narrow)

    return largest_that(fits, np.zeros(len(chosen), dtype=np.int64), most)


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


def weight_bytes(setting: Setting, candidates: Candidates) -> tuple[FloatArray, FloatArray]:
    """Weights of (attention, experts) on the fullest device of each role. Colocated devices hold both."""
    model, precision, pp = setting.model, setting.precision, real(candidates.pp)
    attention = attention_weight_bytes(model, real(candidates.attention_tp), precision, pp=pp)
    experts = expert_weight_bytes(model, real(candidates.slots), real(candidates.expert_tp), precision, pp=pp)
    return np.asarray(attention), np.asarray(experts)


def cache_bytes(setting: Setting, candidates: Candidates) -> FloatArray:
    """What weights and the reserve leave for keys and values on an attention worker's device; below 0 the weights do
    not fit."""
    held, _ = _held_bytes(setting, candidates)
    return _usable(setting, candidates.attention_kind) - held


def missing_bytes(setting: Setting, candidates: Candidates) -> FloatArray:
    """What a device lacks to hold its weights beside the reserve; 0 where they fit."""
    held, apart = _held_bytes(setting, candidates)
    lacking = held - _usable(setting, candidates.attention_kind)
    lacking_experts = np.where(candidates.is_disaggregated, apart - _usable(setting, candidates.expert_kind), 0.0)
    return np.asarray(np.maximum(np.maximum(lacking, lacking_experts), 0.0))


def _held_bytes(setting: Setting, candidates: Candidates) -> tuple[FloatArray, FloatArray]:
    """Weights on the fullest device of an attention worker, and of an expert worker where it has devices of its own."""
    attention, experts = weight_bytes(setting, candidates)
    return attention + np.where(candidates.is_disaggregated, 0.0, experts), experts


def _usable(setting: Setting, kinds: IntArray) -> FloatArray:
    each = np.asarray([group.device.memory_bytes for group in setting.groups], dtype=np.float64)
    return np.asarray(each[kinds] - _reserve(setting, kinds))


def _reserve(setting: Setting, kinds: IntArray) -> FloatArray:
    """Memory that is kept from weights and cache: for activations, workspace, runtime."""
    share = setting.cluster.efficiency.memory_reserve
    return np.asarray([group.device.memory_bytes * share for group in setting.groups], dtype=np.float64)[kinds]


def batch_limits(setting: Setting, candidates: Candidates) -> IntArray:
    """The largest batch of one attention worker and micro-batch; 0 where the weights leave no room for one sequence."""
    limit = np.minimum(_cache_limit(setting, candidates), activation_limit(setting, candidates))
    if setting.phase == "serve":
        limit = np.minimum(limit, fed_sequences(setting, candidates, STEP_TOKENS[-1]))
    if setting.workload.max_batch is not None and setting.decodes:
        num_workers = candidates.attention_dp * (setting.limits.num_instances or 1)
        share = setting.workload.max_batch / (candidates.micro_batches * num_workers)
        limit = np.minimum(limit, np.where(setting.holds_all & (share >= 1), np.ceil(share), np.floor(share)))
    elif setting.workload.max_batch is not None:  # a pass has no more prompts than there are requests
        prompts = np.maximum(setting.workload.max_batch / (candidates.micro_batches * candidates.attention_dp), 1.0)
        tokens = setting.new_tokens(setting.lengths.tail_prompt)
        if setting.holds_all:  # as many whole prompts as `least_latency` puts into a pass
            prompts = np.ceil(prompts)
            tokens = max(tokens, setting.new_tokens(setting.lengths.prompt) * setting.prompt_row_cost)
        limit = np.minimum(limit, np.ceil(prompts * tokens))
    limit = np.where(missing_bytes(setting, candidates) > 0, 0, limit)
    return np.asarray(np.floor(limit), dtype=np.int64)


def fed_sequences(setting: Setting, candidates: Candidates, step_tokens: int) -> FloatArray:
    """Sequences of one worker and micro-batch beside which a step of `step_tokens` rows computes as many prompts as
    they end: more would wait for their prompts, not decode."""
    rows = np.minimum(step_tokens / candidates.micro_batches, activation_limit(setting, candidates, in_rows=True))
    return np.asarray(
        rows / (setting.workload.rows_per_step + FED * prompt_tokens_each(setting) * setting.prompt_row_cost)
    )


def prompt_tokens_each(setting: Setting) -> float:
    """New tokens of prompts that come into each step for every sequence that decodes, in steady state."""
    return setting.new_tokens(setting.lengths.prompt) / setting.lengths.output * setting.workload.tokens_per_step


def sequences_that_fit(setting: Setting, candidates: Candidates, tokens_each: float) -> FloatArray:
    """Sequences of that many tokens one attention worker holds, over all micro-batches."""
    tp, pp = real(candidates.attention_tp), real(candidates.pp)
    budget = cache_bytes(setting, candidates)
    blocks = kv_blocks(budget, setting.model, tp, setting.precision, block_size=BLOCK_SIZE, pp=pp)
    held_tokens = tokens_each + tokens_of_state(setting.model, tp, setting.precision)
    return np.asarray(max_sequences(blocks, held_tokens, block_size=BLOCK_SIZE))


def _cache_limit(setting: Setting, candidates: Candidates) -> FloatArray:
    lengths, m = setting.lengths, candidates.micro_batches
    if setting.decodes:
        return sequences_that_fit(setting, candidates, lengths.held_tokens) // m
    fitting = sequences_that_fit(setting, candidates, lengths.tail_prompt)
    return np.where(fitting >= m, np.floor(fitting * setting.new_tokens(lengths.tail_prompt) / m), 0.0)


def activation_limit(setting: Setting, candidates: Candidates, *, in_rows: bool = False) -> FloatArray:
    """Sequences (prefill, `in_rows`: rows) of one micro-batch whose activations fit into the reserve. Both sides count
    a row's share of pairs."""
    model, precision = setting.model, setting.precision
    of_attention = attention_activation_bytes(model, 1.0, real(candidates.attention_tp), precision)
    share = setting.busiest_each(candidates.expert_ep, candidates.slots)
    per_sequence = setting.workload.rows_per_step if setting.decodes and not in_rows else 1
    pairs_per_row = candidates.attention_dp * model.router.top_k * share
    of_experts = expert_activation_bytes(model, pairs_per_row, real(candidates.expert_tp), precision)
    apart = candidates.is_disaggregated
    reserve = _reserve(setting, candidates.attention_kind)
    together = reserve / (of_attention + of_experts)
    beside = np.minimum(reserve / of_attention, _reserve(setting, candidates.expert_kind) / of_experts)
    return np.asarray(np.where(apart, beside, together) / per_sequence)
