"""From several ranks' seconds to the tables that `plan --phase train --profile` reads (`cost.profile`)."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from antiphon.base.allowance import share_of_threads
from antiphon.base.errors import UserError
from antiphon.base.progress import Report
from antiphon.bench.limits import measure_gemm_flops_per_s
from antiphon.bench.profile.crew import Crew, RigHandle
from antiphon.bench.profile.effort import Effort
from antiphon.bench.profile.orders import TimeTraining, TrainingSeconds
from antiphon.cost.curves import Curve, Surface
from antiphon.cost.profile import TrainingLayer, TrainingSum, TrainingTables
from antiphon.models.config import load_model_spec
from antiphon.specs.device import ComputeDtype

MOST_RANKS = 64
ANSWER_TIMEOUT_S = 3600.0  # all ways to share a layer are one order


@dataclass(frozen=True, kw_only=True)
class WantedTraining:
    """What to measure. `ranks`: how many at a time."""

    model: Path
    effort: Effort
    sequence_length: int
    ranks: tuple[int, ...] = (1, 2, 4)
    dtype: ComputeDtype = "float32"

    def __post_init__(self) -> None:
        if not self.ranks or any(not 1 <= count <= MOST_RANKS for count in self.ranks):
            raise UserError(f"--ranks is {list(self.ranks)}: give numbers from 1 to {MOST_RANKS}")
        if self.sequence_length < max(self.ranks):
            raise UserError(f"--sequence-length is {self.sequence_length}: it must be at least {max(self.ranks)} ranks")


def measure_training(wanted: WantedTraining, report: Report) -> TrainingTables:
    """Blocks for a minute or so. `UserError` if the model is at fault."""
    spec = load_model_spec(wanted.model)
    if wanted.sequence_length > spec.max_position:
        raise UserError(f"--sequence-length is {wanted.sequence_length}: the model has {spec.max_position} positions")
    counts = sorted({1, *wanted.ranks})
    limits = {
        "attention heads": spec.attention.num_heads,
        "experts": spec.router.num_experts,
        "columns of an expert": spec.feed_forward.intermediate,
    }
    found: dict[int, TrainingSeconds] = {}
    with Crew() as crew:
        handles: list[RigHandle] = []
        for number, ranks in enumerate(counts):
            handles += [crew.start(f"rank {rank}") for rank in range(len(handles), ranks)]
            degrees = [each for each in counts if 1 < each <= min(limits.values()) and ranks % each == 0]
            found[ranks] = _measure(wanted, handles[:ranks], degrees)
            report(number + 1, len(counts))
    return _tables(wanted, found, measure_gemm_flops_per_s(getattr(torch, wanted.dtype)))


def _measure(wanted: WantedTraining, handles: Sequence[RigHandle], degrees: list[int]) -> TrainingSeconds:
    """Rank 0's answer. Ranks have the threads that `antiphon train --nproc` gives them."""
    effort = wanted.effort
    with tempfile.TemporaryDirectory() as folder:
        for rank, handle in enumerate(handles):
            handle.begin(
                TimeTraining(
                    rank=rank,
                    world_size=len(handles),
                    num_threads=share_of_threads(len(handles)),
                    store=f"{folder}/store",
                    model=str(wanted.model),
                    dtype=wanted.dtype,
                    sequence_length=wanted.sequence_length,
                    sequences=list(effort.sequences),
                    degrees=degrees,
                    sizes_bytes=list(effort.sum_bytes),
                    repetitions=effort.training_steps,
                )
            )
        answers = [handle.answer(TrainingSeconds, ANSWER_TIMEOUT_S) for handle in handles]
        return answers[0]


def _tables(wanted: WantedTraining, found: dict[int, TrainingSeconds], flops_per_s: float) -> TrainingTables:
    ranks, effort = tuple(sorted(found)), wanted.effort
    tokens = tuple(float(count * wanted.sequence_length) for count in effort.sequences)
    sizes = tuple(map(float, effort.sum_bytes))
    layers: dict[tuple[Any, ...], dict[str, dict[int, list[float]]]] = {}
    head: dict[int, list[float]] = {}
    for count, seconds in found.items():
        for each in seconds.layers:  # by ascending number of sequences
            for kind in each.forward_s:
                way = (each.attention, each.experts, each.dispatch, kind, each.model_parallel)
                values = {"forward": each.forward_s[kind], "backward": each.backward_s[kind], "waiting": each.waiting_s}
                for name, value in values.items():
                    layers.setdefault(way, {}).setdefault(name, {}).setdefault(count, []).append(value)
            if each.model_parallel == 1:
                head.setdefault(count, []).append(each.head_s)
    return TrainingTables(
        dtype=wanted.dtype,
        flops_per_s=flops_per_s,
        sequence_length=wanted.sequence_length,
        ranks=ranks,
        layers=tuple(
            TrainingLayer(
                attention=way[0],
                experts=way[1],
                dispatch=way[2],
                layer=way[3],
                model_parallel=way[4],
                **{name: _surface(values, tokens) for name, values in by_name.items()},
            )
            for way, by_name in layers.items()
        ),
        head=_surface(head, tokens),
        update={
            name: Curve(tuple(map(float, ranks)), tuple(found[count].update[name] for count in ranks))
            for name in found[ranks[0]].update
        },
        step=Curve(tuple(map(float, ranks)), tuple(max(found[count].step) for count in ranks)),
        sums=tuple(
            TrainingSum(
                name=name,
                degree=degree,
                times=_surface(
                    {count: each.sums[degree][name] for count, each in found.items() if degree in each.sums}, sizes
                ),
            )
            for degree in ranks[1:]
            for name in ("all_reduce", "reduce_scatter", "all_gather")
            if degree in found[degree].sums
        ),
        message=next((Curve(sizes, tuple(each.message)) for each in found.values() if each.message), None),
    )


def _surface(by_ranks: dict[int, list[float]], second: tuple[float, ...]) -> Surface:
    ranks = sorted(by_ranks)
    return Surface(tuple(map(float, ranks)), second, tuple(tuple(by_ranks[count]) for count in ranks))
