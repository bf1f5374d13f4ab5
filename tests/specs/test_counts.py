"""Counts against what we did not write: transformers' own models, torch's FLOP counter, publishers' totals."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from antiphon.cost.memory import kv_bytes_per_token
from antiphon.models.config import load_model_spec, model_spec
from antiphon.models.planned import load_planned_model
from antiphon.specs import counts
from antiphon.specs.catalog import catalog, shipped_file
from antiphon.specs.model import ModelSpec, PrecisionSpec
from tests.models.conftest import FAMILIES, family_config

VARIANTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"attention_bias": True},
    "deepseek_v3": {"attention_bias": True, "n_shared_experts": 2},
    "mixtral": {"tie_word_embeddings": True},
    "olmoe": {"attention_bias": True},
    "phimoe": {"attention_bias": False, "lm_head_bias": False},
    "qwen2_moe": {"qkv_bias": False},
    "qwen3_moe": {"attention_bias": True, "tie_word_embeddings": True},
}
CASES = [(family, {}) for family in FAMILIES] + list(VARIANTS.items())
TOKENS = 7


def spec_of(config: Any) -> ModelSpec:
    return model_spec(config.to_dict())


def shipped(name: str) -> ModelSpec:
    return load_model_spec(shipped_file("model", name))


@pytest.mark.parametrize(("family", "changes"), CASES, ids=lambda case: case if isinstance(case, str) else str(case))
def test_every_parameter_of_a_transformers_model_is_counted(family: str, changes: dict[str, Any]) -> None:
    config = family_config(family, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    score_biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    expected = sum(tensor.numel() for tensor in [*model.parameters(), *score_biases])
    assert counts.count_parameters(spec_of(config)).total == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_equal_those_torch_counts(family: str) -> None:
    """A prompt through transformers: full score matrices (no half is skipped), latent attention expanded."""
    config = family_config(family)
    config._experts_implementation = "eager"  # torch counts no FLOPs of grouped products
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(TOKENS)[None])
    rotary_layers = [name for name in counter.get_flop_counts() if name.endswith("rotary_emb")]
    rotary = sum(sum(counter.get_flop_counts()[name].values()) for name in rotary_layers)
    ours = TOKENS * counts.flops_per_token(spec_of(config), TOKENS, absorbed=False)
    assert ours == counter.get_total_flops() - rotary


@pytest.mark.parametrize("entry", catalog("model"), ids=lambda entry: entry.name)
def test_shipped_models_have_the_published_numbers_of_parameters(entry: Any) -> None:
    """Totals within 1%. Active ones are printed with two digits, with or without the embedding: one is within 2.5% or
    half of the last digit."""
    count = counts.count_parameters(load_planned_model(entry.path).spec)
    assert count.total == pytest.approx(entry.stated["total"], rel=0.01)
    if "active" in entry.stated:
        stated = entry.stated["active"]
        errors = [abs(number - stated) for number in (count.active, count.active - count.embedding)]
        assert min(errors) < max(0.025 * stated, 0.5e9)


def test_only_models_of_which_nobody_states_them_lack_active_parameters() -> None:
    assert {entry.name for entry in catalog("model") if "active" not in entry.stated} == {
        "msm-internal-352b",
        "scaled-moe",
    }


def test_totals_by_hand() -> None:
    """Mixtral 8x7B: 32 layers of 41.94M attention, 8 x 176.16M experts, a gate and two norms; two tables of 131M."""
    attention = 4096 * (4096 + 2 * 1024) + 4096 * 4096
    layer = attention + 8 * 3 * 4096 * 14_336 + 8 * 4096 + 2 * 4096
    count = counts.count_parameters(shipped("mixtral-8x7b"))
    assert count.total == 32 * layer + 4096 + 2 * 32_000 * 4096 == 46_702_792_704
    assert count.active == count.total - 32 * 6 * count.expert


def test_the_internal_model_needs_its_shared_expert() -> None:
    """The row of MegaScale-MoE's Table 2 adds up to 341B; one shared expert of equal width makes the printed 352B."""
    spec = shipped("msm-internal-352b")
    count = counts.count_parameters(spec)
    assert count.shared_expert == count.expert
    without = count.total - spec.num_layers * count.shared_expert
    assert without == pytest.approx(341.3e9, rel=5e-4)
    assert count.total == pytest.approx(351.9e9, rel=5e-4)


@pytest.mark.parametrize(("num_gpus", "tokens_per_s", "printed"), [(240, 272.9e3, 0.3248), (1440, 1407.7e3, 0.2789)])
def test_the_internal_model_gives_the_printed_mfu(num_gpus: int, tokens_per_s: float, printed: float) -> None:
    """MegaScale-MoE section 6.1: Table 3's throughputs on H800 are 32.48% and 27.89% of the peak. Three times the
    forward pass, sequences of 8,192 with the causal half of attention; without a shared expert a fifth is missing."""
    spec = shipped("msm-internal-352b")
    forward = counts.flops_per_token(spec, (8192 + 1) / 2)
    share = 3 * tokens_per_s / (num_gpus * 989e12)
    assert share * forward == pytest.approx(printed, abs=0.0005)
    assert share * (forward - spec.num_layers * counts.count_flops(spec).shared_expert) < 0.8 * printed


def test_scaled_moe_adds_up_to_its_total() -> None:
    """MegaScale-Infer Table 4: 48 layers of 32 experts of 3 x 8192 x 8192 are 309B of the 317B."""
    spec = shipped("scaled-moe")
    count = counts.count_parameters(spec)
    assert spec.num_layers * spec.router.num_experts * count.expert == 48 * 32 * 3 * 8192**2
    assert count.total == pytest.approx(317e9, rel=1e-3)


def test_latent_attention_absorbed_against_expanded() -> None:
    """DeepSeek-V3, 128 heads: absorbed 2 x 128 x (576 + 512), expanded 2 x 128 x (192 + 128) FLOPs per context."""
    flops = counts.count_flops(shipped("deepseek-v3"))
    assert flops.score_flops_absorbed == 278_528
    assert flops.score_flops_expanded == 81_920
    q, kv, out = 7168 * 1536 + 1536 * 24_576, 7168 * 576 + 512 * 32_768, 16_384 * 7168
    assert flops.attention_projections == 2 * (q + kv + out)


def test_grouped_query_attention_has_one_order() -> None:
    flops = counts.count_flops(shipped("mixtral-8x22b"))
    assert flops.score_flops_absorbed == flops.score_flops_expanded == 4 * 6144


def test_kv_bytes() -> None:
    mixtral, deepseek = shipped("mixtral-8x22b"), shipped("deepseek-v3")
    assert mixtral.kv_bytes_per_token(2) == 56 * 2 * 8 * 128 * 2
    assert deepseek.kv_bytes_per_token(2) == 61 * 576 * 2
    assert deepseek.kv_bytes_per_token(1) == 61 * 576
    assert kv_bytes_per_token(deepseek, 1, PrecisionSpec(kv="int4")) == 61 * (288 + 36)


def test_int4_gives_fractions_of_bytes() -> None:
    model = model_spec(family_config("deepseek_v2", kv_lora_rank=19, qk_rope_head_dim=8).to_dict())
    assert kv_bytes_per_token(model, 1, PrecisionSpec(kv="int4")) == 27 * (0.5 + 2 / 32) * model.num_layers


@settings(max_examples=50, deadline=None)
@given(
    heads=st.integers(1, 9),
    groups=st.integers(1, 5),
    width=st.integers(1, 64),
    experts=st.integers(1, 17),
    layers=st.integers(1, 7),
    data=st.data(),
)
def test_parts_add_up(heads: int, groups: int, width: int, experts: int, layers: int, data: Any) -> None:
    top_k = data.draw(st.integers(1, experts))
    config = {
        "model_type": "deepseek",
        "vocab_size": 11,
        "hidden_size": 2 * heads * groups,
        "num_attention_heads": heads * groups,
        "num_key_value_heads": heads,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * width,
        "moe_intermediate_size": width,
        "n_routed_experts": experts,
        "n_shared_experts": data.draw(st.integers(0, 3)),
        "num_experts_per_tok": top_k,
        "first_k_dense_replace": data.draw(st.integers(0, layers - 1)),
        "max_position_embeddings": 64,
    }
    spec = model_spec(config)
    count = counts.count_parameters(spec)
    num_moe = spec.num_moe_layers
    parts = layers * (count.attention + count.layer_norms) + (layers - num_moe) * count.dense
    parts += num_moe * (count.router + count.shared_expert + experts * count.expert)
    assert count.total == parts + count.final_norm + count.embedding + count.head
    assert count.total - count.active == num_moe * (experts - top_k) * count.expert
