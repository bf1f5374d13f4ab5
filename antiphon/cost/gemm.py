"""Matrix products: rows [rows, inner] times a weight [inner, outputs], one weight or one per expert.

1. 2 * rows * inner * outputs FLOPs; weights are read once, rows are read and written once.
2. With few rows the weights' bytes dominate, so the product is bound by memory: that is what batching cures.
3. Of a grouped product only the touched experts' weights are read.
"""

import numpy as np

from antiphon.cost.parts import Number, Parts
from antiphon.cost.roofline import Roof, kernel
from antiphon.specs.precision import PrecisionSpec


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
