"""The roofline: a kernel takes as long as its arithmetic or its memory traffic, whichever is longer, plus its launch.

    T = max(flops / (peak * efficiency), bytes / (bandwidth * efficiency)) + num_kernels * kernel_s

Efficiencies are the cluster's one calibration (`EfficiencySpec`), the same for every model and layout. A matrix product
of rows [rows, inner] and a weight [inner, outputs] has 2 * rows * inner * outputs FLOPs; weights are read once, rows
are read and written once. With few rows the weights' bytes dominate: that is what batching cures. Of a grouped product
only the touched experts' weights are read.

Rejected: an efficiency by shape fitted to single results. It explains what was fitted and predicts nothing; where
shapes matter, a measured profile (`cost.profile`) takes the roofline's place.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from antiphon.cost.parts import Number, Parts
from antiphon.specs.cluster import EfficiencySpec
from antiphon.specs.device import ComputeDtype, DeviceSpec
from antiphon.specs.precision import PrecisionSpec


@dataclass(frozen=True, kw_only=True)
class Roof:
    """What one device really reaches: arithmetic, memory bandwidth, and the fixed time of a kernel."""

    flops_per_s: Number
    bytes_per_s: Number
    kernel_s: Number = 0.0


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
        flops_per_s=device.peak_flops_per_s(compute) * fraction,
        bytes_per_s=device.memory_bytes_per_s * efficiency.memory,
        kernel_s=efficiency.kernel_s,
    )


def roofs(device: DeviceSpec, efficiency: EfficiencySpec, compute: ComputeDtype = "bfloat16") -> Roofs:
    """Both roofs of a device. Scores and values are computed in BF16 at least where products are in FP8, if it can."""
    scores: ComputeDtype = "bfloat16" if compute == "fp8" and "bfloat16" in device.flops_per_s else compute
    return Roofs(
        gemm=roof(device, efficiency, compute),
        attention=roof(device, efficiency, scores, "attention"),
        layer_s=efficiency.layer_overhead_s,
    )


def kernel(roof: Roof, flops: Number, moved_bytes: Number, num_kernels: Number = 1) -> Parts:
    """Time of `num_kernels` kernels that do `flops` and move `moved_bytes` together. With neither, none is run."""
    compute_s = np.asarray(flops / roof.flops_per_s, dtype=np.float64)
    memory_s = np.asarray(moved_bytes / roof.bytes_per_s, dtype=np.float64)
    by_compute = compute_s >= memory_s
    runs = (compute_s > 0) | (memory_s > 0)
    return Parts(
        compute_s=np.where(by_compute, compute_s, 0.0),
        memory_s=np.where(by_compute, 0.0, memory_s),
        fixed_s=np.where(runs, num_kernels * roof.kernel_s, 0.0),
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
    flops = 2 * rows * inner * outputs
    moved = num_touched * inner * outputs * weight_bytes + rows * (inner + outputs) * row_bytes
    return kernel(roof, flops, np.where(np.asarray(rows) > 0, moved, 0.0))
