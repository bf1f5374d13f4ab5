"""Models, devices and clusters with round or published numbers, for tests of the cost model."""

from dataclasses import replace

from antiphon.cost.layers import StepRows, attention_layer
from antiphon.cost.roofline import Number, Parts, Roofs
from antiphon.specs.cluster import ClusterSpec, DeviceSpec, EfficiencySpec, NodeGroup
from antiphon.specs.model import (
    AttentionSpec,
    FeedForwardSpec,
    LatentSpec,
    ModelSpec,
    PrecisionSpec,
    RopeSpec,
    RouterSpec,
)

# A device with round numbers: 1 TFLOP/s, 1 GB/s of memory, so that times are flops / 1e12 and bytes / 1e9.
ROUND = DeviceSpec(
    name="round",
    kind="gpu",
    memory_bytes=10**9,
    memory_bytes_per_s=1e9,
    flops_per_s={"bfloat16": 1e12, "fp8": 2e12},
    scale_up_bytes_per_s=1e9,
    scale_up_domain=4,
    scale_out_bytes_per_s=1e8,
    power_w=100.0,
)
PERFECT = EfficiencySpec(
    gemm=1.0,
    attention=1.0,
    memory=1.0,
    scale_up=1.0,
    scale_out=1.0,
    scale_up_half_bytes=0.0,
    scale_out_half_bytes=0.0,
    kernel_s=0.0,
    collective_s=0.0,
    exchange_s=0.0,
    layer_overhead_s=0.0,
    memory_reserve=0.0,
    overlap=1.0,
    source="test",
)


def round_group(**changes: object) -> NodeGroup:
    """3 nodes of 4 devices, 1 GB/s inside a node and 0.1 GB/s per device between nodes."""
    group = NodeGroup(
        device=ROUND,
        num_nodes=3,
        devices_per_node=4,
        scale_up_domain=4,
        scale_up_bytes_per_s=1e9,
        node_scale_out_bytes_per_s=4e8,
    )
    return replace(group, **changes)


def round_cluster(**changes: object) -> ClusterSpec:
    cluster = ClusterSpec(
        name="round", groups=(round_group(),), scale_up_latency_s=0.0, scale_out_latency_s=0.0, efficiency=PERFECT
    )
    return replace(cluster, **changes)


def mixtral_8x22b() -> ModelSpec:
    return ModelSpec(
        family="mixtral",
        vocab_size=32768,
        hidden_size=6144,
        num_layers=56,
        moe_layers=(True,) * 56,
        attention=AttentionSpec(
            num_heads=48, num_kv_heads=8, head_dim=128, scale=128**-0.5, rope=RopeSpec(dim=128, theta=1e6)
        ),
        router=RouterSpec(num_experts=8, top_k=2),
        feed_forward=FeedForwardSpec(intermediate=16384),
        max_position=65536,
    )


def deepseek_v3() -> ModelSpec:
    return ModelSpec(
        family="deepseek_v3",
        vocab_size=129280,
        hidden_size=7168,
        num_layers=61,
        moe_layers=(False,) * 3 + (True,) * 58,
        attention=AttentionSpec(
            num_heads=128,
            num_kv_heads=128,
            head_dim=192,
            scale=192**-0.5,
            rope=RopeSpec(dim=64, theta=1e4, interleaved=True),
            latent=LatentSpec(
                q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
            ),
        ),
        router=RouterSpec(num_experts=256, top_k=8, scoring="sigmoid", num_groups=8, top_k_groups=4),
        feed_forward=FeedForwardSpec(intermediate=2048, shared_intermediate=2048, dense_intermediate=18432),
        max_position=163840,
    )


def tiny_model(**changes: object) -> ModelSpec:
    """Sizes that a person can multiply: hidden 8, 4 heads of 2, 2 KV heads, 5 experts of width 6, top 2."""
    model = ModelSpec(
        family="mixtral",
        vocab_size=10,
        hidden_size=8,
        num_layers=3,
        moe_layers=(True, True, True),
        attention=AttentionSpec(
            num_heads=4, num_kv_heads=2, head_dim=2, scale=2**-0.5, rope=RopeSpec(dim=2, theta=1e4)
        ),
        router=RouterSpec(num_experts=5, top_k=2),
        feed_forward=FeedForwardSpec(intermediate=6),
    )
    return replace(model, **changes)


def attention_decode(
    model: ModelSpec,
    roofs: Roofs,
    batch: Number,
    context: Number,
    tp: Number,
    precision: PrecisionSpec,
    *,
    moe_layer: bool = True,
) -> Parts:
    """One layer of a step that only decodes: `batch` sequences."""
    rows = StepRows(decoding=batch, context=context)
    return attention_layer(model, roofs, rows, tp, precision, moe_layer=moe_layer)


def attention_prefill(
    model: ModelSpec,
    roofs: Roofs,
    tokens: Number,
    context: Number,
    tp: Number,
    precision: PrecisionSpec,
    *,
    past: Number = 0.0,
) -> Parts:
    """One layer of a pass of `tokens` new tokens of several sequences, `context` new ones in each after `past` cached
    ones."""
    return attention_layer(model, roofs, StepRows(prompt_tokens=tokens, prompt=context, past=past), tp, precision)


def without_shared(model: ModelSpec) -> ModelSpec:
    return replace(model, feed_forward=replace(model.feed_forward, shared_intermediate=0))
