"""MegaScale-MoE's tables and figures under one calibration: what comes out, and what does not."""

import numpy as np
import pytest

from antiphon.cost.training.megascale import (
    STRATEGIES,
    communication_share,
    devices_compared,
    fused_pairs,
    intra_operator_gain,
    ladder,
    rematerialized_memory,
    sequence_expert_gain,
    strategy_mfu,
    strong_scaling,
)
from antiphon.cost.training.megascale_models import TABLE_2, TABLE_3, TABLE_5
from antiphon.cost.training.step import StepEstimate
from tests.cost.training.specimens import megascale_cluster


def one(estimate: StepEstimate, name: str) -> float:
    return float(np.asarray(getattr(estimate, name)).reshape(-1)[0])


@pytest.mark.parametrize("row", TABLE_3["megascale"], ids=lambda row: str(row.num_devices))
def test_table_3(row) -> None:
    estimate = strong_scaling(megascale_cluster(), row.num_devices)
    assert one(estimate, "iteration_s") == pytest.approx(row.iteration_s, rel=0.05)


def test_mfu_falls_as_printed() -> None:
    cluster = megascale_cluster()
    found = [one(strong_scaling(cluster, row.num_devices), "mfu") for row in TABLE_3["megascale"]]
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(0.3248, abs=0.01)
    assert found[-1] == pytest.approx(0.2789, abs=0.005)


def test_megatron_does_not_come_out() -> None:
    """The same model without SP, EP and overlap is 1.28 times slower; Megatron-LM is 1.65 to 1.88 times."""
    cluster = megascale_cluster()
    for row in TABLE_3["megatron"]:
        assert one(strong_scaling(cluster, row.num_devices, ladder_step=0), "iteration_s") < 0.8 * row.iteration_s


def test_weak_scaling_is_nearly_linear() -> None:
    cluster = megascale_cluster()
    rates = [one(strong_scaling(cluster, n, batch=n * 3 // 4), "tokens_per_s") / n for n in (480, 1440)]
    assert 0.99 < rates[1] / rates[0] <= 1


def test_table_5() -> None:
    found = ladder(megascale_cluster())
    assert found[0] == 1
    assert np.allclose(found, TABLE_5, atol=0.03)
    assert found[-1] == pytest.approx(1.28, abs=0.01)


def test_figure_14() -> None:
    """14.9% to 32.9% over six models; ours 12.7% to 32.5%."""
    cluster = megascale_cluster()
    gains = {name: sequence_expert_gain(cluster, row) for name, row in TABLE_2.items()}
    assert min(gains.values()) == pytest.approx(0.149, abs=0.03)
    assert max(gains.values()) == pytest.approx(0.329, abs=0.03)
    for row in TABLE_2.values():
        mfu = {pair: strategy_mfu(cluster, row, *pair) for pair in STRATEGIES}
        assert max(mfu, key=mfu.__getitem__) == ("sequence", "expert")


def test_intra_operator_gains() -> None:
    """7.1% to 12.9% over six models; ours 2.6% to 11.2%: too small where experts are wide."""
    gains = [intra_operator_gain(megascale_cluster(), row) for row in TABLE_2.values()]
    assert all(0.02 < gain < 0.129 for gain in gains)


def test_fused_pairs_are_bounded_by_two() -> None:
    """Figure 16 measures 1.2 to 4.7: beyond 2 it is faster kernels, not overlap."""
    speedups = [value for row in TABLE_2.values() for value in fused_pairs(megascale_cluster(), row).values()]
    assert min(speedups) > 1.1
    assert max(speedups) < 2


def test_communication_share_is_below_the_internal_models() -> None:
    """43.6% of forward and 32% of training are of a model and a setup that are not stated; ours 25.7% and 19.6%."""
    forward, both = communication_share(megascale_cluster())
    assert forward == pytest.approx(0.257, abs=0.01)
    assert both == pytest.approx(0.196, abs=0.01)


def test_rematerialization_costs_more_than_the_paper_says() -> None:
    memory = rematerialized_memory(megascale_cluster(), TABLE_2["Mixtral-8x7B"], pipeline=2)
    assert memory.saved_of_activations[0] == pytest.approx(0.66, abs=0.005)
    assert -0.035 < memory.mfu_kept / memory.mfu_needed - 1 < -0.005


def test_figure_13_orders_devices() -> None:
    """The more arithmetic a device has, the lower its MFU and the more is gained."""
    mfu, gain = [], []
    for name in ("msm-h800", "msm-a100", "msm-h20"):
        cluster = megascale_cluster(name)
        ours, baseline = (one(devices_compared(cluster, megascale=flag), "mfu") for flag in (True, False))
        mfu.append(ours)
        gain.append(ours / baseline)
    assert mfu == sorted(mfu)
    assert gain == sorted(gain, reverse=True)
    assert 1.3 < gain[0] < 1.58
