"""How long a kernel takes: arithmetic and memory traffic beside each other, and what starts and ends it.

    T = sqrt(arithmetic^2 + traffic^2) + num_kernels * kernel_s
    arithmetic = flops / (peak * sustained * efficiency) + waves * tile_s,    traffic = bytes / (bandwidth * efficiency)

1. The two hide each other only where one is much longer; as long as each other, they take 1.4 times as long as one.
2. A product of rows [rows, inner] and a weight [inner, outputs] has 2 * rows * inner * outputs FLOPs. Its outputs are
   cut into tiles of 128 x 128, which the device's processors take in waves: each wave costs `tile_s` to begin and end,
   and a quarter of one is lost at the end. A small `inner` or few outputs make a product inefficient that way.
3. Weights are read once, rows read and written once. With few rows the weights' bytes dominate: batching cures that.
   Of a grouped product only the touched experts' weights are read, and each expert's rows fill tiles of 64 at least.
4. Efficiencies are the cluster's one calibration (`EfficiencySpec`), the same for every model and layout.

`docs/calibration.md` holds this against published tables of products and attention. Rejected: an efficiency for each
table's shapes. It explains what was measured and says nothing about the shape between; where a machine was measured
(`cost.profile`), that takes the formula's place.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from antiphon.cost.parts import Number, Parts
from antiphon.specs.cluster import EfficiencySpec
from antiphon.specs.device import ComputeDtype, DeviceSpec
from antiphon.specs.precision import PrecisionSpec

TILE = 128
LEAST_TILE_ROWS = 64
LOST_OF_LAST_WAVE = 0.25


@dataclass(frozen=True, kw_only=True)
class Roof:
    """What one device really reaches: arithmetic, memory bandwidth, the fixed time of a kernel and of a wave of tiles.
    `num_processors`: tiles at a time; 0: products are not cut into tiles."""

    flops_per_s: Number
    bytes_per_s: Number
    kernel_s: Number = 0.0
    tile_s: Number = 0.0
    num_processors: int = 0


@dataclass(frozen=True, kw_only=True)
class Roofs:
    """A device's roofs: `gemm` for matrix products, `attention` for scores and values. `layer_s`: what a layer costs
    beside what is modelled; the attention functions add it once per layer."""

    gemm: Roof
    attention: Roof
    layer_s: Number = 0.0


def roof(
    device: DeviceSpec,
    efficiency: EfficiencySpec,
    compute: ComputeDtype = "bfloat16",
    kind: Literal["gemm", "attention"] = "gemm",
) -> Roof:
    """The roof of one device for one kind of kernel. `UserError` if it cannot compute in `compute`."""
    fraction = efficiency.gemm if kind == "gemm" else efficiency.attention
    return Roof(
        flops_per_s=device.peak_flops_per_s(compute) * device.sustained * fraction,
        bytes_per_s=device.memory_bytes_per_s * (device.streamed or 1.0) * efficiency.memory,
        kernel_s=efficiency.kernel_s,
        tile_s=efficiency.tile_s,
        num_processors=device.num_processors or 0,
    )


def roofs(device: DeviceSpec, efficiency: EfficiencySpec, compute: ComputeDtype = "bfloat16") -> Roofs:
    """Both roofs of a device. Where products are in FP8 or FP4, scores and values are in BF16, if it can."""
    scores: ComputeDtype = "bfloat16" if compute in ("fp8", "fp4") and "bfloat16" in device.flops_per_s else compute
    return Roofs(
        gemm=roof(device, efficiency, compute),
        attention=roof(device, efficiency, scores, "attention"),
        layer_s=efficiency.layer_overhead_s,
    )


def kernel(roof: Roof, flops: Number, moved_bytes: Number, num_kernels: Number = 1, num_outputs: Number = 0.0) -> Parts:
    """Time of `num_kernels` kernels that do `flops` and move `moved_bytes` together. With neither, none is run.
    `num_outputs`: elements of a product's result, which are made in tiles; 0: no product."""
    compute_s = np.asarray(flops / roof.flops_per_s, dtype=np.float64)
    if roof.num_processors:
        waves = np.asarray(num_outputs) / (TILE * TILE * roof.num_processors)
        lost = LOST_OF_LAST_WAVE * np.minimum(waves, 1.0)
        share_lost = lost / np.maximum(waves, 1e-12)
        compute_s = np.where(waves > 0, compute_s * (1 + share_lost) + (waves + lost) * roof.tile_s, compute_s)
    memory_s = np.asarray(moved_bytes / roof.bytes_per_s, dtype=np.float64)
    by_compute = compute_s >= memory_s
    both_s = np.hypot(compute_s, memory_s)
    return Parts(
        compute_s=np.where(by_compute, both_s, 0.0),
        memory_s=np.where(by_compute, 0.0, both_s),
        fixed_s=np.where(both_s > 0, num_kernels * roof.kernel_s, 0.0),
    )


def row_bytes_of(precision: PrecisionSpec) -> float:
    """Bytes of one element of a row between kernels: 4 where float32 is computed in, else 2 (FP8 products still
    read and write rows in 16 bits or convert them on the way)."""
    return 4.0 if precision.compute == "float32" else 2.0


def gemm(
    roof: Roof, rows: Number, inner: Number, outputs: Number, weight_bytes: Number, row_bytes: Number, count: Number = 1
) -> Parts:
    """One product; `weight_bytes` and `row_bytes` are per element. `count` equal products in one kernel, each with its
    own weight and rows (as one per head). No rows: no time."""
    return grouped_gemm(roof, rows * count, count, inner, outputs, weight_bytes, row_bytes)


def grouped_gemm(
    roof: Roof,
    rows: Number,
    num_touched: Number,
    inner: Number,
    outputs: Number,
    weight_bytes: Number,
    row_bytes: Number,
) -> Parts:
    """`rows` over all experts together, of whose weights `num_touched` are read. One kernel."""
    some = np.asarray(rows) > 0
    computed = np.where(some, np.maximum(rows, LEAST_TILE_ROWS * num_touched), 0.0) if roof.num_processors else rows
    moved = num_touched * inner * outputs * weight_bytes + rows * (inner + outputs) * row_bytes
    flops, num_outputs = 2 * computed * inner * outputs, computed * outputs
    return kernel(roof, flops, np.where(some, moved, 0.0), num_outputs=num_outputs)
