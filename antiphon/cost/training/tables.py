"""What `antiphon profile --phase train` measured: tables of seconds.

1. A layer by how it is shared (attention, experts, dispatch, over how many ranks): forward and backward of one
   micro-batch of its group, exchanges and waiting included, over (ranks at work on the machine, tokens of that
   micro-batch). So ranks that share cores, caches and links are in the times; nothing is scaled from one rank to many.
2. Of a rank: embedding, final norm and loss by its tokens; a parameter's update; what else a step takes.
3. Collectives over the ranks that hold a parameter, by bytes; one message between two stages.

The trainer's own layers, dispatchers and collectives are timed. Rejected: products, kernels and messages one by one. On
a CPU most of a small layer is neither, and ranks on few cores slow each other in ways that no model predicts.
"""

from dataclasses import dataclass
from typing import Literal

from antiphon.cost.curves import Curve, Surface
from antiphon.specs.device import ComputeDtype

SumName = Literal["all_reduce", "reduce_scatter", "all_gather"]


@dataclass(frozen=True, kw_only=True)
class TrainingLayer:
    """One kind of layer under one way to share it. `waiting`: for others in exchanges, both passes, part of them."""

    attention: Literal["sequence", "tensor"]
    experts: Literal["expert", "tensor"]
    dispatch: Literal["all_to_all", "all_gather"]
    layer: Literal["moe", "dense"]
    model_parallel: int
    forward: Surface
    backward: Surface
    waiting: Surface


@dataclass(frozen=True, kw_only=True)
class TrainingSum:
    """One collective over `degree` ranks: seconds over (ranks at work, bytes of the whole tensor)."""

    name: SumName
    degree: int
    times: Surface


@dataclass(frozen=True, kw_only=True)
class TrainingTables:
    """All of it, for one length of sequences. `ranks`: how many at work were measured. `head` over (ranks at work,
    tokens of the rank); `update`: seconds of a parameter by optimizer, and `step`: of what else a step takes, by ranks
    at work; `message`: one way between two ranks by bytes. `flops_per_s`: of the machine's fastest product in
    `dtype`."""

    dtype: ComputeDtype
    flops_per_s: float
    sequence_length: int
    ranks: tuple[int, ...]
    layers: tuple[TrainingLayer, ...]
    head: Surface
    update: dict[str, Curve]
    step: Curve
    sums: tuple[TrainingSum, ...] = ()
    message: Curve | None = None
