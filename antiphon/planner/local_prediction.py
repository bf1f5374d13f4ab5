"""What the engine on this machine will take for a token: the measured pieces put together by the papers' equations.

The tables are those of `antiphon profile`. `antiphon plan --profile` takes decode steps from here, and
`benchmarks/predict.py` holds the very same predictions against measurements.

1. A worker has cores / workers threads, at least one, as the engine deals them (`serve.config`).
2. Colocated: a step is its layers' attention and experts, head and sampling, bookkeeping, and the engine's turn. Ranks
   that share layers (TP) each take their part of that time, and a message's time for each of the two sums of a layer.
   Of P stages with m micro-batches each works m turns of m + P - 1. Hybrid: a rank computes its part of the experts for
   the rows of all replicas, and every layer waits for the rank with the fullest part. The engine plans the next step of
   all replicas while none computes.
3. Apart: T_a, T_e, T_c of one micro-batch and layer, then MegaScale-Infer's layer time (`cost.ping_pong`), L times; the
   rest of the step as before. Both sides work at once only with two micro-batches or more: then each is slowed down
   by the other for the share of its time in which the other is busy too.
4. More workers than cores: no schedule is faster than all their work over the cores.
5. What travels between nodes, or between replicas that share experts, takes what the cluster's network says (`Wires`).

Rejected: simulating two cores' scheduler. What it would add is below what the machine drifts within an hour.

`measured_steps` takes the search's candidates from here. Of one machine: replicas, of one device or of several in ranks
and stages, attention and experts apart, and hybrid layouts. Of several machines: the same, with workers on any of them.
What stays inside one machine, and is not hybrid, the profile has measured; for the rest the cluster's network says what
it takes. Rejected: everything from the network's model. A wire's time it knows from bytes; how long two processes of a
machine take to wake each other it does not.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from antiphon.base.errors import UserError
from antiphon.cost import ping_pong
from antiphon.cost.curves import Curve
from antiphon.cost.profile import LocalTimes, ThreadTimes
from antiphon.cost.roofline import Number, row_bytes_of
from antiphon.cost.skew import fullest_part
from antiphon.planner.candidates import Candidates, real
from antiphon.planner.setting import Setting
from antiphon.planner.worker_times import decode_context, rows_each
from antiphon.specs.checked import Count, checked
from antiphon.specs.model import ModelSpec

LocalLayout = Literal["colocated", "disaggregated", "hybrid"]
_SLOWDOWN_ROUNDS = 20
_LOGIT_BYTES = 4


@checked("")
@dataclass(frozen=True, kw_only=True)
class LocalChoice:
    """How the engine is asked to run here. Colocated: `num_attention` replicas of `num_stages` stages of `attention_tp`
    ranks, the rest is 1; apart these two are 1. Hybrid: such replicas, whose experts are dealt out in `num_experts`
    parts of `expert_tp` ranks."""

    layout: LocalLayout
    num_attention: Count = 1
    num_experts: Count = 1
    num_micro_batches: Count = 1
    attention_tp: Count = 1
    expert_tp: Count = 1
    num_stages: Count = 1

    @property
    def num_workers(self) -> int:
        """Processes."""
        attention = self.num_attention * self.attention_tp * self.num_stages
        return attention + (self.num_experts if self.layout == "disaggregated" else 0)


@dataclass(frozen=True, kw_only=True)
class Wires:
    """Seconds of one micro-batch on the cluster's network. `layer_s`: the collectives of a MoE layer, or, with
    attention and experts apart, one way of its rows; `dense_layer_s`: the sums of a dense one; `hop_s`: from one stage
    to the next. `head_s`: of a whole step, the sum of the embedding and the logits of all ranks."""

    layer_s: float
    dense_layer_s: float = 0.0
    hop_s: float = 0.0
    head_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LocalPrediction:
    """Seconds of one decode step and its rate. `parts_s` adds up to `tpot_s`. `t_a_s`, `t_e_s`, `t_c_s` as in the
    paper, with the slowdown by the other side and what the calls of the exchange take of each; None if colocated."""

    tpot_s: float
    tokens_per_s: float
    parts_s: dict[str, float] = field(default_factory=dict)
    t_a_s: float | None = None
    t_e_s: float | None = None
    t_c_s: float | None = None


def predict_decode(
    times: LocalTimes,
    model: ModelSpec,
    choice: LocalChoice,
    *,
    concurrency: int,
    context: float,
    wires: Wires | None = None,
) -> LocalPrediction:
    """A step in which `concurrency` requests, `context` tokens behind each, all decode. `wires` None: all processes are
    on the machine of the times and talk over its shared memory; the hybrid layout needs them."""
    if concurrency < 1 or not context >= 1:
        raise UserError(f"{concurrency} requests of context {context}: both must be at least 1")
    both_sides = choice.layout == "colocated" and choice.attention_tp == choice.num_stages == 1
    threads = _with_threads(times, max(1, times.num_cores // choice.num_workers), both_sides=both_sides)
    if choice.layout == "disaggregated":
        return _disaggregated(times, threads, model, choice, concurrency, context, wires)
    return _colocated(times, threads, model, choice, concurrency, context, wires)


def _colocated(
    times: LocalTimes,
    threads: ThreadTimes,
    model: ModelSpec,
    choice: LocalChoice,
    concurrency: int,
    context: float,
    wires: Wires | None,
) -> LocalPrediction:
    """Replicas step independently; on shared cores the engine's turn for one is taken from the other's time. Those that
    share experts step together."""
    is_hybrid = choice.layout == "hybrid"
    replicas = min(choice.num_attention, concurrency)
    rows_each = concurrency / replicas
    micro_batches = max(1, min(choice.num_stages, int(rows_each)))
    rows = rows_each / micro_batches
    turns = micro_batches + choice.num_stages - 1
    at_work = replicas * choice.attention_tp * choice.num_stages * micro_batches / turns
    beside = times.slowdowns.replica_beside_replica.value(rows)
    slow = 1.0 + (beside - 1.0) * min(1.0, at_work - 1.0)
    crowd = max(1.0, at_work * threads.num_threads / times.num_cores)
    # how often a process goes through what share of the model's layers, itself computing one part of `tp`
    passes = turns * math.ceil(model.num_layers / choice.num_stages) / model.num_layers
    work = slow * crowd * passes
    experts_s, further = experts_layer_s(threads, rows, model.router.num_experts) / choice.attention_tp, 0
    if is_hybrid:
        experts_s = fullest_experts_s(threads, model, rows * replicas, choice.num_experts) / choice.expert_tp
        further = replicas - 1
    parts = {
        "attention": work * model.num_layers * threads.attention_layer_s(rows, context) / choice.attention_tp,
        "experts": work * model.num_moe_layers * experts_s,
        "head": slow * crowd / choice.attention_tp * threads.head_s.value(rows_each),
        "bookkeeping": crowd * times.engine.bookkeeping_s.value(rows_each),
        "engine": crowd * times.engine.alone_s.value(rows_each)
        + further * times.engine.per_further_worker_s.value(rows_each),
    }
    if wires is None:
        assert not is_hybrid, "how rows reach the experts of other replicas is the network's to say"
        message_s = times.exchange.one_way_s.value(rows)
        sums_s = 2 * crowd * message_s if choice.attention_tp > 1 else 0.0
        wires = Wires(layer_s=sums_s, dense_layer_s=sums_s, hop_s=message_s)
    dense_layers = model.num_layers - model.num_moe_layers
    parts["exchange"] = passes * (model.num_moe_layers * wires.layer_s + dense_layers * wires.dense_layer_s)
    parts["exchange"] += wires.head_s
    if is_hybrid:
        calls_s = times.row_calls.layer_s(
            rows,
            attention_tp=choice.attention_tp,
            expert_tp=choice.expert_tp,
            num_ranks=choice.num_attention * choice.attention_tp,
        )
        parts["calls"] = crowd * passes * model.num_moe_layers * calls_s
    if choice.num_stages > 1:
        parts["hops"] = choice.num_stages * wires.hop_s
    tpot_s = sum(parts.values())
    return LocalPrediction(tpot_s=tpot_s, tokens_per_s=concurrency / tpot_s, parts_s=parts)


def _disaggregated(
    times: LocalTimes,
    threads: ThreadTimes,
    model: ModelSpec,
    choice: LocalChoice,
    concurrency: int,
    context: float,
    wires: Wires | None,
) -> LocalPrediction:
    num_attention = min(choice.num_attention, concurrency)
    rows_each = concurrency / num_attention
    num_micro_batches = max(1, min(choice.num_micro_batches, int(rows_each)))
    rows = rows_each / num_micro_batches
    t_a, t_e, t_c = _one_micro_batch(times, threads, model, choice, num_attention, rows, context)
    t_c = t_c if wires is None else wires.layer_s
    if num_micro_batches > 1 and times.num_cores > 1:
        slowdowns = times.slowdowns
        t_a, t_e = _slowed(
            t_a,
            t_e,
            slowdowns.attention_beside_experts.value(rows),
            slowdowns.experts_beside_attention.value(rows),
        )
    moe_layer_s = float(ping_pong.layer_time(num_micro_batches, t_a, t_e, t_c))
    work_s = num_micro_batches * (num_attention * t_a + choice.num_experts * t_e)
    moe_layer_s = max(moe_layer_s, work_s / times.num_cores)
    trailing_s = float(ping_pong.iteration(num_micro_batches, 1, t_a, t_e, t_c)) - float(
        ping_pong.layer_time(num_micro_batches, t_a, t_e, t_c)
    )
    dense_layers = model.num_layers - model.num_moe_layers
    further = num_attention - 1
    crowd = max(1.0, num_attention * threads.num_threads / times.num_cores)
    parts = {
        "layers": model.num_moe_layers * moe_layer_s + trailing_s + dense_layers * num_micro_batches * t_a,
        "head": crowd * times.engine.apart_head_ratio.value(rows_each) * threads.head_s.value(rows_each),
        "bookkeeping": crowd
        * (times.engine.apart_bookkeeping_s.value(rows_each) + (num_micro_batches - 1) * threads.step_s.value(1)),
        "engine": times.engine.apart_s.value(rows_each) + further * times.engine.per_further_worker_s.value(rows_each),
    }
    tpot_s = sum(parts.values())
    return LocalPrediction(
        tpot_s=tpot_s, tokens_per_s=concurrency / tpot_s, parts_s=parts, t_a_s=t_a, t_e_s=t_e, t_c_s=t_c
    )


def _one_micro_batch(
    times: LocalTimes,
    threads: ThreadTimes,
    model: ModelSpec,
    choice: LocalChoice,
    num_attention: int,
    rows: float,
    context: float,
) -> tuple[float, float, float]:
    """(T_a, T_e, T_c) of one layer while the other side does nothing.

    The calls of the exchange belong to the side that makes them: dispatch and combine to T_a, receive and reply to T_e.
    Each further expert worker costs one more message, whose fixed part is that of one row.
    """
    exchange, slow = times.exchange, times.slowdowns
    calls_a = exchange.dispatch_s.value(rows) + exchange.combine_s.value(rows)
    calls_a += (choice.num_experts - 1) * (exchange.dispatch_s.value(1) + exchange.combine_s.value(1))
    all_rows = num_attention * rows
    calls_e = num_attention * (exchange.receive_s.value(rows) + exchange.reply_s.value(rows))
    t_a = threads.attention_layer_s(rows, context)
    t_e = experts_layer_s(threads, all_rows, model.router.num_experts / choice.num_experts)
    if num_attention > 1:
        t_a *= slow.attention_beside_attention.value(rows) * max(1.0, num_attention / times.num_cores)
    if choice.num_experts > 1:
        t_e *= slow.experts_beside_experts.value(all_rows) * max(1.0, choice.num_experts / times.num_cores)
    return t_a + calls_a, t_e + calls_e, exchange.one_way_s.value(rows)


def experts_layer_s(times: ThreadTimes, rows: float, num_held: float) -> float:
    """Straight between the numbers of held experts that were measured; below the fewest, the line through the two
    fewest goes on."""
    known = sorted(times.experts_s)
    values = Curve(tuple(map(float, known)), tuple(times.experts_s[held].value(rows) for held in known))
    if num_held >= known[0] or len(known) == 1:
        return values.value(num_held)
    slope = (values.seconds[1] - values.seconds[0]) / (values.sizes[1] - values.sizes[0])
    return max(0.0, values.seconds[0] + slope * (num_held - values.sizes[0]))


def fullest_experts_s(times: ThreadTimes, model: ModelSpec, rows: float, num_parts: int) -> float:
    """Seconds of the part of the experts that a layer waits for: where products count, the one with the most pairs;
    where weights are read, the one with the most experts that got rows."""
    router = model.router
    busiest, widest = fullest_part(rows, num_parts, num_experts=router.num_experts, top_k=router.top_k)
    held = router.num_experts / num_parts
    by_reads = experts_layer_s(times, rows, held) * float(widest)
    return max(by_reads, experts_layer_s(times, rows * float(busiest), held))


def _slowed(t_a: float, t_e: float, slow_a: float, slow_e: float) -> tuple[float, float]:
    """T_a and T_e while both sides work: the slower one is disturbed for the share of its time in which the faster one
    is busy, the faster one always. Their ratio depends on the result, so it is found by repetition."""
    new_a, new_e = t_a, t_e
    for _ in range(_SLOWDOWN_ROUNDS):
        longest = max(new_a, new_e)
        new_a = t_a * (1 + (slow_a - 1) * new_e / longest)
        new_e = t_e * (1 + (slow_e - 1) * new_a / longest)
    return new_a, new_e


def _with_threads(times: LocalTimes, num_threads: int, *, both_sides: bool) -> ThreadTimes:
    """The times with this many threads, of a worker with `both_sides` or with one if both were measured; `UserError` if
    none was."""
    if found := [each for each in times.threads if each.num_threads == num_threads]:
        return next((each for each in found if each.both_sides == both_sides), found[0])
    known = ", ".join(map(str, dict.fromkeys(each.num_threads for each in times.threads)))
    raise UserError(
        f"the profile has no times with {num_threads} threads, only with {known}: "
        f"measure again with antiphon profile --threads {known.replace(' ', '')},{num_threads}"
    )


def measured_steps(
    setting: Setting,
    candidates: Candidates,
    engine: LocalTimes,
    *,
    kind: int,
    near: bool,
    layer_s: Number,
    hop_s: Number,
) -> Iterator[tuple[int, LocalPrediction]]:
    """Decode steps of those candidates that `engine` was measured like, by place. All have attention on devices of
    `kind`; `near`: and all of an instance on one machine. `layer_s`, `hop_s`: of `Wires`, by candidate."""
    contexts = np.broadcast_to(decode_context(setting, candidates), (len(candidates),))
    times = _of_all_machines(setting, engine)
    known = {threads.num_threads for threads in times.threads}
    pieces: Any = candidates.piece_devices
    net = replace(setting.networks[kind], domain=pieces)  # ranks of a stage that share a domain
    tp, rows = real(candidates.attention_tp), rows_each(setting, candidates)
    sum_s = net.all_reduce(rows * setting.model.hidden_size * row_bytes_of(setting.precision), tp).total_s
    logits_bytes = rows * candidates.micro_batches * setting.model.vocab_size * _LOGIT_BYTES
    head_s = candidates.micro_batches * sum_s + net.all_gather(logits_bytes, tp).total_s
    columns = [np.broadcast_to(each, (len(candidates),)) for each in (layer_s, 2 * sum_s, hop_s, head_s)]
    apart = candidates.is_disaggregated & (candidates.attention_tp == 1) & (candidates.expert_tp == 1)
    for index in map(int, np.flatnonzero(apart | ~candidates.is_disaggregated)):
        choice, num_instances = _choice(times, candidates, index)
        if max(1, times.num_cores // choice.num_workers) not in known:
            continue
        way_s, dense_layer_s, stage_s, step_s = (float(column[index]) for column in columns)
        wires = Wires(layer_s=way_s, dense_layer_s=dense_layer_s, hop_s=stage_s, head_s=step_s)
        yield (
            index,
            predict_decode(
                times,
                setting.model,
                choice,
                concurrency=int(candidates.instance_batch[index]) * num_instances,
                context=max(1.0, float(contexts[index])),
                wires=None if near and choice.layout != "hybrid" else wires,
            ),
        )


def _of_all_machines(setting: Setting, engine: LocalTimes) -> LocalTimes:
    """The times with the cores of all nodes, where these are CPUs."""
    cores = sum(group.num_devices for group in setting.groups if group.device.kind == "cpu")
    return replace(engine, num_cores=max(engine.num_cores, cores))


def _choice(times: LocalTimes, candidates: Candidates, index: int) -> tuple[LocalChoice, int]:
    """What the engine is asked for, and how many instances of the candidate that is. Replicas are on all cores, for
    idle ones would take none of the load."""
    one = {name: int(getattr(candidates, name)[index]) for name in candidates.__dataclass_fields__}
    if candidates.is_disaggregated[index]:
        apart = LocalChoice(
            layout="disaggregated",
            num_attention=one["attention_dp"],
            num_experts=one["expert_ep"],
            num_micro_batches=one["micro_batches"],
        )
        return apart, 1
    tp, num_stages = one["attention_tp"], one["pp"]
    if one["attention_dp"] == one["expert_ep"] == 1:
        replicas = max(1, times.num_cores // (tp * num_stages))
        return LocalChoice(layout="colocated", num_attention=replicas, attention_tp=tp, num_stages=num_stages), replicas
    hybrid = LocalChoice(
        layout="hybrid",
        num_attention=one["attention_dp"],
        num_experts=one["expert_ep"],
        attention_tp=tp,
        expert_tp=one["expert_tp"],
        num_stages=num_stages,
    )
    return hybrid, 1
