"""Where a token's share of the devices goes: the account by which one candidate is held against another.

Devices times step over batch is what a token takes of the objective's resource (devices, price, watts) for so many
seconds. It is split, exactly, into attention, experts, communication, fixed costs (of kernels and collectives), the
rest of the step (dense layers, head), waiting for the other side or another stage, and capacity that the rate leaves
spare.

Rejected: naming the largest part of the loser's step. A large part that the winner has as well explains nothing.
"""

import numpy as np

from antiphon.cost.parts import Parts
from antiphon.planner.candidates import Candidates
from antiphon.planner.predict import outcome_at, step_parts_of
from antiphon.planner.setting import Setting

ITEMS = ("attention", "experts", "communication", "fixed costs", "dense layers and head", "waiting", "spare capacity")


def resource_weights(setting: Setting) -> list[float]:
    """What one device of each kind counts for in the objective."""
    devices = [group.device for group in setting.groups]
    if setting.objective == "per-cost":
        return [float(device.price or 0.0) for device in devices]
    return [device.power_w if setting.objective == "per-power" else 1.0 for device in devices]


def account(setting: Setting, one: Candidates, num_instances: int) -> dict[str, float]:
    """Resource-seconds per token by item of `ITEMS`; they add up to 1 / score."""
    weights, parts = resource_weights(setting), step_parts_of(setting, one)
    outcome = outcome_at(setting, one, np.array([num_instances]))
    step_s = float(outcome.step_s[0])
    tokens = float(outcome.capacity[0]) * step_s
    attention_weight = weights[int(one.attention_kind[0])] * int(one.attention_devices[0])
    expert_weight = weights[int(one.expert_kind[0])] * int(one.expert_devices[0])
    apart = one.layout_of(0) == "disaggregated"
    m, num_moe = int(one.micro_batches[0]), setting.model.num_moe_layers
    num_dense = setting.model.num_layers - num_moe
    share = 1.0 if apart else 1.0 / int(one.pp[0])  # a stage has its share of the layers
    times = dict.fromkeys(ITEMS, 0.0)
    layers = m * num_moe * share
    _book(times, "attention", parts.attention.moe_layer.at(0), layers * attention_weight)
    _book(times, "experts", parts.experts.at(0), layers * (expert_weight if apart else attention_weight))
    if not apart:
        exchange = parts.dispatch.at(0)
        shown = float(np.asarray(parts.exposed_s).reshape(-1)[0]) / max(float(exchange.total_s), 1e-30)
        _book(times, "communication", exchange * shown, layers * attention_weight)
        times["communication"] += m * float(parts.hop.at(0).total_s) * attention_weight
    dense_s = num_dense * share * float(parts.attention.dense_layer.at(0).total_s)
    head_s = float(parts.attention.head.at(0).total_s)
    times["dense layers and head"] = m * (dense_s + share * head_s) * attention_weight
    whole = (attention_weight + expert_weight) * step_s
    times["waiting"] = max(whole - sum(times.values()), 0.0)
    per_token = {item: value / tokens for item, value in times.items()}
    served = float(outcome.tokens_per_s[0])
    used = int(outcome.num_instances[0])
    if served > 0:
        per_token["spare capacity"] = max(used * (attention_weight + expert_weight) / served - whole / tokens, 0.0)
    return per_token


def _book(times: dict[str, float], item: str, part: Parts, weight: float) -> None:
    """Arithmetic and memory under `item`, the network under communication, launches under fixed costs."""
    times[item] += weight * float(part.compute_s + part.memory_s)
    times["communication"] += weight * float(part.scale_up_s + part.scale_out_s)
    times["fixed costs"] += weight * float(part.fixed_s)
