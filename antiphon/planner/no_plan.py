"""When there is no plan: the nearest promise, rate or size that there would be one for.

1. No candidate fits: how much memory is missing in all, and how many more devices hold the weights.
2. Candidates fit, none keeps the promise: the fastest one's latency, rounded up, is what can be promised.
3. The promise is kept, the rate is too high: the rate that the cluster takes.

Rejected: "infeasible" alone. A user needs to know what to change.
"""

import math
from collections.abc import Mapping

import numpy as np

from antiphon.base.errors import ResourceError
from antiphon.base.units import milliseconds
from antiphon.cost.memory import attention_weight_bytes, expert_weight_bytes
from antiphon.planner.explain import nearest
from antiphon.planner.setting import Setting
from antiphon.planner.table import RATE, TPOT, CandidateTable


class NoPlan(ResourceError):
    """Nothing meets what was asked. `nearest`: what could be asked instead, such as ``{"tpot_s": 0.031}``."""

    def __init__(self, message: str, nearest: Mapping[str, float]) -> None:
        super().__init__(message)
        self.nearest = dict(nearest)


def rounded_up(value: float) -> float:
    """To three significant digits, never down, so that what is offered can be kept."""
    scale = 10.0 ** (2 - math.floor(math.log10(value)))
    return math.ceil(value * scale - 1e-12) / scale


def no_plan(setting: Setting, table: CandidateTable) -> NoPlan:
    """The error for a table without a feasible candidate."""
    if not len(table):
        return _no_room(setting, table)
    index = nearest(table, np.ones(len(table), dtype=bool))
    phase, slo, code = setting.phase, setting.workload.slo, int(table.why_not[index])
    name = table.candidates.layout_of(index)
    if code == RATE and setting.workload.requests_per_s is None:
        held = _most_at_once(setting, table)
        return NoPlan(
            f"{phase}: {setting.workload.max_batch or 1:,} requests at once do not fit on {setting.cluster.name}: it "
            f"holds {held:,} ({name}): ask for fewer, or add nodes",
            {"max_batch": held},
        )
    if code == RATE:
        tokens = setting.tokens_of_request
        most = float(table.tokens_per_s[index]) / tokens * (1 - 1e-3)
        return NoPlan(
            f"{phase}: {setting.workload.requests_per_s:g} requests/s are too many for {setting.cluster.name}: "
            f"it takes {most:.3g} ({name}): lower the rate, loosen the promise, or add nodes",
            {"requests_per_s": most},
        )
    is_tpot = code == TPOT
    key, target_s = ("tpot_s", slo.tpot_s) if is_tpot else ("ttft_s", slo.ttft_s)
    fastest_s = float((table.tpot_s if is_tpot else table.ttft_s)[index])
    possible_s = rounded_up(fastest_s if is_tpot else fastest_s * 1.001)
    what = "per output token" if is_tpot else "to the first token"
    return NoPlan(
        f"{phase}: no layout keeps {milliseconds(target_s or math.nan)} {what} on {setting.cluster.name}: the nearest "
        f"feasible promise is {milliseconds(possible_s)} ({name})",
        {key: possible_s},
    )


def _most_at_once(setting: Setting, table: CandidateTable) -> int:
    """Requests that the roomiest candidate holds; of prefill, whose batch is tokens, whole prompts in one pass."""
    if setting.decodes:
        return int((table.batch * table.outcome.num_instances).max())
    places = table.candidates.micro_batches * table.candidates.attention_dp
    prompts = table.outcome.batch // math.ceil(setting.new_tokens(setting.lengths.prompt) * setting.prompt_row_cost)
    return max(1, int((prompts * places * table.outcome.num_instances).max()))


def total_weight_bytes(setting: Setting) -> float:
    """All weights, once."""
    model, precision = setting.model, setting.precision
    attention = attention_weight_bytes(model, 1, precision)
    experts = expert_weight_bytes(model, model.router.num_experts, 1, precision)
    return float(np.asarray(attention)) + float(np.asarray(experts))


def _no_room(setting: Setting, table: CandidateTable) -> NoPlan:
    usable = [
        (group.device.memory_bytes * (1 - setting.cluster.efficiency.memory_reserve), group) for group in setting.groups
    ]
    needed = total_weight_bytes(setting)
    offered = sum(each * group.num_devices for each, group in usable)
    pins = str(setting.limits.pins)
    lacking = [value for value in table.least_missing_bytes if math.isfinite(value) and value > 0]
    each, group = max(usable, key=lambda pair: pair[0])
    if needed > offered:
        missing = needed - offered
        more = math.ceil(missing / each)
        return NoPlan(
            f"{setting.cluster.name} is too small for the weights: they take {needed / 1e9:.4g} GB, its "
            f"devices ({setting.cluster.num_devices}) hold {offered / 1e9:.4g} GB beside the reserve: "
            f"{missing / 1e9:.4g} GB are missing: at least {more} more {group.device.name}, or a smaller weight format",
            {"missing_bytes": missing, "num_devices": setting.cluster.num_devices + more},
        )
    if lacking:
        return NoPlan(
            f"{setting.cluster.name} holds the weights in all ({needed / 1e9:.4g} of {offered / 1e9:.4g} GB), but no "
            f"layout divides them so: the nearest lacks {min(lacking) / 1e9:.3g} GB on each device: add a node, use a "
            f"smaller weight format, or allow more layouts",
            {"missing_bytes": min(lacking)},
        )
    if pins:
        return NoPlan(
            f"{setting.phase}: no layout on {setting.cluster.name} has {pins}: a TP degree divides the heads (or the "
            f"experts' width) and a domain, batch is a multiple of attention.dp × micro_batches and fits in memory, "
            f"and micro_batches is pp where attention and experts share devices: leave some of these out",
            {"num_devices": setting.cluster.num_devices},
        )
    dropped = int(table.num_without_memory.sum())
    if dropped:
        return NoPlan(
            f"{setting.phase}: the KV cache of one request does not fit beside the weights on {setting.cluster.name}, "
            f"or max_batch is below one request per worker: add nodes, use a smaller KV format, or raise max_batch",
            {"num_devices": setting.cluster.num_devices + 1},
        )
    return NoPlan(
        f"{setting.phase}: no candidate of the layouts and limits given fits on the {setting.cluster.num_devices} "
        f"devices of {setting.cluster.name}: allow more layouts or other degrees, or add nodes",
        {"num_devices": setting.cluster.num_devices + 1},
    )
