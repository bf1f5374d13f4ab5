"""The training plan: the layout with the most tokens per second among all that fit in memory, and why the others lost.

1. Strategies: sequence- or tensor-parallel attention, expert- or tensor-parallel experts, dispatch by all-to-all or
   all-gather; of each, all degrees (`planner.training_space`).
2. Memory first: what its parameters and states alone do not fit is dropped before anything is timed.
3. Each candidate makes again as little as its memory allows, cheapest first (`cost.training.rematerialize`).
4. The fastest wins; of equally fast ones that with fewer devices.
5. The winner is held against the best of every other strategy, and against itself with one thing changed at a time.

Rejected: one group of devices of several kinds. A pipeline is as slow as its slowest stage; kinds are planned apart.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from antiphon.base.errors import ResourceError, UserError
from antiphon.base.units import format_bytes
from antiphon.cost.profile import Profile
from antiphon.cost.training.memory import fullest_stage, rank_parameters, state_bytes
from antiphon.cost.training.setup import OverlapLevel, Training, TrainingPrecision, TrainingSetup
from antiphon.cost.training.step import estimate_step
from antiphon.cost.training.step_estimate import StepEstimate
from antiphon.planner.training_explain import layout_of, lost, name_of, notes_of, one, one_change, predicted_of
from antiphon.planner.training_space import TrainingDegrees, candidates
from antiphon.specs.cluster import ClusterSpec, NodeGroup
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


class NoTrainingPlan(ResourceError):
    """Nothing fits. `num_devices`: the fewest of this kind that would do, None if no number up to 65,536 does."""

    def __init__(self, message: str, num_devices: int | None) -> None:
        super().__init__(message)
        self.num_devices = num_devices


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
    device: str | None = None,
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
    devices of one kind (`device`; None: whichever kind is fastest).

    `pins`: degrees that are fixed, by the names of `training_space.PIN_NAMES`. `profile`: its training tables take the
    place of rooflines. `compress`: gradients may travel in BF16. `deduplicate`: the trainer sends a token once per
    rank. `on_progress(done, total)` is called after each strategy. `UserError` for what cannot be meant,
    `NoTrainingPlan` if nothing fits."""
    started = time.perf_counter()
    wanted = replace(TrainingSetup(), precision=precision or TrainingPrecision(), overlap=overlap, zero=zero)
    wanted = replace(wanted, deduplicate=deduplicate)
    if compress and wanted.precision.gradients == "float32":
        wanted = replace(wanted, precision=replace(wanted.precision, gradient_wire="bfloat16"))
    found: list[tuple[Training, int, list[_Best]]] = []
    groups = _groups(cluster, device)
    for number, group in enumerate(groups):
        offered = _offered(group, num_devices, alone=len(groups) == 1)
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
                on_progress(number * total + done, len(groups) * total)

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


def _groups(cluster: ClusterSpec, device: str | None) -> tuple[NodeGroup, ...]:
    if device is None:
        return cluster.groups
    found = tuple(group for group in cluster.groups if group.device.name.lower() == device.lower())
    if not found:
        known = ", ".join(group.device.name for group in cluster.groups)
        raise UserError(f"cluster {cluster.name} has no {device}: choose one of {known}")
    return found


def _offered(group: NodeGroup, num_devices: int | None, *, alone: bool) -> int:
    if num_devices is None:
        return group.num_devices
    if num_devices < 1:
        raise UserError(f"training: num_devices is {num_devices}: it must be at least 1")
    if num_devices > group.num_devices and alone:
        raise UserError(
            f"training: num_devices is {num_devices}, but the cluster has {group.num_devices} {group.device.name}: "
            f"ask for at most {group.num_devices}"
        )
    return min(num_devices, group.num_devices)


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
    total = len(degrees)
    states = _states(training, strategy, degrees)
    fits = states < training.usable_bytes
    least = np.inf if np.any(fits) else float(np.min(states, initial=np.inf))
    degrees = degrees.where(fits)
    best: tuple[float, int, tuple[int, int, int, int, int, int]] | None = None
    for start in range(0, len(degrees), BATCH_OF_CANDIDATES):
        part = degrees.where(np.arange(len(degrees)) // BATCH_OF_CANDIDATES == start // BATCH_OF_CANDIDATES)
        estimate = estimate_step(training, _with(strategy, part), "fit")
        memory = np.broadcast_to(np.asarray(estimate.memory.total), (len(part),))
        least = min(least, float(np.min(memory)))
        rates = np.where(memory <= training.usable_bytes, estimate.tokens_per_s, 0.0)
        used = part.model_parallel * part.pipeline * part.data_parallel
        index = int(np.lexsort((used, -rates))[0])
        if rates[index] > 0 and (best is None or (rates[index], -used[index]) > best[:2]):
            best = (float(rates[index]), -int(used[index]), part.at(index))
    if best is None:
        return _Best(setup=strategy, estimate=None, num_candidates=total, least_bytes=least)
    setup = _single(strategy, best[2])
    return _Best(setup=setup, estimate=estimate_step(training, setup, "fit"), num_candidates=total, least_bytes=least)


def _states(training: Training, strategy: TrainingSetup, degrees: TrainingDegrees) -> NDArray[np.float64]:
    """Bytes of parameters, gradients and optimizer state of each candidate's fullest device."""
    if not len(degrees):
        return np.zeros(0)
    setup = _with(strategy, degrees)
    layers = fullest_stage(training.model, setup.pipeline, setup.virtual_stages)
    parts = state_bytes(rank_parameters(training.model, setup, layers), setup)
    return np.asarray(sum(np.asarray(part) for part in parts), dtype=np.float64)


def _with(strategy: TrainingSetup, degrees: TrainingDegrees) -> TrainingSetup:
    """The strategy with candidates as columns."""
    return replace(
        strategy,
        model_parallel=degrees.model_parallel.astype(np.float64),
        pipeline=degrees.pipeline.astype(np.float64),
        virtual_stages=degrees.virtual_stages.astype(np.float64),
        data_parallel=degrees.data_parallel.astype(np.float64),
        micro_batch=degrees.micro_batch.astype(np.float64),
        expert_copies=degrees.expert_copies.astype(np.float64),
    )


def _single(strategy: TrainingSetup, degrees: tuple[int, int, int, int, int, int]) -> TrainingSetup:
    degree, pipeline, chunks, data, micro, shared = degrees
    return replace(
        strategy,
        model_parallel=degree,
        pipeline=pipeline,
        virtual_stages=chunks,
        data_parallel=data,
        micro_batch=micro,
        expert_copies=shared,
    )


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
) -> NoTrainingPlan:
    device = training.group.device.name
    if pins:
        given = ", ".join(f"{name}={value}" for name, value in pins.items())
        least = min(best.least_bytes for best in bests)
        why = "cannot be run: copies and micro-batches divide the batch, n divides heads, experts and a domain"
        if np.isfinite(least):
            why = f"needs {format_bytes(least - training.usable_bytes)} more than a device has"
        return NoTrainingPlan(f"no layout on {offered} {device} with {given}: it {why}: leave some of these out", None)
    least = min(best.least_bytes for best in bests)
    enough = smallest_training_cluster(training, wanted)
    fix = f"use at least {enough} {device}" if enough else f"use devices with more memory than {device}"
    usable, missing = format_bytes(training.usable_bytes), format_bytes(least - training.usable_bytes)
    return NoTrainingPlan(
        f"training does not fit on {offered} {device}: the smallest layout needs {format_bytes(least)} "
        f"per device, {missing} more than the {usable} it has: {fix}",
        enough,
    )
