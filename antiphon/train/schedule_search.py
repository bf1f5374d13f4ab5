"""`overlap.search`: finds the order of a layer's operators from times that are measured here, before the first step.

1. Some passes run with every exchange waited for where it is started, so that each operator and each exchange has its
   own time. Ranks that share the rows of a stage take the slowest rank's times, so that all find the same order.
2. `search` looks for a faster order of each kind of layer, forward and backward. One processor computes, one link
   carries exchanges in the order in which they were started; a wait ends when its exchange does. All orders that the
   operators' needs allow are built up action by action (list scheduling, all choices at once): after n actions, one
   front of states for each set of actions done, where a state that is nowhere ahead of another is dropped. That is
   exact as long as no more than `MOST_STATES` are left after an action; beyond that the most promising stay. What is
   found is compared with the order that was there, so it is never slower in this model.
3. The order is written beside the run. A run that goes on takes it from there if all ranks find one that fits, and
   another run may name it as `overlap.schedule`.

Which order is taken changes no number: sums are made in the order of operators, not of the schedule.
Rejected: an integer program. The solver would be a dependency, and needs longer than a step.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.base.system import replace_text
from antiphon.base.units import format_seconds
from antiphon.comm.mesh import Mesh
from antiphon.specs.checked import read_text
from antiphon.train.device import HOST
from antiphon.train.layer_plan import LayerPlan, needs
from antiphon.train.layer_schedule import WAIT_OF, Action, Schedule, one_by_one, span_name
from antiphon.train.model import Batch, MoeModel
from antiphon.train.passes import Passes
from antiphon.train.ranks import largest, sums
from antiphon.train.shards import Shards
from antiphon.train.spans import Span

MOST_STATES = 2000
Needs = Mapping[Action, Mapping[Action, str]]


@dataclass(frozen=True)
class ActionTimes:
    """Seconds of each action on the processor, and of each start's exchange on the link."""

    computing_s: Mapping[Action, float]
    travelling_s: Mapping[Action, float]


@dataclass(frozen=True, slots=True)
class _SearchState:
    """`arrivals_s`: of what is under way, by the action that waits for it."""

    now_s: float
    link_free_s: float
    arrivals_s: tuple[tuple[Action, float], ...]
    order: tuple[Action, ...]

    def after(self, action: Action, times: ActionTimes) -> "_SearchState":
        now_s = self.now_s + times.computing_s.get(action, 0.0)
        arrivals, link_s = dict(self.arrivals_s), self.link_free_s
        if action in times.travelling_s:
            link_s = max(now_s, link_s) + times.travelling_s[action]
            arrivals[Action(WAIT_OF[action.verb], action.operator)] = link_s
        now_s = max(now_s, arrivals.pop(action, 0.0))
        by_name = sorted(arrivals.items(), key=lambda arrival: str(arrival[0]))
        return _SearchState(now_s, link_s, tuple(by_name), (*self.order, action))

    def is_behind(self, other: "_SearchState") -> bool:
        """Whether nothing here is earlier than in `other`, which did the same actions."""
        return (
            self.now_s >= other.now_s
            and self.link_free_s >= other.link_free_s
            and all(mine[1] >= theirs[1] for mine, theirs in zip(self.arrivals_s, other.arrivals_s, strict=True))
        )


def seconds_of(order: Sequence[Action], times: ActionTimes) -> float:
    """How long this order takes."""
    state = _SearchState(0.0, 0.0, (), ())
    for action in order:
        state = state.after(action, times)
    return state.now_s


def search(
    order: Sequence[Action], needs: Needs, times: ActionTimes, most_states: int = MOST_STATES
) -> tuple[tuple[Action, ...], float, bool]:
    """The fastest order of the actions in `order` that `needs` allows; its seconds; whether no order is faster, by
    these times."""
    numbers = {action: 1 << index for index, action in enumerate(order)}
    masks = {action: sum(numbers[other] for other in needs[action]) for action in order}
    left_s, is_exact = _longest_after(order, needs, times), True
    fronts: dict[int, list[_SearchState]] = {0: [_SearchState(0.0, 0.0, (), ())]}
    for _ in order:
        following: dict[int, list[_SearchState]] = {}
        for done, states in fronts.items():
            for action in order:
                if not done & numbers[action] and masks[action] & done == masks[action]:
                    front = following.setdefault(done | numbers[action], [])
                    for state in states:
                        _add(front, state.after(action, times))
        fronts, was_exact = _best(following, numbers, left_s, most_states)
        is_exact = is_exact and was_exact
    best = min((state for states in fronts.values() for state in states), key=lambda state: state.now_s)
    given_s = seconds_of(order, times)
    if best.now_s >= given_s:
        return tuple(order), given_s, is_exact
    return best.order, best.now_s, is_exact


def _add(front: list[_SearchState], state: _SearchState) -> None:
    if not any(state.is_behind(other) for other in front):
        front[:] = [other for other in front if not other.is_behind(state)]
        front.append(state)


def _best(
    fronts: dict[int, list[_SearchState]],
    numbers: Mapping[Action, int],
    left_s: Mapping[Action, float],
    most_states: int,
) -> tuple[dict[int, list[_SearchState]], bool]:
    """The states from which the end can be nearest, and whether that is all of them."""
    every = [(done, state) for done, states in fronts.items() for state in states]
    if len(every) <= most_states:
        return fronts, True

    def least_s(done: int, state: _SearchState) -> float:
        return state.now_s + max((left_s[each] for each in numbers if not done & numbers[each]), default=0.0)

    every.sort(key=lambda item: (least_s(*item), item[1].now_s, item[1].link_free_s))
    kept: dict[int, list[_SearchState]] = {}
    for done, state in every[:most_states]:
        kept.setdefault(done, []).append(state)
    return kept, False


def _longest_after(order: Sequence[Action], needs: Needs, times: ActionTimes) -> Mapping[Action, float]:
    """Seconds from the beginning of each action to the end, on the longest chain of needs."""
    left_s = dict.fromkeys(order, 0.0)
    for action in reversed(order):
        left_s[action] += times.computing_s.get(action, 0.0)
        for other in needs[action]:
            way_s = times.travelling_s.get(other, 0.0) if WAIT_OF.get(other.verb) == action.verb else 0.0
            left_s[other] = max(left_s[other], left_s[action] + way_s)
    return left_s


ROUNDS = 4  # the first one warms up
_log = get_logger("train")


def choose_schedules(model: MoeModel, folder: Path, passes: Passes, shards: Shards, batches: Sequence[Batch]) -> None:
    """Give the layers of this rank the schedules found, and say how they compare. `batches`: of a step, to measure
    with; no parameter changes. All ranks call it together, before the first step."""
    by_kind = _kinds(model)
    known = {kind: _file(folder, model.mesh, kind) for kind in by_kind}
    former = _former(model, by_kind, known)
    if not any(sums(model.mesh.world, "schedule", former is None)):  # else all measure
        assert former is not None
        for layer, plan in former.items():
            model.layers[layer].plan = plan
        return
    options = {layer: model.layers[layer].plan for layers in by_kind.values() for layer in layers}
    for layer, plan in options.items():
        model.layers[layer].plan = plan.with_schedule(str(one_by_one(plan.schedule)), "one by one")
    measured = _measure(passes, shards, batches)
    for kind, layers in by_kind.items():
        plan = options[layers[0]]
        of_kind = [span for span in measured if span.label.layer in layers]
        orders = []
        for actions, backward in ((plan.schedule.forward, False), (plan.schedule.backward, True)):
            times = _times(actions, of_kind, model.mesh, backward=backward)
            needed = needs(plan.graph, actions, plan.kept, backward=backward)
            order, seconds, is_exact = search(actions, needed, times)
            orders.append(order)
            if model.mesh.rank == 0:
                way, exact = "backward" if backward else "forward", "of the orders looked at the fastest"
                _log.info(
                    "schedule of %s layers, %s: %s by default, %s found (%s)",
                    *(kind, way, format_seconds(seconds_of(actions, times)), format_seconds(seconds)),
                    "no order is faster" if is_exact else exact,
                )
        text = str(Schedule(*orders))
        for layer in layers:
            model.layers[layer].plan = options[layer].with_schedule(text, f"the schedule found for {kind} layers")
        if model.mesh.stage.index == 0:
            replace_text(known[kind], text)


def _former(
    model: MoeModel, by_kind: Mapping[str, list[int]], known: Mapping[str, Path]
) -> dict[int, LayerPlan] | None:
    """This rank's layers in the orders that a former run has left; None where there are none that fit."""
    try:
        return {
            layer: model.layers[layer].plan.with_schedule(read_text(known[kind]), str(known[kind]))
            for kind, layers in by_kind.items()
            for layer in layers
        }
    except UserError:  # there is none, or it is of a run whose ranks shared layers in another way
        return None


def _kinds(model: MoeModel) -> dict[str, list[int]]:
    """This rank's layers by kind."""
    found: dict[str, list[int]] = {}
    for layer in model.layers:
        found.setdefault("MoE" if model.spec.moe_layers[layer.layer] else "dense", []).append(layer.layer)
    return found


def _file(folder: Path, mesh: Mesh, kind: str) -> Path:
    return folder / f"schedule-{kind}-stage-{mesh.sizes.place(mesh.rank, 'pipeline')}.txt"


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


def _times(actions: Sequence[Action], spans: Sequence[Span], mesh: Mesh, *, backward: bool) -> ActionTimes:
    """The median of each action over layers and rounds; the slowest rank of a stage counts."""
    by_name: dict[str, list[float]] = {}
    for span in spans:
        if span.label.backward == backward:
            by_name.setdefault(span.label.operator, []).append((span.end_ns - span.start_ns - span.inner_ns) * 1e-9)
    own = torch.tensor([statistics.median(by_name.get(span_name(action), [0.0])) for action in actions], device=HOST)
    slowest = largest(mesh.stage, "schedule", own)
    seconds: Mapping[Action, float] = dict(zip(actions, slowest.tolist(), strict=True))
    waits = {Action(WAIT_OF[each.verb], each.operator): each for each in actions if each.verb in WAIT_OF}
    return ActionTimes(
        {action: each for action, each in seconds.items() if action not in waits},
        {start: seconds[wait] for wait, start in waits.items()},
    )
