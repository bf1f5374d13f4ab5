"""`counted_model`: a `ModelSpec` with the right sizes from any MoE config, for planning; nothing can be run with it.

1. Usual keys by all their spellings, layers by all the ways families distinguish them (`counted_layers`).
2. Families whose keys mean something else have a line in `QUIRKS`.
3. What does not change a size, or is not counted (rotation, scoring, norms of heads), is not read.

Rejected: one reader per family, as models that run have. A planner is asked about models of the week.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from antiphon.models.counted_layers import Keys, moe_layers, state_layers, state_spec, windowed_layers
from antiphon.models.families.config_values import MAX_POSITIONS
from antiphon.specs.model import AttentionSpec, FeedForwardSpec, LatentSpec, ModelSpec, RopeSpec, RouterSpec, SparseSpec

UNKNOWN_TYPE = "unknown"


@dataclass(frozen=True, kw_only=True)
class Quirk:
    """What a family does unlike the usual. `shared_experts`: their number, which no key says, each as wide as a routed
    one. `output_gate`, `shared_gate`: as in the spec. `tied`: embedding and head, where not stated."""

    shared_experts: int = 0
    output_gate: bool = False
    shared_gate: bool = False
    tied: bool = False


QUIRKS = {
    "llama4_text": Quirk(shared_experts=1),
    "hunyuan": Quirk(shared_experts=1, tied=True),
    "hunyuan_v1_moe": Quirk(shared_experts=1),
    "lfm2_moe": Quirk(tied=True),
    "qwen3_next": Quirk(output_gate=True, shared_gate=True),
    "qwen3_5_moe_text": Quirk(output_gate=True, shared_gate=True),
}


def counted_model(config: Mapping[str, Any]) -> tuple[ModelSpec, tuple[str, ...]]:
    """The sizes that a config describes, and the keys that might be sizes and were not read."""
    keys = Keys(config)
    family = keys.raw("model_type")
    quirk = QUIRKS.get(str(family), Quirk())
    hidden, num_layers = keys.get("hidden"), keys.get("layers")
    routed = moe_layers(keys, num_layers)
    attention = _latent(keys) if keys.raw("kv_lora_rank") is not None else _grouped(keys, hidden, num_layers, quirk)
    states = state_layers(keys, num_layers)
    spec = ModelSpec(
        family=family if isinstance(family, str) else UNKNOWN_TYPE,
        vocab_size=keys.get("vocabulary"),
        hidden_size=hidden,
        num_layers=num_layers,
        moe_layers=routed,
        attention=attention,
        router=_router(keys),
        feed_forward=_feed_forward(keys, quirk, has_dense=not all(routed)),
        tie_embeddings=quirk.tied if keys.raw("tie_word_embeddings") is None else bool(keys.raw("tie_word_embeddings")),
        max_position=keys.get("positions", 131_072),
        state=state_spec(keys, states, hidden, attention.num_heads, attention.head_dim),
    )
    return spec, unread_sizes(keys)


def _router(keys: Keys) -> RouterSpec:
    groups = max(keys.get("groups", 1), 1)
    return RouterSpec(
        num_experts=keys.get("experts"),
        top_k=keys.get("experts per token"),
        num_groups=groups,
        top_k_groups=min(max(keys.get("groups per token", groups), 1), groups),
    )


def _feed_forward(keys: Keys, quirk: Quirk, *, has_dense: bool) -> FeedForwardSpec:
    """Where experts have no width of their own they have that of the dense feed-forward."""
    width = keys.get("expert width") if keys.has("expert width") else keys.get("dense width")
    shared = keys.get("shared experts", quirk.shared_experts) * width
    if keys.has("shared width"):
        shared = keys.get("shared width")
    dense = 0
    if keys.raw("intermediate_size_mlp") is not None:  # Llama-4's second one
        dense = keys.whole("intermediate_size_mlp")
    elif keys.has("dense width") or has_dense:
        dense = keys.get("dense width")
    return FeedForwardSpec(
        intermediate=width,
        shared_intermediate=shared,
        shared_gate=quirk.shared_gate,
        dense_intermediate=dense if has_dense else 0,
    )


def _grouped(keys: Keys, hidden: int, num_layers: int, quirk: Quirk) -> AttentionSpec:
    heads = keys.get("heads")
    head_dim = keys.get("head width", max(hidden // heads, 1))
    window = keys.optional("sliding_window", least=0, most=MAX_POSITIONS)
    if keys.raw("use_sliding_window") is False:
        window = None
    if keys.raw("attention_chunk_size") is not None:
        window = keys.whole("attention_chunk_size", most=MAX_POSITIONS)
    shared = keys.raw("use_cla") is True
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=keys.get("kv heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=_rope(head_dim),
        sliding_window=window or None,
        windowed_layers=windowed_layers(keys, num_layers) if window else (),
        query_rank=keys.optional("share_q_dim"),
        output_gate=quirk.output_gate,
        layers_per_cache=keys.whole("cla_share_factor", 2) if shared else 1,
    )


def _latent(keys: Keys) -> AttentionSpec:
    heads = keys.get("heads")
    latent = LatentSpec(
        q_lora_rank=keys.optional("q_lora_rank"),
        kv_lora_rank=keys.whole("kv_lora_rank"),
        qk_nope_head_dim=keys.whole("qk_nope_head_dim"),
        qk_rope_head_dim=keys.whole("qk_rope_head_dim"),
        v_head_dim=keys.whole("v_head_dim"),
    )
    sparse = None
    if keys.raw("index_topk") is not None:
        sparse = SparseSpec(
            heads=keys.whole("index_n_heads"),
            dim=keys.whole("index_head_dim"),
            top_tokens=keys.whole("index_topk", most=MAX_POSITIONS),
        )
    head_dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=_rope(latent.qk_rope_head_dim),
        latent=latent,
        sparse=sparse,
    )


def _rope(width: int) -> RopeSpec:
    """Any: rotation has no size."""
    return RopeSpec(dim=width - width % 2, theta=10_000.0)


SIZE_WORDS = ("num_", "n_", "_dim", "_size", "_rank", "_heads", "_layers", "expert", "_freq", "_period", "_interval")
NO_SIZES = (
    *("_loss", "_coef", "_token", "token_id", "initializer", "rope", "nextn", "mtp", "capacity", "scal"),
    *("bias", "dropout", "chunk_size", "block_size", "num_labels", "pretrain", "norm", "max_window", "vision", "image"),
    *("audio", "jitter", "temperature", "beta_factor", "alpha_factor", "method", "func", "kernel", "qk_head_dim"),
    "rotary",
)


def unread_sizes(keys: Keys) -> tuple[str, ...]:
    """Keys that were not asked for, hold a number above 1 and sound like a size."""
    return tuple(
        key
        for key, value in keys.config.items()
        if key not in keys.known
        and type(value) is int
        and value > 1
        and any(word in key for word in SIZE_WORDS)
        and not any(word in key for word in NO_SIZES)
    )
