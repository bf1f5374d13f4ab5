"""More of what is good is never slower, more work is never faster: whole layers on random devices and sizes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cost.layers import expert_feed_forward
from antiphon.cost.roofline import roofs
from antiphon.specs.cluster import DeviceSpec, EfficiencySpec
from antiphon.specs.model import ModelSpec, PrecisionSpec
from tests.cost.specimens import ROUND, attention_decode, attention_prefill, deepseek_v3, mixtral_8x22b, tiny_model

BF16 = PrecisionSpec()
MODELS = st.sampled_from([mixtral_8x22b(), deepseek_v3(), tiny_model()])
DEVICES = st.builds(
    lambda flops, rate: replace(ROUND, flops_per_s={"bfloat16": flops}, memory_bytes_per_s=rate),
    st.floats(1e12, 1e15),
    st.floats(1e10, 1e13),
)


def layer_s(model: ModelSpec, device: DeviceSpec, batch: float, context: float, tp: int) -> tuple[float, float, float]:
    """(decode, prefill, experts) seconds."""
    both = roofs(device, EfficiencySpec())
    decode = attention_decode(model, both, batch, context, tp, BF16)
    prefill = attention_prefill(model, both, batch * context, context, tp, BF16)
    experts = expert_feed_forward(model, both.gemm, batch, 3, tp, BF16)
    return float(decode.total_s), float(prefill.total_s), float(experts.total_s)


@settings(max_examples=50, deadline=None)
@given(MODELS, DEVICES, st.integers(1, 600), st.integers(1, 30_000), st.integers(1, 9))
def test_layers_are_monotone(model: ModelSpec, device: DeviceSpec, batch: int, context: int, tp: int) -> None:
    now = layer_s(model, device, batch, context, tp)
    twice = {"bfloat16": device.flops_per_s["bfloat16"] * 2}
    better = (
        layer_s(model, replace(device, memory_bytes_per_s=device.memory_bytes_per_s * 2), batch, context, tp),
        layer_s(model, replace(device, flops_per_s=twice), batch, context, tp),
        layer_s(model, device, batch, context, tp + 1),
    )
    worse = (layer_s(model, device, batch + 1, context, tp), layer_s(model, device, batch, context + 1, tp))
    for times in better:
        assert all(faster <= slower * (1 + 1e-12) for faster, slower in zip(times, now, strict=True))
    for times in worse:
        assert all(slower >= faster * (1 - 1e-12) for faster, slower in zip(now, times, strict=True))


@pytest.mark.parametrize("model", [mixtral_8x22b(), deepseek_v3()], ids=lambda model: model.family)
def test_many_candidates_need_no_loop(model: ModelSpec) -> None:
    """10^5 candidates in one call; shapes, not time, are asserted."""
    batch = np.linspace(1, 1024, 100_000)
    tp = np.where(np.arange(100_000) % 2 == 0, 3.0, 8.0)
    parts = attention_decode(model, roofs(ROUND, EfficiencySpec()), batch, 700.0, tp, BF16)
    assert np.shape(parts.total_s) == (100_000,)
    assert parts.bound_by_each().shape == (100_000,)
    assert np.all(np.diff(np.asarray(parts.total_s)[::2]) >= 0)
