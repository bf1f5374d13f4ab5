"""Real, published configs (shortened to the keys that matter) and what they mean."""

import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.models.config import load_model_spec, model_spec

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_deepseek_v3() -> None:
    spec = model_spec(DEEPSEEK_V3)
    assert spec.num_moe_layers == 58
    assert spec.attention.latent is not None
    assert spec.attention.latent.key_dim == 576
    assert spec.attention.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert spec.attention.rope.interleaved
    assert (spec.router.scoring, spec.router.num_groups, spec.router.top_k_groups) == ("sigmoid", 8, 4)
    assert spec.router.scaling == 2.5
    assert spec.feed_forward.shared_intermediate == 2048
    assert spec.dtype == "bfloat16"


def test_dbrx_reads_its_nested_configs() -> None:
    spec = model_spec(
        {
            "model_type": "dbrx",
            "d_model": 6144,
            "n_heads": 48,
            "n_layers": 40,
            "max_seq_len": 32768,
            "vocab_size": 100352,
            "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
            "ffn_config": {
                "ffn_hidden_size": 10752,
                "moe_jitter_eps": 0.01,
                "moe_loss_weight": 0.05,
                "moe_num_experts": 16,
                "moe_top_k": 4,
            },
            "torch_dtype": "bfloat16",
        }
    )
    assert (spec.attention.rope.theta, spec.attention.clip_qkv, spec.attention.num_kv_heads) == (500000.0, 8.0, 8)
    assert (spec.norm, spec.norm_eps, spec.max_position) == ("layer_no_bias", 1e-5, 32768)
    assert (spec.router.num_experts, spec.router.top_k, spec.router.normalize) == (16, 4, True)


def test_phi_35_moe() -> None:
    spec = model_spec(
        {
            "model_type": "phimoe",
            "attention_bias": True,
            "hidden_size": 4096,
            "intermediate_size": 6400,
            "lm_head_bias": True,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 16,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "long_factor": [2.0] * 64,
                "long_mscale": 1.243163121016122,
                "original_max_position_embeddings": 4096,
                "short_factor": [1.0] * 64,
                "short_mscale": 1.243163121016122,
                "type": "longrope",
            },
            "rope_theta": 10000.0,
            "router_jitter_noise": 0.01,
            "sliding_window": 131072,
            "vocab_size": 32064,
        }
    )
    rope = spec.attention.rope
    assert (rope.scaling, rope.theta, rope.original_max_position) == ("longrope", 10000.0, 4096)
    assert rope.parameters["long_factor"] == rope.parameters["short_factor"]
    assert (spec.router.scoring, spec.norm, spec.lm_head_bias) == ("sparsemixer", "layer", True)


def test_generation_config_lists_the_tokens_that_end_a_text(save_model: Any, tools: Any) -> None:
    folder: Path = save_model(tools.config("qwen3_moe")).folder
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_model_spec(folder).eos_token_ids == (5, 6, 2)
    (folder / "generation_config.json").unlink()
    assert load_model_spec(folder).eos_token_ids == (2,)
    assert load_model_spec(folder / "config.json").eos_token_ids == (2,)
