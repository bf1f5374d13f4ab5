"""How a family names its tensors in a checkpoint: plain data, one `TensorNames` per family.

Names are given without the layer's prefix. A tuple of names means "one of these": published checkpoints and the ones
transformers 5 writes differ. Defaults are the names most families share; an entry of `NAMES` states only its own.
Rejected: rewriting names with regular expressions, which cannot say what is missing.
"""

from dataclasses import dataclass, replace
from typing import Literal

BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"  # of a matrix in MXFP4


@dataclass(frozen=True, kw_only=True)
class GatedNames:
    """One gated feed-forward: three matrices under a common prefix, or two where `gate` holds `up` below it.

    As a layout of routed experts: each has such tensors, `{expert}` in the prefix stands for its number."""

    prefix: str
    gate: str = "gate_proj.weight"
    up: str | None = "up_proj.weight"
    down: str = "down_proj.weight"

    def marker(self) -> str:
        """The tensor whose presence in the first layer shows that a checkpoint uses this layout."""
        return self.prefix.format(expert=0) + self.gate


@dataclass(frozen=True, kw_only=True)
class StackedLayout:
    """All experts of a layer in few tensors.

    "fused": gate_up [E, 2I, H] and down [E, H, I], as transformers 5 holds them.
    "rows": w1, v1, w2 [E * I, H] with the down projection transposed, as DBRX publishes them.
    "columns": gate_up [E, H, 2I], gate and up in turns, and down [E, I, H], as transformers 5 holds gpt-oss.
    "apart": gate and up, each [E, I, H], and down [E, H, I], as GGUF has them.
    "mxfp4": gate_up [E, 2I, H], gate and up in turns, and down [E, H, I], each as blocks and scales, as gpt-oss is
    published (`models/packed`).
    """

    kind: Literal["fused", "rows", "columns", "apart", "mxfp4"]
    gate_up: tuple[str, ...]
    down: str

    def marker(self) -> str:
        return self.gate_up[0] + (BLOCKS_SUFFIX if self.kind == "mxfp4" else "")


ExpertLayout = GatedNames | StackedLayout

STACKED = StackedLayout(kind="fused", gate_up=("mlp.experts.gate_up_proj",), down="mlp.experts.down_proj")
PER_EXPERT = GatedNames(prefix="mlp.experts.{expert}.")


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """Every tensor of a decoder, by what it is for. Biases are named like the weight they belong to."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{layer}."
    input_norm: str = "input_layernorm.weight"
    post_norm: str = "post_attention_layernorm.weight"
    qkv: tuple[str, ...] = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
    out: str = "self_attn.o_proj.weight"
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    sinks: str = "self_attn.sinks"
    router: tuple[str, ...] = ("mlp.gate.weight",)
    score_bias: tuple[str, ...] = ("mlp.gate.e_score_correction_bias",)
    score_bias_in_one_row: bool = False  # as a matrix of one row
    shared: GatedNames = GatedNames(prefix="mlp.shared_expert.")
    shared_gate: str = "mlp.shared_expert_gate.weight"
    dense: GatedNames = GatedNames(prefix="mlp.")
    experts: tuple[ExpertLayout, ...] = (PER_EXPERT, STACKED)
    # latent attention
    q_direct: str = "self_attn.q_proj.weight"
    q_down: str = "self_attn.q_a_proj.weight"
    q_down_norm: str = "self_attn.q_a_layernorm.weight"
    q_up: str = "self_attn.q_b_proj.weight"
    kv_down: str = "self_attn.kv_a_proj_with_mqa.weight"
    kv_down_norm: str = "self_attn.kv_a_layernorm.weight"
    kv_up: str = "self_attn.kv_b_proj.weight"


_BLOCK = "block_sparse_moe."
_W1_W2_W3 = GatedNames(prefix=_BLOCK + "experts.{expert}.", gate="w1.weight", up="w3.weight", down="w2.weight")
_MIXTRAL = TensorNames(router=(_BLOCK + "gate.weight", "mlp.gate.weight"), experts=(_W1_W2_W3, STACKED))
_DEEPSEEK = TensorNames(shared=GatedNames(prefix="mlp.shared_experts."))
_GRANITE = TensorNames(
    router=(_BLOCK + "router.layer.weight", _BLOCK + "router.weight"),
    experts=(
        StackedLayout(kind="fused", gate_up=(_BLOCK + "input_linear.weight",), down=_BLOCK + "output_linear.weight"),
        StackedLayout(kind="fused", gate_up=(_BLOCK + "experts.gate_up_proj",), down=_BLOCK + "experts.down_proj"),
    ),
    shared=GatedNames(prefix="shared_mlp.", gate="input_linear.weight", up=None, down="output_linear.weight"),
)
NAMES = {
    **dict.fromkeys(("deepseek", "deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "glm4_moe_lite"), _DEEPSEEK),
    **dict.fromkeys(("kimi_k2", "solar_open"), _DEEPSEEK),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), _GRANITE),
    **dict.fromkeys(("olmoe", "qwen2_moe", "qwen3_moe"), TensorNames()),
    "mixtral": _MIXTRAL,
    "minimax_m2": replace(_MIXTRAL, score_bias=(_BLOCK + "e_score_correction_bias", "mlp.e_score_correction_bias")),
    "phimoe": replace(_MIXTRAL, router=(_BLOCK + "gate.weight", "mlp.router.weight")),
    "ernie4_5_moe": replace(
        _DEEPSEEK,
        score_bias=("mlp.moe_statics.e_score_correction_bias", "mlp.gate.moe_statics.e_score_correction_bias"),
        score_bias_in_one_row=True,
    ),
    "gpt_oss": TensorNames(
        router=("mlp.router.weight",),
        experts=tuple(replace(STACKED, kind=kind) for kind in ("mxfp4", "columns")),
    ),
    "dbrx": TensorNames(
        embedding="transformer.wte.weight",
        final_norm="transformer.norm_f.weight",
        layer="transformer.blocks.{layer}.",
        input_norm="norm_attn_norm.norm_1.weight",
        post_norm="norm_attn_norm.norm_2.weight",
        qkv=("norm_attn_norm.attn.Wqkv.weight",),
        out="norm_attn_norm.attn.out_proj.weight",
        router=("ffn.router.layer.weight",),
        experts=(
            StackedLayout(kind="rows", gate_up=("ffn.experts.mlp.w1", "ffn.experts.mlp.v1"), down="ffn.experts.mlp.w2"),
        ),
    ),
}  # by `model_type`


_GGUF = TensorNames(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    head="output.weight",
    layer="blk.{layer}.",
    input_norm="attn_norm.weight",
    post_norm="ffn_norm.weight",
    qkv=("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    out="attn_output.weight",
    q_norm="attn_q_norm.weight",
    k_norm="attn_k_norm.weight",
    sinks="attn_sinks.weight",
    router=("ffn_gate_inp.weight",),
    score_bias=("exp_probs_b.bias", "exp_probs_b.weight"),
    shared=GatedNames(prefix="", gate="ffn_gate_shexp.weight", up="ffn_up_shexp.weight", down="ffn_down_shexp.weight"),
    shared_gate="ffn_gate_inp_shexp.weight",
    dense=GatedNames(prefix="", gate="ffn_gate.weight", up="ffn_up.weight", down="ffn_down.weight"),
    experts=(
        StackedLayout(
            kind="apart", gate_up=("ffn_gate_exps.weight", "ffn_up_exps.weight"), down="ffn_down_exps.weight"
        ),
        StackedLayout(kind="fused", gate_up=("ffn_gate_up_exps.weight",), down="ffn_down_exps.weight"),
    ),
    q_direct="attn_q.weight",
    q_down="attn_q_a.weight",
    q_down_norm="attn_q_a_norm.weight",
    q_up="attn_q_b.weight",
    kv_down="attn_kv_a_mqa.weight",
    kv_down_norm="attn_kv_a_norm.weight",
    kv_up="attn_kv_b.weight",
)
_GGUF_AFTER_ATTENTION = replace(_GGUF, post_norm="post_attention_norm.weight")
GGUF_NAMES = {
    **dict.fromkeys(NAMES, _GGUF),
    **dict.fromkeys(("glm4_moe", "gpt_oss"), _GGUF_AFTER_ATTENTION),
    "dbrx": replace(_GGUF, qkv=("attn_qkv.weight",), post_norm="attn_output_norm.weight"),
}
