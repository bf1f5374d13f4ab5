"""Measures training on several ranks: the trainer's own layers, sums and updates, with gloo over loopback. The
tables are those that `plan --phase train --profile` reads (`cost.profile`).

Two layers of each kind stand for all of them. Every way to share them is run for some numbers of sequences: forward,
backward, and for the plain way the whole step. Times by operator come from the spans that a timeline is made of;
medians over the steps. Weights and tokens are random, as at the begin of a run.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from antiphon.base.allowance import share_of_threads
from antiphon.base.errors import UserError
from antiphon.base.progress import Report
from antiphon.bench.harness.children import Child, Children, join_gloo, programs, seconds_of_calls
from antiphon.bench.harness.limits import measure_gemm_flops_per_s
from antiphon.bench.profile.measure import PROCESSES, Effort
from antiphon.comm.collectives import AllGather, AllReduce, Collective, ReduceScatter, barrier, run
from antiphon.comm.mesh import Group, Mesh, Sizes, connect
from antiphon.cost.curves import Curve, Surface
from antiphon.cost.profile import TrainingLayer, TrainingSum, TrainingTables
from antiphon.kernels import native_rows
from antiphon.models.config import load_model_spec
from antiphon.specs.cluster import ComputeDtype
from antiphon.specs.model import ModelSpec
from antiphon.train.config_tables import LossConfig, OptimizerConfig, ParallelConfig
from antiphon.train.model import Batch, MoeModel
from antiphon.train.optimizer import Optimizer, shards_of
from antiphon.train.passes import Passes
from antiphon.train.pipeline import start_receive, start_send
from antiphon.train.shards import clip_factor
from antiphon.train.spans import Span, StepSpans, share_spans
from antiphon.train.weights import FirstValues

OPTIMIZERS = ("adamw", "muon")
_TIMEOUT_S = 900.0  # beside busy programs a rank may be loading for minutes
_NUM_LAYERS = 2  # of each kind
_WARM = 1


Way = tuple[Any, ...]
"""How a layer is shared: attention, experts, dispatch, kind of layer ("moe", "dense"), ranks of a group."""


@dataclass(frozen=True, kw_only=True)
class TrainingSeconds:
    """With all ranks of a group at work: `layers`, forward, backward and waiting for other ranks in both, by way and by
    number of sequences; `head` of what belongs to no layer; `update` of a parameter by optimizer; `step`: what else a
    step takes; `sums` by number of ranks, collective and size; `message` by size."""

    layers: dict[Way, dict[str, list[float]]] = field(default_factory=dict)
    head: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    update: dict[str, float] = field(default_factory=dict)
    sums: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    message: list[float] = field(default_factory=list)


def time_training(rank: int, wanted: "WantedTraining", store: str, ranks: int, degrees: list[int]) -> TrainingSeconds:
    """What a rank's process does (`harness.children`): join a gloo group over loopback and time the trainer's parts;
    layers are shared by groups of each of `degrees` ranks. Rank 0's answer counts, and it keeps the store, a file.
    Ranks have the threads that `antiphon train --nproc` gives them. Groups are ended all together: PyTorch would name
    a new one like one that ended, and find its addresses in the store."""
    torch.set_num_threads(share_of_threads(ranks))
    native_rows.share_threads()
    if ranks > 1:
        join_gloo(store, rank, ranks, _TIMEOUT_S)
    try:
        return _time_all(wanted, few_layers(load_model_spec(wanted.model)), rank, ranks, degrees)
    finally:
        if ranks > 1:
            dist.destroy_process_group()


def few_layers(spec: ModelSpec) -> ModelSpec:
    """The model with two layers of each kind that it has."""
    kinds = tuple(kind for kind in (False, True) if kind in spec.moe_layers for _ in range(_NUM_LAYERS))
    return replace(spec, num_layers=len(kinds), moe_layers=kinds)


def _time_all(
    wanted: "WantedTraining", spec: ModelSpec, rank: int, ranks: int, degrees: Sequence[int]
) -> TrainingSeconds:
    found = TrainingSeconds()
    plain = connect(Sizes(world_size=ranks), rank, _TIMEOUT_S)
    _time_layers(wanted, spec, plain, "all_to_all", 1, found)
    for name in OPTIMIZERS:
        found.update[name], step_s = _time_step(wanted, spec, plain, name)
        found.step.append(step_s)
    for degree in degrees:
        _time_ways(wanted, spec, plain, degree, found)
        mesh = connect(Sizes(world_size=ranks, tensor=degree), rank, _TIMEOUT_S)
        found.sums[degree] = _time_sums(wanted.effort, mesh.group("tensor"))
        if not found.message:
            found.message.extend(_time_messages(wanted.effort, mesh.group("tensor")))
    return found


def _time_ways(wanted: "WantedTraining", spec: ModelSpec, plain: Mesh, degree: int, found: TrainingSeconds) -> None:
    """All ways to share a layer between `degree` ranks; as many such groups as there are ranks for."""
    for attention in ("sequence", "tensor"):
        for experts in ("expert", "expert_tensor"):
            sizes = Sizes(world_size=plain.sizes.world_size, **{attention: degree, experts: degree})
            mesh = connect(sizes, plain.rank, _TIMEOUT_S)
            for dispatch in ("all_to_all", "gather_scatter") if experts == "expert" else ("gather_scatter",):
                _time_layers(wanted, spec, mesh, dispatch, degree, found)


def _model(wanted: "WantedTraining", spec: ModelSpec, mesh: Mesh, dispatch: str, spans: StepSpans) -> MoeModel:
    model = MoeModel(
        spec,
        mesh,
        max_positions=wanted.sequence_length,
        dtype=getattr(torch, wanted.dtype),
        first=FirstValues(0, 0.02),
        parallel=ParallelConfig(dispatch=dispatch),  # type: ignore[arg-type]  # one of its names
    )
    share_spans(model, spans)
    return model


def _batch(wanted: "WantedTraining", spec: ModelSpec, sequences: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, spec.vocab_size, (sequences, wanted.sequence_length + 1), generator=generator)
    positions = torch.arange(wanted.sequence_length).expand(sequences, -1).contiguous()
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions, None)


def _time_layers(
    wanted: "WantedTraining", spec: ModelSpec, mesh: Mesh, dispatch: str, degree: int, found: TrainingSeconds
) -> None:
    """Forward and backward for each number of sequences of a group."""
    spans = StepSpans()
    model = _model(wanted, spec, mesh, dispatch, spans)
    passes = Passes(model, LossConfig(), spans)
    attention = "tensor" if mesh.sizes.tensor > 1 else "sequence"
    experts = "tensor" if mesh.sizes.expert_tensor > 1 else "expert"
    exchange = "all_to_all" if dispatch == "all_to_all" else "all_gather"
    for sequences in wanted.effort.sequences:
        batch = _batch(wanted, spec, sequences, mesh.sizes.place(mesh.rank, "data"))
        taken: list[tuple[dict[str, float], dict[str, float], float, float]] = []
        for number in range(_WARM + wanted.effort.training_steps):
            barrier(mesh.world)
            mesh.ledger.take()
            spans.on = True
            passes.run([batch])
            spans.on = False
            seconds = _of_layers(spec, spans.take(), mesh)
            model.zero_grad(set_to_none=True)
            if number >= _WARM:
                taken.append(seconds)
        forward, backward, waiting, head = zip(*taken, strict=True)
        for kind in forward[0]:
            by_name = found.layers.setdefault((attention, experts, exchange, kind, degree), {})
            by_name.setdefault("forward", []).append(median(each[kind] for each in forward))
            by_name.setdefault("backward", []).append(median(each[kind] for each in backward))
            by_name.setdefault("waiting", []).append(median(waiting))
        if degree == 1:
            found.head.append(median(head))


def _of_layers(
    spec: ModelSpec, spans: list[Span], mesh: Mesh
) -> tuple[dict[str, float], dict[str, float], float, float]:
    """One run's seconds: forward and backward by layer of each kind, a layer's waiting; what belongs to no layer, the
    head's."""
    forward = {"moe" if kind else "dense": 0.0 for kind in spec.moe_layers}
    backward, head_s = dict(forward), 0.0
    for span in spans:
        own_s = (span.end_ns - span.start_ns - span.inner_ns) * 1e-9
        layer = span.label.layer
        if layer < 0:
            head_s += own_s
        else:
            passed = backward if span.label.backward else forward
            passed["moe" if spec.moe_layers[layer] else "dense"] += own_s / _NUM_LAYERS
    waited = mesh.ledger.take().waited_s
    inside = sum(seconds for name, seconds in waited.items() if not name.startswith("loss"))
    return forward, backward, inside / spec.num_layers, head_s


def _time_step(wanted: "WantedTraining", spec: ModelSpec, mesh: Mesh, optimizer: str) -> tuple[float, float]:
    """(seconds of a parameter's update, of what else a step takes beside layers and sums), all ranks at work."""
    spans = StepSpans()
    model = _model(wanted, spec, mesh, "all_to_all", spans)
    config = OptimizerConfig(name=optimizer)  # type: ignore[arg-type]  # one of its names
    shards = shards_of(model, 0, config)
    updates, passes = Optimizer(model, shards, config), Passes(model, LossConfig(), spans)
    num_parameters = sum(piece.values.numel() for piece in shards.pieces)
    batch = _batch(wanted, spec, 1, mesh.rank)
    updated, rest = [], []
    for _ in range(_WARM + wanted.effort.training_steps):
        barrier(mesh.world)
        spans.on = True
        begin = time.perf_counter()
        passes.run([batch])
        spans.on = False
        passed = time.perf_counter()
        shards.reduce()
        norm_from = time.perf_counter()
        norm = shards.norm()
        updates.step(1e-6, clip_factor(norm, config.clip))
        shards.end_step()
        updated.append((time.perf_counter() - norm_from) / num_parameters)
        recorded = sum(span.end_ns - span.start_ns - span.inner_ns for span in spans.take())
        rest.append(max(0.0, passed - begin - recorded * 1e-9))
    return median(updated[_WARM:]), median(rest[_WARM:])


def _time_sums(effort: Effort, group: Group) -> dict[str, list[float]]:
    """Median seconds by collective, for each size of the whole tensor."""
    found: dict[str, list[float]] = {"all_reduce": [], "reduce_scatter": [], "all_gather": []}
    for size in effort.sum_bytes:
        part = max(1, size // 4 // group.size)
        whole, own, sizes = torch.ones(part * group.size), torch.ones(part), (part,) * group.size
        collectives: dict[str, tuple[Collective, torch.Tensor]] = {
            "all_reduce": (AllReduce(group, "sum"), whole),
            "reduce_scatter": (ReduceScatter(group, "sum", sizes), whole),
            "all_gather": (AllGather(group, "sum", sizes), own),
        }
        for name, (collective, x) in collectives.items():
            found[name].append(_median_s(effort, group, partial(run, collective, x)))
    return found


def _time_messages(effort: Effort, group: Group) -> list[float]:
    """One way between the first two ranks by bytes: half of there and back."""

    def there_and_back(x: torch.Tensor) -> None:
        if group.index == 0:
            start_send(group, 1, 0, "message", x).wait()
            start_receive(group, 1, 1, "message", x).wait()
        elif group.index == 1:
            start_receive(group, 0, 0, "message", x).wait()
            start_send(group, 0, 1, "message", x).wait()

    tensors = [torch.ones(max(1, size // 4)) for size in effort.sum_bytes]
    return [_median_s(effort, group, partial(there_and_back, x)) / 2 for x in tensors]


def _median_s(effort: Effort, group: Group, action: Callable[[], object]) -> float:
    return median(seconds_of_calls(action, max(5, effort.training_steps), partial(barrier, group)))


# --- all ranks' seconds to tables


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
    with Children(PROCESSES) as crew:
        handles: list[Child] = []
        for number, ranks in enumerate(counts):
            more = range(len(handles), ranks)
            made = [partial(int, rank) for rank in more]
            handles += crew.start([f"rank {rank}" for rank in more], made, programs()) if made else []
            degrees = [each for each in counts if 1 < each <= min(limits.values()) and ranks % each == 0]
            found[ranks] = _measure(wanted, crew, handles[:ranks], degrees)
            report(number + 1, len(counts))
    return _tables(wanted, found, measure_gemm_flops_per_s(getattr(torch, wanted.dtype)))


def _measure(wanted: WantedTraining, crew: Children, handles: Sequence[Child], degrees: list[int]) -> TrainingSeconds:
    """Rank 0's answer."""
    with tempfile.TemporaryDirectory() as folder:
        for handle in handles:
            handle.begin(time_training, wanted, f"{folder}/store", len(handles), degrees)
        answers: list[TrainingSeconds] = crew.collect(handles, ANSWER_TIMEOUT_S)
        return answers[0]


def _tables(wanted: WantedTraining, found: dict[int, TrainingSeconds], flops_per_s: float) -> TrainingTables:
    ranks, effort = tuple(sorted(found)), wanted.effort
    tokens = tuple(float(count * wanted.sequence_length) for count in effort.sequences)
    sizes = tuple(map(float, effort.sum_bytes))
    layers: dict[Way, dict[str, dict[int, list[float]]]] = {}
    for count, seconds in found.items():
        for way, by_name in seconds.layers.items():
            for name, values in by_name.items():
                layers.setdefault(way, {}).setdefault(name, {})[count] = values
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
        head=_surface({count: each.head for count, each in found.items()}, tokens),
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
