"""What was measured on a machine, and the cost functions that read it: used instead of the roofline where it covers the
question.

1. Per layer: attention by (sequences, context) for decode and (tokens, context) for prefill, and experts by (experts
   held, (token, expert) pairs); per iteration: the head by rows, and the engine's own fixed work.
2. Per message: one-way time by bytes and transport. Of training: `TrainingTables`.
3. Results are the same `Parts` as the roofline's. A measurement cannot tell arithmetic from memory, so all beyond the
   fixed share k2 is booked under the table's `bound`, which the writer states.

`antiphon profile` writes a `Profile` as JSON, key by key with tuples as lists; `antiphon plan --profile` reads it back,
strictly: a misspelt table would else be taken for one that was never measured, and the roofline would answer for it.

Rejected: correcting the roofline by measured ratios. At sizes that were not measured it inherits the faults of both.

Of the engine on one machine, `LocalTimes`: rows are the tokens of one micro-batch at one worker. Everything is per
layer that has the part, or said to be per step. Times are kept by number of threads, because a worker's share of the
cores decides it; beside a worker on other cores the shared memory slows both, which is kept as a ratio by rows.
Rejected: a roofline with fitted efficiencies for the local machine. On two cores half of a decode step is Python,
caches and waiting, which a roofline has no term for.

Of training, `antiphon profile --phase train` measures tables of seconds.

1. A layer by how it is shared (attention, experts, dispatch, over how many ranks): forward and backward of one
   micro-batch of its group, exchanges and waiting included, over (ranks at work on the machine, tokens of that
   micro-batch). So ranks that share cores, caches and links are in the times; nothing is scaled from one rank to many.
2. Of a rank: embedding, final norm and loss by its tokens; a parameter's update; what else a step takes.
3. Collectives over the ranks that hold a parameter, by bytes; one message between two stages.

The trainer's own layers, dispatchers and collectives are timed. Rejected: products, kernels and messages one by one. On
a CPU most of a small layer is neither, and ranks on few cores slow each other in ways that no model predicts.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from antiphon.base.errors import UserError
from antiphon.cost.curves import Curve, Surface
from antiphon.cost.roofline import Number, Parts
from antiphon.specs.catalog import a_file_of
from antiphon.specs.checked import (
    Count,
    CountFromZero,
    Flag,
    NotNegative,
    Positive,
    Text,
    check_version,
    checked,
    read,
    read_mapping,
)
from antiphon.specs.cluster import ComputeDtype

SumName = Literal["all_reduce", "reduce_scatter", "all_gather"]


def flat(value: float) -> Curve:
    """The same for every x."""
    return Curve((1.0,), (value,))


@dataclass(frozen=True, kw_only=True)
class ThreadTimes:
    """Times of one worker with `num_threads` threads and no other worker beside it. `both_sides`: it has attention and
    all experts, as a replica of one process has; otherwise each side was timed alone, as with the other elsewhere.

    Attention of a layer: `attention_s(rows)` at a context of `base_context`, plus `per_context_s(rows)` for every
    cached token beyond, of each row. `experts_s[h]`: a layer's experts when the worker holds h of them, by all rows
    that go to any expert. `head_s`, `step_s`: per step; logits and sampling, and the rest of a step that is sent again
    and again, which finds everything in the caches.
    `prompt_attention_s`: one layer of a prompt's first x tokens. `per_cached_s`: what each token of a later piece adds
    for every token before the piece; None: not measured.
    """

    num_threads: Count
    base_context: CountFromZero
    attention_s: Curve
    per_context_s: Curve
    experts_s: dict[int, Curve]
    head_s: Curve
    step_s: Curve
    prompt_attention_s: Curve
    per_cached_s: NotNegative | None = None
    both_sides: Flag = False

    def attention_layer_s(self, rows: float, context: float) -> float:
        beyond = max(0.0, context - self.base_context)
        return self.attention_s.value(rows) + rows * beyond * max(0.0, self.per_context_s.value(rows))


@dataclass(frozen=True, kw_only=True)
class Slowdowns:
    """How many times longer a one-worker time takes while the other cores are at work, by rows of both."""

    attention_beside_experts: Curve
    experts_beside_attention: Curve
    attention_beside_attention: Curve
    experts_beside_experts: Curve
    replica_beside_replica: Curve


@dataclass(frozen=True, kw_only=True)
class ExchangeTimes:
    """One micro-batch between one attention and one expert worker, by rows: what each call takes of its caller's core,
    and one way beside the calls (waking up included)."""

    dispatch_s: Curve
    receive_s: Curve
    reply_s: Curve
    combine_s: Curve
    one_way_s: Curve
    message_bytes: Curve


@dataclass(frozen=True, kw_only=True)
class RowCalls:
    """What a rank of a hybrid layout computes itself, in one layer, for rows to reach their experts and come back, by
    its rows. `across_s`: experts are dealt out over nodes (of `comm/two_level`); `gathered_s`: the ranks of an expert
    have rows of their own; `completed_s`: ranks with the same rows have different experts."""

    across_s: Curve
    gathered_s: Curve
    completed_s: Curve

    def layer_s(self, rows: float, *, attention_tp: int, expert_tp: int, num_ranks: int) -> float:
        """The largest of what applies: much of it is the same in all."""
        found = [0.0]
        if num_ranks > max(attention_tp, expert_tp):
            found.append(self.across_s.value(rows))
        if expert_tp > attention_tp:
            found.append(self.gathered_s.value(rows))
        if attention_tp > expert_tp:
            found.append(self.completed_s.value(rows))
        return max(found)


@dataclass(frozen=True, kw_only=True)
class EngineTimes:
    """Between a worker's end of one step and its begin of the next: messages, commit, the next plan; by running
    requests of one attention worker (`alone_s`), and what every further attention worker adds. `bookkeeping_s`: of a
    worker's step beside kernels, head and sampling, as it is within the engine. With attention and experts apart, each
    on cores of its own, the engine has none to itself: all of it, and the head, takes longer then."""

    alone_s: Curve
    bookkeeping_s: Curve
    apart_s: Curve
    apart_bookkeeping_s: Curve
    apart_head_ratio: Curve
    per_further_worker_s: Curve


@dataclass(frozen=True, kw_only=True)
class LocalTimes:
    """All of it, with where it is from. `foreign_share`: CPU of other processes while it was measured; `spread`: the
    median over all measurements of (upper quartile - lower quartile) / median."""

    model: str
    model_config: dict[str, Any]
    dtype: str
    kernels: str
    cpu: str
    num_cores: Count
    threads: tuple[ThreadTimes, ...]
    slowdowns: Slowdowns
    exchange: ExchangeTimes
    engine: EngineTimes
    read_bytes_per_s: dict[int, Positive] = field(default_factory=dict)
    gemm_flops_per_s: dict[int, Positive] = field(default_factory=dict)
    row_calls: RowCalls
    foreign_share: NotNegative = 0.0
    spread: NotNegative = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrainingLayer:
    """One kind of layer under one way to share it. `waiting`: for others in exchanges, both passes, part of them."""

    attention: Literal["sequence", "tensor"]
    experts: Literal["expert", "tensor"]
    dispatch: Literal["all_to_all", "all_gather"]
    layer: Literal["moe", "dense"]
    model_parallel: Count
    forward: Surface
    backward: Surface
    waiting: Surface


@dataclass(frozen=True, kw_only=True)
class TrainingSum:
    """One collective over `degree` ranks: seconds over (ranks at work, bytes of the whole tensor)."""

    name: SumName
    degree: Count
    times: Surface


@dataclass(frozen=True, kw_only=True)
class TrainingTables:
    """All of it, for one length of sequences. `ranks`: how many at work were measured. `head` over (ranks at work,
    tokens of the rank); `update`: seconds of a parameter by optimizer, and `step`: of what else a step takes, by ranks
    at work; `message`: one way between two ranks by bytes. `flops_per_s`: of the machine's fastest product in
    `dtype`."""

    dtype: ComputeDtype
    flops_per_s: Positive
    sequence_length: Count
    ranks: tuple[Count, ...]
    layers: tuple[TrainingLayer, ...]
    head: Surface
    update: dict[str, Curve]
    step: Curve
    sums: tuple[TrainingSum, ...] = ()
    message: Curve | None = None


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """What serving takes beside the model's steps, on a machine with a server and a client. Seconds of a core:
    `request_s` and `token_s` of the server's event loop, `client_*` of the client; of tokens by how many come out of
    one step. Seconds on the clock: `wait_s` of a request until the engine has it, beside that; `handover_s`: what its
    first token takes longer if another pool of workers computes the prompt. `step_ratio`: how many times as long the
    layers and head of a decode step take within the server as measured alone, by rows: what else runs there takes
    caches. Profiles from before lack it."""

    request_s: NotNegative
    token_s: Curve
    client_request_s: NotNegative
    client_token_s: Curve
    wait_s: NotNegative
    handover_s: NotNegative = 0.0
    step_ratio: Curve = field(default_factory=lambda: flat(1.0))


PROFILE_VERSION = 1
Bound = Literal["compute", "memory"]
AttentionPhase = Literal["decode", "prefill"]
LayerKind = Literal["moe", "dense"]


@checked("profile: machine")
@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """The machine measured: what it is called and what it reached. 0: not measured."""

    name: Text
    num_cores: Count
    memory_bytes: Count
    memory_bytes_per_s: NotNegative = 0.0
    flops_per_s: NotNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class AttentionTable:
    """Seconds of one layer without its routed experts. Decode: `times` over (sequences, context each). Prefill: over
    (new tokens in all, new tokens of each sequence), nothing cached; `per_cached_s`: what each new token adds for every
    cached one, None where it was not measured. `num_threads`: cores the worker had. `both_sides`: it has all experts,
    too, as in `ThreadTimes`."""

    phase: AttentionPhase
    layer: LayerKind
    times: Surface
    tp: Count = 1
    num_threads: Count = 1
    bound: Bound = "memory"
    per_cached_s: NotNegative | None = None
    both_sides: Flag = False


@dataclass(frozen=True, kw_only=True)
class ExpertTable:
    """Seconds of one layer's routed experts on one worker: `times` over (experts held, (token, expert) pairs).
    `both_sides`: with attention, as in `ThreadTimes`; such a worker holds all experts."""

    times: Surface
    tp: Count = 1
    num_threads: Count = 1
    bound: Bound = "memory"
    both_sides: Flag = False


@dataclass(frozen=True, kw_only=True)
class MessageTable:
    """Seconds one way of one message by bytes, latency included, over one transport (`shm`, `tcp`, `libfabric`)."""

    transport: str
    times: Curve


@checked("profile")
@dataclass(frozen=True, kw_only=True)
class Profile:
    """All that was measured. `command`: what to run to get it again; `model_config`: the `config.json` keys it is for.

    `head`: seconds of the last norm, logits and sampling by rows. `step_s`, `step_per_sequence_s`: what the engine
    itself takes per step and per running sequence (scheduling, messages, detokenizing). `engine`: the
    pieces of its decode steps, from which `planner.local_prediction` puts steps together; the tables before it are for
    what the engine does not run so. `host`: HTTP, for simulations. `training`, `host` None, or `attention` empty: not
    measured."""

    version: Count = PROFILE_VERSION
    command: str
    created: str
    machine: MachineFacts
    model: str
    dtype: str
    attention: tuple[AttentionTable, ...]
    experts: tuple[ExpertTable, ...]
    head: Curve | None = None
    messages: tuple[MessageTable, ...] = ()
    step_s: NotNegative = 0.0
    step_per_sequence_s: NotNegative = 0.0
    model_config: dict[str, object] = field(default_factory=dict)
    engine: LocalTimes | None = None
    host: HostTimes | None = None
    training: TrainingTables | None = None

    def attention_table(
        self, phase: AttentionPhase = "decode", layer: LayerKind = "moe", tp: int = 1, *, both_sides: Flag = False
    ) -> AttentionTable | None:
        """The first table that answers for this worker, if there is one as `both_sides` says; None if none was
        measured."""
        key = (phase, layer, tp)
        found = [table for table in self.attention if (table.phase, table.layer, table.tp) == key]
        return next((table for table in found if table.both_sides == both_sides), found[0] if found else None)

    def expert_table(self, tp: int = 1, *, both_sides: bool = False) -> ExpertTable | None:
        """The first table that answers for this worker, if there is one as `both_sides` says; None if none was
        measured."""
        found = [table for table in self.experts if table.tp == tp]
        return next((table for table in found if table.both_sides == both_sides), found[0] if found else None)

    def turn_s(self, rows: Number) -> Number:
        """What the engine itself takes between two steps with this many running sequences on a worker."""
        return self.step_s + self.step_per_sequence_s * rows

    def training_tables(self, sequence_length: int) -> TrainingTables:
        """`UserError` if training was not measured, or with sequences of another length."""
        again = f"run antiphon profile --phase train --sequence-length {sequence_length}"
        if self.training is None:
            raise UserError(f"the profile of {self.model} holds no training: {again}")
        if self.training.sequence_length != sequence_length:
            measured = f"measured with sequences of {self.training.sequence_length} tokens"
            raise UserError(f"the profile of {self.model} was {measured}, not {sequence_length}: {again}")
        return self.training


def profiled_attention(table: AttentionTable, rows: Number, context: Number, cached: Number = 0.0) -> Parts:
    """One layer from a table: `rows` sequences (decode) or tokens (prefill), `context` tokens each. `cached`: tokens
    before those of a prompt; they cost nothing where the table does not have what they take."""
    alone = _parts(table.times, rows, context, table.bound)
    if not table.per_cached_s or not np.any(cached):
        return alone
    return alone + Parts(compute_s=np.asarray(rows) * np.asarray(cached) * table.per_cached_s)


def profiled_experts(table: ExpertTable, rows: Number, num_held: Number) -> Parts:
    """One layer of one worker: `rows` (token, expert) pairs over `num_held` experts."""
    return _parts(table.times, num_held, rows, table.bound)


def profiled_messages(times: Curve, message_bytes: Number, num_messages: Number = 1) -> Parts:
    """This many messages one after another, booked as scale-out; the time of the smallest measured one as fixed."""
    total = np.asarray(num_messages * np.asarray(times.at(message_bytes)))
    fixed = np.minimum(total, num_messages * times.seconds[0])
    return Parts(scale_out_s=total - fixed, fixed_s=fixed)


def _parts(times: Surface, first: Number, second: Number, bound: Bound) -> Parts:
    total = np.asarray(times.at(first, second))
    fixed = np.minimum(total, times.at(times.first[0], times.second[0]))
    beyond = total - fixed
    if bound == "compute":
        return Parts(compute_s=beyond, fixed_s=fixed)
    return Parts(memory_s=beyond, fixed_s=fixed)


def read_profile(path: Path) -> Profile:
    """Read a file of `antiphon profile`. `UserError` names the file and the entry that is wrong."""
    with a_file_of("profile", path):
        mapping = read_mapping(path)
        check_version(mapping, PROFILE_VERSION, str(path), "make the profile again with `antiphon profile`")
        return read(Profile, mapping, str(path))


def read_serving_profile(path: Path) -> Profile:
    """`read_profile`; `UserError` if only training was measured."""
    profile = read_profile(path)
    if not profile.attention:
        raise UserError(f"{path}: holds training only: run antiphon profile without --phase train")
    return profile
