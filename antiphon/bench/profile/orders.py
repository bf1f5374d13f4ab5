"""What the profiler asks of its processes and is answered: how thoroughly to measure, the sizes of each piece of work,
and seconds by part. Plain data."""

from dataclasses import dataclass, field, replace
from typing import Literal, Self

from antiphon.base.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Effort:
    """`rows`: requests of a micro-batch; `prompts`: tokens of a prompt; `contexts`: a short and a long one, in tokens;
    `beside_rows`: sizes at which two workers run beside each other. Of training: `sequences` of a micro-batch,
    `training_steps` of each, `sum_bytes` that are summed over ranks. `point_s`: time for one figure. `together`:
    whether an engine of several workers is started, to see what each further one adds to the engine's turn.
    `host_requests` over HTTP at each of `host_streams` at once."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    prompts: tuple[int, ...] = (32, 128, 512, 2048)
    contexts: tuple[int, int] = (64, 512)
    beside_rows: tuple[int, ...] = (1, 8, 32, 128)
    exchange_rows: tuple[int, ...] = (1, 8, 32, 128, 512)
    engine_rows: tuple[int, ...] = (1, 8, 32, 128)
    sequences: tuple[int, ...] = (1, 4, 8)
    sum_bytes: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24)
    training_steps: int = 4
    point_s: float = 0.25
    min_repetitions: int = 3
    exchange_rounds: int = 20
    engine_steps: int = 24
    host_requests: int = 96
    host_streams: tuple[int, ...] = (1, 8, 32)
    limit_passes: int = 3
    together: bool = True

    def bounded(self, max_rows: int, max_context: int) -> Self:
        """The same within what is wanted and what the model's context allows. `UserError` where nothing is left."""
        if max_rows < 1:
            raise UserError(f"--max-rows is {max_rows}: it must be at least 1")
        if max_context < 2:
            raise UserError(f"the model's context is {max_context}: at least 2 tokens are needed to measure")
        short = min(self.contexts[0], max_context // 2)
        return replace(
            self,
            rows=_up_to(self.rows, max_rows),
            prompts=_up_to(self.prompts, max_context),
            contexts=(short, max(short + 1, min(self.contexts[1], max_context))),
            beside_rows=_up_to(self.beside_rows, max_rows),
            engine_rows=_up_to(self.engine_rows, max_rows),
        )


def _up_to(sizes: tuple[int, ...], largest: int) -> tuple[int, ...]:
    """The sizes up to `largest`, and `largest` itself if any was above."""
    return sizes if sizes[-1] <= largest else (*(size for size in sizes if size < largest), largest)


NORMAL = Effort()
QUICK = Effort(
    rows=(1, 4, 16),
    prompts=(16, 64),
    contexts=(16, 64),
    beside_rows=(1, 16),
    exchange_rows=(1, 32),
    engine_rows=(1, 8),
    sequences=(1, 2),
    sum_bytes=(1 << 10, 1 << 18, 1 << 22),
    training_steps=2,
    point_s=0.02,
    min_repetitions=3,
    exchange_rounds=5,
    engine_steps=12,
    host_requests=48,
    host_streams=(1, 8),
    limit_passes=1,
    together=False,
)


# --- one worker's parts


@dataclass(frozen=True, kw_only=True)
class RigOrder:
    """The model to load. `max_rows` sequences and `max_tokens` cached tokens are the most any work will have."""

    model: str
    dtype: str
    kernels: str
    max_rows: int
    max_tokens: int
    max_context: int


@dataclass(frozen=True, kw_only=True)
class RigWork:
    """One kind of work at one size. `colocated`: a whole decode step; `attention`: the same without experts;
    `experts`: all MoE layers of `rows` rows, of which the process acts as if it held `num_held` experts.

    `prompt_tokens` > 0: instead of decoding, the first `prompt_tokens` of one prompt."""

    kind: Literal["colocated", "attention", "experts"]
    rows: int
    context: int = 1
    num_held: int = 0
    prompt_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class PartSeconds:
    """Seconds of each repetition. `attention`, `experts`: per layer that has them; `head`: logits and sampling;
    `step`: what else the step took; empty where the work has no such part."""

    attention: list[float] = field(default_factory=list)
    experts: list[float] = field(default_factory=list)
    head: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)


# --- the exchange between one attention and one expert worker


@dataclass(frozen=True, kw_only=True)
class ExchangeOrder:
    """One end of it."""

    role: Literal["attention", "experts"]
    model: str
    dtype: str
    waiting: str
    max_rows: int
    secret: bytes


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The attention worker's side of each round, nanoseconds of the machine's clock: the begin and end of the dispatch,
    and of the combine. `message_bytes`: what one dispatch sends."""

    dispatch_ns: list[tuple[int, int]]
    combine_ns: list[tuple[int, int]]
    message_bytes: int


@dataclass(frozen=True, kw_only=True)
class Served:
    """The expert worker's side of all rounds since it joined, in their order."""

    receive_ns: list[tuple[int, int]]
    reply_ns: list[tuple[int, int]]


# --- training


@dataclass(frozen=True, kw_only=True)
class TrainingOrder:
    """Join a gloo group over loopback and time the trainer's parts, with `num_threads` threads: layers with each number
    of `sequences`, shared by groups of each of `degrees` ranks."""

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


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
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


@dataclass(frozen=True, kw_only=True)
class TrainingSeconds:
    """With all ranks of a group at work: `layers`; `update` of a parameter by optimizer; `step`: what else a step
    takes; `sums` by number of ranks, collective and size; `message` by size."""

    layers: list[LayerSeconds]
    step: list[float]
    update: dict[str, float]
    sums: dict[int, dict[str, list[float]]]
    message: list[float]
