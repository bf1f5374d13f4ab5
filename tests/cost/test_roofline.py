"""Parts, roofline and matrix products, with numbers small enough to work out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from antiphon.base.errors import UserError
from antiphon.cost.roofline import Parts, Roof, gemm, grouped_gemm, kernel, longest, roof, roofs, select
from antiphon.specs.cluster import EfficiencySpec
from tests.cost.specimens import PERFECT, ROUND

ROOF = Roof(flops_per_s=100.0, bytes_per_s=10.0, kernel_s=0.5)


def test_parts_add_up_and_scale() -> None:
    total = 2 * Parts(compute_s=1.0, fixed_s=0.25) + Parts(memory_s=3.0, scale_up_s=0.5, scale_out_s=4.0)
    assert total == Parts(2.0, 3.0, 0.5, 4.0, 0.5)
    assert total.total_s == 10.0
    assert total.bound_by() == "scale-out network"
    assert Parts(compute_s=1.0).bound_by() == "compute"


def test_parts_of_many_candidates() -> None:
    parts = np.array([1.0, 0.0, 2.0]) * Parts(compute_s=1.0, memory_s=np.array([0.5, 1.0, 3.0]), fixed_s=0.1)
    assert isinstance(parts, Parts)
    np.testing.assert_allclose(parts.total_s, [1.6, 0.0, 8.2])
    assert list(parts.bound_by_each()) == ["compute", "compute", "memory bandwidth"]
    assert parts.at(2) == Parts(2.0, 6.0, 0.0, 0.0, pytest.approx(0.2))
    with pytest.raises(AssertionError, match="bound_by_each"):
        parts.bound_by()


def test_choosing_between_parts() -> None:
    fast, slow = Parts(compute_s=np.array([1.0, 5.0])), Parts(memory_s=np.array([2.0, 3.0]))
    slower = longest(fast, slow)
    np.testing.assert_array_equal(slower.compute_s, [0.0, 5.0])
    np.testing.assert_array_equal(slower.memory_s, [2.0, 0.0])
    assert select(True, fast, slow) is fast
    assert select(False, fast, slow) is slow


def test_arithmetic_and_memory_hide_each_other_only_in_part() -> None:
    assert kernel(ROOF, 400.0, 30.0) == Parts(compute_s=5.0, memory_s=0.0, fixed_s=0.5)
    assert kernel(ROOF, 300.0, 40.0, num_kernels=3) == Parts(compute_s=0.0, memory_s=5.0, fixed_s=1.5)
    assert kernel(ROOF, 300.0, 0.0) == Parts(compute_s=3.0, fixed_s=0.5)
    assert kernel(ROOF, 0.0, 0.0) == Parts()


def test_products_are_made_in_waves_of_tiles() -> None:
    # 4 processors: 8 tiles are 2 waves and a quarter lost, each 0.5 s to begin and end.
    tiled = Roof(flops_per_s=100.0, bytes_per_s=math.inf, tile_s=0.5, num_processors=4)
    outputs = 8 * 128 * 128
    assert kernel(tiled, 800.0, 0.0, num_outputs=outputs).compute_s == pytest.approx((8 + 2 * 0.5) * 2.25 / 2)
    # a quarter of a wave loses a quarter of itself
    assert kernel(tiled, 800.0, 0.0, num_outputs=outputs / 8).compute_s == pytest.approx((8 + 0.25 * 0.5) * 1.25)
    # two experts with three rows each fill a tile of 64 rows each
    few, full = (grouped_gemm(tiled, rows, 2, 128, 128, 2.0, 2.0).compute_s for rows in (6.0, 128.0))
    assert few == full > grouped_gemm(tiled, 64.0, 1, 128, 128, 2.0, 2.0).compute_s


def test_a_loaded_device_settles_below_its_peak() -> None:
    cooler = replace(ROUND, sustained=0.5, num_processors=7)
    assert roof(cooler, PERFECT).flops_per_s == 5e11
    assert roof(cooler, PERFECT).num_processors == 7


def test_a_roof_is_peak_times_efficiency() -> None:
    efficiency = EfficiencySpec(gemm=0.5, attention=0.25, memory=0.8, kernel_s=1e-6)
    assert roof(ROUND, efficiency) == Roof(flops_per_s=5e11, bytes_per_s=8e8, kernel_s=1e-6, tile_s=efficiency.tile_s)
    assert roof(ROUND, efficiency, "fp8", "attention").flops_per_s == 5e11
    with pytest.raises(UserError, match="round has no float32 arithmetic: compute in one of bfloat16, fp8"):
        roof(ROUND, efficiency, "float32")


def test_scores_stay_in_bfloat16_where_products_are_fp8() -> None:
    both = roofs(ROUND, PERFECT, "fp8")
    assert (both.gemm.flops_per_s, both.attention.flops_per_s) == (2e12, 1e12)


def test_gemm_reads_weights_once_and_rows_in_and_out() -> None:
    # 2 rows x [3, 4]: 48 FLOPs; 12 weights of 2 bytes and 2 * (3 + 4) row elements of 1 byte: 38 bytes.
    assert gemm(ROOF, 2, 3, 4, 2.0, 1.0) == Parts(memory_s=math.hypot(3.8, 0.48), fixed_s=0.5)
    assert gemm(ROOF, 0, 3, 4, 2.0, 1.0) == Parts()
    # 5 products at once, each with its own weight and rows: 5 times both, one launch.
    assert gemm(ROOF, 2, 3, 4, 2.0, 1.0, count=5) == Parts(
        memory_s=pytest.approx(5 * math.hypot(3.8, 0.48)), fixed_s=0.5
    )


def test_small_batches_wait_for_weights_and_large_ones_compute() -> None:
    few, many = (gemm(roof(ROUND, PERFECT), rows, 1000, 1000, 2.0, 2.0) for rows in (1, 100_000))
    assert (few.bound_by(), many.bound_by()) == ("memory bandwidth", "memory bandwidth")
    wide = Roof(flops_per_s=1e12, bytes_per_s=1e11)
    assert gemm(wide, 100_000, 1000, 1000, 2.0, 2.0).bound_by() == "compute"


def test_grouped_gemm_reads_only_touched_experts() -> None:
    # 6 rows over 2 of the experts, [3, 4] each: 144 FLOPs; 24 weights of 2 bytes, 6 * 7 row elements: 90 bytes.
    assert grouped_gemm(ROOF, 6, 2, 3, 4, 2.0, 1.0) == Parts(memory_s=math.hypot(9.0, 1.44), fixed_s=0.5)


def test_gemm_over_an_array_of_batches_equals_one_by_one() -> None:
    rows = np.array([0.0, 1.0, 7.0, 512.0])
    together = gemm(ROOF, rows, 3, 4, 2.0, 1.0)
    for index, count in enumerate(rows):
        assert together.at(index) == gemm(ROOF, float(count), 3, 4, 2.0, 1.0)
