"""Whether a run fits in memory, before its first step: the planner's sizes, in the formats that the trainer keeps.

1. parameters, gradients and the optimizer's moments in float32 (float64 if that is the arithmetic). A bfloat16 run
   keeps a copy of the parameters for its products until backward has used them
2. activations that backward needs, of the micro-batches in flight, and what the cross-entropy keeps
3. what cannot fit is refused. A process holds more than backward needs, `KEPT_OVER_NEEDED` times by the peak of the
   demo model (autograd saves 1.5 times; the rest are results in between and what the allocator keeps): what fits by
   need and not by that is warned about

Rejected: trying a step and looking. The kernel kills what asks for too much, without a word.
"""

from dataclasses import dataclass, fields, replace

from antiphon.base.allowance import allowance
from antiphon.base.errors import ResourceError
from antiphon.base.logging import get_logger
from antiphon.base.units import format_bytes
from antiphon.comm.mesh import Sizes
from antiphon.cost.training.layer_case import LayerSizes
from antiphon.cost.training.memory import fullest_stage, layers_in_flight, rank_parameters, state_bytes
from antiphon.cost.training.rematerialize import CHEAP, activations_of, dense_bytes, needed_bytes
from antiphon.cost.training.setup import TrainingSetup, trained_in
from antiphon.specs.counts import count_parameters
from antiphon.specs.model import ModelSpec
from antiphon.train.config import TrainConfig

KEPT_OVER_NEEDED = 2.5
_log = get_logger("train")


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Bytes of one rank."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    head: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.head

    def __str__(self) -> str:
        return ", ".join(f"{each.name} {format_bytes(getattr(self, each.name))}" for each in fields(self))


def setup_of(config: TrainConfig, sizes: Sizes) -> TrainingSetup:
    """The setup of a run whose ranks share work by `sizes`, in the planner's terms: one group of ranks for attention
    and experts. Where theirs differ the smaller one counts, which needs more memory. A float64 run is set up as a
    float32 one."""
    experts = sizes.expert * sizes.expert_tensor
    attention = sizes.sequence * sizes.tensor
    size = config.batch // config.micro_batches
    return TrainingSetup(
        attention="tensor" if sizes.tensor > 1 else "sequence",
        experts="tensor" if sizes.expert_tensor > 1 else "expert",
        dispatch="all_gather"
        if sizes.expert_tensor > 1 or config.parallel.dispatch == "gather_scatter"
        else "all_to_all",
        overlap="none",
        deduplicate=config.parallel.deduplicate,
        zero=config.parallel.zero,
        gate_after_down=True,
        micro_batch=max(1, size // sizes.data),
        model_parallel=min(experts, attention),
        pipeline=sizes.pipeline,
        virtual_stages=config.parallel.virtual_stages,
        data_parallel=min(sizes.data, sizes.expert_data),
        precision=trained_in("bfloat16" if config.dtype == "bfloat16" else "float32"),
    )


def memory_need(spec: ModelSpec, config: TrainConfig, setup: TrainingSetup) -> MemoryNeed:
    """What the fullest rank needs under `setup`."""
    layers = fullest_stage(spec, setup.pipeline, setup.virtual_stages)
    held = rank_parameters(spec, setup, layers)
    parameters, gradients, optimizer = state_bytes(held, setup)
    sizes = LayerSizes(model=spec, setup=setup, sequence_length=config.sequence_length)
    in_flight = passes_in_flight(config, setup)
    activations = in_flight * float(layers.num_moe * needed_bytes(sizes) + layers.num_dense * dense_bytes(sizes))
    activations = _kept(activations, in_flight * float(layers.num_moe), in_flight * float(layers.total), sizes, config)
    rows = sizes.rows * spec.hidden_size * setup.precision.row_bytes
    head = 4.0 * spec.vocab_size * spec.hidden_size + 2 * rows  # the cross-entropy's gradients of head and rows
    copies = 2.0 * held.total if config.dtype == "bfloat16" else 0.0
    wide = 2.0 if config.dtype == "float64" else 1.0
    return MemoryNeed(
        parameters=wide * float(parameters) + float(copies),
        gradients=wide * float(gradients),
        optimizer=wide * float(optimizer) * _moments(spec, config),
        activations=wide * float(activations),
        head=wide * float(head),
    )


def _moments(spec: ModelSpec, config: TrainConfig) -> float:
    """Bytes of the optimizer's moments over those of AdamW's two: Muon keeps one for matrices."""
    if config.optimizer.name == "adamw":
        return 1.0
    counts = count_parameters(spec)
    others = counts.embedding + counts.head + spec.num_moe_layers * counts.router
    return 0.5 + 0.5 * others / counts.total


def _kept(everything: float, moe_layers: float, layers: float, sizes: LayerSizes, config: TrainConfig) -> float:
    """What `[memory]` keeps of `everything` that backward reads; a list of names may keep less than this."""
    unit = float(sizes.rows) * sizes.model.hidden_size * sizes.setup.precision.row_bytes
    if config.memory.activation_bytes:
        return min(everything, float(config.memory.activation_bytes))
    if config.memory.remake == "full":
        return layers * unit
    again = {name for option in config.memory.again for name in option.split("+")}
    if config.memory.remake == "selective":
        again = {*CHEAP, "fc2_out"}
    saved = sum(float(each.width) for each in activations_of(sizes) if each.needed and each.name in again)
    return everything - moe_layers * saved * unit


def check_memory(
    spec: ModelSpec, config: TrainConfig, setup: TrainingSetup, *, ranks_here: int = 1, free_bytes: int | None = None
) -> MemoryNeed:
    """What a rank needs; `ResourceError` if `ranks_here` of them do not fit on this machine, a warning if they may
    not. `free_bytes` None: what this process may take. To be called before the model is built."""
    free = allowance().memory.left_bytes if free_bytes is None else free_bytes
    need = memory_need(spec, config, setup)
    each = "" if ranks_here == 1 else f"{ranks_here} ranks of "
    if ranks_here * need.total > free:
        raise ResourceError(
            f"training needs {each}{format_bytes(need.total)} ({need}), {format_bytes(free)} are free: "
            f"{_advice(spec, config, setup, ranks_here, free)}"
        )
    kept = need.total + (KEPT_OVER_NEEDED - 1) * need.activations
    if ranks_here * kept > free:
        _log.warning(
            "training may need %s%s (%s, of activations up to %.1f times that), %s are free: %s",
            each,
            format_bytes(kept),
            need,
            KEPT_OVER_NEEDED,
            format_bytes(free),
            _advice(spec, config, setup, ranks_here, free),
        )
    return need


def _advice(spec: ModelSpec, config: TrainConfig, setup: TrainingSetup, ranks_here: int, free: int) -> str:
    """The largest micro-batch that fits with room; where even one sequence does not, what else helps."""
    for size in range(int(setup.micro_batch) - 1, 0, -1):
        if config.batch % size:
            continue
        smaller = replace(config, micro_batch=size)
        need = memory_need(spec, smaller, replace(setup, micro_batch=size))
        if ranks_here * (need.total + (KEPT_OVER_NEEDED - 1) * need.activations) <= free:
            return f"set micro_batch={size}"
    one = memory_need(spec, replace(config, micro_batch=1), replace(setup, micro_batch=1))
    if ranks_here * (one.total - one.activations) > free:
        return "take a smaller model, or divide it over more machines"
    return "shorten sequence_length, or divide the model over more machines"


def passes_in_flight(config: TrainConfig, setup: TrainingSetup) -> float:
    """Micro-batches whose activations a rank holds at once."""
    held = float(layers_in_flight(1.0, setup.pipeline, setup.virtual_stages, config.micro_batches))
    return max(held, 2.0) if config.overlap.pairs else held
