"""How one layer runs: its operators, its schedule, what it keeps; checked when it is made, before the first step.

1. The schedule's lines for this layer are taken. Every operator has to have its actions, each once.
2. What has to be made again and stands nowhere is put right before the first action that needs it.
3. Forward and backward are gone through: an action whose inputs are not there yet is refused.
4. It follows after which action a tensor is used for the last time; there it is freed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from antiphon.base.errors import UserError
from antiphon.train.keep import Keep, Keeping, keeping
from antiphon.train.layer_schedule import (
    AGAIN,
    DEFAULT,
    GRADIENT,
    RUN,
    START,
    START_AGAIN,
    START_GRADIENT,
    WAIT,
    WAIT_AGAIN,
    WAIT_GRADIENT,
    WEIGHTS,
    Action,
    Schedule,
    only,
    parse,
)
from antiphon.train.operators import Exchange, Graph, Operator, Product


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """`keep`: a policy or names, see `train.keep`. `schedule`: as text, and where it comes from."""

    keep: Keep = "none"
    schedule: str = DEFAULT
    where: str = "the default schedule"


@dataclass(frozen=True)
class LayerPlan:
    """`freed_forward[i]`: names that nothing reads after action i; without the kept ones, unless nothing is recorded.
    `freed_backward` likewise."""

    graph: Graph
    keeping: Keeping
    schedule: Schedule
    freed_forward: tuple[tuple[str, ...], ...]
    freed_backward: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(graph: Graph, options: PlanOptions) -> "LayerPlan":
        """`UserError` for a schedule that cannot run."""
        kept = keeping(graph, options.keep)
        text = parse(options.schedule, options.where)
        forward = only(text.forward, graph.operators, kept.again)
        backward = only(text.backward, graph.operators, kept.again)
        needed = _needed(graph, kept)
        _check_all_there(forward, needed.forward, f"{options.where}, forward")
        backward = list(_with_again(graph, kept, backward))
        _check_all_there(backward, needed.backward, f"{options.where}, backward")
        _check_forward(graph, forward, options.where)
        _check_backward(graph, kept, backward, options.where)
        return LayerPlan(
            graph,
            kept,
            Schedule(tuple(forward), tuple(backward)),
            _last_uses([_touched(graph, each) for each in forward], {graph.end}),
            _last_uses([_touched(graph, each) for each in backward], set()),
        )


def _needed(graph: Graph, kept: Keeping) -> Schedule:
    forward, backward = list[Action](), list[Action]()
    for name, operator in graph.operators.items():
        exchanged = isinstance(operator, Exchange)
        forward += [Action(verb, name) for verb in ((START, WAIT) if exchanged else (RUN,))]
        verbs: list[str] = []
        if operator.has_gradient:
            verbs += (START_GRADIENT, WAIT_GRADIENT) if exchanged else (GRADIENT,)
        if isinstance(operator, Product):
            verbs.append(WEIGHTS)
        if name in kept.again:
            verbs += (START_AGAIN, WAIT_AGAIN) if exchanged else (AGAIN,)
        backward += [Action(verb, name) for verb in verbs]
    return Schedule(tuple(forward), tuple(backward))


def _check_all_there(actions: list[Action], needed: tuple[Action, ...], where: str) -> None:
    counts = Counter(actions)
    missing = [each for each in needed if not counts[each]]
    if missing:
        raise UserError(f"{where}: no line says {', '.join(repr(str(each)) for each in missing)}: add it")
    twice = [each for each, count in counts.items() if count > 1]
    if twice:
        raise UserError(f"{where}: {str(twice[0])!r} stands there {counts[twice[0]]} times: once is needed")
    unknown = [each for each in actions if each not in set(needed)]
    if unknown:
        raise UserError(f"{where}: {str(unknown[0])!r} is nothing that this operator does: take the line out")


def read_by(graph: Graph, action: Action) -> tuple[str, ...]:
    """Names of the values that must be there for `action`."""
    operator = graph.operators[action.operator]
    match action.verb:
        case "" | "start" | "again" | "start again":
            return operator.reads
        case "gradient":
            return operator.reads[1:] if isinstance(operator, Product) else operator.saves
        case "weights":
            return operator.saves
        case _:
            return ()


def _touched(graph: Graph, action: Action) -> set[str]:
    """Names that `action` reads or makes."""
    made = graph.operators[action.operator].makes if action.verb in (RUN, WAIT, AGAIN, WAIT_AGAIN) else ()
    return {*read_by(graph, action), *made}


def _with_again(graph: Graph, kept: Keeping, actions: list[Action]) -> Iterator[Action]:
    """`actions`, with what they need again put before them where it is not there already."""
    there, started, done = set(kept.kept), set[str](), set[Action]()

    def need(names: tuple[str, ...]) -> Iterator[Action]:
        for name in names:
            maker = graph.maker_of.get(name)
            if name not in there and maker is not None and maker.name in kept.again:
                yield from again(maker)

    def again(operator: Operator) -> Iterator[Action]:
        if isinstance(operator, Exchange):
            if operator.name not in started:
                yield from do(Action(START_AGAIN, operator.name))
            yield from do(Action(WAIT_AGAIN, operator.name))
        else:
            yield from do(Action(AGAIN, operator.name))

    def do(action: Action) -> Iterator[Action]:
        if action in done and action.verb in (AGAIN, START_AGAIN, WAIT_AGAIN):
            return
        done.add(action)
        yield from need(read_by(graph, action))
        operator = graph.operators[action.operator]
        if action.verb == WAIT_AGAIN and operator.name not in started:
            yield from do(Action(START_AGAIN, operator.name))
        if action.verb == START_AGAIN:
            started.add(operator.name)
        if action.verb in (AGAIN, WAIT_AGAIN):
            there.update(operator.makes)
        yield action

    for action in actions:
        yield from do(action)


def _check_forward(graph: Graph, actions: list[Action], where: str) -> None:
    there, started = {graph.begin}, set[str]()
    for action in actions:
        operator = graph.operators[action.operator]
        _check_there(graph, action, there, f"{where}, forward")
        if action.verb == WAIT and operator.name not in started:
            raise UserError(f"{where}, forward: {str(action)!r} stands before 'start {operator.name}': turn them round")
        if action.verb == START:
            started.add(operator.name)
        else:
            there.update(operator.makes)


def _check_there(graph: Graph, action: Action, there: set[str], where: str) -> None:
    for name in read_by(graph, action):
        if name not in there:
            maker = graph.maker_of[name].name
            raise UserError(
                f"{where}: {str(action)!r} needs {name}, which {maker} makes, and {maker} comes later, so each would "
                f"wait for the other: put {maker} first"
            )


def _check_backward(graph: Graph, kept: Keeping, actions: list[Action], where: str) -> None:
    where = f"{where}, backward"
    there, done = set(kept.kept), set[Action]()
    readers = _readers(graph)
    for action in actions:
        operator = graph.operators[action.operator]
        _check_there(graph, action, there, where)
        if action.verb in (GRADIENT, WEIGHTS, START_GRADIENT):
            for reader in (reader for name in operator.makes for reader in readers.get(name, ())):
                last = Action(WAIT_GRADIENT if isinstance(reader, Exchange) else GRADIENT, reader.name)
                if last not in done:
                    raise UserError(
                        f"{where}: {str(action)!r} needs the gradient that {str(last)!r} gives, which comes later, so "
                        f"each would wait for the other: put {str(last)!r} first"
                    )
        for verb, first in ((WAIT_GRADIENT, START_GRADIENT), (WAIT_AGAIN, START_AGAIN)):
            if action.verb == verb and Action(first, operator.name) not in done:
                raise UserError(f"{where}: {str(action)!r} stands before '{first} {operator.name}': turn them round")
        done.add(action)
        if action.verb in (AGAIN, WAIT_AGAIN):
            there.update(operator.makes)


def _readers(graph: Graph) -> Mapping[str, list[Operator]]:
    """By name: the operators that read it and give it a gradient."""
    found: dict[str, list[Operator]] = {}
    for operator in graph.operators.values():
        for name in set(operator.reads) - graph.facts if operator.has_gradient else ():
            found.setdefault(name, []).append(operator)
    return found


def _last_uses(touched: list[set[str]], never: set[str]) -> tuple[tuple[str, ...], ...]:
    last = {name: index for index, names in enumerate(touched) for name in names}
    return tuple(
        tuple(sorted(name for name in names if last[name] == index and name not in never))
        for index, names in enumerate(touched)
    )
