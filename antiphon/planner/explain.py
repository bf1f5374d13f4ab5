"""Why a layout lost, in a sentence with numbers: every word of it follows from the model's own terms.

1. A layout that can run is held against the winner by the account of a token: devices times step over batch is what it
   takes of the objective's resource (devices, price, watts) for a number of seconds, and is split, exactly, into
   attention, experts, communication, fixed costs (of kernels and collectives), the rest of the step (dense layers,
   head), waiting for the other side or another stage, and capacity that the rate leaves spare. The item that differs
   most is named, and what causes it (T_c against T_f, idle sides, too few micro-batches, other devices).
2. A layout that cannot run is explained by the limit that its nearest candidate broke: promise, rate, memory, devices.

Rejected: naming the largest part of the loser's step. A large part that the winner has as well explains nothing.
Rejected: fixed sentences by layout. They are true of the average case and false of the one at hand.

Where there is no plan (`NoPlan`): the nearest promise, rate or size that there would be one for.

1. No candidate fits: how much memory is missing in all, and how many more devices hold the weights.
2. Candidates fit, none keeps the promise: the fastest one's latency, rounded up, is what can be promised.
3. The promise is kept, the rate is too high: the rate that the cluster takes.

Rejected: "infeasible" alone. A user needs to know what to change.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from antiphon.base.errors import ResourceError
from antiphon.base.units import milliseconds
from antiphon.cost.memory import attention_weight_bytes, expert_weight_bytes
from antiphon.cost.roofline import Parts
from antiphon.planner.candidate_table import RATE, TPOT, CandidateTable
from antiphon.planner.candidates import Candidates
from antiphon.planner.outcome import outcome_at
from antiphon.planner.predict import devices_of, named_parts, predicted_of, resource_weights, step_parts_of
from antiphon.planner.setting import Setting
from antiphon.specs.model import WEIGHT_FORMATS
from antiphon.specs.plan import LAYOUTS, Layout, Objective, Rejected

ITEMS = ("attention", "experts", "communication", "fixed costs", "dense layers and head", "waiting", "spare capacity")
RESOURCES: dict[Objective, tuple[str, str]] = {
    "per-gpu": ("tokens/s per device", "device-ms"),
    "per-cost": ("tokens/s per unit of price", "price-ms"),
    "per-power": ("tokens/s per watt", "watt-ms"),
    "ttft": ("prompts/s of one request", "ms"),
    "tpot": ("tokens/s of one request", "ms"),
}


def rejected_layouts(
    setting: Setting,
    table: CandidateTable,
    winner: int,
    layouts: tuple[Layout, ...],
    pairs: Mapping[Layout, float] | None = None,
) -> tuple[Rejected, ...]:
    """The best candidate of each other layout, and what beat it. `pairs`: where a pair of pools was chosen, the best
    pair with each layout as a share of it."""
    won = table.candidates.layout_of(winner)
    return tuple(_rejected(setting, table, winner, layout, pairs) for layout in layouts if layout != won)


def _rejected(
    setting: Setting, table: CandidateTable, winner: int, layout: Layout, pairs: Mapping[Layout, float] | None
) -> Rejected:
    of_layout = np.asarray(table.candidates.layout == LAYOUTS.index(layout))
    index = table.best(setting.objective, of_layout)
    if index is not None:
        return _described(setting, table, index, why_slower(setting, table, index, winner, pairs))
    if of_layout.any():
        index = nearest(table, of_layout)
        return _described(setting, table, index, why_infeasible(setting, table, index))
    return Rejected(layout=layout, reason=why_no_room(setting, table, layout))


def _described(setting: Setting, table: CandidateTable, index: int, reason: str) -> Rejected:
    one, instances = table.one(index), int(table.outcome.num_instances[index])
    return Rejected(
        layout=one.layout_of(0),
        reason=reason,
        parallel=one.parallel_of(0),
        micro_batches=int(one.micro_batches[0]),
        batch=int(one.instance_batch[0]),
        devices=devices_of(setting, one, instances),
        predicted=predicted_of(setting, one, instances),
    )


def nearest(table: CandidateTable, among: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> int:
    """The infeasible candidate that breaks its limit least: only the rate before a promise, then the
    fastest."""
    index = np.flatnonzero(among)
    latency = table.latency_s[index]
    only_rate = table.outcome.why_not[index] == RATE
    if only_rate.any():
        chosen = index[only_rate]
        return int(chosen[np.argmax(table.outcome.tokens_per_s[chosen])])
    return int(index[np.argmin(latency)])


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


def why_slower(
    setting: Setting, table: CandidateTable, loser: int, winner: int, pairs: Mapping[Layout, float] | None = None
) -> str:
    """The item of the account that differs most, and why. The rates stand beside it in every report."""
    scores, won = table.score(setting.objective), table.candidates.layout_of(winner)
    mine, best = float(scores[loser]), float(scores[winner])
    if setting.wants_latency:
        return _why_later(setting, table, loser, winner, mine / best)
    if mine >= best * (1 - 1e-6) and pairs is not None:
        return f"not behind by itself; {_why_not_paired(setting, table.candidates.layout_of(loser), pairs)}"
    if mine > best * (1 + 1e-6):
        return f"a tie within what the model can tell apart; {won} is simpler"
    if mine >= best * (1 - 1e-6):
        return EQUAL_BUT_LONGER
    accounts = [
        account(setting, table.one(index), int(table.outcome.num_instances[index])) for index in (loser, winner)
    ]
    item = max(accounts[0], key=lambda name: accounts[0][name] - accounts[1][name])
    one = table.one(loser)
    times = _layer_times_s(setting, one)
    cause = _cause(setting, table, loser, winner, item, times)
    more = f"{item}{cause}{_made_up(accounts[0], accounts[1], item, mine, best)}"
    return f"most of the difference is {more}{_unhidden(one, times, item)}"


def _layer_times_s(setting: Setting, one: Candidates) -> dict[str, float]:
    """Times of attention, experts and exchange, in one layer and micro-batch."""
    return {name: float(part.total_s) for name, part in named_parts(step_parts_of(setting, one)).items()}


EQUAL_BUT_LONGER = "equal, and chosen against for its longer step or its more devices"


def _why_later(setting: Setting, table: CandidateTable, loser: int, winner: int, ratio: float) -> str:
    """The part of a layer that makes the loser's latency longer."""
    if ratio >= 1 - 1e-6:
        return EQUAL_BUT_LONGER
    times = []
    for index in (loser, winner):
        one = table.one(index)
        turns = int(one.micro_batches[0]) if one.is_disaggregated[0] else 1
        times.append({name: turns * seconds for name, seconds in _layer_times_s(setting, one).items()})
    part = max(times[0], key=lambda name: times[0][name] - times[1][name])
    longer_s = times[0][part] - times[1][part]
    if longer_s <= 0:
        return "its layers are no longer, its stages or its queue are"
    return f"most of the difference is {part}: {milliseconds(longer_s)} more in a layer"


def _why_not_paired(setting: Setting, layout: Layout, pairs: Mapping[Layout, float]) -> str:
    """Why another pair of pools was taken, though this layout is not behind in its own phase."""
    if layout not in pairs:
        return "but no whole instances of it fit beside the other pool"
    unit = RESOURCES[setting.objective][0].replace("tokens", "requests")
    head = f"its best pair with the other pool, in whole instances, gives {pairs[layout]:.1%} of this pair's {unit}"
    if pairs[layout] < 1:
        return f"but {head}"
    fewer = "takes fewer requests/s or " if setting.workload.requests_per_s is None else ""
    return f"{head}, but {fewer}does not fit into the scale-up domains"


def _made_up(loser: dict[str, float], winner: dict[str, float], item: str, mine: float, best: float) -> str:
    """Where the named item alone would explain much more than the whole difference: what makes up for the rest."""
    whole = 1 / mine - 1 / best
    if loser[item] - winner[item] <= 1.5 * whole:
        return ""
    return f", in part made up by {min(loser, key=lambda name: loser[name] - winner[name])}"


def _unhidden(one: Candidates, times: dict[str, float], item: str) -> str:
    """Whether a disaggregated loser's exchange is longer than what should hide it (MegaScale-Infer eq. 2)."""
    if one.layout_of(0) != "disaggregated" or item == "waiting":
        return ""
    hidden = times["exchange"] <= max(times["attention"], times["experts"])
    return "" if hidden else "; besides, an exchange (T_c) takes longer than what should hide it (T_f)"


def _cause(setting: Setting, table: CandidateTable, loser: int, winner: int, item: str, times: dict[str, float]) -> str:
    one = table.one(loser)
    if item == "waiting":
        uneven = f"the layers do not divide by {int(one.pp[0])} stages: all wait for the slowest"
        return f" ({_why_idle(one, times) if one.layout_of(0) == 'disaggregated' else uneven})"
    if item == "spare capacity":
        return f" ({_why_spare(setting, table, loser)})"
    names = [_device_name(setting, table.one(index), item) for index in (loser, winner)]
    if item in ("attention", "experts") and names[0] != names[1]:
        return f" (on {names[0]} against {names[1]})"
    if item == "experts":
        batches = [float(table.one(index).instance_batch[0] / _devices(table.one(index))) for index in (loser, winner)]
        if batches[0] < batches[1] * 0.95 and setting.decodes:
            return f" ({batches[0] / batches[1]:.2f} times as many requests per device share the reading of weights)"
    if item == "communication":
        return f" ({_slowest_network(setting, one)})"
    return ""


def _why_spare(setting: Setting, table: CandidateTable, loser: int) -> str:
    """What leaves capacity unused: instances that are added whole, or the promise to the first token."""
    one, count, rate = table.one(loser), int(table.outcome.num_instances[loser]), setting.workload.requests_per_s
    if rate is None:
        share = float(table.outcome.tokens_per_s[loser]) / (count * float(table.outcome.capacity[loser]))
        return f"the promise allows {share:.0%} of what it can compute: requests wait for each other"
    most = most_requests_per_s(setting, one, count)
    return f"the rate is {rate / most:.0%} of what its whole instance{'s' * (count > 1)} would take"


def most_requests_per_s(setting: Setting, one: Candidates, num_instances: int) -> float:
    """The largest rate at which this many instances keep the promise, at its percentile."""
    beyond = replace(setting, workload=replace(setting.workload, requests_per_s=1e15))
    served = outcome_at(beyond, one, np.array([num_instances]))
    return float(served.tokens_per_s[0]) / setting.tokens_of_request


def _device_name(setting: Setting, one: Candidates, item: str) -> str:
    kinds = one.expert_kind if item == "experts" else one.attention_kind
    return setting.groups[int(kinds[0])].device.name


def _devices(one: Candidates) -> int:
    return int(one.attention_devices[0] + one.expert_devices[0])


def _why_idle(one: Candidates, times: dict[str, float]) -> str:
    """Why a disaggregated candidate idles: exchange longer than work, too few micro-batches, or unequal sides."""
    m, t_a, t_e, t_c = int(one.micro_batches[0]), times["attention"], times["experts"], times["exchange"]
    t_f = max(t_a, t_e)
    if t_c > t_f:
        return "an exchange takes longer than attention and than experts: the network sets the pace of a layer"
    if m * t_f < t_a + t_e + 2 * t_c:
        return f"it takes {math.ceil(2 * (1 + t_c / t_f) - 1e-9)} micro-batches to fill the round trip"
    slow, fast = ("attention", "expert") if t_a >= t_e else ("experts", "attention")
    return f"{fast} devices wait {1 - min(t_a, t_e) / t_f:.0%} of a layer for {slow}"


def _slowest_network(setting: Setting, one: Candidates) -> str:
    parts = step_parts_of(setting, one)
    named = [parts.attention.moe_layer.at(0), parts.experts.at(0), parts.dispatch.at(0)]
    counted = named[:2] if one.layout_of(0) == "disaggregated" else named
    up, out = (sum(float(getattr(part, name)) for part in counted) for name in ("scale_up_s", "scale_out_s"))
    return f"{milliseconds(max(up, out))} of a layer on the {'scale-up' if up >= out else 'scale-out'} network"


def why_infeasible(setting: Setting, table: CandidateTable, index: int) -> str:
    """Which promise or rate the nearest candidate breaks, and by how much."""
    workload, code = setting.workload, int(table.outcome.why_not[index])
    parts = named_parts(step_parts_of(setting, table.one(index)))
    slowest = max(parts, key=lambda name: float(parts[name].total_s))
    bound = f"{slowest} takes most of a layer and waits for {parts[slowest].bound_by()}"
    if code == RATE and workload.requests_per_s is None:
        return f"the cluster does not hold {workload.max_batch or 1:,} requests at once in this layout"
    if code == RATE:
        most = float(table.outcome.tokens_per_s[index]) / setting.tokens_of_request
        return f"the cluster takes at most {most:.3g} requests/s in this layout"
    times = table.outcome
    fastest_s, what = (times.tpot_s, "a token") if code == TPOT else (times.ttft_s, "to the first token")
    return f"no candidate keeps the target: the fastest takes {milliseconds(float(fastest_s[index]))} {what} ({bound})"


def why_no_room(setting: Setting, table: CandidateTable, layout: Layout) -> str:
    """Memory or devices, whichever dropped the layout's last candidates."""
    code = LAYOUTS.index(layout)
    missing = table.space.least_missing_bytes[code]
    if table.space.num_without_memory[code] and math.isfinite(missing) and missing > 0:
        return f"its weights do not fit: the nearest candidate lacks {missing / 1e9:.3g} GB on a device"
    if table.space.num_without_memory[code]:
        return (
            "its weights leave no memory for the KV cache of one request, or its limit on requests in flight is too low"
        )
    devices = setting.cluster.num_devices
    return f"the cluster's {devices} devices are too few for it, or the limits given leave none of its candidates"


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
    phase, slo, code = setting.phase, setting.workload.slo, int(table.outcome.why_not[index])
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
        most = float(table.outcome.tokens_per_s[index]) / tokens * (1 - 1e-3)
        return NoPlan(
            f"{phase}: {setting.workload.requests_per_s:g} requests/s are too many for {setting.cluster.name}: "
            f"it takes {most:.3g} ({name}): lower the rate, loosen the promise, or add nodes",
            {"requests_per_s": most},
        )
    is_tpot = code == TPOT
    key, target_s = ("tpot_s", slo.tpot_s) if is_tpot else ("ttft_s", slo.ttft_s)
    fastest_s = float((table.outcome.tpot_s if is_tpot else table.outcome.ttft_s)[index])
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


def in_other_formats(setting: Setting) -> Iterator[tuple[str, Setting]]:
    """The setting with weights in each of `WEIGHT_FORMATS`, by what `--precision` calls it."""
    for name, formats in WEIGHT_FORMATS.items():
        yield name, replace(setting, precision=setting.precision.with_weights(*formats))


def _format_that_fits(setting: Setting, offered: float) -> str:
    """The widest format whose weights fit; else what the smallest takes."""
    for name, other in in_other_formats(setting):
        if (needed := total_weight_bytes(other)) <= offered:
            return f"--precision {name}, whose weights take {needed / 1e9:.4g} GB"
    return f"fewer weights: even --precision {name} takes {needed / 1e9:.4g} GB"


def _no_room(setting: Setting, table: CandidateTable) -> NoPlan:
    usable = [
        (group.device.memory_bytes * (1 - setting.cluster.efficiency.memory_reserve), group) for group in setting.groups
    ]
    needed = total_weight_bytes(setting)
    offered = sum(each * group.num_devices for each, group in usable)
    pins = str(setting.limits.pins)
    lacking = [value for value in table.space.least_missing_bytes if math.isfinite(value) and value > 0]
    each, group = max(usable, key=lambda pair: pair[0])
    if needed > offered:
        missing = needed - offered
        more = math.ceil(missing / each)
        return NoPlan(
            f"{setting.cluster.name} is too small for the weights: they take {needed / 1e9:.4g} GB, its "
            f"devices ({setting.cluster.num_devices}) hold {offered / 1e9:.4g} GB beside the reserve: "
            f"{missing / 1e9:.4g} GB are missing: at least {more} more {group.device.name}, or "
            f"{_format_that_fits(setting, offered)}",
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
    dropped = int(table.space.num_without_memory.sum())
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
