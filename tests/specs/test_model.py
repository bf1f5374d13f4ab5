"""Sizes that follow from a `ModelSpec`."""

from dataclasses import replace

from antiphon.specs.model import AttentionSpec, FeedForwardSpec, LatentSpec, ModelSpec, RopeSpec, RouterSpec

SPEC = ModelSpec(
    family="mixtral",
    vocab_size=32_000,
    hidden_size=4096,
    num_layers=32,
    moe_layers=(False, *(True,) * 31),
    attention=AttentionSpec(
        num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5, rope=RopeSpec(dim=128, theta=1e6)
    ),
    router=RouterSpec(num_experts=8, top_k=2),
    feed_forward=FeedForwardSpec(intermediate=14_336),
)


def test_kv_bytes_of_grouped_query_attention() -> None:
    """Mixtral 8x7B in bfloat16: 2 * 32 layers * 8 heads * 128 * 2 bytes = 128 KiB a token."""
    assert SPEC.kv_bytes_per_token(2) == 128 * 1024


def test_kv_bytes_of_latent_attention() -> None:
    """DeepSeek-V3 in bfloat16: 61 layers * (512 + 64) * 2 bytes = 68.6 KiB a token."""
    latent = LatentSpec(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    spec = replace(SPEC, num_layers=61, attention=replace(SPEC.attention, latent=latent))
    assert latent.key_dim == 576
    assert spec.kv_bytes_per_token(2) == 61 * 576 * 2


def test_layers_without_experts_are_not_counted() -> None:
    assert SPEC.num_moe_layers == 31
