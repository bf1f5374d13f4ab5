"""What a run needs in memory: whether it fits, before its first step, and what layers keep for backward.

1. Parameters, gradients and the optimizer's moments are in float32 (float64 if that is the arithmetic). A bfloat16 run
   without shards keeps a copy of the parameters for its products until backward has used them; one with shards keeps
   parameters in bfloat16 and the main ones of its shard.
2. Activations are those that backward needs, of the micro-batches in flight, and what the cross-entropy keeps.
3. What cannot fit is refused. A process holds more than backward needs, `KEPT_OVER_NEEDED` times by the peak of the
   demo model (autograd saves 1.5 times; the rest are results in between and what the allocator keeps): what fits by
   need and not by that is warned about.
4. A checkpoint that is written beside steps is a copy of parameters and moments.
5. A limit to activations is the planner's business: `cost.training.rematerialize` takes options by seconds per byte,
   priced for the cluster that MegaScale-MoE was measured on. Only their order counts here.

The bytes of a layer are the widths of MegaScale-MoE's Figure 9 (`cost.training.rematerialize`), added over what its
plan keeps. The metrics set beside them what hooks count on what autograd saves (`train.operators`). The count is larger
by what the formula leaves out: routing, a number a row of each norm, attention's log-sum-exp. Rows of experts are those
of even use.

Rejected: trying a step and looking. The kernel kills what asks for too much, without a word.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from antiphon.base.allowance import allowance
from antiphon.base.errors import ResourceError, UserError
from antiphon.base.logging import get_logger
from antiphon.base.units import format_bytes
from antiphon.comm.mesh import Sizes
from antiphon.cost.training.memory import fullest_stage, layers_in_flight, rank_parameters, state_bytes
from antiphon.cost.training.operators import layer_operators
from antiphon.cost.training.rematerialize import CHEAP, activations_of, choose, dense_bytes, needed_bytes, options
from antiphon.cost.training.setup import LayerSizes, Training, TrainingSetup, layer_case, trained_in
from antiphon.specs.checked import did_you_mean
from antiphon.specs.cluster import load_cluster
from antiphon.specs.counts import count_parameters
from antiphon.specs.model import ModelSpec
from antiphon.train.attention import reads_qkv
from antiphon.train.config import TrainConfig
from antiphon.train.layer_plan import HEADS, LayerPlan
from antiphon.train.model import MoeModel
from antiphon.train.operators import whole_name

KEPT_OVER_NEEDED = 2.5
_log = get_logger("train")


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Bytes of one rank. `copy`: what a checkpoint adds to the most that a step holds."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    head: float
    copy: float = 0.0

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.head + self.copy

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
        precision=trained_in("bfloat16" if config.dtype == "bfloat16" else "float32", config.parallel.zero),
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
    copies = 2.0 * held.total if config.dtype == "bfloat16" and setup.precision.weights == "float32" else 0.0
    wide = 2.0 if config.dtype == "float64" else 1.0
    held_layers = min(1.0, 2.0 / float(layers.total))  # of what is mapped: one in use, one fetched
    moments, experts, copy = 1.0, 0.0, 0.0
    state = wide * float(optimizer) * _moments(spec, config, setup)
    if config.output.save_beside and config.memory.offload == "none":
        owned = float(held.owned(setup) if setup.zero else held.total)
        copy = state + (4.0 * wide * owned if setup.precision.weights == "float32" else 0.0)
        if not 0 < config.output.checkpoint_every < config.steps:  # the only one is behind the last step
            copy = max(0.0, copy - wide * (float(activations) + float(head)))
    if config.memory.offload != "none" and setup.precision.weights == "float32":
        moments = held_layers
    elif config.memory.offload != "none":
        moments = (1.0 + 2.0 * held_layers) / 3.0  # main parameters stay
    if config.memory.offload == "experts":
        of_layer = spec.router.num_experts * count_parameters(spec).expert / float(setup.model_parallel)
        experts = 4.0 * float(layers.num_moe) * of_layer * (1.0 - held_layers)
    return MemoryNeed(
        parameters=wide * (float(parameters) - experts) + float(copies),
        gradients=wide * float(gradients),
        optimizer=state * moments,
        activations=wide * float(activations),
        head=wide * float(head),
        copy=copy,
    )


def _moments(spec: ModelSpec, config: TrainConfig, setup: TrainingSetup) -> float:
    """Bytes of the optimizer's state over those with AdamW's two moments: Muon keeps one for matrices."""
    if config.optimizer.name == "adamw":
        return 1.0
    counts = count_parameters(spec)
    others = counts.embedding + counts.head + spec.num_moe_layers * counts.router
    adamw = 0.5 + 0.5 * others / counts.total
    return adamw if setup.precision.weights == "float32" else (1.0 + 2.0 * adamw) / 3.0


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
    need = memory_need(spec, config, setup)
    if need.copy and ranks_here * (need.total - need.copy) <= free:
        return "set output.save_beside to false: steps wait for checkpoints then, which need no copy"
    one = memory_need(spec, replace(config, micro_batch=1), replace(setup, micro_batch=1))
    if ranks_here * (one.total - one.activations) > free:
        return "take a smaller model, or divide it over more machines"
    return "shorten sequence_length, or divide the model over more machines"


def passes_in_flight(config: TrainConfig, setup: TrainingSetup) -> float:
    """Micro-batches whose activations a rank holds at once."""
    held = float(layers_in_flight(1.0, setup.pipeline, setup.virtual_stages, config.micro_batches))
    return max(held, 2.0) if config.overlap.pairs else held


TENSORS_OF = {
    "ln1_out": ("ln1_out", "ln1_out_ag"),
    "attn_a2a": ("attn_a2a",),
    "ln2_out": ("ln2_out", "gate_in"),
    "ffn_in": ("ffn_in",),
    "fc2_in": ("fc2_in", "shared_fc2_in", "dense_fc2_in"),
    "qkv_a2a": HEADS,
    "fc1_out+fc3_out": ("fc1_out", "shared_fc1_out", "dense_fc1_out"),
    "attn": ("attn",),
}


def layer_bytes(plan: LayerPlan, sizes: LayerSizes) -> float:
    """What one rank keeps of one layer under `plan`."""
    model, setup, kept = sizes.model, sizes.setup, frozenset(map(whole_name, plan.kept))
    width = {each.name: float(each.width) for each in activations_of(sizes)}
    total: float = sum(
        width[name]
        for name in ("hidden", "qkv", "qkv_a2a", "attn", "ln2_in", "ffn_in", "fc2_in", "fc2_out")
        if name in kept
    )
    total += (
        width["ln1_out"]
        * (float(setup.model_parallel) if setup.attention == "tensor" else 1.0)
        * ("ln1_out_ag" in kept)
    )
    total += width["ln2_out"] * ("ln2_out" in kept or "gate_in" in kept)
    total += (width["fc1_out"] + width["fc3_out"]) * ("fc1_out" in kept)
    total += width["attn_a2a"] * ("attn_a2a" in kept) if "attn" in kept else width["attn"] * ("attn_a2a" in kept)
    if kept.issuperset(HEADS):
        values = width["k_rope"] if "qkv" in kept and width["attn_a2a"] == 0 else 0.0  # a part of qkv where none travel
        total += width["qkv_a2a"] - values
    for kind, inner in (
        ("shared", model.feed_forward.shared_intermediate),
        ("dense", model.feed_forward.dense_intermediate),
    ):
        widths = {f"{kind}_fc1_out": 2.0, f"{kind}_fc2_in": 1.0}
        total += sum(each * inner / model.hidden_size for name, each in widths.items() if name in kept)
    return total * float(sizes.rows) * model.hidden_size * setup.precision.row_bytes


def bytes_by_formula(model: MoeModel, config: TrainConfig) -> float:
    """What this rank's layers keep at most, in all micro-batches in flight."""
    setup = setup_of(config, model.mesh.sizes)
    sizes = LayerSizes(model=model.spec, setup=setup, sequence_length=config.sequence_length)
    wide = 2.0 if config.dtype == "float64" else 1.0
    return wide * passes_in_flight(config, setup) * sum(layer_bytes(layer.plan, sizes) for layer in model.layers)


def dropped_to_fit(spec: ModelSpec, config: TrainConfig, setup: TrainingSetup) -> tuple[str, ...]:
    """Names of what to make again so that a rank keeps at most `memory.activation_bytes`; none where all fits."""
    limit = config.memory.activation_bytes
    sizes = LayerSizes(model=spec, setup=setup, sequence_length=config.sequence_length)
    layers = fullest_stage(spec, setup.pipeline, setup.virtual_stages)
    in_flight = passes_in_flight(config, setup)
    moe_layers = in_flight * float(layers.num_moe)
    everything = moe_layers * float(needed_bytes(sizes)) + in_flight * float(layers.num_dense * dense_bytes(sizes))
    if reads_qkv(spec.attention):  # which the planner takes for freed
        width = next(float(each.width) for each in activations_of(sizes) if each.name == "qkv")
        unit = float(sizes.rows) * spec.hidden_size * setup.precision.row_bytes
        everything += in_flight * float(layers.total) * width * unit
    if not limit or everything <= limit:
        return ()
    cluster = load_cluster("msm-h800")
    training = Training(
        model=spec,
        cluster=cluster,
        group=cluster.groups[0],
        sequence_length=config.sequence_length,
        batch=config.batch,
    )
    case = layer_case(training, setup)
    target = (everything - limit) / max(moe_layers, 1.0)
    choice = choose(options(case, layer_operators(case)), target, overlaps=True, overlap=cluster.efficiency.overlap)
    saved = float(choice.saved_bytes.max())
    if saved < target:
        raise UserError(
            f"memory.activation_bytes is {format_bytes(limit)}: layers keep at least "
            f"{format_bytes(everything - moe_layers * saved)} of {format_bytes(everything)}: raise it, or make "
            "micro_batch smaller"
        )
    return tensors_of(choice.chosen(0))


def tensors_of(options: Sequence[str]) -> tuple[str, ...]:
    """The tensors that a planner's `options` make again; `UserError` for one that it does not have."""
    for option in options:
        if option not in TENSORS_OF:
            raise UserError(f"memory.again names {option!r}: {did_you_mean(option, list(TENSORS_OF))}")
    return tuple(name for option in options for name in TENSORS_OF[option])
