"""`overlap.search`: finds the order of a layer's operators from times that are measured here, before the first step.

1. Some passes run with every exchange waited for where it is started, so that each operator and each exchange has its
   own time. Ranks that share the rows of a stage take the slowest rank's times, so that all find the same order.
2. `train.schedule_search` looks for a faster order of each kind of layer, forward and backward.
3. The order is written beside the run. A run that goes on takes it from there if all ranks find one that fits, and
   another run may name it as `overlap.schedule`.

Which order is taken changes no number: sums are made in the order of operators, not of the schedule.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.base.units import format_seconds
from antiphon.comm.collectives import AllGather, AllReduce, run
from antiphon.comm.mesh import Mesh
from antiphon.specs.checked import read_text
from antiphon.train.layer_plan import needs
from antiphon.train.layer_schedule import WAIT_OF, Action, Schedule, one_by_one, span_name
from antiphon.train.model import Batch, MoeModel
from antiphon.train.passes import Passes
from antiphon.train.schedule_search import Found, Times, search, seconds_of
from antiphon.train.shards import Shards
from antiphon.train.spans import Span

ROUNDS = 4  # the first one warms up
_log = get_logger("train")


@dataclass(frozen=True)
class Choice:
    """What was chosen for one kind of layer and one direction."""

    kind: str
    backward: bool
    default_s: float
    found: Found

    def __str__(self) -> str:
        way = "backward" if self.backward else "forward"
        exact = "no order is faster" if self.found.is_exact else "of the orders looked at the fastest"
        times = f"{format_seconds(self.default_s)} by default, {format_seconds(self.found.seconds)} found"
        return f"schedule of {self.kind} layers, {way}: {times} ({exact})"


def choose_schedules(
    model: MoeModel, folder: Path, passes: Passes, shards: Shards, batches: Sequence[Batch]
) -> list[Choice]:
    """Give the layers of this rank the schedules found, and say how they compare. `batches`: of a step, to measure
    with; no parameter changes. All ranks call it together, before the first step."""
    by_kind = _kinds(model)
    known = {kind: _file(folder, model.mesh, kind) for kind in by_kind}
    missing = torch.tensor([float(not _usable(model, by_kind, known))])  # on a rank: then all measure
    if not float(run(AllReduce(model.mesh.world, "schedule"), missing)):
        for kind, layers in by_kind.items():
            _give(model, layers, read_text(known[kind]), str(known[kind]))
        return []
    options = {layer: model.layers[layer].plan for layers in by_kind.values() for layer in layers}
    for layer, plan in options.items():
        model.layers[layer].plan = plan.with_schedule(str(one_by_one(plan.schedule)), "one by one")
    measured = _measure(passes, shards, batches)
    choices = []
    for kind, layers in by_kind.items():
        plan = options[layers[0]]
        of_kind = [span for span in measured if span.label.layer in layers]
        orders = []
        for actions, backward in ((plan.schedule.forward, False), (plan.schedule.backward, True)):
            times = _times(actions, of_kind, model.mesh, backward=backward)
            found = search(actions, needs(plan.graph, actions, plan.keeping.kept, backward=backward), times)
            choices.append(Choice(kind, backward, seconds_of(actions, times), found))
            orders.append(found.order)
        text = str(Schedule(*orders))
        _give(model, layers, text, f"the schedule found for {kind} layers")
        if model.mesh.stage.index == 0:
            partial = known[kind].with_suffix(".partial")
            partial.write_text(text, encoding="utf-8")
            partial.replace(known[kind])
    if model.mesh.rank == 0:
        for choice in choices:
            _log.info("%s", choice)
    return choices


def _usable(model: MoeModel, by_kind: Mapping[str, list[int]], known: Mapping[str, Path]) -> bool:
    """Whether a former run has left orders that fit this rank's layers."""
    try:
        for kind, layers in by_kind.items():
            for layer in layers:
                model.layers[layer].plan.with_schedule(read_text(known[kind]), str(known[kind]))
    except UserError:  # there is none, or it is of a run whose ranks shared layers in another way
        return False
    return True


def _kinds(model: MoeModel) -> dict[str, list[int]]:
    """This rank's layers by kind."""
    found: dict[str, list[int]] = {}
    for layer in model.layers:
        found.setdefault("MoE" if model.spec.moe_layers[layer.layer] else "dense", []).append(layer.layer)
    return found


def _file(folder: Path, mesh: Mesh, kind: str) -> Path:
    return folder / f"schedule-{kind}-stage-{mesh.sizes.place(mesh.rank, 'pipeline')}.txt"


def _give(model: MoeModel, layers: Sequence[int], text: str, where: str) -> None:
    for layer in layers:
        plan = model.layers[layer].plan
        model.layers[layer].plan = plan.with_schedule(text, where)


def _measure(passes: Passes, shards: Shards, batches: Sequence[Batch]) -> list[Span]:
    spans = passes.spans
    spans.on = True
    for number in range(ROUNDS):
        spans.step = number
        shards.begin_step()
        passes.run(batches)
        shards.end_step()
        passes.model.zero_grad()
        shards.zero_grad()
    taken = spans.take()
    spans.on = False
    return [span for span in taken if span.step]


def _times(actions: Sequence[Action], spans: Sequence[Span], mesh: Mesh, *, backward: bool) -> Times:
    """By action, the median over layers and rounds; of the ranks of a stage the slowest."""
    by_name: dict[str, list[float]] = {}
    for span in spans:
        if span.label.backward == backward:
            by_name.setdefault(span.label.operator, []).append((span.end_ns - span.start_ns - span.inner_ns) * 1e-9)
    own = torch.tensor([statistics.median(by_name.get(span_name(action), [0.0])) for action in actions])
    ranks = mesh.stage.size
    slowest = run(AllGather(mesh.stage, "schedule", (len(actions),) * ranks), own.double()).view(ranks, -1).amax(0)
    seconds: Mapping[Action, float] = dict(zip(actions, slowest.tolist(), strict=True))
    waits = {Action(WAIT_OF[each.verb], each.operator): each for each in actions if each.verb in WAIT_OF}
    return Times(
        {action: each for action, each in seconds.items() if action not in waits},
        {start: seconds[wait] for wait, start in waits.items()},
    )
