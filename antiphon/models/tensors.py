"""Which tensors a half of the model needs, with the shapes `config.json` promises: the load plan, and one rank's part.

A plan maps a purpose ("qkv", "router", ...) to one or several tensors; several are stacked along their rows. So the
rows of a tensor-parallel rank's share become rows of one tensor after the other, and its columns a cut of each. What a
rank leaves out is never mapped, let alone read; only of a matrix whose columns it takes the pages between them come
along where a row is shorter than a page.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from antiphon.base.errors import CheckpointError
from antiphon.models import packed
from antiphon.models.checkpoint import Checkpoint, Cut, Rows
from antiphon.models.shard_index import stored_counts
from antiphon.models.shares import Range, Ranges, Share, head_ranges
from antiphon.models.tensor_names import BLOCKS_SUFFIX, GatedNames, StackedLayout, TensorNames
from antiphon.specs.model import AttentionSpec, LatentSpec, ModelSpec

_OTHER_MODEL = "weights and config.json are of different models, download both again"


class NoCheckpoint:
    """Stands where a checkpoint does when there is none: no tensor is stored, so the family's first names are taken.
    `marker`: how names of experts end in the layout that is taken; empty: in the first one."""

    folder = Path()

    def __init__(self, marker: str = "") -> None:
        self._marker = marker

    def __contains__(self, name: object) -> bool:
        return bool(self._marker) and isinstance(name, str) and name.endswith(self._marker)

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)


Stored = Checkpoint | NoCheckpoint  # what a plan asks which of a family's spellings is used


@dataclass(frozen=True)
class TensorRef:
    """A stored tensor of a known shape, or rows [start, stop) of it, of which `cut` may leave a part of an axis.
    `part_of`: the rows of which `rows` are one rank's, where rows of the file are columns of a matrix."""

    name: str
    shape: tuple[int, ...]
    rows: Rows = None
    cut: Cut = None
    part_of: Rows = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what is read."""
        sizes = list(self.shape)
        if self.rows is not None:
            sizes[0] = self.rows[1] - self.rows[0]
        if self.cut is not None:
            sizes[self.cut[0]] = self.cut[2] - self.cut[1]
        return tuple(sizes)

    def in_groups(self, axis: int, width: int) -> "tuple[TensorRef, int]":
        """The same, but along an axis of which it has a part in whole groups of that width; and how far its own part is
        from where that begins."""
        if axis == 0 and self.rows is not None and self.part_of is not None:
            (start, limit), (first, last) = self.part_of, self.rows
        elif self.cut is not None and self.cut[0] == axis:
            start, limit, (_, first, last) = 0, self.shape[axis], self.cut
        else:
            return self, 0
        begin, end = first - (first - start) % width, min(last + (start - last) % width, limit)
        return replace(self, **({"rows": (begin, end)} if axis == 0 else {"cut": (axis, begin, end)})), first - begin


LoadPlan = dict[str, tuple[TensorRef, ...]]


def bias_of(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"


def check(checkpoint: Checkpoint, refs: Iterable[TensorRef]) -> int:
    """Every tensor is there with its shape; returns the bytes that reading them all takes."""
    total = 0
    for ref in refs:
        checkpoint.require(ref.name, ref.shape)
        total += checkpoint.stored_bytes(ref.name, ref.rows, ref.cut)
    return total


def check_sizes(checkpoint: Checkpoint, spec: ModelSpec, names: TensorNames) -> None:
    """`CheckpointError` unless layers, experts, vocabulary and hidden size are those of `config.json`.

    One pass over the names of the stored tensors: it takes as long however large `config.json` says the model is."""
    layers, experts = stored_counts(checkpoint.names, names)
    _check_layers(checkpoint, spec, layers, names)
    for layer, num_experts in sorted(experts.items()):
        if layer < spec.num_layers and num_experts != spec.router.num_experts:
            raise CheckpointError(
                f"config.json: {spec.router.num_experts} experts, but layer {layer} of the weights in "
                f"{checkpoint.folder} has {num_experts}: {_OTHER_MODEL}"
            )
    checkpoint.require(names.embedding, (spec.vocab_size, spec.hidden_size))
    first = names.layer.format(layer=spec.moe_layers.index(True))
    router = next((first + name for name in names.router if first + name in checkpoint), None)
    if router is not None:  # where experts are stacked, no name says how many they are
        checkpoint.require(router, (spec.router.num_experts, spec.hidden_size))


def _check_layers(checkpoint: Checkpoint, spec: ModelSpec, layers: frozenset[int], names: TensorNames) -> None:
    if not layers:
        raise CheckpointError(
            f"{checkpoint.folder}: no tensor is named {names.layer.format(layer=0)}*, as those of {spec.family} are: "
            f"{_OTHER_MODEL}"
        )
    num_stored = max(layers) + 1
    if num_stored != spec.num_layers:
        raise CheckpointError(
            f"config.json: {spec.num_layers} layers, but the weights in {checkpoint.folder} have {num_stored}: "
            f"{_OTHER_MODEL}"
        )
    if len(layers) != num_stored:
        missing = next(layer for layer in range(num_stored) if layer not in layers)
        raise CheckpointError(
            f"{checkpoint.folder}: layer {missing} of {num_stored} is missing: the download is incomplete, repeat it"
        )


def outer_plan(spec: ModelSpec, names: TensorNames) -> LoadPlan:
    """Embedding, final norm and head. A tied head reads nothing: it is the embedding."""
    table = (spec.vocab_size, spec.hidden_size)
    plan: LoadPlan = {"embedding": (TensorRef(names.embedding, table),)}
    plan |= _norm(spec, "final_norm", names.final_norm)
    if not spec.tie_embeddings:
        plan["head"] = (TensorRef(names.head, table),)
    if spec.lm_head_bias:
        plan["head_bias"] = (TensorRef(bias_of(names.head), (spec.vocab_size,)),)
    return plan


def attention_layer_plan(spec: ModelSpec, names: TensorNames, layer: int, checkpoint: Stored) -> LoadPlan:
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


def _norm(spec: ModelSpec, purpose: str, name: str) -> LoadPlan:
    plan: LoadPlan = {purpose: (TensorRef(name, (spec.hidden_size,)),)}
    if spec.norm == "layer":
        plan[purpose + "_bias"] = (TensorRef(bias_of(name), (spec.hidden_size,)),)
    return plan


def _grouped_query(attention: AttentionSpec, hidden: int, names: TensorNames, prefix: str) -> LoadPlan:
    q_size = attention.num_heads * attention.head_dim
    kv_size = attention.num_kv_heads * attention.head_dim
    sizes = (q_size, kv_size, kv_size) if len(names.qkv) == 3 else (q_size + 2 * kv_size,)
    parts = list(zip(names.qkv, sizes, strict=True))
    plan: LoadPlan = {"qkv": tuple(TensorRef(prefix + name, (size, hidden)) for name, size in parts)}
    if attention.qkv_bias:
        plan["qkv_bias"] = tuple(TensorRef(bias_of(prefix + name), (size,)) for name, size in parts)
    if attention.qk_norm != "none":
        whole = attention.qk_norm == "full"
        plan["q_norm"] = (TensorRef(prefix + names.q_norm, (q_size if whole else attention.head_dim,)),)
        plan["k_norm"] = (TensorRef(prefix + names.k_norm, (kv_size if whole else attention.head_dim,)),)
    if attention.sinks:
        plan["sinks"] = (TensorRef(prefix + names.sinks, (attention.num_heads,)),)
    return plan


def _latent(attention: AttentionSpec, latent: LatentSpec, hidden: int, names: TensorNames, prefix: str) -> LoadPlan:
    q_size = attention.num_heads * attention.head_dim
    up_size = attention.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    plan: LoadPlan = {}
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


def _router(spec: ModelSpec, names: TensorNames, prefix: str, checkpoint: Stored) -> LoadPlan:
    hidden, num_experts, widths = spec.hidden_size, spec.router.num_experts, spec.feed_forward
    router = _stored(names.router, prefix, checkpoint)
    plan: LoadPlan = {"router": (TensorRef(router, (num_experts, hidden)),)}
    if spec.router.has_logit_bias:
        plan["router_bias"] = (TensorRef(bias_of(router), (num_experts,)),)
    if spec.router.has_score_bias:
        plan["score_bias"] = (_score_bias(_stored(names.score_bias, prefix, checkpoint), num_experts, checkpoint),)
    if widths.shared_intermediate:
        plan |= _gated("shared", names.shared, prefix, hidden, widths.shared_intermediate)
    if widths.shared_gate:
        plan["shared_gate"] = (TensorRef(prefix + names.shared_gate, (1, hidden)),)
    return plan


def _stored(names: tuple[str, ...], prefix: str, checkpoint: Stored) -> str:
    """The first of `names` that the checkpoint has; the first of all, to be reported as missing, if it has none."""
    return prefix + next((name for name in names if prefix + name in checkpoint), names[0])


def _score_bias(name: str, num_experts: int, checkpoint: Stored) -> TensorRef:
    """One value an expert; ERNIE stores them as a matrix of one row."""
    shape = (num_experts,)
    in_one_row = name in checkpoint and checkpoint.shape(name) == (1, *shape)
    return TensorRef(name, (1, *shape) if in_one_row else shape)


def _gated(purpose: str, names: GatedNames, prefix: str, hidden: int, width: int) -> LoadPlan:
    prefix += names.prefix
    return {
        f"{purpose}.gate_up": _gate_up(names, prefix, hidden, width),
        f"{purpose}.down": (TensorRef(prefix + names.down, (hidden, width)),),
    }


def _gate_up(names: GatedNames, prefix: str, hidden: int, width: int) -> tuple[TensorRef, ...]:
    if names.up is None:
        return (TensorRef(prefix + names.gate, (2 * width, hidden)),)
    return tuple(TensorRef(prefix + name, (width, hidden)) for name in (names.gate, names.up))


@dataclass(frozen=True)
class ExpertRefs:
    """Where the matrices of one expert lie: `gate_up` is one tensor holding both, or two ("separate", "rows");
    `StackedLayout` says what the other layouts mean. `biases`: of gate and up, in turns or ("separate") apart, or none.
    `down_bias`: None too where another rank adds it."""

    layout: Literal["separate", "fused", "rows", "columns", "mxfp4"]
    gate_up: tuple[TensorRef, ...]
    down: TensorRef
    biases: tuple[TensorRef, ...] = ()
    down_bias: TensorRef | None = None

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return (*self.gate_up, self.down, *self.biases, *([] if self.down_bias is None else [self.down_bias]))


def expert_refs(spec: ModelSpec, names: TensorNames, layer: int, expert: int, checkpoint: Stored) -> ExpertRefs:
    """The tensors of one routed expert, in whichever layout the checkpoint stores this layer."""
    prefix = names.layer.format(layer=layer)
    for layout in names.experts:
        if prefix + layout.marker() not in checkpoint:
            continue
        if isinstance(layout, GatedNames):
            stem = prefix + layout.prefix.format(expert=expert)
            gate_up = _gate_up(layout, stem, spec.hidden_size, spec.feed_forward.intermediate)
            down = TensorRef(stem + layout.down, (spec.hidden_size, spec.feed_forward.intermediate))
            return ExpertRefs("separate" if len(gate_up) == 2 else "fused", gate_up, down)
        return _stacked_refs(spec, layout, prefix, expert)
    tried = " or ".join(prefix + layout.marker() for layout in names.experts)
    stored = checkpoint.names if isinstance(checkpoint, Checkpoint) else []
    if found := next((name for name in stored if name.endswith(packed.PACKED_SUFFIXES)), None):
        raise CheckpointError(
            f"{checkpoint.folder}: {found} is packed, and no quantization_config in config.json says how: download "
            f"config.json again"
        )
    raise CheckpointError(f"{checkpoint.folder}: experts of layer {layer} not found: expected {tried}")


def _stacked_refs(spec: ModelSpec, layout: StackedLayout, prefix: str, expert: int) -> ExpertRefs:
    hidden, width, num_experts = spec.hidden_size, spec.feed_forward.intermediate, spec.router.num_experts
    if layout.kind == "rows":
        rows, shape = (expert * width, (expert + 1) * width), (num_experts * width, hidden)
        parts = tuple(TensorRef(prefix + name, shape, rows) for name in layout.gate_up)
        return ExpertRefs("rows", parts, TensorRef(prefix + layout.down, shape, rows))
    rows, is_apart, suffix = (expert, expert + 1), layout.kind == "apart", ""
    gate_up: tuple[int, ...] = (width if is_apart else 2 * width, hidden)
    down: tuple[int, ...] = (hidden, width)
    if layout.kind == "columns":
        gate_up, down = gate_up[::-1], down[::-1]
    if layout.kind == "mxfp4":
        gate_up, down, suffix = packed.blocks_shape(gate_up), packed.blocks_shape(down), BLOCKS_SUFFIX
    names, last = [prefix + name for name in layout.gate_up], prefix + layout.down
    refs = ExpertRefs(
        "separate" if layout.kind == "apart" else layout.kind,
        tuple(TensorRef(name + suffix, (num_experts, *gate_up), rows) for name in names),
        TensorRef(last + suffix, (num_experts, *down), rows),
    )
    if not spec.feed_forward.expert_bias:
        return refs
    *of_gate_up, of_down = [bias_of(name) if is_apart else name + "_bias" for name in (*names, last)]
    bias_width = width if is_apart else 2 * width
    return replace(
        refs,
        biases=tuple(TensorRef(name, (num_experts, bias_width), rows) for name in of_gate_up),
        down_bias=TensorRef(of_down, (num_experts, hidden), rows),
    )


_VOCABULARY = ("embedding", "head", "head_bias")


def plan_of(plan: LoadPlan, spec: ModelSpec, share: Share) -> LoadPlan:
    """What this rank reads of a plan of the attention half."""
    if share.is_whole:
        return plan
    found: LoadPlan = {}
    for purpose, refs in plan.items():
        if purpose == "out_bias" and not share.leads:
            continue
        found[purpose] = _of_purpose(purpose, refs, spec, share)
    return found


def expert_of(refs: ExpertRefs, width: int, share: Share) -> ExpertRefs:
    """What this rank reads of one expert of this width."""
    if share.is_whole:
        return refs
    first, last = share.columns(width)
    layout = refs.layout
    if layout == "rows":
        parts = [_rows(ref, (first, last)) for ref in (*refs.gate_up, refs.down)]
        return replace(refs, gate_up=tuple(parts[:-1]), down=parts[-1])
    if layout in ("columns", "mxfp4"):  # gate and up in turns
        axis, down_axis = (2, 1) if layout == "columns" else (1, 2)
        return replace(
            refs,
            gate_up=(replace(refs.gate_up[0], cut=(axis, 2 * first, 2 * last)),),
            down=replace(refs.down, cut=(down_axis, first, last)),
            **_biases(refs, (2 * first, 2 * last), share),
        )
    if refs.down.rows is not None:  # stacked: an expert is one row of the first axis
        down = replace(refs.down, cut=(2, first, last))
        if layout == "separate":
            parts = [replace(ref, cut=(1, first, last)) for ref in refs.gate_up]
            return replace(refs, gate_up=tuple(parts), down=down, **_biases(refs, (first, last), share))
        ref = refs.gate_up[0]
        gate_up = tuple(replace(ref, cut=(1, start + first, start + last)) for start in (0, width))
        return replace(refs, layout="separate", gate_up=gate_up, down=down)
    gate_up = tuple(_of_rows(refs.gate_up, ((first, last), (width + first, width + last))))
    return replace(refs, layout="separate", gate_up=gate_up, down=replace(refs.down, cut=(1, first, last)))


def _biases(refs: ExpertRefs, columns: Range, share: Share) -> dict[str, Any]:
    """Both kinds of biases as this rank reads them."""
    biases = tuple(replace(ref, cut=(1, *columns)) for ref in refs.biases)
    return {"biases": biases, "down_bias": refs.down_bias if share.leads else None}


def _of_purpose(purpose: str, refs: tuple[TensorRef, ...], spec: ModelSpec, share: Share) -> tuple[TensorRef, ...]:
    if purpose in _VOCABULARY:
        return tuple(_of_rows(refs, (share.vocabulary,)))
    kind, _, matrix = purpose.partition(".")
    if matrix:
        widths = spec.feed_forward
        width = widths.dense_intermediate if kind == "dense" else widths.shared_intermediate
        first, last = share.columns(width)
        if matrix == "down":
            return (replace(refs[0], cut=(1, first, last)),)
        return tuple(_of_rows(refs, ((first, last), (width + first, width + last))))
    kv_heads = _merged(tuple((head, head + 1) for head in share.kv_heads))
    own = head_ranges(spec.attention, purpose, share.q_heads, kv_heads)
    if own is None:
        return refs
    dim, ranges = own
    if dim == 0:
        return tuple(_of_rows(refs, _merged(ranges)))
    ((first, last),) = ranges
    return tuple(replace(ref, cut=(dim, first, last)) for ref in refs)


def _merged(ranges: Ranges) -> Ranges:
    """The same indices in the same order in as few ranges as can be."""
    found: list[Range] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


def _of_rows(refs: Sequence[TensorRef], ranges: Ranges) -> list[TensorRef]:
    """These rows of the stacked tensors, in the order of `ranges`."""
    starts = [0, *itertools.accumulate(ref.shape[0] for ref in refs)]
    found = []
    for start, stop in ranges:
        for ref, begin in zip(refs, starts, strict=False):
            first, last = max(start - begin, 0), min(stop - begin, ref.shape[0])
            if first < last:
                found.append(replace(ref, rows=(first, last)))
    return found


def _rows(ref: TensorRef, part: Range) -> TensorRef:
    """Part of the rows that `ref` already picks."""
    assert ref.rows is not None, "experts stacked by rows are picked by rows"
    return replace(ref, rows=(ref.rows[0] + part[0], ref.rows[0] + part[1]), part_of=ref.rows)
