"""What the profiler and its processes say to each other. Plain data, checked when decoded.

A process carries out one order at a time and answers it. Only `Busy` is answered at once: the process then repeats the
work until the next order arrives.
"""

from typing import Literal

import msgspec

from antiphon.bench.obeying import Done, Failed, Stop

Kind = Literal["colocated", "attention", "experts"]


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of work at one size. `colocated`: a whole decode step; `attention`: the same without experts;
    `experts`: all MoE layers of `rows` rows, of which the process acts as if it held `num_held` experts.

    `prompt_tokens` > 0: instead of decoding, the first `prompt_tokens` of one prompt."""

    kind: Kind
    rows: int
    context: int = 1
    num_held: int = 0
    prompt_tokens: int = 0


class Open(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Load the model. `max_rows` sequences and `max_tokens` cached tokens are the most any work will have."""

    model: str
    dtype: str
    kernels: str
    max_rows: int
    max_tokens: int
    max_context: int


class Settle(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Compute with this many threads on these cores."""

    num_threads: int
    cores: list[int]


class Time(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Repeat the work at least `min_repetitions` times and for `seconds`; answered by `Times`."""

    work: Work
    seconds: float
    min_repetitions: int


class Busy(msgspec.Struct, tag=True, frozen=True):
    """Repeat the work until another order comes."""

    work: Work


class OpenExchange(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Become one end of the exchange between one attention and one expert worker; answered by `Ticket`."""

    role: Literal["attention", "experts"]
    model: str
    dtype: str
    waiting: str
    max_rows: int
    secret: bytes


class JoinExchange(msgspec.Struct, tag=True, frozen=True):
    """Connect to the expert worker with this ticket. The expert worker's process answers at once and then serves."""

    ticket: bytes


class TimeExchange(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """`num_rounds` rounds of each kind with `rows` rows; answered by `Rounds`. For the attention worker's process."""

    rows: int
    num_rounds: int


class StopExchange(msgspec.Struct, tag=True, frozen=True):
    """Leave the exchange."""


class TimeTraining(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Join a gloo group over loopback and time the trainer's parts, with `num_threads` threads: layers with each number
    of `sequences`, shared by groups of each of `degrees` ranks; answered by `TrainingSeconds`."""

    rank: int
    world_size: int
    num_threads: int
    store: str
    model: str
    dtype: str
    sequence_length: int
    sequences: list[int]
    degrees: list[int]
    sizes_bytes: list[int]
    repetitions: int


class Opened(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    kernels: str
    weight_bytes: int


class Times(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Seconds of each repetition. `attention`, `experts`: per layer that has them; `head`: logits and sampling;
    `step`: what else the step took; empty where the work has no such part."""

    attention: list[float] = []
    experts: list[float] = []
    head: list[float] = []
    step: list[float] = []


class Ticket(msgspec.Struct, tag=True, frozen=True):
    ticket: bytes


class Rounds(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The attention worker's side of each round, nanoseconds of the machine's clock: the begin and end of the dispatch,
    and of the combine. `message_bytes`: what one dispatch sends."""

    dispatch_ns: list[tuple[int, int]]
    combine_ns: list[tuple[int, int]]
    message_bytes: int


class Served(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The expert worker's side of all rounds since it joined, in their order."""

    receive_ns: list[tuple[int, int]]
    reply_ns: list[tuple[int, int]]


class LayerSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """One layer, by kind ("moe", "dense"), of a micro-batch of `sequences` of a group of `model_parallel` ranks.
    `waiting_s`: for other ranks, in both passes; `head_s`: of what belongs to no layer."""

    attention: str
    experts: str
    dispatch: str
    model_parallel: int
    sequences: int
    forward_s: dict[str, float]
    backward_s: dict[str, float]
    waiting_s: float
    head_s: float


class TrainingSeconds(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """With all ranks of a group at work: `layers`; `update` of a parameter by optimizer; `step`: what else a step
    takes; `sums` by number of ranks, collective and size; `message` by size."""

    layers: list[LayerSeconds]
    step: list[float]
    update: dict[str, float]
    sums: dict[int, dict[str, list[float]]]
    message: list[float]


ToRig = Open | Settle | Time | Busy | OpenExchange | JoinExchange | TimeExchange | StopExchange | TimeTraining | Stop
FromRig = Done | Opened | Times | Ticket | Rounds | Served | TrainingSeconds | Failed
