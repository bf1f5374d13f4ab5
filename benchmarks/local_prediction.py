"""What the engine on this machine will take for a token: the measured pieces put together by the papers' equations.

The tables are `local.json` of `antiphon profile`; `benchmarks/predict.py` holds the predictions against measurements.

1. A worker has cores / workers threads, at least one, as the engine deals them (`serve.config`).
2. Colocated: a step is its layers' attention and experts, head and sampling, bookkeeping, and the engine's turn.
3. Apart: T_a, T_e, T_c of one micro-batch and layer, then MegaScale-Infer's layer time (`cost.ping_pong`), L times; the
   rest of the step as before. Both sides work at once only with two micro-batches or more: then each is slowed down
   by the other for the share of its time in which the other is busy too.
4. More workers than cores: no schedule is faster than all their work over the cores.

Rejected: simulating two cores' scheduler. What it would add is below what the machine drifts within an hour.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from antiphon.base.errors import UserError
from antiphon.bench.profile.local_times import KIND, VERSION, LocalTimes, Samples, ThreadTimes
from antiphon.cost import ping_pong
from antiphon.specs.model import ModelSpec

LocalLayout = Literal["colocated", "disaggregated"]
_SLOWDOWN_ROUNDS = 20


@dataclass(frozen=True, kw_only=True)
class LocalChoice:
    """How the engine is asked to run here. Colocated: `num_attention` replicas, the rest is 1."""

    layout: LocalLayout
    num_attention: int = 1
    num_experts: int = 1
    num_micro_batches: int = 1

    def __post_init__(self) -> None:
        for name in ("num_attention", "num_experts", "num_micro_batches"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least 1")

    @property
    def num_workers(self) -> int:
        return self.num_attention + (self.num_experts if self.layout == "disaggregated" else 0)


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
    times: LocalTimes, model: ModelSpec, choice: LocalChoice, *, concurrency: int, context: float
) -> LocalPrediction:
    """A step in which `concurrency` requests, `context` tokens behind each, all decode."""
    if concurrency < 1 or not context >= 1:
        raise UserError(f"{concurrency} requests of context {context}: both must be at least 1")
    threads = _with_threads(times, max(1, times.num_cores // choice.num_workers))
    if choice.layout == "colocated":
        return _colocated(times, threads, model, choice, concurrency, context)
    return _disaggregated(times, threads, model, choice, concurrency, context)


def _colocated(
    times: LocalTimes, threads: ThreadTimes, model: ModelSpec, choice: LocalChoice, concurrency: int, context: float
) -> LocalPrediction:
    """Replicas step independently; on shared cores the engine's turn for one is taken from the other's time."""
    replicas = min(choice.num_attention, concurrency)
    rows = concurrency / replicas
    slow = ratio_at(times.slowdowns.replica_beside_replica, rows) if replicas > 1 else 1.0
    crowd = max(1.0, replicas * threads.num_threads / times.num_cores)
    parts = {
        "attention": slow * crowd * model.num_layers * threads.attention_layer_s(rows, context),
        "experts": slow * crowd * model.num_moe_layers * experts_layer_s(threads, rows, model.router.num_experts),
        "head": slow * crowd * threads.head_s.at(rows),
        "bookkeeping": crowd * times.engine.bookkeeping_s.at(rows),
        "engine": crowd * times.engine.alone_s.at(rows),
    }
    tpot_s = sum(parts.values())
    return LocalPrediction(tpot_s=tpot_s, tokens_per_s=concurrency / tpot_s, parts_s=parts)


def _disaggregated(
    times: LocalTimes, threads: ThreadTimes, model: ModelSpec, choice: LocalChoice, concurrency: int, context: float
) -> LocalPrediction:
    num_attention = min(choice.num_attention, concurrency)
    rows_each = concurrency / num_attention
    num_micro_batches = max(1, min(choice.num_micro_batches, int(rows_each)))
    rows = rows_each / num_micro_batches
    t_a, t_e, t_c = _one_micro_batch(times, threads, model, choice, num_attention, rows, context)
    if num_micro_batches > 1 and times.num_cores > 1:
        slowdowns = times.slowdowns
        t_a, t_e = _slowed(
            t_a,
            t_e,
            ratio_at(slowdowns.attention_beside_experts, rows),
            ratio_at(slowdowns.experts_beside_attention, rows),
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
        "head": crowd * ratio_at(times.engine.apart_head_ratio, rows_each) * threads.head_s.at(rows_each),
        "bookkeeping": crowd
        * (times.engine.apart_bookkeeping_s.at(rows_each) + (num_micro_batches - 1) * threads.step_s.at(1)),
        "engine": times.engine.apart_s.at(rows_each) + further * times.engine.per_further_worker_s.at(rows_each),
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
    """(T_a, T_e, T_c) of one layer with nobody of the other side at work.

    The calls of the exchange belong to the side that makes them: dispatch and combine to T_a, receive and reply to T_e.
    Each further expert worker costs one more message, whose fixed part is that of one row.
    """
    exchange, slow = times.exchange, times.slowdowns
    calls_a = exchange.dispatch_s.at(rows) + exchange.combine_s.at(rows)
    calls_a += (choice.num_experts - 1) * (exchange.dispatch_s.at(1) + exchange.combine_s.at(1))
    all_rows = num_attention * rows
    calls_e = num_attention * (exchange.receive_s.at(rows) + exchange.reply_s.at(rows))
    t_a = threads.attention_layer_s(rows, context)
    t_e = experts_layer_s(threads, all_rows, model.router.num_experts / choice.num_experts)
    if num_attention > 1:
        t_a *= ratio_at(slow.attention_beside_attention, rows) * max(1.0, num_attention / times.num_cores)
    if choice.num_experts > 1:
        t_e *= ratio_at(slow.experts_beside_experts, all_rows) * max(1.0, choice.num_experts / times.num_cores)
    return t_a + calls_a, t_e + calls_e, exchange.one_way_s.at(rows)


def ratio_at(ratios: Samples, x: float) -> float:
    """Beyond the last as at the last: ratios do not grow on."""
    return ratios.at(min(x, ratios.x[-1]))


def experts_layer_s(times: ThreadTimes, rows: float, num_held: float) -> float:
    """Straight between the numbers of held experts that were measured; below the fewest, the line through the two
    fewest goes on."""
    known = sorted(times.experts_s)
    values = Samples(x=tuple(map(float, known)), y=tuple(times.experts_s[held].at(rows) for held in known))
    if num_held >= known[0] or len(known) == 1:
        return values.at(num_held)
    slope = (values.y[1] - values.y[0]) / (values.x[1] - values.x[0])
    return max(0.0, values.y[0] + slope * (num_held - values.x[0]))


def _slowed(t_a: float, t_e: float, slow_a: float, slow_e: float) -> tuple[float, float]:
    """T_a and T_e while both sides work: the slower one is disturbed for the share of its time in which the faster one
    is busy, the faster one always. Their ratio depends on the result, so it is found by repetition."""
    new_a, new_e = t_a, t_e
    for _ in range(_SLOWDOWN_ROUNDS):
        longest = max(new_a, new_e)
        new_a = t_a * (1 + (slow_a - 1) * new_e / longest)
        new_e = t_e * (1 + (slow_e - 1) * new_a / longest)
    return new_a, new_e


def _with_threads(times: LocalTimes, num_threads: int) -> ThreadTimes:
    """The times with so many threads; `UserError` if they were not measured."""
    for measured in times.threads:
        if measured.num_threads == num_threads:
            return measured
    known = ", ".join(str(measured.num_threads) for measured in times.threads)
    raise UserError(
        f"the profile has no times with {num_threads} threads, only with {known}: "
        f"measure again with antiphon profile --threads {known.replace(' ', '')},{num_threads}"
    )


def local_times_from_json(mapping: Any, where: str) -> LocalTimes:
    """`UserError` if it is not what `local_times_to_json` wrote."""
    if not isinstance(mapping, dict) or mapping.get("kind") != KIND:
        raise UserError(f"{where} is no profile of a machine: make one with antiphon profile MODEL --json FILE")
    if mapping.get("version") != VERSION:
        raise UserError(
            f"{where} has version {mapping.get('version')!r}, this program reads {VERSION}: "
            f"measure again with antiphon profile"
        )
    try:
        return msgspec.convert(mapping, LocalTimes, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        raise UserError(f"{where} is damaged: {error}; measure again with antiphon profile") from error


def read_local_times(path: Path) -> LocalTimes:
    """The measured tables in a profile file: the file itself, or its part called `local`."""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give the file antiphon profile wrote") from error
    except msgspec.DecodeError as error:
        raise UserError(f"{path} is not JSON ({error}): give the file antiphon profile wrote") from error
    if isinstance(found, dict) and "local" in found:
        found = found["local"]
    return local_times_from_json(found, str(path))
