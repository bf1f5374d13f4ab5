"""How many sequences (tokens of a pass) memory allows, by the serving engine's own admission: checked before any
latency.

1. Weights by role; what they and the reserve leave becomes KV blocks (`cost.memory`, `cost.kv_blocks`).
2. Sequences are admitted as the engine admits them, at the length they grow to; a micro-batch gets an m-th of them.
3. The activations of one micro-batch must fit into the reserve, on the attention side, on the experts', or,
   colocated, both.
4. The workload's own limit on requests in flight.

Rejected: filling all memory with KV. No engine does, and throughput predicted that way was several times too high.
"""

from dataclasses import dataclass

import numpy as np

from antiphon.cost.memory import (
    attention_activation_bytes,
    attention_weight_bytes,
    device_memory,
    expert_activation_bytes,
    expert_weight_bytes,
    kv_blocks,
    max_sequences,
    tokens_of_state,
)
from antiphon.cost.parts import FloatArray
from antiphon.planner.candidates import Candidates, IntArray, real
from antiphon.planner.setting import Setting

BLOCK_SIZE = 16
"""Tokens of a KV block, as the engine's default."""


@dataclass(frozen=True, kw_only=True)
class WeightBytes:
    """Of one device, by role. Colocated devices hold both."""

    attention: FloatArray
    experts: FloatArray


def weight_bytes(setting: Setting, candidates: Candidates) -> WeightBytes:
    """Weights on the fullest device of each role."""
    model, precision, pp = setting.model, setting.precision, real(candidates.pp)
    attention = attention_weight_bytes(model, real(candidates.attention_tp), precision, pp=pp)
    experts = expert_weight_bytes(model, real(candidates.slots), real(candidates.expert_tp), precision, pp=pp)
    return WeightBytes(attention=np.asarray(attention), experts=np.asarray(experts))


def missing_bytes(setting: Setting, candidates: Candidates) -> FloatArray:
    """What a device lacks to hold its weights beside the reserve; 0 where they fit."""
    weights, apart = weight_bytes(setting, candidates), candidates.is_disaggregated
    attention = np.where(apart, weights.attention, weights.attention + weights.experts)
    lacking = attention - _usable(setting, candidates.attention_kind)
    lacking_experts = np.where(apart, weights.experts - _usable(setting, candidates.expert_kind), 0.0)
    return np.asarray(np.maximum(np.maximum(lacking, lacking_experts), 0.0))


def _usable(setting: Setting, kinds: IntArray) -> FloatArray:
    efficiency = setting.cluster.efficiency
    each = [device_memory(group.device, efficiency, 0.0).kv_budget_bytes for group in setting.groups]
    return np.asarray(each, dtype=np.float64)[kinds]


def _reserve(setting: Setting, kinds: IntArray) -> FloatArray:
    efficiency = setting.cluster.efficiency
    each = [device_memory(group.device, efficiency, 0.0).reserve_bytes for group in setting.groups]
    return np.asarray(each, dtype=np.float64)[kinds]


def batch_limits(setting: Setting, candidates: Candidates) -> IntArray:
    """The largest batch of one attention worker and micro-batch; 0 where the weights leave no room for one sequence."""
    limit = np.minimum(_cache_limit(setting, candidates), activation_limit(setting, candidates))
    if setting.workload.max_batch is not None and setting.phase == "decode":
        limit = np.minimum(limit, setting.workload.max_batch // (candidates.micro_batches * candidates.attention_dp))
    limit = np.where(missing_bytes(setting, candidates) > 0, 0, limit)
    return np.asarray(np.floor(limit), dtype=np.int64)


def sequences_that_fit(setting: Setting, candidates: Candidates, tokens_each: float) -> FloatArray:
    """Sequences of that many tokens one attention worker holds, over all micro-batches."""
    weights = weight_bytes(setting, candidates)
    held = weights.attention + np.where(candidates.is_disaggregated, 0.0, weights.experts)
    budget = _usable(setting, candidates.attention_kind) - held
    tp, pp = real(candidates.attention_tp), real(candidates.pp)
    blocks = kv_blocks(budget, setting.model, tp, setting.precision, block_size=BLOCK_SIZE, pp=pp)
    held_tokens = tokens_each + tokens_of_state(setting.model, tp, setting.precision)
    return np.asarray(max_sequences(blocks, held_tokens, block_size=BLOCK_SIZE))


def _cache_limit(setting: Setting, candidates: Candidates) -> FloatArray:
    lengths, m = setting.lengths, candidates.micro_batches
    if setting.phase == "decode":
        return sequences_that_fit(setting, candidates, lengths.held_tokens) // m
    fitting = sequences_that_fit(setting, candidates, lengths.tail_prompt)
    return np.where(fitting >= m, np.floor(fitting * setting.new_tokens(lengths.tail_prompt) / m), 0.0)


def activation_limit(setting: Setting, candidates: Candidates) -> FloatArray:
    """Rows of one micro-batch whose activations fit into the reserve. Both sides count a row's share of pairs."""
    model, precision = setting.model, setting.precision
    of_attention = attention_activation_bytes(model, 1.0, real(candidates.attention_tp), precision)
    share = setting.busiest_each(candidates.expert_ep, candidates.slots)
    per_sequence = setting.workload.rows_per_step if setting.phase == "decode" else 1
    pairs_per_row = candidates.attention_dp * model.router.top_k * share
    of_experts = expert_activation_bytes(model, pairs_per_row, real(candidates.expert_tp), precision)
    apart = candidates.is_disaggregated
    reserve = _reserve(setting, candidates.attention_kind)
    together = reserve / (of_attention + of_experts)
    beside = np.minimum(reserve / of_attention, _reserve(setting, candidates.expert_kind) / of_experts)
    return np.asarray(np.where(apart, beside, together) / per_sequence)
