"""What a Mixture-of-Experts decoder is, as frozen data: one description for models, planner and engine.

A `ModelSpec` says what is computed (sizes, attention kind, router, rotary scaling), never how weights are named in a
checkpoint (`models/families`) and never where they run (`specs/placement`). It is built from a Hugging Face
`config.json` by the family that knows that config's keys.

`PrecisionSpec`: in which number formats weights are kept, keys and values cached, rows sent and products computed.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from antiphon.specs.checked import Count, Positive, checked
from antiphon.specs.cluster import ComputeDtype


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding of `dim` dimensions per head, with the long-context scaling the model was trained with.

    `interleaved` pairs neighbours (x0,x1),(x2,x3) as DeepSeek does; otherwise the halves are paired (x0,x_{d/2}).
    `scaling` selects the formula; `parameters` holds its numbers under the names that `config.json` uses.
    """

    dim: int
    theta: float
    interleaved: bool = False
    scaling: Literal["none", "linear", "dynamic", "yarn", "longrope", "llama3"] = "none"
    parameters: dict[str, float | list[float]] = field(default_factory=dict)
    max_position: int = 4096
    original_max_position: int = 4096


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): what is cached is one latent vector per token.

    `norm_eps` belongs to the norms of the two latent vectors; DeepSeek fixes it, whatever the layers' norms use.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6

    @property
    def key_dim(self) -> int:
        """Width of one cached row: the latent vector, then the rotated key all heads share."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class SparseSpec:
    """DeepSeek-V3.2's sparse attention: an indexer of `heads` heads over one cached key of `dim` elements a token picks
    the `top_tokens` tokens of the context that attention then looks at."""

    heads: int
    dim: int
    top_tokens: int


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """Layers with a state of fixed size in place of keys and values (Mamba, linear attention); for planning alone.

    `layers[l]`: whether layer l is one. `in_width`: outputs of all projections from a row; `out_width`: inputs of the
    projection back; `rest`: its other parameters (convolution, decay, norms). `elements`: of one sequence's state."""

    layers: tuple[bool, ...]
    in_width: int
    out_width: int
    elements: int
    rest: int = 0


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention, or latent attention when `latent` is given.

    `head_dim` is the width of one query head; for latent attention qk_nope + qk_rope. `scale` multiplies the scores.
    `qk_norm` "head" normalises each head (Qwen3), "full" the whole projection (OLMoE). `sliding_window` binds the
    layers that `windowed_layers` marks, or all if it is empty. `sinks`: a learned logit per head joins the softmax and
    has no value, so that a head may attend to nothing (gpt-oss).

    Only for planning: `sparse`; `query_rank`: queries go through so narrow a row first (Step-3); `output_gate`: as many
    gates as query elements are projected beside them (Qwen3-Next); `layers_per_cache`: this many neighbouring layers
    share keys and values (Hunyuan-Large).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec
    latent: LatentSpec | None = None
    qk_norm: Literal["none", "head", "full"] = "none"
    qkv_bias: bool = False
    out_bias: bool = False
    clip_qkv: float | None = None
    sliding_window: int | None = None
    windowed_layers: tuple[bool, ...] = ()
    sinks: bool = False
    sparse: SparseSpec | None = None
    query_rank: int | None = None
    output_gate: bool = False
    layers_per_cache: int = 1

    def window_of(self, layer: int) -> int | None:
        """Tokens a row of this layer sees, its own included; None: all before it."""
        return self.sliding_window if not self.windowed_layers or self.windowed_layers[layer] else None

    @property
    def windowed_share(self) -> float:
        """Part of the layers that see `sliding_window` tokens only."""
        if self.sliding_window is None:
            return 0.0
        return sum(self.windowed_layers) / len(self.windowed_layers) if self.windowed_layers else 1.0


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How the gate turns a hidden row into `top_k` experts and their weights.

    `scoring` "sparsemixer" is Phi-3.5-MoE's two-pass top-2. With `num_groups` > 1 only the best `top_k_groups` groups
    of experts may be chosen; a group's score is its maximum ("max", DeepSeek-V2) or the sum of its two best biased
    scores ("top2", DeepSeek-V3). `has_score_bias`: a per-expert bias steers the choice but not the weights;
    `has_logit_bias`: one is added to the logits, so that it does both (gpt-oss).
    `normalize` divides the chosen weights by their sum; `scaling` multiplies them at the end.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    normalize: bool = True
    softmax_after_top_k: bool = False
    has_score_bias: bool = False
    has_logit_bias: bool = False
    num_groups: int = 1
    top_k_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    scaling: float = 1.0
    jitter: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FeedForwardSpec:
    """Gated feed-forward widths: `intermediate` per routed expert, `shared_intermediate` (0: none) for the shared
    expert all tokens pass, `shared_gate` if a sigmoid gate scales it, `dense_intermediate` without experts.

    Activation "swiglu_oai" (gpt-oss) with g = min(gate, `limit`) and u = clamp(up, -`limit`, `limit`):
    (u + 1) * g * sigmoid(`alpha` * g); the other activations read neither number. `expert_bias`: the routed experts'
    matrices have biases.

    One more activation: its key in a config (`models/families/config_keys`), PyTorch (`kernels/ops/feed_forward`, which
    training uses too), Triton (`kernels/triton/rowwise`), and csrc: `kernels/vector_math.h`, `grouped_ffn.h`,
    `training_activation.h`, `bind/bind.h`."""

    activation: Literal["silu", "gelu", "swiglu_oai"] = "silu"
    alpha: float = 1.702
    limit: float = 7.0
    expert_bias: bool = False
    intermediate: int
    shared_intermediate: int = 0
    shared_gate: bool = False
    dense_intermediate: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One MoE decoder. `moe_layers[l]` says whether layer l routes to experts or has a dense feed-forward.

    Granite scales what others leave alone: `embedding_multiplier` what the embedding gives, `residual_multiplier` what
    attention and the local feed-forward add to the residual stream (routed experts take it by `router.scaling`), and
    `logits_divisor` the logits.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    moe_layers: tuple[bool, ...]
    attention: AttentionSpec
    router: RouterSpec
    feed_forward: FeedForwardSpec
    norm: Literal["rms", "layer", "layer_no_bias"] = "rms"
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    lm_head_bias: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    max_position: int = 4096
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    state: StateSpec | None = None

    @property
    def num_state_layers(self) -> int:
        """Layers without keys and values."""
        return 0 if self.state is None else sum(self.state.layers)

    @property
    def num_caching_layers(self) -> int:
        """Layers that make keys and values of their own."""
        return -(-(self.num_layers - self.num_state_layers) // self.attention.layers_per_cache)

    @property
    def num_moe_layers(self) -> int:
        return sum(self.moe_layers)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that route to experts."""
        return tuple(layer for layer, routes in enumerate(self.moe_layers) if routes)

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes of KV cache one token occupies over all layers (MegaScale-Infer eq. 8 counts the same, in BF16)."""
        attention = self.attention
        if attention.latent is not None:
            width = attention.latent.key_dim
        else:
            width = 2 * attention.num_kv_heads * attention.head_dim
        width += 0 if attention.sparse is None else attention.sparse.dim
        return self.num_caching_layers * width * bytes_per_element


# --- number formats

StorageDtype = Literal["float32", "bfloat16", "float16", "fp8", "int8", "int4", "mxfp4", "nvfp4"]
WEIGHTS_ONLY: tuple[StorageDtype, ...] = ("int8", "int4", "mxfp4", "nvfp4")  # computed in bfloat16
# How an engine keeps keys and values: in the model's dtype, or in 8 bits with a float32 scale for each key and value.
KVStorage = Literal["auto", "int8", "fp8"]
KV_SCALE_BYTES = 4
WEIGHT_GROUP = 32
"""Columns that share a scale in int8 and int4, unless another number is given: of `serve --weights` and `antiphon
quantize`, which pack weights so, of plans, and of GGUF's Q8_0 and Q4_0."""
WEIGHT_SCALE_BYTES = 2  # a scale has the 16 bits of the weights that were rounded
BYTES_OF: dict[StorageDtype, float] = {
    **{"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1},
    "int8": 1 + WEIGHT_SCALE_BYTES / WEIGHT_GROUP,
    "int4": 0.5 + WEIGHT_SCALE_BYTES / WEIGHT_GROUP,
    "mxfp4": 0.5 + 1 / 32,  # OCP Microscaling Formats 1.0, section 5.2: an 8-bit scale for 32
    "nvfp4": 0.5 + 1 / 16,  # an 8-bit scale for 16
}


WEIGHT_FORMATS: dict[str, tuple[StorageDtype, StorageDtype]] = {
    "weights=bfloat16": ("bfloat16", "bfloat16"),
    "weights=int8": ("int8", "int8"),
    "weights=fp8": ("fp8", "fp8"),
    "weights=int8,experts=int4": ("int8", "int4"),
    "weights=int4": ("int4", "int4"),
}
"""What plans offer in place of another format: as `--precision` names it, widest first; all weights but the routed
experts', and these."""


@checked("precision")
@dataclass(frozen=True, kw_only=True)
class PrecisionSpec:
    """`dispatch` is the format of rows on their way to the experts, `combine` of what comes back. `experts`: of the
    routed experts' weights, where it is not that of all others (None). `group`: columns of a scale in int8 and int4.
    `stored`: bytes of an element of routed experts, other matrices and the head in a checkpoint's own formats, to which
    those named are the nearest; empty: what the names say."""

    weights: StorageDtype = "bfloat16"
    kv: StorageDtype = "bfloat16"
    dispatch: StorageDtype = "bfloat16"
    combine: StorageDtype = "bfloat16"
    compute: ComputeDtype = "bfloat16"
    experts: StorageDtype | None = None
    group: Count = WEIGHT_GROUP
    stored: tuple[()] | tuple[Positive, Positive, Positive] = ()

    @property
    def weight_bytes(self) -> float:
        return self.stored[1] if self.stored else self._weight_bytes(self.weights)

    @property
    def expert_bytes(self) -> float:
        """Bytes of one element of a routed expert."""
        return self.stored[0] if self.stored else self._weight_bytes(self.experts or self.weights)

    def with_weights(self, weights: StorageDtype, experts: StorageDtype) -> "PrecisionSpec":
        """The same with weights in other formats, in groups of the usual size."""
        return replace(self, weights=weights, experts=experts, group=WEIGHT_GROUP, stored=())

    @property
    def head_bytes(self) -> float:
        """Bytes of one element of the head's table."""
        return self.stored[2] if self.stored else self.plain_bytes

    @property
    def plain_bytes(self) -> float:
        """Bytes of one element of what stays in floats when weights are rounded: embedding, head, norms, routers, and
        the up projections of latent attention."""
        return BYTES_OF["bfloat16" if self.weights in ("fp8", *WEIGHTS_ONLY) else self.weights]

    @property
    def kv_bytes(self) -> float:
        return BYTES_OF[self.kv]

    @property
    def dispatch_bytes(self) -> float:
        return BYTES_OF[self.dispatch]

    @property
    def combine_bytes(self) -> float:
        return BYTES_OF[self.combine]

    def _weight_bytes(self, storage: StorageDtype) -> float:
        codes = {"int8": 1.0, "int4": 0.5}.get(storage)
        return BYTES_OF[storage] if codes is None else codes + WEIGHT_SCALE_BYTES / self.group
