"""Bytes that layers keep between forward and backward: by formula, and what to make again to stay within a limit.

The formula adds the widths of MegaScale-MoE's Figure 9 (`cost.training.activations`) over what a layer's plan keeps.
What stands beside it in the metrics is counted by hooks on what autograd saves (`train.operator_graph`). The count is
larger by what the formula leaves out: routing, a number a row of each norm, attention's log-sum-exp. Rows of experts
are those of even use.

The limit is the planner's business: `cost.training.rematerialize` takes options by seconds per byte, priced for the
cluster that MegaScale-MoE was measured on. Only their order counts here.
"""

from collections.abc import Sequence

from antiphon.base.errors import UserError
from antiphon.base.units import format_bytes
from antiphon.cost.training.layer_case import LayerSizes, layer_case
from antiphon.cost.training.memory import fullest_stage
from antiphon.cost.training.operators import layer_operators
from antiphon.cost.training.rematerialize import activations_of, choose, dense_bytes, needed_bytes, options
from antiphon.cost.training.setup import Training, TrainingSetup
from antiphon.specs.checked import did_you_mean
from antiphon.specs.cluster import load_cluster
from antiphon.specs.model import ModelSpec
from antiphon.train.attention import reads_qkv
from antiphon.train.config import TrainConfig
from antiphon.train.keep import HEADS
from antiphon.train.layer_plan import LayerPlan
from antiphon.train.memory_check import passes_in_flight, setup_of
from antiphon.train.model import MoeModel
from antiphon.train.operators import whole_name

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
    model, setup, kept = sizes.model, sizes.setup, frozenset(map(whole_name, plan.keeping.kept))
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


def activation_facts(model: MoeModel, config: TrainConfig) -> dict[str, float]:
    """For the metrics: what this rank has kept at most, in all layers and micro-batches in flight, since this was asked
    last; and what it is by formula."""
    setup = setup_of(config, model.mesh.sizes)
    sizes = LayerSizes(model=model.spec, setup=setup, sequence_length=config.sequence_length)
    in_flight = passes_in_flight(config, setup)
    wide = 2.0 if config.dtype == "float64" else 1.0
    of_layers = sum(layer_bytes(layer.plan, sizes) for layer in model.layers)
    counted, by_formula = model.held.take().peak, wide * in_flight * of_layers
    return {"activation_bytes": counted, "activation_bytes_by_formula": by_formula}


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
