"""The training plan: the layout with the most tokens per second among all that fit in memory, and why the others lost.

1. Strategies: sequence- or tensor-parallel attention, expert- or tensor-parallel experts, dispatch by all-to-all or
   all-gather; of each, all degrees (`candidates`).
2. Memory first: what its parameters and states alone do not fit is dropped before anything is timed.
3. Each candidate makes again as little as its memory allows, cheapest first (`cost.training.rematerialize`).
4. The fastest wins; of equally fast ones that with fewer devices.
5. The winner is held against the best of every other strategy, and against itself with one thing changed at a time.

Rejected: one group of devices of several kinds. A pipeline is as slow as its slowest stage; kinds are planned apart.

All ways to divide a number of devices (`candidates`), as columns:

1. Model parallelism n: up to 16 devices or any divisor of a scale-up domain, and two and four whole domains. A group
   never straddles a domain's edge: of a domain of 8 devices, groups of 3 use 6.
2. Pipeline: of the stage counts with the same longest stage only the smallest, which has the smallest bubble.
3. Virtual stages: only where micro-batches divide by stages, which interleaving needs.
   Experts may lie over several data-parallel copies (expert parallelism over more ranks than share a layer).
4. Data parallelism times micro-batch must divide the batch; what remains are the micro-batches of a pipeline.
5. The space of more devices contains that of fewer, so a plan never gets slower by offering more.

Rejected: only layouts that use every device. With 7 devices or 13 nodes the best layout leaves some idle.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.base.errors import ResourceError
from antiphon.base.units import format_bytes
from antiphon.cost.profile import Profile
from antiphon.cost.training.counts import StepEstimate
from antiphon.cost.training.memory import fullest_stage, rank_parameters, state_bytes
from antiphon.cost.training.setup import (
    AttentionParallel,
    ExpertParallel,
    OverlapLevel,
    Training,
    TrainingPrecision,
    TrainingSetup,
)
from antiphon.cost.training.step import estimate_step
from antiphon.planner.candidates import BoolArray, IntArray
from antiphon.planner.training_explain import layout_of, lost, name_of, notes_of, one, one_change, predicted_of
from antiphon.specs.cluster import ClusterSpec
from antiphon.specs.model import ModelSpec
from antiphon.specs.training_plan import RejectedTraining, TrainingPlan

STRATEGIES: tuple[TrainingSetup, ...] = (
    TrainingSetup(attention="sequence", experts="expert", dispatch="all_to_all"),
    TrainingSetup(attention="sequence", experts="expert", dispatch="all_gather"),
    TrainingSetup(attention="sequence", experts="tensor", dispatch="all_gather"),
    TrainingSetup(attention="tensor", experts="expert", dispatch="all_to_all"),
    TrainingSetup(attention="tensor", experts="expert", dispatch="all_gather"),
    TrainingSetup(attention="tensor", experts="tensor", dispatch="all_gather"),
)
BATCH_OF_CANDIDATES = 20_000
VIRTUAL_STAGES = (1, 2, 3, 4, 6, 8)
MICRO_BATCHES = (1, 2, 4, 8, 16)
MOST_MODEL_PARALLEL = 16
EXPERT_COPIES = (1, 2, 4, 8, 16, 32, 64)
PIN_NAMES = {
    "n": "model_parallel",
    "pp": "pipeline",
    "chunks": "virtual_stages",
    "dp": "data_parallel",
    "micro_batch": "micro_batch",
    "shared": "expert_copies",
}
"""What a degree of `TrainingSetup` is called where it is fixed."""
Degrees = dict[str, IntArray]
"""Columns of candidates, by the names of `TrainingSetup`."""


@dataclass(frozen=True, kw_only=True)
class _Best:
    """The best candidate of a strategy. `least_bytes`: memory of its smallest candidate, for those that do not fit."""

    setup: TrainingSetup
    estimate: StepEstimate | None
    num_candidates: int
    least_bytes: float


def plan_training(
    model: ModelSpec,
    cluster: ClusterSpec,
    *,
    sequence_length: int,
    global_batch: int,
    num_devices: int | None = None,
    model_name: str = "model",
    precision: TrainingPrecision | None = None,
    compress: bool = True,
    deduplicate: bool = False,
    overlap: OverlapLevel = "intra",
    zero: int = 1,
    profile: Profile | None = None,
    pins: Mapping[str, int] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> TrainingPlan:
    """The fastest way to train `model` with batches of `global_batch` sequences on at most `num_devices` (None: all)
    devices of one kind, the fastest.

    `pins`: degrees that are fixed, by the names of `PIN_NAMES`. `profile`: its training tables take the place of
    rooflines. `compress`: gradients may travel in BF16. `deduplicate`: the trainer sends a token once per rank.
    `on_progress(done, total)` is called after each strategy. `UserError` for what cannot be meant, `ResourceError` if
    nothing fits."""
    started = time.perf_counter()
    precision = precision or TrainingPrecision()
    if compress and precision.gradients == "float32":
        precision = replace(precision, gradient_wire="bfloat16")
    wanted = TrainingSetup(precision=precision, overlap=overlap, zero=zero, deduplicate=deduplicate)
    found: list[tuple[Training, int, list[_Best]]] = []
    for number, group in enumerate(cluster.groups):
        offered = group.num_devices if num_devices is None else min(num_devices, group.num_devices)
        training = Training(
            model=model,
            cluster=cluster,
            group=group,
            sequence_length=sequence_length,
            batch=global_batch,
            profile=profile,
        )

        def report(done: int, total: int, number: int = number) -> None:
            if on_progress is not None:
                on_progress(number * total + done, len(cluster.groups) * total)

        found.append((training, offered, _search(training, wanted, offered, report, pins)))
    training, offered, bests = max(found, key=lambda item: max(_rate(best) for best in item[2]))
    if all(best.estimate is None for best in bests):
        raise _no_plan(training, wanted, offered, bests, pins)
    return _plan(training, offered, bests, model_name, started)


def smallest_training_cluster(training: Training, wanted: TrainingSetup, limit: int = 65_536) -> int | None:
    """The fewest devices of `training`'s kind that can train the model at all, however many nodes that takes."""
    fits = 1
    while not _fits(training, wanted, fits):
        fits *= 2
        if fits > limit:
            return None
    low, high = fits // 2, fits
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(training, wanted, middle) else (middle, high)
    return high


def _fits(training: Training, wanted: TrainingSetup, num_devices: int) -> bool:
    return any(best.estimate is not None for best in _search(training, wanted, num_devices, lambda done, total: None))


def _search(
    training: Training,
    wanted: TrainingSetup,
    num_devices: int,
    on_progress: Callable[[int, int], None],
    pins: Mapping[str, int] | None = None,
) -> list[_Best]:
    found = []
    for index, strategy in enumerate(STRATEGIES):
        setup = replace(
            strategy,
            precision=wanted.precision,
            overlap=wanted.overlap,
            zero=wanted.zero,
            gate_after_down=wanted.precision.compute == "fp8",
            deduplicate=wanted.deduplicate and strategy.dispatch == "all_to_all",
        )
        found.append(_best_of(training, setup, num_devices, pins))
        on_progress(index + 1, len(STRATEGIES))
    return found


def _best_of(training: Training, strategy: TrainingSetup, num_devices: int, pins: Mapping[str, int] | None) -> _Best:
    """The fastest candidate of one strategy that fits in memory."""
    degrees = candidates(
        training.model,
        domain=training.group.scale_up_domain,
        num_devices=num_devices,
        batch=training.batch,
        attention=strategy.attention,
        experts=strategy.experts,
        shares_experts=strategy.dispatch == "all_to_all" and (strategy.deduplicate or "shared" in (pins or {})),
        pins=pins,
    )
    total = degrees["pipeline"].size
    states = _states(training, strategy, degrees)
    fits = states < training.usable_bytes
    least = np.inf if np.any(fits) else float(np.min(states, initial=np.inf))
    degrees = _where(degrees, fits)
    best, setup = (0.0, 0), strategy
    for start in range(0, degrees["pipeline"].size, BATCH_OF_CANDIDATES):
        part = {name: column[start : start + BATCH_OF_CANDIDATES] for name, column in degrees.items()}
        estimate = estimate_step(training, _with(strategy, part), "fit")
        memory = np.broadcast_to(np.asarray(estimate.memory.total), part["pipeline"].shape)
        least = min(least, float(np.min(memory)))
        rates = np.where(memory <= training.usable_bytes, estimate.tokens_per_s, 0.0)
        used = part["model_parallel"] * part["pipeline"] * part["data_parallel"]
        index = int(np.lexsort((used, -rates))[0])
        if (rates[index], -used[index]) > best:
            best = float(rates[index]), -int(used[index])
            chosen: dict[str, Any] = {name: int(column[index]) for name, column in part.items()}
            setup = replace(strategy, **chosen)
    found = estimate_step(training, setup, "fit") if best[0] > 0 else None
    return _Best(setup=setup, estimate=found, num_candidates=total, least_bytes=least)


def _states(training: Training, strategy: TrainingSetup, degrees: Degrees) -> NDArray[np.float64]:
    """Bytes of parameters, gradients and optimizer state of each candidate's fullest device."""
    if not degrees["pipeline"].size:
        return np.zeros(0)
    setup = _with(strategy, degrees)
    layers = fullest_stage(training.model, setup.pipeline, setup.virtual_stages)
    parts = state_bytes(rank_parameters(training.model, setup, layers), setup)
    return np.asarray(sum(np.asarray(part) for part in parts), dtype=np.float64)


def _with(strategy: TrainingSetup, degrees: Degrees) -> TrainingSetup:
    """The strategy with candidates as columns."""
    columns: dict[str, Any] = {name: column.astype(np.float64) for name, column in degrees.items()}
    return replace(strategy, **columns)


def _where(degrees: Degrees, keep: BoolArray) -> Degrees:
    return {name: column[keep] for name, column in degrees.items()}


def _rate(best: _Best) -> float:
    return 0.0 if best.estimate is None else one(best.estimate.tokens_per_s)


def _plan(training: Training, offered: int, bests: list[_Best], model_name: str, started: float) -> TrainingPlan:
    """The plan from the best of each strategy, at least one of which fits."""
    winner = max(bests, key=lambda best: (_rate(best), -_used(best)))
    setup, estimate = winner.setup, winner.estimate
    assert estimate is not None
    rejected = []
    for best in bests:
        if best is winner:
            continue
        if best.estimate is None:
            rejected.append(RejectedTraining(name=name_of(best.setup), reason=_why_none(training, best)))
        else:
            rejected.append(lost(training, name_of(best.setup), best.setup, best.estimate, estimate))
    return TrainingPlan(
        model=model_name,
        cluster=training.cluster.name,
        device=training.group.device.name,
        sequence_length=training.sequence_length,
        global_batch=training.batch,
        num_devices=offered,
        weights=setup.precision.weights,
        gradients=setup.precision.gradients,
        compute=setup.precision.compute,
        layout=layout_of(setup, estimate),
        predicted=predicted_of(training, setup, estimate),
        rejected=(*rejected, *one_change(training, setup, estimate)),
        notes=notes_of(training, setup, offered),
        num_candidates=sum(best.num_candidates for best in bests),
        search_s=time.perf_counter() - started,
    )


def _used(best: _Best) -> float:
    return one(best.setup.num_devices)


def _why_none(training: Training, best: _Best) -> str:
    if best.num_candidates == 0:
        return "cannot be run: no degree of parallelism has a head and an expert for every device"
    missing = format_bytes(best.least_bytes - training.usable_bytes)
    return f"does not fit: its smallest layout needs {missing} more than a device has"


def _no_plan(
    training: Training, wanted: TrainingSetup, offered: int, bests: list[_Best], pins: Mapping[str, int] | None
) -> ResourceError:
    device = training.group.device.name
    if pins:
        given = ", ".join(f"{name}={value}" for name, value in pins.items())
        least = min(best.least_bytes for best in bests)
        why = "cannot be run: copies and micro-batches divide the batch, n divides heads, experts and a domain"
        if np.isfinite(least):
            why = f"needs {format_bytes(least - training.usable_bytes)} more than a device has"
        return ResourceError(f"no layout on {offered} {device} with {given}: it {why}: leave some of these out")
    least = min(best.least_bytes for best in bests)
    enough = smallest_training_cluster(training, wanted)
    fix = f"use at least {enough} {device}" if enough else f"use devices with more memory than {device}"
    usable, missing = format_bytes(training.usable_bytes), format_bytes(least - training.usable_bytes)
    return ResourceError(
        f"training does not fit on {offered} {device}: the smallest layout needs {format_bytes(least)} "
        f"per device, {missing} more than the {usable} it has: {fix}"
    )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})


def model_parallel_degrees(
    model: ModelSpec, domain: int, attention: AttentionParallel, experts: ExpertParallel
) -> list[int]:
    """Degrees a strategy can use: heads for each rank, an expert (or a column of each) for each rank."""
    wanted = {*range(1, min(domain, MOST_MODEL_PARALLEL) + 1), *divisors(domain), 2 * domain, 4 * domain}
    most = model.attention.num_heads
    most = min(most, model.router.num_experts if experts == "expert" else model.feed_forward.intermediate)
    if attention == "tensor" and model.num_moe_layers < model.num_layers:
        most = min(most, model.feed_forward.dense_intermediate)
    return sorted(degree for degree in wanted if degree <= most)


def num_groups(num_devices: int, domain: int, degree: int) -> int:
    """Model-parallel groups that fit: none straddles a domain, wide ones consist of whole domains."""
    if degree > domain:
        return num_devices // domain // (degree // domain)
    full, rest = divmod(num_devices, domain)
    return full * (domain // degree) + rest // degree


def stage_counts(num_layers: int) -> list[int]:
    """Pipeline stages worth trying: the fewest for each length of the longest stage."""
    fewest: dict[int, int] = {}
    for stages in range(1, num_layers + 1):
        fewest.setdefault(-(-num_layers // stages), stages)
    return sorted(fewest.values())


def candidates(
    model: ModelSpec,
    *,
    domain: int,
    num_devices: int,
    batch: int,
    attention: AttentionParallel,
    experts: ExpertParallel,
    shares_experts: bool = False,
    pins: Mapping[str, int] | None = None,
) -> Degrees:
    """Everything that can be run, memory aside. `shares_experts`: whether copies may share experts, which is worth it
    where a token goes to a rank once; `pins`: degrees that are fixed, by the names of `PIN_NAMES`."""
    axes: list[Sequence[int]] = [
        model_parallel_degrees(model, domain, attention, experts),
        stage_counts(model.num_layers),
        VIRTUAL_STAGES,
        divisors(batch),
        [size for size in MICRO_BATCHES if batch % size == 0],
        EXPERT_COPIES if shares_experts and experts == "expert" else EXPERT_COPIES[:1],
    ]
    for place, name in enumerate(PIN_NAMES):
        if pins and name in pins:
            axes[place] = _pinned(name, pins[name], axes[place], model.num_layers)
    grid = np.meshgrid(*(np.asarray(axis, dtype=np.int64) for axis in axes), indexing="ij")
    degree, pipeline, chunks, data, micro, shared = (axis.reshape(-1) for axis in grid)
    groups = np.asarray([num_groups(num_devices, domain, value) for value in axes[0]], dtype=np.int64)
    room = groups[np.searchsorted(np.asarray(axes[0]), degree)]
    count = batch // (data * micro)
    keep = (
        (pipeline * data <= room)
        & (batch % (data * micro) == 0)
        & (pipeline * chunks <= model.num_layers)
        & (data % shared == 0)
        & ((shared == 1) | (degree * shared <= model.router.num_experts))
        & ((chunks == 1) | ((pipeline > 1) & (count % pipeline == 0)))
    )
    return _where(dict(zip(PIN_NAMES.values(), (degree, pipeline, chunks, data, micro, shared), strict=True)), keep)


def _pinned(name: str, value: int, tried: Sequence[int], num_layers: int) -> Sequence[int]:
    """The value alone, where it can be run at all. Stages need not be the fewest of their length."""
    if name == "pp":
        return [value] if value <= num_layers else []
    return [value] if value in tried or name in ("chunks", "micro_batch") else []
