"""In which order a layer's operators run. A schedule is text, one list of actions forward, one backward. A line has an
action, or several with commas between them:

    forward:
    ln1                       run an operator
    start dispatch            begin an exchange ...
    wait dispatch             ... and take its result
    backward:
    gradient fc1              the gradient of what it reads
    weights fc1               of its parameters, where that is a step of its own (products)
    start gradient dispatch   begin the reverse exchange ...
    wait gradient dispatch
    again ln2                 run an operator again, for what was not kept
    start again dispatch      receive again ...
    wait again dispatch

`DEFAULT` below is the one that runs where a run names no other. It is written for all layers: lines of operators that a
layer does not have, and of what need not be made again, are skipped.

Where the experts work in parts (`train.expert_exchange`) their operators have numbers: "fc1/1", "fc1/2".

All ranks of a group run one schedule, line by line, so they start a group's collectives in one order.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from antiphon.base.errors import UserError
from antiphon.specs.checked import did_you_mean
from antiphon.train.operators import whole_name

RUN, START, WAIT = "", "start", "wait"
GRADIENT, WEIGHTS, START_GRADIENT, WAIT_GRADIENT = "gradient", "weights", "start gradient", "wait gradient"
AGAIN, START_AGAIN, WAIT_AGAIN = "again", "start again", "wait again"
WAIT_OF = {START: WAIT, START_GRADIENT: WAIT_GRADIENT, START_AGAIN: WAIT_AGAIN}
FORWARD_VERBS = (START, WAIT)
BACKWARD_VERBS = (START_GRADIENT, WAIT_GRADIENT, START_AGAIN, WAIT_AGAIN, GRADIENT, WEIGHTS, AGAIN)


@dataclass(frozen=True, slots=True)
class Action:
    """What is done with which operator."""

    verb: str
    operator: str

    def __str__(self) -> str:
        return f"{self.verb} {self.operator}".strip()


@dataclass(frozen=True)
class Schedule:
    forward: tuple[Action, ...]
    backward: tuple[Action, ...]

    def __str__(self) -> str:
        parts = (("forward:", self.forward), ("backward:", self.backward))
        return "".join(f"{head}\n" + "".join(f"{each}\n" for each in actions) for head, actions in parts)


def actions_of(line: str) -> list[str]:
    """What stands between the commas of a schedule's line, without its comment: actions, or `forward:` or `backward:`,
    with which a list begins."""
    return [" ".join(each.split()) for each in line.partition("#")[0].split(",") if each.strip()]


def parse(text: str, where: str) -> Schedule:
    """The schedule that `text` writes out. `UserError` for a line that is no action of an operator that exists."""
    found: dict[str, list[Action]] = {"forward:": [], "backward:": []}
    part = ""
    for number, line in enumerate(text.splitlines(), start=1):
        for words in actions_of(line):
            if words in found:
                part = words
            elif part:
                found[part].append(_action(words, part, f"{where}, line {number}"))
            else:
                raise UserError(f"{where}, line {number}: {words!r} stands before 'forward:' and 'backward:'")
    return Schedule(tuple(found["forward:"]), tuple(found["backward:"]))


def _action(words: str, part: str, where: str) -> Action:
    verbs = FORWARD_VERBS if part == "forward:" else BACKWARD_VERBS
    verb = next((verb for verb in verbs if words.startswith(f"{verb} ")), RUN)
    operator = words.removeprefix(verb).strip()
    if part == "backward:" and verb == RUN:
        raise UserError(f"{where}: {words!r} does not say what is done: begin with {', '.join(BACKWARD_VERBS)}")
    if whole_name(operator) not in OPERATORS:
        raise UserError(f"{where}: there is no operator {operator!r}: {did_you_mean(operator, sorted(OPERATORS))}")
    return Action(verb, operator)


def one_by_one(schedule: Schedule) -> Schedule:
    """Each exchange waited for where it is started: nothing runs beside it."""

    def whole(actions: Iterable[Action]) -> Iterator[Action]:
        for action in actions:
            if action.verb not in WAIT_OF.values():
                yield action
            if action.verb in WAIT_OF:
                yield Action(WAIT_OF[action.verb], action.operator)

    return Schedule(tuple(whole(schedule.forward)), tuple(whole(schedule.backward)))


def only(actions: Iterable[Action], operators: Collection[str], again: Collection[str]) -> list[Action]:
    """Those of `operators`; of what is run again those in `again`."""
    return [
        each
        for each in actions
        if each.operator in (again if each.verb in (AGAIN, START_AGAIN, WAIT_AGAIN) else operators)
    ]


def with_late_weights(schedule: Schedule, operators: Collection[str]) -> Schedule:
    """`schedule` with the gradients of the experts' first weights behind the way back of heads, where nothing else is
    left to compute, and not behind the way back of rows, which those of the second weights fill."""
    heads = next((name for name in ("qkv_heads_a2a", "heads_a2a") if name in operators), None)
    if heads is None:
        return schedule
    late = [each for each in schedule.backward if each in _LATE]
    order = [each for each in schedule.backward if each not in _LATE]
    place = order.index(Action(START_GRADIENT, heads)) + 1
    return Schedule(schedule.forward, (*order[:place], *late, *order[place:]))


_LATE = frozenset(
    Action(verb, operator)
    for verb, operator in (
        (WAIT_AGAIN, "dispatch"),
        (WAIT_AGAIN, "dispatch_fc1"),
        (AGAIN, "scatter"),
        (WEIGHTS, "fc1"),
        (WEIGHTS, "dispatch_fc1"),
        (WEIGHTS, "dispatch_2_fc1"),
    )
)

DEFAULT = """
forward:
ln1
start tensor_gather, wait tensor_gather
start tensor_gather_qkv, wait tensor_gather_qkv
qkv
start qkv_heads_a2a, wait qkv_heads_a2a
rope, heads
pack_heads, start heads_a2a, wait heads_a2a, unpack_heads
attention
rows
pack_rows, start rows_a2a, wait rows_a2a, unpack_rows
start rows_a2a_out, wait rows_a2a_out
out
start tensor_scatter, wait tensor_scatter
start out_tensor_scatter, wait out_tensor_scatter
add_attention
ln2
dense_fc1, dense_activation, dense_fc2
widen, gate, route
hop, start routing, send
start dispatch, start dispatch_fc1        # behind it: half of the shared expert
shared_fc1, shared_activation
wait routing, arrive, choices
wait dispatch
hop_2, start routing_2, send_2
start dispatch_2, start dispatch_2_fc1
wait routing_2, arrive_2, choices_2
wait dispatch_2
sort, scatter
wait dispatch_fc1, wait dispatch_2_fc1
fc1, activation, weigh, fc2, weigh_bias
gather
start combine_2, start fc2_combine_2
wait combine_2, wait fc2_combine_2
total_2
start combine, start fc2_combine          # behind it: the other half
shared_fc2, shared_gate
wait combine, wait fc2_combine
total, over_budget, add
backward:
gradient add
gradient dense_fc2, weights dense_fc2
gradient dense_activation
gradient dense_fc1, weights dense_fc1
again ln2
gradient over_budget, gradient total
start gradient combine, start gradient fc2_combine    # behind it: activations made again, the shared expert
again activation, again weigh
gradient shared_gate
gradient shared_fc2, weights shared_fc2
gradient shared_activation
gradient shared_fc1, weights shared_fc1
wait gradient combine, wait gradient fc2_combine
gradient total_2
start gradient combine_2, start gradient fc2_combine_2
wait gradient combine_2, wait gradient fc2_combine_2
again send               # what is received again travels behind the experts' gradients, when the wire is idle
start again dispatch, start again dispatch_fc1
start again qkv_heads_a2a, again rope, again pack_heads
start again heads_a2a, again pack_rows
start again rows_a2a, start again rows_a2a_out
gradient gather, gradient weigh_bias
gradient fc2, gradient weigh, gradient activation, gradient fc1
gradient scatter
gradient choices_2, gradient arrive_2
start gradient routing_2
start gradient dispatch_2, start gradient dispatch_2_fc1
wait gradient routing_2, gradient hop_2
wait gradient dispatch_2, wait gradient dispatch_2_fc1
gradient send_2
gradient choices, gradient arrive
start gradient routing
start gradient dispatch, start gradient dispatch_fc1  # behind it: gradients of the experts' weights
weights fc2, weights fc2_combine, weights fc2_combine_2
wait again dispatch, wait again dispatch_fc1, again scatter
weights fc1, weights dispatch_fc1, weights dispatch_2_fc1
again widen
wait gradient routing, gradient hop
gradient gate, gradient widen
wait gradient dispatch, wait gradient dispatch_fc1
gradient send
gradient ln2
gradient add_attention
start gradient tensor_scatter, start gradient out_tensor_scatter
again ln1
wait gradient tensor_scatter, wait gradient out_tensor_scatter
gradient out
gradient rows, gradient unpack_rows
start gradient rows_a2a, start gradient rows_a2a_out  # behind it: the output projection's weights
wait again rows_a2a, wait again rows_a2a_out
weights out, weights rows_a2a_out, weights out_tensor_scatter
wait gradient rows_a2a, wait gradient rows_a2a_out
gradient pack_rows
gradient attention
gradient heads, gradient unpack_heads
start gradient heads_a2a, wait gradient heads_a2a
gradient pack_heads, gradient rope
start gradient qkv_heads_a2a, wait gradient qkv_heads_a2a
gradient qkv
start gradient tensor_gather, start gradient tensor_gather_qkv
start again tensor_gather, wait again tensor_gather
start again tensor_gather_qkv, wait again tensor_gather_qkv
weights qkv, weights qkv_heads_a2a, weights tensor_gather_qkv
wait gradient tensor_gather, wait gradient tensor_gather_qkv
gradient ln1
"""
OPERATORS = frozenset(
    words.split()[-1] for line in DEFAULT.splitlines() for words in actions_of(line) if ":" not in words
)


def span_name(action: Action) -> str:
    """What the time of `action` is recorded as: gradients are those in backward."""
    if action.verb in (WAIT, WAIT_GRADIENT):
        return f"wait for {action.operator}"
    again = {WEIGHTS: "weights", AGAIN: "again", START_AGAIN: "again", WAIT_AGAIN: "again, wait"}.get(action.verb)
    return f"{action.operator} {again}" if again else action.operator
