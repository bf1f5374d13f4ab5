"""Which tensors a half of the model needs, with the shapes `config.json` promises: the load plan.

A plan maps a purpose ("qkv", "router", ...) to one or several tensors; several are stacked along their rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from antiphon.base.errors import CheckpointError
from antiphon.models.checkpoint import Checkpoint, Rows
from antiphon.models.names import GatedNames, PerExpertLayout, StackedLayout, TensorNames
from antiphon.specs.model import AttentionSpec, LatentSpec, ModelSpec


@dataclass(frozen=True)
class TensorRef:
    """A stored tensor of a known shape, or rows [start, stop) of it."""

    name: str
    shape: tuple[int, ...]
    rows: Rows = None


Plan = dict[str, tuple[TensorRef, ...]]


def bias_of(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"


def check(checkpoint: Checkpoint, refs: Iterable[TensorRef]) -> int:
    """Every tensor is there with its shape; returns the bytes that reading them all takes."""
    total = 0
    for ref in refs:
        checkpoint.require(ref.name, ref.shape)
        total += checkpoint.stored_bytes(ref.name, ref.rows)
    return total


def outer_plan(spec: ModelSpec, names: TensorNames) -> Plan:
    """Embedding, final norm and head. A tied head reads nothing: it is the embedding."""
    table = (spec.vocab_size, spec.hidden_size)
    plan: Plan = {"embedding": (TensorRef(names.embedding, table),)}
    plan |= _norm(spec, "final_norm", names.final_norm)
    if not spec.tie_embeddings:
        plan["head"] = (TensorRef(names.head, table),)
    if spec.lm_head_bias:
        plan["head_bias"] = (TensorRef(bias_of(names.head), (spec.vocab_size,)),)
    return plan


def attention_layer_plan(spec: ModelSpec, names: TensorNames, layer: int, checkpoint: Checkpoint) -> Plan:
    """One layer without its routed experts: norms, attention, and router with shared expert or dense feed-forward."""
    prefix = names.layer.format(layer=layer)
    attention, hidden = spec.attention, spec.hidden_size
    plan = _norm(spec, "input_norm", prefix + names.input_norm)
    plan |= _norm(spec, "post_norm", prefix + names.post_norm)
    if attention.latent is None:
        plan |= _grouped_query(attention, hidden, names, prefix)
        out_inputs = attention.num_heads * attention.head_dim
    else:
        plan |= _latent(attention, attention.latent, hidden, names, prefix)
        out_inputs = attention.num_heads * attention.latent.v_head_dim
    plan["out"] = (TensorRef(prefix + names.out, (hidden, out_inputs)),)
    if attention.out_bias:
        plan["out_bias"] = (TensorRef(bias_of(prefix + names.out), (hidden,)),)
    if spec.moe_layers[layer]:
        plan |= _router(spec, names, prefix, checkpoint)
    else:
        plan |= _gated("dense", names.dense, prefix, hidden, spec.feed_forward.dense_intermediate)
    return plan


def _norm(spec: ModelSpec, purpose: str, name: str) -> Plan:
    plan: Plan = {purpose: (TensorRef(name, (spec.hidden_size,)),)}
    if spec.norm == "layer":
        plan[purpose + "_bias"] = (TensorRef(bias_of(name), (spec.hidden_size,)),)
    return plan


def _grouped_query(attention: AttentionSpec, hidden: int, names: TensorNames, prefix: str) -> Plan:
    q_size = attention.num_heads * attention.head_dim
    kv_size = attention.num_kv_heads * attention.head_dim
    sizes = (q_size, kv_size, kv_size) if len(names.qkv) == 3 else (q_size + 2 * kv_size,)
    parts = list(zip(names.qkv, sizes, strict=True))
    plan: Plan = {"qkv": tuple(TensorRef(prefix + name, (size, hidden)) for name, size in parts)}
    if attention.qkv_bias:
        plan["qkv_bias"] = tuple(TensorRef(bias_of(prefix + name), (size,)) for name, size in parts)
    if attention.qk_norm != "none":
        whole = attention.qk_norm == "full"
        plan["q_norm"] = (TensorRef(prefix + names.q_norm, (q_size if whole else attention.head_dim,)),)
        plan["k_norm"] = (TensorRef(prefix + names.k_norm, (kv_size if whole else attention.head_dim,)),)
    return plan


def _latent(attention: AttentionSpec, latent: LatentSpec, hidden: int, names: TensorNames, prefix: str) -> Plan:
    q_size = attention.num_heads * attention.head_dim
    up_size = attention.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    plan: Plan = {}
    downs = [(names.kv_down, latent.key_dim)]
    if latent.q_lora_rank is None:
        downs.insert(0, (names.q_direct, q_size))
    else:
        rank = latent.q_lora_rank
        downs.insert(0, (names.q_down, rank))
        plan["q_down_norm"] = (TensorRef(prefix + names.q_down_norm, (rank,)),)
        plan["q_up"] = (TensorRef(prefix + names.q_up, (q_size, rank)),)
    plan["down"] = tuple(TensorRef(prefix + name, (size, hidden)) for name, size in downs)
    if attention.qkv_bias:  # DeepSeek's attention_bias: on the down projections only, never on a direct q_proj
        biased = downs if latent.q_lora_rank is not None else downs[1:]
        plan["down_bias"] = tuple(TensorRef(bias_of(prefix + name), (size,)) for name, size in biased)
    plan["kv_down_norm"] = (TensorRef(prefix + names.kv_down_norm, (latent.kv_lora_rank,)),)
    plan["kv_up"] = (TensorRef(prefix + names.kv_up, (up_size, latent.kv_lora_rank)),)
    return plan


def _router(spec: ModelSpec, names: TensorNames, prefix: str, checkpoint: Checkpoint) -> Plan:
    hidden, num_experts, widths = spec.hidden_size, spec.router.num_experts, spec.feed_forward
    found = next((name for name in names.router if prefix + name in checkpoint), names.router[0])
    plan: Plan = {"router": (TensorRef(prefix + found, (num_experts, hidden)),)}
    if spec.router.has_score_bias:
        plan["score_bias"] = (TensorRef(prefix + names.score_bias, (num_experts,)),)
    if widths.shared_intermediate:
        plan |= _gated("shared", names.shared, prefix, hidden, widths.shared_intermediate)
    if widths.shared_gate:
        plan["shared_gate"] = (TensorRef(prefix + names.shared_gate, (1, hidden)),)
    return plan


def _gated(purpose: str, names: GatedNames, prefix: str, hidden: int, width: int) -> Plan:
    prefix += names.prefix
    return {
        f"{purpose}.gate": (TensorRef(prefix + names.gate, (width, hidden)),),
        f"{purpose}.up": (TensorRef(prefix + names.up, (width, hidden)),),
        f"{purpose}.down": (TensorRef(prefix + names.down, (hidden, width)),),
    }


@dataclass(frozen=True)
class ExpertRefs:
    """Where the matrices of one expert lie. `gate_up` is one tensor holding both, or two. See `StackedLayout` for
    "rows", whose down projection is stored transposed."""

    gate_up: tuple[TensorRef, ...]
    down: TensorRef
    transposed_down: bool = False

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return (*self.gate_up, self.down)


def expert_refs(spec: ModelSpec, names: TensorNames, layer: int, expert: int, checkpoint: Checkpoint) -> ExpertRefs:
    """The tensors of one routed expert, in whichever layout the checkpoint stores this layer."""
    prefix = names.layer.format(layer=layer)
    hidden, width, num_experts = spec.hidden_size, spec.feed_forward.intermediate, spec.router.num_experts
    for layout in names.experts:
        if prefix + layout.marker() not in checkpoint:
            continue
        if isinstance(layout, PerExpertLayout):
            stem = prefix + layout.names.prefix.format(expert=expert)
            gate_up = tuple(TensorRef(stem + name, (width, hidden)) for name in (layout.names.gate, layout.names.up))
            return ExpertRefs(gate_up, TensorRef(stem + layout.names.down, (hidden, width)))
        return _stacked_refs(layout, prefix, expert, hidden, width, num_experts)
    tried = " or ".join(prefix + layout.marker() for layout in names.experts)
    raise CheckpointError(f"{checkpoint.folder}: experts of layer {layer} not found: expected {tried}")


def _stacked_refs(
    layout: StackedLayout, prefix: str, expert: int, hidden: int, width: int, num_experts: int
) -> ExpertRefs:
    if layout.kind == "rows":
        rows, shape = (expert * width, (expert + 1) * width), (num_experts * width, hidden)
        gate_up = tuple(TensorRef(prefix + name, shape, rows) for name in layout.gate_up)
        return ExpertRefs(gate_up, TensorRef(prefix + layout.down, shape, rows), transposed_down=True)
    rows = (expert, expert + 1)
    fused = TensorRef(prefix + layout.gate_up[0], (num_experts, 2 * width, hidden), rows)
    return ExpertRefs((fused,), TensorRef(prefix + layout.down, (num_experts, hidden, width), rows))
