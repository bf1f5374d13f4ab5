"""Configs of models that do not run here: counted sizes against what their publishers state."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from antiphon.base.errors import CheckpointError, UserError
from antiphon.models.families.config_readers import FAMILIES
from antiphon.models.planned import changed, planned_model
from antiphon.specs.counts import count_parameters

V32 = {
    **{"model_type": "deepseek_v32", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048},
    **{"num_hidden_layers": 61, "num_attention_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256},
    **{"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "moe_layer_freq": 1},
    **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    **{"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64, "vocab_size": 129280},
}
QWEN3_NEXT = {
    **{"model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48},
    **{"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4},
    **{"linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "vocab_size": 151936},
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10},
    **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1},
}
SCOUT = {
    **{"model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384},
    **{"num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128},
    **{"num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "vocab_size": 202048},
    **{"attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0] * 12},
}
STEP3 = {
    **{"model_type": "step3_text", "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 64},
    **{"num_attention_groups": 1, "num_hidden_layers": 61, "vocab_size": 128815, "moe_intermediate_size": 5120},
    **{"moe_num_experts": 48, "moe_top_k": 3, "share_expert_dim": 5120, "share_q_dim": 2048, "head_dim": 256},
    "moe_layers_enum": ",".join(map(str, range(4, 60))),
}
MINIMAX_M1 = {
    **{"model_type": "minimax_m1", "hidden_size": 6144, "intermediate_size": 9216, "num_hidden_layers": 80},
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 32},
    **{"num_experts_per_tok": 2, "vocab_size": 200064, "shared_intermediate_size": 0},
    "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10,
}
HUNYUAN_LARGE = {
    **{"model_type": "hunyuan", "hidden_size": 6400, "intermediate_size": 18304, "num_hidden_layers": 64},
    **{"num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 80, "num_experts": 16, "moe_topk": 1},
    **{"num_shared_expert": 1, "use_cla": True, "cla_share_factor": 2, "vocab_size": 128512},
}
HUNYUAN_A13B = {
    **{"model_type": "hunyuan_v1_moe", "hidden_size": 4096, "intermediate_size": 3072, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 64},
    **{"moe_topk": [8] * 32, "num_shared_expert": [1] * 32, "moe_intermediate_size": [3072] * 32},
    **{"use_cla": False, "vocab_size": 128167, "tie_word_embeddings": True},
}
JAMBA = {
    **{"model_type": "jamba", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2},
    **{"attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1},
    **{"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256, "vocab_size": 65536},
}
GRANITE_SMALL = {
    **{"model_type": "granitemoehybrid", "hidden_size": 4096, "intermediate_size": 768, "num_hidden_layers": 40},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 72, "num_experts_per_tok": 10},
    **{"shared_intermediate_size": 1536, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128},
    **{"mamba_n_groups": 1, "mamba_expand": 2, "vocab_size": 100352, "tie_word_embeddings": True},
    "layer_types": (["mamba"] * 9 + ["attention"]) * 4,
}
KIMI_LINEAR = {
    **{"model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27},
    **{"num_attention_heads": 32, "num_experts": 256, "num_experts_per_token": 8, "moe_intermediate_size": 1024},
    **{"num_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "vocab_size": 163840},
    **{"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    "linear_attn_config": {
        **{"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4},
        "kda_layers": [layer for layer in range(1, 28) if layer % 4 and layer != 27],
    },
}
PUBLISHED: dict[str, tuple[dict[str, Any], float, float]] = {
    # parameters in all and active, as the publisher states them
    "DeepSeek-V3.2 (arXiv 2412.19437 and its indexer)": (V32, 671e9, 37e9),
    "Qwen3-Next-80B-A3B's model card": (QWEN3_NEXT, 80e9, 3e9),
    "Llama 4 Scout's model card": (SCOUT, 109e9, 17e9),
    "Llama 4 Maverick's model card": (SCOUT | {"num_local_experts": 128, "interleave_moe_layer_step": 2}, 400e9, 17e9),
    "Step-3 (arXiv 2507.19427): language model": (STEP3, 316e9, 38e9),
    "MiniMax-M1 (arXiv 2506.13585)": (MINIMAX_M1, 456e9, 45.9e9),
    "Hunyuan-Large (arXiv 2411.02265)": (HUNYUAN_LARGE, 389e9, 52e9),
    "Hunyuan-A13B's model card": (HUNYUAN_A13B, 80e9, 13e9),
    "Jamba (arXiv 2403.19887)": (JAMBA, 52e9, 12e9),
    "Granite 4.0 H-Small's model card": (GRANITE_SMALL, 32e9, 9e9),
    "Kimi-Linear (arXiv 2510.26692)": (KIMI_LINEAR, 48e9, 3e9),
}


@pytest.mark.parametrize("source", PUBLISHED)
def test_counts_are_what_publishers_state(source: str) -> None:
    config, total, active = PUBLISHED[source]
    model = planned_model(config)
    counts = count_parameters(model.spec)
    assert counts.total == pytest.approx(total, rel=0.025)
    assert counts.active == pytest.approx(active, rel=0.08) or abs(counts.active - active) < 0.9e9
    assert len(model.notes) == 1  # every key of it was understood


def test_layers_without_keys_and_values_cache_nothing() -> None:
    full = planned_model(QWEN3_NEXT | {"full_attention_interval": 1}).spec
    assert planned_model(QWEN3_NEXT).spec.kv_bytes_per_token(2) * 4 == full.kv_bytes_per_token(2)
    assert planned_model(HUNYUAN_LARGE).spec.num_caching_layers == 32
    assert planned_model(V32).spec.kv_bytes_per_token(1) == 61 * (576 + 128)


def test_a_text_model_inside_another_is_planned_alone() -> None:
    model = planned_model({"model_type": "llama4", "text_config": SCOUT, "vision_config": {"hidden_size": 1408}})
    assert model.spec.family == "llama4_text"
    assert "only the text part of 'llama4' is planned" in model.notes


def test_a_quantised_checkpoint_is_planned_and_said_to_be() -> None:
    model = planned_model(V32 | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    assert "quantised (gptq with 4 bits)" in model.notes[0]


def test_a_missing_size_is_named_and_can_be_given() -> None:
    config = {key: value for key, value in QWEN3_NEXT.items() if key != "num_experts"}
    with pytest.raises(CheckpointError, match="experts of this model are unknown: give --model-set num_experts=N"):
        planned_model(config)
    assert planned_model(changed(config, ["num_experts=512"])).spec == planned_model(QWEN3_NEXT).spec


def test_an_unknown_size_is_named() -> None:
    model = planned_model(QWEN3_NEXT | {"model_type": "new", "num_zero_experts": 128, "linear_num_lanes": 3})
    assert model.notes[-1].endswith(": num_zero_experts, linear_num_lanes")


@pytest.mark.parametrize("text", ["", "num_experts", "=3", "num_experts=", "vocab_size.x=3"])
def test_changes_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="--model-set"):
        changed({"vocab_size": 3}, [text])


def test_changes_are_json_or_text() -> None:
    assert changed({"a": 1}, ["a=[1, 2]", "b=yarn", "c.d=2.5", "e=null"]) == {
        **{"a": [1, 2], "b": "yarn", "c": {"d": 2.5}, "e": None}
    }


@pytest.mark.parametrize("value", [-1, 0, 2**40, 1.5, "many", True, [], {}, ["x"]])
@pytest.mark.parametrize("config", [V32, QWEN3_NEXT, JAMBA, MINIMAX_M1], ids=lambda config: str(config["model_type"]))
def test_damaged_values_are_refused_or_harmless(config: dict[str, Any], value: object) -> None:
    for key in config:
        try:
            planned_model(config | {key: value})
        except UserError:
            continue


READ = (
    *("deepseek_v32", "exaone_moe", "glm_moe_dsa", "granitemoehybrid", "jamba", "lfm2_moe", "llama4_text"),
    *("minimax", "mimo_v2_flash", "qwen3_next", "qwen3_5_moe_text", "step3p5", "afmoe", "flex_olmo"),
)


@pytest.mark.parametrize("name", READ)
def test_default_configs_of_transformers_are_read(name: str) -> None:
    assert name not in FAMILIES
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    spec = planned_model(CONFIG_MAPPING[name]().to_dict()).spec
    assert spec.num_moe_layers > 0


def test_one_key_is_set_at_a_time() -> None:
    """Other options of the command take lists; a value of JSON may have commas of its own."""
    with pytest.raises(UserError, match=r"--model-set 'a=1,b=2': it takes one key: write --model-set again"):
        changed({}, ["a=1,b=2"])
    assert changed({}, ["a=[1, 2]", "b=x, y"]) == {"a": [1, 2], "b": "x, y"}
    assert changed({}, ["a=NaN"]) == {"a": "NaN"}, "which every reader of a number refuses"
