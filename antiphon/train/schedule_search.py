"""Finds an order of a layer's operators from measured times. Plain Python.

One processor computes, one wire carries exchanges in the order in which they were started; a wait ends when its
exchange does. All orders that the operators' needs allow are built up action by action (list scheduling, all choices
at once): after n actions, one front of states for each set of actions done, where a state that is nowhere ahead of
another is dropped. That is exact as long as no more than `MOST_STATES` are left after an action; beyond that the most
promising stay. What is found is compared with the order that was there, so it is never slower in this model.

Rejected: an integer program. The solver would be a dependency, and needs longer than a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from antiphon.train.layer_schedule import WAIT_OF, Action

MOST_STATES = 2000
Needs = Mapping[Action, Mapping[Action, str]]


@dataclass(frozen=True)
class Times:
    """Seconds of each action on the processor, and of each start's exchange on the wire."""

    computing_s: Mapping[Action, float]
    travelling_s: Mapping[Action, float]


@dataclass(frozen=True)
class Found:
    """`is_exact`: no order is faster, by these times."""

    order: tuple[Action, ...]
    seconds: float
    is_exact: bool


@dataclass(frozen=True, slots=True)
class _State:
    """`arrivals_s`: of what is under way, by the action that waits for it."""

    now_s: float
    wire_free_s: float
    arrivals_s: tuple[tuple[Action, float], ...]
    order: tuple[Action, ...]

    def after(self, action: Action, times: Times) -> "_State":
        now_s = self.now_s + times.computing_s.get(action, 0.0)
        arrivals, wire_s = dict(self.arrivals_s), self.wire_free_s
        if action in times.travelling_s:
            wire_s = max(now_s, wire_s) + times.travelling_s[action]
            arrivals[Action(WAIT_OF[action.verb], action.operator)] = wire_s
        now_s = max(now_s, arrivals.pop(action, 0.0))
        return _State(now_s, wire_s, tuple(sorted(arrivals.items(), key=_by_name)), (*self.order, action))

    def is_behind(self, other: "_State") -> bool:
        """Whether nothing here is earlier than in `other`, which did the same actions."""
        return (
            self.now_s >= other.now_s
            and self.wire_free_s >= other.wire_free_s
            and all(mine[1] >= theirs[1] for mine, theirs in zip(self.arrivals_s, other.arrivals_s, strict=True))
        )


def seconds_of(order: Sequence[Action], times: Times) -> float:
    """How long this order takes."""
    state = _State(0.0, 0.0, (), ())
    for action in order:
        state = state.after(action, times)
    return state.now_s


def search(order: Sequence[Action], needs: Needs, times: Times, most_states: int = MOST_STATES) -> Found:
    """The fastest order of the actions in `order` that `needs` allows."""
    numbers = {action: 1 << index for index, action in enumerate(order)}
    masks = {action: sum(numbers[other] for other in needs[action]) for action in order}
    left_s, is_exact = _longest_after(order, needs, times), True
    fronts: dict[int, list[_State]] = {0: [_State(0.0, 0.0, (), ())]}
    for _ in order:
        following: dict[int, list[_State]] = {}
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
        return Found(tuple(order), given_s, is_exact)
    return Found(best.order, best.now_s, is_exact)


def _add(front: list[_State], state: _State) -> None:
    if not any(state.is_behind(other) for other in front):
        front[:] = [other for other in front if not other.is_behind(state)]
        front.append(state)


def _best(
    fronts: dict[int, list[_State]], numbers: Mapping[Action, int], left_s: Mapping[Action, float], most_states: int
) -> tuple[dict[int, list[_State]], bool]:
    """The states from which the end can be nearest, and whether that is all of them."""
    every = [(done, state) for done, states in fronts.items() for state in states]
    if len(every) <= most_states:
        return fronts, True

    def least_s(done: int, state: _State) -> float:
        return state.now_s + max((left_s[each] for each in numbers if not done & numbers[each]), default=0.0)

    every.sort(key=lambda item: (least_s(*item), item[1].now_s, item[1].wire_free_s))
    kept: dict[int, list[_State]] = {}
    for done, state in every[:most_states]:
        kept.setdefault(done, []).append(state)
    return kept, False


def _longest_after(order: Sequence[Action], needs: Needs, times: Times) -> Mapping[Action, float]:
    """Seconds from the beginning of each action to the end, on the longest chain of needs."""
    left_s = dict.fromkeys(order, 0.0)
    for action in reversed(order):
        left_s[action] += times.computing_s.get(action, 0.0)
        for other in needs[action]:
            way_s = times.travelling_s.get(other, 0.0) if WAIT_OF.get(other.verb) == action.verb else 0.0
            left_s[other] = max(left_s[other], left_s[action] + way_s)
    return left_s


def _by_name(arrival: tuple[Action, float]) -> str:
    return str(arrival[0])
