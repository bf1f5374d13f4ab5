"""Building either half of a model from a checkpoint: only the bytes of that half are read.

1. Sizes: those of `config.json` are the weights' own (`tensors.check_sizes`), before they decide how long a loop runs.
2. Plan: every tensor's name and shape, from the family's names and `config.json`; checked before anything is copied.
   Of a rank's plan only its part is left (`tensors.plan_of`).
3. Copy: tensor by tensor into the back-end's packed weights (`models/weights`). What that took goes back to the system.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from antiphon.base.errors import CheckpointError, UserError
from antiphon.base.system import give_memory_back
from antiphon.base.units import format_bytes
from antiphon.comm.rank_group import RankGroup
from antiphon.kernels.api import ExpertShape, KernelBackend, PackedLinear, RotaryTable
from antiphon.models.attention import (
    Attention,
    GroupedQueryAttention,
    LatentAttention,
    WholeNorms,
)
from antiphon.models.attention_half import AttentionHalf, AttentionLayer, LayerNorm, LocalFeedForward, Norm, RMSNorm
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.checkpoint_folder import brief
from antiphon.models.expert_half import FREE, LAYERS_IN_POOL, ExpertHalf, OffloadedExperts
from antiphon.models.gguf.checkpoint import GgufCheckpoint, open_weights
from antiphon.models.gguf.container import ROPE_TABLES
from antiphon.models.rotary import rotary_table
from antiphon.models.shares import Share, share_of
from antiphon.models.tensor_names import TensorNames
from antiphon.models.tensors import (
    ExpertRefs,
    LoadPlan,
    attention_layer_plan,
    bias_of,
    check,
    check_sizes,
    expert_of,
    expert_refs,
    outer_plan,
    plan_of,
)
from antiphon.models.weights import ReportProgress, WeightReader
from antiphon.specs.model import ModelSpec

ALONE = RankGroup()
_NUMBERS_AT_ONCE = 1 << 22
_EXPERT = re.compile(r"(\.experts)\.\d+\.")
_AROUND = re.compile(r"(model|transformer)\.(?!layers\.|blocks\.|mtp)[\w.]*(norm|embed|wte)")  # not in a layer
_BLOCK = "blk."  # begins tensors of layers in a GGUF file; all others there are the model's too
_LEFT_ALONE = re.compile(
    r"attn_[kv]_b\.weight$"  # of a matrix that is there as a whole, too
    r"|rotary_emb\.|\.(input|output|activation|[qkv]|kv|prob|cache)_(global_)?(scale|zero_point|amax)$"
)
_COMPARED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ExpertIds = Sequence[int] | Mapping[int, Sequence[int]]


def open_checkpoint(folder: str | Path, spec: ModelSpec) -> Checkpoint:
    """The checkpoint of `spec`, before anything is started for it: every header is read, all sizes are compared.

    `CheckpointError` if a shard is missing or damaged, the weights are of another model, or have a head, a bias or a
    norm that `config.json` does not know."""
    checkpoint = open_weights(folder)
    try:
        _check(checkpoint, spec, checkpoint.family_names(spec.family))
    except CheckpointError as error:
        if not isinstance(checkpoint, GgufCheckpoint):
            raise
        raise CheckpointError(str(error).replace("config.json", "its metadata")) from error
    return checkpoint


def _check(checkpoint: Checkpoint, spec: ModelSpec, names: TensorNames) -> None:
    check_sizes(checkpoint, spec, names)
    checkpoint.open_shards()
    _check_all_used(checkpoint, spec, names)
    if spec.tie_embeddings and names.head in checkpoint:
        _check_tied_head(checkpoint, spec, names)


def _check_all_used(checkpoint: Checkpoint, spec: ModelSpec, names: TensorNames) -> None:
    """`CheckpointError` for a weight, bias or norm of a layer that `config.json` says nothing of: what is computed
    without it is another model. Zeros, as some tools write for every bias, change nothing."""
    plans = [attention_layer_plan(spec, names, layer, checkpoint) for layer in range(spec.num_layers)]
    used = {ref.name for plan in (outer_plan(spec, names), *plans) for refs in plan.values() for ref in refs}
    for layer in spec.expert_layers:
        used |= {ref.name for ref in expert_refs(spec, names, layer, 0, checkpoint).refs}
    used |= {part for name in used if name in checkpoint for part in checkpoint.parts(name)}
    layers = tuple(names.layer.format(layer=layer) for layer in range(spec.num_layers))
    made_of, is_gguf = checkpoint.made_of, isinstance(checkpoint, GgufCheckpoint)
    for stored in checkpoint.names:
        name = made_of.get(stored, stored)
        if _EXPERT.sub(r"\1.0.", name) in used or _LEFT_ALONE.search(stored):
            continue
        around = _AROUND.match(name) and checkpoint.prefix is None
        if is_gguf and not name.startswith((_BLOCK, *ROPE_TABLES)):
            around = True
        if not (around or name == bias_of(names.head) or name.startswith(layers)):
            continue
        tensor = checkpoint.read(name) if stored in made_of else checkpoint.stored_view(stored).float()
        if tensor.any() and not ("scale" in name and bool((tensor == 1).all())):
            fix = "state there what it belongs to, such as attention_bias, or leave the tensor out of the weights"
            raise CheckpointError(
                f"{checkpoint.file_of(name)}: tensor {brief(stored)} has no use by config.json: "
                f"{'use another GGUF file of the model' if is_gguf else fix}"
            )


def _check_tied_head(checkpoint: Checkpoint, spec: ModelSpec, names: TensorNames) -> None:
    """`CheckpointError` for a head of its own where `config.json` says that it is the embedding, as tools leave it that
    train both. A copy of it is as large, and read once."""
    table = (spec.vocab_size, spec.hidden_size)
    checkpoint.require(names.head, table)
    if any(checkpoint.is_packed(name) or checkpoint.stored_view(name).dtype not in _COMPARED for name in _tied(names)):
        return  # a head in few bits: the embedding says the same more exactly
    step = max(1, _NUMBERS_AT_ONCE // spec.hidden_size)
    for first in range(0, spec.vocab_size, step):
        rows = first, min(first + step, spec.vocab_size)
        parts = [checkpoint.stored_view(name)[rows[0] : rows[1]].float() for name in _tied(names)]
        if not torch.equal(*parts):
            raise CheckpointError(
                f"config.json: tie_word_embeddings = true, but {names.head} in {checkpoint.file_of(names.head)} is not "
                f"{names.embedding}: write false there, or leave {names.head} out of the weights"
            )
        checkpoint.release(names.head, rows)


def _tied(names: TensorNames) -> tuple[str, str]:
    return names.embedding, names.head


def load_attention_half(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    backend: KernelBackend,
    progress: ReportProgress | None = None,
    *,
    max_positions: int | None = None,
    ranks: RankGroup = ALONE,
    layers: range | None = None,
) -> AttentionHalf:
    """Read all but the routed experts. `max_positions` bounds the rotary table (default: what the model was made for).
    Of several `ranks` each reads what it works on; nothing is said between them here. `layers`: those of a stage of a
    pipeline, the first of which has embedding and head besides.

    Reports (bytes done, bytes total) to `progress`. `CheckpointError` if a tensor is missing or has the wrong shape.
    Memory that only reading took goes back to the system."""
    names = checkpoint.family_names(spec.family)
    check_sizes(checkpoint, spec, names)
    share = share_of(spec, ranks.rank, ranks.size)
    layers = range(spec.num_layers) if layers is None else layers
    is_first = layers.start == 0
    outer = plan_of(outer_plan(spec, names), spec, share) if is_first else {}
    plans = {layer: plan_of(attention_layer_plan(spec, names, layer, checkpoint), spec, share) for layer in layers}
    refs = [ref for plan in (outer, *plans.values()) for part in plan.values() for ref in part]
    reader = WeightReader(checkpoint, backend, check(checkpoint, refs), progress)

    embedding_WH = reader.tensor(outer["embedding"]) if is_first else None
    output_head = None if embedding_WH is None else _head(spec, outer, reader, embedding_WH)
    if spec.tie_embeddings:
        embedding_WH = None  # the head is the table
    rotary = rotary_table(spec.attention.rope, max_positions or spec.max_position, backend.device)
    local = share.local_spec(spec)
    norms = None if share.is_whole or spec.attention.qk_norm != "full" else _whole_norms(spec, share, ranks)
    half = AttentionHalf(
        spec=spec,
        backend=backend,
        embedding_WH=embedding_WH,
        layers={
            layer: _attention_layer(_of_layer(local, layer), plan, reader, rotary, norms)
            for layer, plan in plans.items()
        },
        final_norm=_norm(spec, outer, "final_norm", reader) if is_first else None,
        output_head=output_head,
        weight_bytes=reader.done_bytes,
        ranks=ranks,
    )
    reader.log_formats("attention")
    give_memory_back()
    return half


def load_expert_half(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    backend: KernelBackend,
    expert_ids: ExpertIds | None = None,
    progress: ReportProgress | None = None,
    *,
    share: Share | None = None,
    num_slots: int = 0,
) -> ExpertHalf:
    """Read the routed experts with these global ids: the same for every layer, or layer by layer; all by default. A
    layer that is not named, because another stage of a pipeline has it, is left out.
    `share`: of each only the columns of this rank. Each layer has room for `num_slots` experts at least, so that others
    can be read later (`load_expert`).

    Reports (bytes done, bytes total) to `progress`. `CheckpointError` if a tensor is missing or has the wrong shape.
    Memory that only reading took goes back to the system."""
    check_sizes(checkpoint, spec, checkpoint.family_names(spec.family))
    ids_of = _ids_of_each_layer(spec, expert_ids)
    share = share or share_of(spec)
    refs_of = _expert_refs_of(checkpoint, spec, share)
    plans = {layer: [refs_of(layer, expert) for expert in ids] for layer, ids in ids_of.items()}
    refs = [ref for plan in plans.values() for expert in plan for ref in expert.refs]
    reader = WeightReader(checkpoint, backend, check(checkpoint, refs), progress)
    local = share.local_spec(spec)
    experts = {
        layer: reader.new_experts(
            _expert_shape(local, max(len(plan), num_slots, 1)),
            plan,
            plan[0] if plan else refs_of(layer, 0),
            checkpoint.rounding.experts,
        )
        for layer, plan in plans.items()
    }
    reader.log_formats("experts")
    give_memory_back()
    slots = {layer: ids + (FREE,) * (num_slots - len(ids)) for layer, ids in ids_of.items()}
    return ExpertHalf(spec=local, backend=backend, experts=experts, expert_ids=slots)


def load_offloaded_experts(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    backend: KernelBackend,
    num_bytes: int,
    expert_ids: ExpertIds | None = None,
    *,
    share: Share | None = None,
) -> OffloadedExperts:
    """Experts of the model, named and cut as in `load_expert_half`, in a pool of at most `num_bytes`. `UserError` if
    that is less than two layers' experts, or if layers have different formats.
    Memory that only reading took goes back to the system."""
    check_sizes(checkpoint, spec, checkpoint.family_names(spec.family))
    ids_of = _ids_of_each_layer(spec, expert_ids)
    share, rounding = share or share_of(spec), checkpoint.rounding.experts
    local, refs_of = share.local_spec(spec), _expert_refs_of(checkpoint, spec, share)
    like = refs_of(spec.expert_layers[0], 0)
    reader = WeightReader(checkpoint, backend, 0, None)
    one = reader.new_experts(_expert_shape(local, 1), [], like, rounding)
    most, least = sum(map(len, ids_of.values())), LAYERS_IN_POOL * max(map(len, ids_of.values()))
    num_slots = min(num_bytes // one.num_bytes, most)
    if num_slots < min(least, most):
        raise UserError(
            f"--expert-memory {format_bytes(num_bytes)} holds {num_slots} experts of {format_bytes(one.num_bytes)}: "
            f"give at least {format_bytes(least * one.num_bytes)}, the experts of {LAYERS_IN_POOL} layers"
        )
    pool = reader.new_experts(_expert_shape(local, num_slots), [], like, rounding)

    def load(layer: int, expert: int, slot: int) -> None:
        refs = refs_of(layer, expert)
        own = WeightReader(checkpoint, backend, check(checkpoint, refs.refs), None)
        own.expert(pool, slot, refs, rounding)

    for layer, ids in ids_of.items():  # what is missing or in another format is found before a request comes
        first = next(iter(ids), 0)
        own = reader.new_experts(_expert_shape(local, 1), [], refs_of(layer, first), rounding)
        if own.formats != pool.formats:
            raise UserError(
                f"--expert-memory {format_bytes(num_bytes)} needs experts in one format in all layers: layer "
                f"{spec.expert_layers[0]} has {pool.formats}, layer {layer} {own.formats}; leave it out"
            )
        load(layer, first, 0)
    give_memory_back()
    return OffloadedExperts(backend, pool, spec.router.num_experts, load)


def load_expert(
    checkpoint: Checkpoint, spec: ModelSpec, share: Share, half: ExpertHalf, layer: int, expert: int, slot: int
) -> None:
    """Read one more expert, biases included, into a slot that nothing uses; `half.hold` makes it count.

    `spec` and `share` as in `load_expert_half`. May run beside `half.forward`, in another thread. `CheckpointError` if
    the checkpoint has changed meanwhile."""
    refs = _expert_refs_of(checkpoint, spec, share)(layer, expert)
    reader = WeightReader(checkpoint, half.backend, check(checkpoint, refs.refs), None)
    reader.expert(half.experts[layer], slot, refs, checkpoint.rounding.experts)


def _expert_refs_of(checkpoint: Checkpoint, spec: ModelSpec, share: Share) -> Callable[[int, int], ExpertRefs]:
    """What finds this rank's columns of an expert, by layer and number."""
    names, width = checkpoint.family_names(spec.family), spec.feed_forward.intermediate
    return lambda layer, expert: expert_of(expert_refs(spec, names, layer, expert, checkpoint), width, share)


def _ids_of_each_layer(spec: ModelSpec, expert_ids: ExpertIds | None) -> dict[int, tuple[int, ...]]:
    moe_layers = list(spec.expert_layers)
    expert_ids = range(spec.router.num_experts) if expert_ids is None else expert_ids
    per_layer = expert_ids if isinstance(expert_ids, Mapping) else dict.fromkeys(moe_layers, expert_ids)
    if not set(per_layer) <= set(moe_layers):
        raise UserError(f"expert ids are given for layers {sorted(per_layer)}: only {moe_layers} have experts")
    for layer, ids in per_layer.items():
        if len(set(ids)) != len(ids) or not all(0 <= e < spec.router.num_experts for e in ids):
            raise UserError(
                f"layer {layer}: expert ids {list(ids)}: give distinct ids from 0 to {spec.router.num_experts - 1}"
            )
    return {layer: tuple(ids) for layer, ids in per_layer.items()}


def _expert_shape(spec: ModelSpec, num_experts: int) -> ExpertShape:
    return _shape(spec, num_experts, spec.feed_forward.intermediate, spec.feed_forward.expert_bias)


def _shape(spec: ModelSpec, num_experts: int, width: int, has_bias: bool) -> ExpertShape:
    widths = spec.feed_forward
    return ExpertShape(num_experts, spec.hidden_size, width, widths.activation, widths.alpha, widths.limit, has_bias)


def _of_layer(spec: ModelSpec, layer: int) -> ModelSpec:
    """With the layer's own window for every layer: what attention is called with is the layer's place in the cache."""
    window = spec.attention.window_of(layer)
    return replace(spec, attention=replace(spec.attention, sliding_window=window, windowed_layers=()))


def _head(spec: ModelSpec, outer: LoadPlan, reader: WeightReader, embedding_WH: Tensor) -> PackedLinear:
    if not spec.tie_embeddings:
        return reader.linear(outer, "head")
    return reader.backend.pack_linear(embedding_WH, reader.optional(outer, "head_bias"))


def _whole_norms(spec: ModelSpec, share: Share, ranks: RankGroup) -> WholeNorms:
    attention = spec.attention
    return WholeNorms(
        ranks=ranks,
        q_width=attention.num_heads * attention.head_dim,
        k_width=attention.num_kv_heads * attention.head_dim,
        counted_kv_heads=share.counted_kv_heads(attention.num_heads // attention.num_kv_heads),
    )


def _attention_layer(
    spec: ModelSpec, plan: LoadPlan, reader: WeightReader, rotary: RotaryTable, norms: WholeNorms | None
) -> AttentionLayer:
    return AttentionLayer(
        input_norm=_norm(spec, plan, "input_norm", reader),
        attention=_attention(spec, plan, reader, rotary, norms),
        post_norm=_norm(spec, plan, "post_norm", reader),
        router=reader.linear(plan, "router") if "router" in plan else None,
        score_bias_E=_score_bias(plan, reader),
        local=_local_feed_forward(spec, plan, reader),
    )


def _score_bias(plan: LoadPlan, reader: WeightReader) -> Tensor | None:
    bias = reader.optional(plan, "score_bias", torch.float32)
    return None if bias is None else bias.flatten()  # ERNIE stores it as one row


def _norm(spec: ModelSpec, plan: LoadPlan, purpose: str, reader: WeightReader) -> Norm:
    weight = reader.tensor(plan[purpose])
    if spec.norm == "rms":
        return RMSNorm(reader.backend, weight, spec.norm_eps)
    return LayerNorm(weight, reader.optional(plan, purpose + "_bias"), spec.norm_eps)


def _attention(
    spec: ModelSpec, plan: LoadPlan, reader: WeightReader, rotary: RotaryTable, norms: WholeNorms | None
) -> Attention:
    attention, backend = spec.attention, reader.backend
    if attention.latent is None:
        return GroupedQueryAttention(
            spec=attention,
            eps=spec.norm_eps,
            backend=backend,
            rotary=rotary,
            qkv=reader.linear(plan, "qkv"),
            out=reader.linear(plan, "out"),
            q_norm=reader.optional(plan, "q_norm"),
            k_norm=reader.optional(plan, "k_norm"),
            sinks_N=reader.optional(plan, "sinks", torch.float32),
            residual_multiplier=spec.residual_multiplier,
            norms=norms,
        )
    assert spec.residual_multiplier == 1.0, "no model with latent attention has one"
    up = reader.tensor(plan["kv_up"])
    return LatentAttention(
        spec=attention,
        latent=attention.latent,
        backend=backend,
        rotary=rotary,
        down=reader.linear(plan, "down"),
        q_down_norm=reader.optional(plan, "q_down_norm"),
        q_up=reader.linear(plan, "q_up") if "q_up" in plan else None,
        kv_down_norm=reader.tensor(plan["kv_down_norm"]),
        up_NUL=up.view(attention.num_heads, -1, attention.latent.kv_lora_rank),
        out=reader.linear(plan, "out"),
    )


def _local_feed_forward(spec: ModelSpec, plan: LoadPlan, reader: WeightReader) -> LocalFeedForward | None:
    widths, backend = spec.feed_forward, reader.backend
    purpose = next((kind for kind in ("dense", "shared") if f"{kind}.gate_up" in plan), None)
    if purpose is None:
        return None
    width = widths.dense_intermediate if purpose == "dense" else widths.shared_intermediate
    gate_up = plan[f"{purpose}.gate_up"]
    refs = ExpertRefs("separate" if len(gate_up) == 2 else "fused", gate_up, plan[f"{purpose}.down"][0])
    expert = reader.new_experts(_shape(spec, 1, width, False), [refs], refs, reader.checkpoint.rounding.dense)
    shared_gate = reader.linear(plan, "shared_gate") if "shared_gate" in plan else None
    return LocalFeedForward(backend, expert, shared_gate, spec.residual_multiplier)
