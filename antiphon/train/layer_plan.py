"""How one layer runs: its operators, its schedule, what it keeps; checked when it is made, before the first step.

What is kept between forward and backward, and what is made again (MegaScale-MoE, section 4.1):

    none        keep all that backward reads
    selective   keep what is dear to make: products and attention; make norms, activations and exchanges again
    full        keep the layer's input and its routing
    a list      keep these tensors, by name

An operator that is run again may be an exchange: then its rows are received again. Choices of experts, counts and maps
of rows are always kept: choosing again could choose otherwise. Rejected: `torch.utils.checkpoint`. It runs a whole
layer again before its backward begins, products and all; here each tensor is made again where the backward schedule
says, beside other work.

1. The schedule's lines for this layer are taken. Every operator has to have its actions, each once.
2. What has to be made again and stands nowhere is put right before the first action that needs it.
3. Forward and backward are gone through: an action whose inputs are not there yet is refused.
4. It follows after which action a tensor is used for the last time; there it is freed.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from antiphon.base.errors import UserError
from antiphon.kernels.ops.products import Products
from antiphon.specs.checked import nearest_names
from antiphon.train.expert_exchange import schedule_in_parts
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
    WAIT_OF,
    WEIGHTS,
    Action,
    Schedule,
    one_by_one,
    only,
    parse,
    with_late_weights,
)
from antiphon.train.operators import Graph, Operator, RowExchange, WeightProduct, part_name, whole_name
from antiphon.train.tiled import Tiled

PROJECTED = ("qkv", "qkv_a2a")  # one of them, if backward reads it: `qkv_a2a` in tiles
DEAR = (*PROJECTED, "attn", "ln2_in", "fc1_out", "fc2_out", "returned", "shared_fc1_out", "shared_out", "dense_fc1_out")
HEADS = ("q_a2a", "k_a2a", "v_a2a")
Keep = str | tuple[str, ...]


def kept_and_again(graph: Graph, keep: Keep, dropped: Collection[str] = ()) -> tuple[frozenset[str], frozenset[str]]:
    """(names held until backward, operators that backward runs again) under a policy or a list of names; "none" without
    those in `dropped`. A name may be of another kind of layer; `check_names` refuses it if it is of none."""
    saved = graph.saved
    if keep == "none":
        wanted = {whole_name(name) for name in saved} - set(dropped)
    elif keep == "selective":
        wanted = {*DEAR, *(HEADS if saved.isdisjoint(PROJECTED) else ())}
    elif keep == "full":
        wanted = set[str]()
    else:
        wanted = set(keep)
    kept, again = {graph.begin}, set[str]()
    kept.update(name for each in graph.operators.values() if each.once for name in each.makes)
    waiting = list(saved)
    while waiting:
        name = waiting.pop()
        maker = graph.maker_of.get(name)
        if name in kept or maker is None:
            continue
        if whole_name(name) in wanted:
            kept.add(name)  # even if its maker runs again for another name: what comes out of it is wanted
        elif maker.name not in again:
            again.add(maker.name)
            waiting += maker.reads
    return frozenset(kept), frozenset(again)


def check_names(keep: Collection[str], graphs: Collection[Graph]) -> None:
    """`UserError` for a name that no layer of the model has."""
    known = sorted({whole_name(name) for graph in graphs for name in graph.maker_of})
    for name in keep:
        if name not in known:
            raise UserError(
                f"memory.keep names {name!r}, which no layer of this model has: did you mean "
                f"{' or '.join(nearest_names(name, known)) or 'none'}? There are: {', '.join(known)}"
            )


STARTED = (RowExchange, Tiled)  # operators that are started and waited for


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """`keep` and `dropped`: as for `kept_and_again`. `schedule`: as text, and `where` it comes from; empty: the default
    one, or, unless `beside`, that with every exchange waited for where it is started. `parts`: of the experts' rows,
    see `train.expert_exchange`. `late_weights`: of the default schedule, see `with_late_weights`. `products`: in which
    arithmetic layers multiply by their weights."""

    keep: Keep = "none"
    dropped: tuple[str, ...] = ()
    schedule: str = ""
    where: str = "the default schedule"
    beside: bool = True
    parts: int = 1
    late_weights: bool = False
    products: Products = field(default_factory=Products)

    @property
    def weighs_early(self) -> bool:
        """Whether the router's weights multiply before the experts' second product, see `train.feed_forward`. Not in
        FP8: they widen the range of what it reads (MegaScale-MoE, section 7)."""
        return self.keep in ("selective", "full") and self.products.kind == "plain"


@dataclass(frozen=True)
class LayerPlan:
    """`kept`: names held until backward; `again`: operators that backward runs again. `freed_forward[i]`: names that
    nothing reads after action i; without the kept ones, unless nothing is recorded. `freed_backward` likewise."""

    graph: Graph
    kept: frozenset[str]
    again: frozenset[str]
    schedule: Schedule
    freed_forward: tuple[tuple[str, ...], ...]
    freed_backward: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(graph: Graph, options: PlanOptions) -> "LayerPlan":
        """`UserError` for a schedule that cannot run."""
        kept, again = kept_and_again(graph, options.keep, options.dropped)
        text = options.schedule
        if not text:
            schedule = parse(DEFAULT, options.where)
            if options.late_weights:
                schedule = with_late_weights(schedule, graph.operators)
            schedule = schedule_in_parts(schedule, graph.operators)
            text = str(schedule if options.beside else one_by_one(schedule))
        return LayerPlan._of(graph, kept, again, text, options.where)

    def with_schedule(self, text: str, where: str) -> "LayerPlan":
        """The same operators in another order."""
        return LayerPlan._of(self.graph, self.kept, self.again, text, where)

    def made_again(self, operator: Operator) -> frozenset[str]:
        """What of it backward needs again."""
        read_again = {name for each in self.again for name in self.graph.operators[each].reads}
        return frozenset(operator.makes) & (self.graph.saved | read_again) - self.kept

    @staticmethod
    def _of(graph: Graph, kept: frozenset[str], again: frozenset[str], schedule: str, where: str) -> "LayerPlan":
        text, needed = parse(schedule, where), _needed(graph, again)
        forward = only(text.forward, graph.operators, again)
        _check_all_there(forward, needed.forward, f"{where}, forward")
        backward = list(_with_again(graph, kept, again, only(text.backward, graph.operators, again)))
        _check_all_there(backward, needed.backward, f"{where}, backward")
        _check_order(graph, forward, kept, f"{where}, forward", backward=False)
        _check_order(graph, backward, kept, f"{where}, backward", backward=True)
        return LayerPlan(
            graph,
            kept,
            again,
            Schedule(tuple(forward), tuple(backward)),
            _last_uses([_touched(graph, each) for each in forward], {graph.end}),
            _last_uses([_touched(graph, each) for each in backward], set()),
        )


def records_again(operator: Operator, again: Collection[str]) -> bool:
    """Whether what the operator's backward needs is noted when it runs again, and not in forward."""
    return operator.name in again and bool(operator.saves)


def _needed(graph: Graph, again: Collection[str]) -> Schedule:
    forward, backward = list[Action](), list[Action]()
    for name, operator in graph.operators.items():
        exchanged = isinstance(operator, STARTED)
        forward += [Action(verb, name) for verb in ((START, WAIT) if exchanged else (RUN,))]
        verbs: list[str] = []
        if operator.has_gradient:
            verbs += (START_GRADIENT, WAIT_GRADIENT) if exchanged else (GRADIENT,)
        if isinstance(operator, (WeightProduct, Tiled)):
            verbs.append(WEIGHTS)
        if name in again:
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
    if isinstance(operator, Tiled):
        return operator.reads_at(action.verb)
    match action.verb:
        case "" | "start" | "again" | "start again":
            return operator.reads
        case "gradient":
            return operator.reads[1:] if isinstance(operator, WeightProduct) else operator.saves
        case "weights":
            return operator.saves
        case _:
            return ()


def _touched(graph: Graph, action: Action) -> set[str]:
    """Names that `action` reads or makes."""
    made = graph.operators[action.operator].makes if action.verb in (RUN, WAIT, AGAIN, WAIT_AGAIN) else ()
    return {*read_by(graph, action), *made}


def _with_again(graph: Graph, kept: Collection[str], again: Collection[str], actions: list[Action]) -> Iterator[Action]:
    """`actions`, with what they need again put before them where it is not there already."""
    there, started, done = set(kept), set[str](), set[Action]()

    def need(names: tuple[str, ...]) -> Iterator[Action]:
        for name in names:
            maker = graph.maker_of.get(name)
            if name not in there and maker is not None and maker.name in again:
                yield from run_again(maker)

    def run_again(operator: Operator) -> Iterator[Action]:
        if isinstance(operator, STARTED):
            if operator.name not in started:
                yield from do(Action(START_AGAIN, operator.name))
            yield from do(Action(WAIT_AGAIN, operator.name))
        else:
            yield from do(Action(AGAIN, operator.name))

    def do(action: Action) -> Iterator[Action]:
        if action in done and action.verb in (AGAIN, START_AGAIN, WAIT_AGAIN):
            return
        done.add(action)
        operator = graph.operators[action.operator]
        if action.verb == GRADIENT and records_again(operator, again):
            yield from run_again(operator)
        yield from need(read_by(graph, action))
        if action.verb == WAIT_AGAIN and operator.name not in started:
            yield from do(Action(START_AGAIN, operator.name))
        if action.verb == START_AGAIN:
            started.add(operator.name)
        if action.verb in (AGAIN, WAIT_AGAIN):
            there.update(operator.makes)
        yield action

    for action in actions:
        yield from do(action)


def needs(
    graph: Graph, actions: Sequence[Action], kept: Collection[str], *, backward: bool
) -> dict[Action, dict[Action, str]]:
    """For each action, those that have to come before it, and for what. `kept`: names that backward finds there."""
    making = (each for each in actions if each.verb in (RUN, WAIT, AGAIN, WAIT_AGAIN))
    there_already = kept if backward else ()
    makers = {
        name: each for each in making for name in graph.operators[each.operator].makes if name not in there_already
    }
    readers, there = _readers(graph), set(actions)
    found: dict[Action, dict[Action, str]] = {}
    starts = _starts_of_parts(graph, actions)
    for action in actions:
        before = found[action] = {makers[name]: name for name in read_by(graph, action) if name in makers}
        if action in starts:
            before[starts[action]] = "the part before it, which ranks send in one order"
        if action.verb in _STARTED:
            before[Action(_STARTED[action.verb], action.operator)] = "what was started"
        again = Action(AGAIN, action.operator)
        if action.verb == GRADIENT and again in there and graph.operators[action.operator].saves:
            before[again] = "what its backward reads"
        operator = graph.operators[action.operator]
        if action.verb == WEIGHTS and isinstance(operator, Tiled) and not operator.arrives:
            before[Action(WAIT_GRADIENT, action.operator)] = "the gradient of its product"
        if backward and action.verb in (GRADIENT, WEIGHTS, START_GRADIENT):
            for name in graph.operators[action.operator].makes:
                for reader in readers.get(name, ()):
                    last = Action(WAIT_GRADIENT if isinstance(reader, STARTED) else GRADIENT, reader.name)
                    if last in there:
                        before[last] = f"the gradient of {name}"
    return found


def _starts_of_parts(graph: Graph, actions: Sequence[Action]) -> dict[Action, Action]:
    """The start of each part's exchange, with that of the part before it."""
    found = {}
    for action in actions:
        operator = graph.operators[action.operator]
        if isinstance(operator, RowExchange) and operator.part[0] and action.verb in WAIT_OF:
            found[action] = Action(action.verb, part_name(whole_name(operator.name), operator.part[0] - 1))
    return found


_STARTED = {wait: start for start, wait in WAIT_OF.items()}


def _check_order(graph: Graph, actions: Sequence[Action], kept: Collection[str], where: str, *, backward: bool) -> None:
    place = {action: index for index, action in enumerate(actions)}
    for action, before in needs(graph, actions, kept, backward=backward).items():
        for other, what in before.items():
            if place[other] > place[action]:
                raise UserError(
                    f"{where}: {str(action)!r} needs {what}, which {str(other)!r} gives, and that comes later, so each "
                    f"would wait for the other: put {str(other)!r} first"
                )


def _readers(graph: Graph) -> Mapping[str, list[Operator]]:
    """For each name, the operators that read it and give it a gradient."""
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
