"""Published configs of the newer families (shortened to the keys that matter) and what they mean."""

from typing import Any

import pytest

from antiphon.base.errors import CheckpointError
from antiphon.models.config import model_spec


def test_kimi_k2_is_deepseek_v3_without_groups() -> None:
    rope = {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}
    spec = model_spec(
        {
            "model_type": "kimi_k2",
            "first_k_dense_replace": 1,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "kv_lora_rank": 512,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 2048,
            "moe_layer_freq": 1,
            "n_group": 1,
            "n_routed_experts": 384,
            "num_attention_heads": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "num_key_value_heads": 64,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rope_scaling": rope | {"original_max_position_embeddings": 4096},
            "rope_theta": 50000.0,
            "routed_scaling_factor": 2.827,
            "scoring_func": "sigmoid",
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "v_head_dim": 128,
            "vocab_size": 163840,
        }
    )
    assert (spec.family, spec.num_moe_layers, spec.attention.num_heads) == ("kimi_k2", 60, 64)
    assert (spec.router.num_experts, spec.router.num_groups, spec.router.scaling) == (384, 1, 2.827)
    assert (spec.attention.rope.scaling, spec.attention.rope.theta) == ("yarn", 50000.0)


def test_glm_45_air() -> None:
    spec = model_spec(
        {
            "model_type": "glm4_moe",
            "attention_bias": True,
            "eos_token_id": [151329, 151336, 151338],
            "first_k_dense_replace": 1,
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 96,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 46,
            "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "routed_scaling_factor": 1.0,
            "tie_word_embeddings": False,
            "topk_group": 1,
            "torch_dtype": "bfloat16",
            "use_qk_norm": False,
            "vocab_size": 151552,
        }
    )
    attention = spec.attention
    assert (attention.rope.dim, attention.head_dim, attention.rope.theta) == (64, 128, 1e6)
    assert (attention.qkv_bias, attention.out_bias, attention.qk_norm) == (True, False, "none")
    assert (spec.num_layers, spec.num_moe_layers, spec.feed_forward.shared_intermediate) == (46, 45, 1408)
    assert (spec.router.scoring, spec.router.has_score_bias) == ("sigmoid", True)


MINIMAX_M2: dict[str, Any] = {
    "model_type": "minimax_m2",
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


def test_minimax_m2_gives_the_rotated_width_itself() -> None:
    spec = model_spec(MINIMAX_M2)
    assert (spec.attention.rope.dim, spec.attention.head_dim, spec.attention.rope.theta) == (64, 128, 5e6)
    assert (spec.attention.qk_norm, spec.router.scoring, spec.router.has_score_bias) == ("full", "sigmoid", True)
    linear = [1] * 61 + [0]
    with pytest.raises(CheckpointError, match=r"attn_type_list = .* is not supported: use a model with full attention"):
        model_spec(MINIMAX_M2 | {"attn_type_list": linear})


ERNIE_45_21B: dict[str, Any] = {
    "model_type": "ernie4_5_moe",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_end_index": 27,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
    "vocab_size": 103424,
}


def test_ernie_45() -> None:
    spec = model_spec(ERNIE_45_21B)
    assert spec.moe_layers == (False, *[True] * 27)
    assert (spec.feed_forward.intermediate, spec.feed_forward.shared_intermediate) == (1536, 3072)
    assert (spec.attention.rope.interleaved, spec.tie_embeddings) == (True, True)
    with pytest.raises(CheckpointError, match="use_bias = true is not supported: use a model without it"):
        model_spec(ERNIE_45_21B | {"use_bias": True})
    with pytest.raises(CheckpointError, match=r"moe_norm_min = 0\.01 is not supported: use a model with at most 1e-09"):
        model_spec(ERNIE_45_21B | {"moe_norm_min": 0.01})


def test_granite_31_has_four_multipliers() -> None:
    spec = model_spec(
        {
            "model_type": "granitemoe",
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "hidden_size": 1536,
            "intermediate_size": 512,
            "logits_scaling": 6.0,
            "max_position_embeddings": 131072,
            "num_attention_heads": 24,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 40,
            "residual_multiplier": 0.22,
            "rope_theta": 10000000,
            "tie_word_embeddings": True,
            "vocab_size": 49155,
        }
    )
    assert (spec.embedding_multiplier, spec.attention.scale) == (12.0, 0.015625)
    assert (spec.residual_multiplier, spec.router.scaling, spec.logits_divisor) == (0.22, 0.22, 6.0)
    assert spec.router.softmax_after_top_k


def test_dots_with_windows_in_some_layers_is_refused() -> None:
    config = {
        "model_type": "dots1",
        "first_k_dense_replace": 1,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "layer_types": ["full_attention"] * 61 + ["sliding_attention"],
        "max_position_embeddings": 32768,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 62,
        "sliding_window": 4096,
        "vocab_size": 152064,
    }
    with pytest.raises(
        CheckpointError, match=r"layer_types = .*: use a model with one kind of attention in all layers"
    ):
        model_spec(config)
    spec = model_spec(config | {"layer_types": ["full_attention"] * 62})
    assert (spec.attention.sliding_window, spec.attention.qk_norm, spec.num_moe_layers) == (None, "head", 61)
