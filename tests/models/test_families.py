"""Every family equals transformers' eager model in float32: whole prompt, chunks, token by token, and in a batch."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from antiphon.models.batch import make_attention_batch
from antiphon.models.checkpoint import Checkpoint
from tests.models.conftest import FAMILIES, SavedModel

TOLERANCE = 2e-4


def largest_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert 0.3 < float(expected.std()) < 10, "logits are not of order one: the comparison would say nothing"
    return float((found - expected).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_however_the_prompt_is_cut(family: str, save_model: Any, tools: Any) -> None:
    saved = save_model(tools.config(family))
    decoder = tools.load(saved.folder)
    token_ids = tools.ids(37)
    expected = saved.logits(token_ids)
    for chunks in ([37], [16, 16, 5], [1, 20, 1, 15], [1] * 37):
        error = largest_error(tools.run(decoder, token_ids, chunks), expected)
        print(f"{family} in {len(chunks)} chunks: {error:.1e}")
        assert error < TOLERANCE, f"{family} in chunks {chunks}"


@pytest.mark.parametrize("storage", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"])
def test_keys_and_values_in_8_bits_are_the_same_however_the_prompt_is_cut(
    family: str, storage: str, save_model: Any, tools: Any
) -> None:
    decoder, token_ids = tools.load(save_model(tools.config(family)).folder), tools.ids(37)
    whole, *cut = (tools.run(decoder, token_ids, chunks, storage=storage) for chunks in ([37], [1, 20, 16], [1] * 37))
    assert all(largest_error(each, whole) < TOLERANCE for each in cut)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral, sliding window": ("mixtral", {"sliding_window": 9}),
    "mixtral, own head width": ("mixtral", {"head_dim": 10}),
    "phimoe, sliding window": ("phimoe", {"sliding_window": 9, "attention_bias": False, "lm_head_bias": False}),
    "qwen3, sliding window, biases": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 9, "attention_bias": True},
    ),
    "qwen3, tied embeddings": ("qwen3_moe", {"tie_word_embeddings": True}),
    "qwen3, gelu": ("qwen3_moe", {"hidden_act": "gelu"}),
    "qwen2, no bias, normalised": ("qwen2_moe", {"qkv_bias": False, "norm_topk_prob": True, "mlp_only_layers": []}),
    "olmoe, no clipping, as many KV heads as heads": ("olmoe", {"clip_qkv": None, "num_key_value_heads": 6}),
    "dbrx, one expert per token": (
        "dbrx",
        {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 5, "moe_top_k": 1}},
    ),
    "dbrx, not normalised": (
        "dbrx",
        {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2,
                        "moe_normalize_expert_weights": None}},
    ),
    "gpt-oss, tight clamp, steep gate, one expert": (
        "gpt_oss",
        {"swiglu_limit": 0.4, "swiglu_alpha": 3.0, "num_experts_per_tok": 1, "attention_bias": False},
    ),
    "gpt-oss, full layers first, wide window": (
        "gpt_oss",
        {"layer_types": ["full_attention", "full_attention", "sliding_attention"], "sliding_window": 64},
    ),
    "gpt-oss, odd sizes, window of one": (
        "gpt_oss",
        {"hidden_size": 51, "intermediate_size": 37, "head_dim": 14, "num_key_value_heads": 6, "sliding_window": 1},
    ),
    "gpt-oss, rounded ramp, tied embeddings": (
        "gpt_oss",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": True,
                             "original_max_position_embeddings": 32},
         "tie_word_embeddings": True},
    ),
    "v2, groups, latent queries, biases": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": 28,
         "attention_bias": True},
    ),
    "v2, biases without latent queries": ("deepseek_v2", {"attention_bias": True}),
    "v3, one group, halves paired": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "rope_interleave": False}),
    "glm, no head norms, no biases, all rotated": (
        "glm4_moe",
        {"use_qk_norm": False, "attention_bias": False, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ),
    "glm lite, dense between, two shared experts": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["sparse", "dense", "sparse"], "n_shared_experts": 2, "q_lora_rank": None},
    ),
    "dots, sliding window, biases, normalised": (
        "dots1",
        {"sliding_window": 9, "max_window_layers": 0, "attention_bias": True, "norm_topk_prob": True},
    ),
    "minimax, all rotated, one KV head": ("minimax_m2", {"rope_parameters": None, "num_key_value_heads": 1}),
    "ernie, every second layer up to the third, not tied": (
        "ernie4_5_moe",
        {"num_hidden_layers": 5, "moe_layer_start_index": 0, "moe_layer_end_index": 2, "moe_layer_interval": 2,
         "tie_word_embeddings": False},
    ),
    "ernie, no shared expert": ("ernie4_5_moe", {"moe_num_shared_experts": 0}),
    "granite, biases, tied embeddings": ("granitemoe", {"attention_bias": True, "tie_word_embeddings": True}),
    "granite, no multiplier": (
        "granitemoeshared",
        {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
    ),
    "v3, direct queries, not normalised": ("deepseek_v3", {"q_lora_rank": None, "norm_topk_prob": False}),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_transformers(variant: str, save_model: Any, tools: Any) -> None:
    family, changes = VARIANTS[variant]
    saved = save_model(tools.config(family, **changes))
    decoder = tools.load(saved.folder)
    token_ids = tools.ids(29)
    expected = saved.logits(token_ids)
    for chunks in ([29], [11, 1, 17]):
        assert largest_error(tools.run(decoder, token_ids, chunks), expected) < TOLERANCE, chunks


@pytest.mark.parametrize("family", ["ernie4_5_moe", "glm4_moe", "granitemoe", "minimax_m2"])
def test_names_and_layouts_of_transformers_5_are_read_too(family: str, save_model: Any, tools: Any) -> None:
    """The tests above save checkpoints as publishers name them."""
    saved = save_model(tools.config(family), save_original_format=False)
    decoder = tools.load(saved.folder)
    assert any(name.endswith("experts.gate_up_proj") for name in Checkpoint(saved.folder).names)
    token_ids = tools.ids(13)
    assert largest_error(tools.run(decoder, token_ids, [13]), saved.logits(token_ids)) < TOLERANCE


def test_multi_token_prediction_layers_are_left_alone(save_model: Any, tools: Any) -> None:
    """Published GLM-4.5, Kimi-K2 and DeepSeek-V3 store one layer more than `num_hidden_layers`."""
    saved = save_model(tools.config("glm4_moe"))
    tensors = load_file(saved.folder / "model.safetensors")
    more = {name.replace(".layers.2.", ".layers.3."): tensors[name].clone() for name in tensors if ".layers.2." in name}
    save_file(
        tensors | more | {"model.layers.3.eh_proj.weight": torch.ones(48, 96)}, saved.folder / "model.safetensors"
    )
    token_ids = tools.ids(13)
    found = tools.run(tools.load(saved.folder), token_ids, [13])
    assert largest_error(found, saved.logits(token_ids)) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_moe", "dbrx", "gpt_oss", "deepseek_v3", "minimax_m2", "granitemoeshared"])
def test_one_token_and_a_thousand(family: str, save_model: Any, tools: Any) -> None:
    length = {"max_seq_len": 1024} if family == "dbrx" else {"max_position_embeddings": 1024}
    saved = save_model(tools.config(family, **length))
    decoder = tools.load(saved.folder)
    for token_ids, chunks in ((tools.ids(1), [1]), (tools.ids(1000), [1000]), (tools.ids(1000), [512, 487, 1])):
        found = tools.run(decoder, token_ids, chunks, block_size=16)
        assert largest_error(found, saved.logits(token_ids)) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_mixed_batch_equals_each_sequence_alone(family: str, save_model: Any, tools: Any) -> None:
    """A decode row, a whole prompt, a chunk with context, and another decode row share one call."""
    saved = save_model(tools.config(family))
    decoder = tools.load(saved.folder)
    half = decoder.attention_half
    prompts = [tools.ids(n) for n in (40, 13, 30, 5)]
    done = [39, 0, 21, 4]
    tables = [list(range(1 + 5 * s, 6 + 5 * s)) for s in range(4)]
    cache = half.new_cache(21, 8)
    with torch.inference_mode():
        for prompt, context, table in zip(prompts, done, tables, strict=True):
            if context:
                decoder.forward(prompt[:context], cache, make_attention_batch([context], [context], [table], 8, "cpu"))
        query_lens = [len(p) - c for p, c in zip(prompts, done, strict=True)]
        batch = make_attention_batch(query_lens, [len(p) for p in prompts], tables, 8, "cpu")
        rows = torch.cat([p[c:] for p, c in zip(prompts, done, strict=True)])
        found = half.head(decoder.forward(rows, cache, batch)).split(query_lens)
    for logits, prompt, context in zip(found, prompts, done, strict=True):
        assert largest_error(logits, saved.logits(prompt)[context:]) < TOLERANCE


def saved_deepseek(save_model: Any, tools: Any) -> SavedModel:
    """transformers has no `deepseek` model: a Qwen2-MoE with its shared gate held open is the same computation."""
    saved: SavedModel = save_model(
        tools.config(
            "qwen2_moe", mlp_only_layers=[0], qkv_bias=False, num_key_value_heads=6, shared_expert_intermediate_size=48
        )
    )

    class Open(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.full((*x.shape[:-1], 1), torch.inf)

    for layer in saved.model.model.layers[1:]:
        layer.mlp.shared_expert_gate = Open()
    tensors = load_file(saved.folder / "model.safetensors")
    renamed = {k.replace("shared_expert.", "shared_experts."): v for k, v in tensors.items() if "expert_gate" not in k}
    save_file(renamed, saved.folder / "model.safetensors")
    published = {
        "model_type": "deepseek",
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "n_routed_experts": 5,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "float32",
    }
    (saved.folder / "config.json").write_text(json.dumps(published))
    return saved


def test_deepseek_moe_is_multi_head_attention_with_ungated_shared_experts(save_model: Any, tools: Any) -> None:
    saved = saved_deepseek(save_model, tools)
    token_ids = tools.ids(21)
    found = tools.run(tools.load(saved.folder), token_ids, [10, 11])
    assert largest_error(found, saved.logits(token_ids)) < TOLERANCE
