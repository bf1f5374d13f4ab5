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

A time is in five parts, so that every estimate can say what bounds it:

1. Arithmetic, memory traffic, the two levels of the network and fixed costs are kept apart; `total_s` is their sum.
2. Of a kernel that both computes and moves bytes, the longer of the two is booked and the other is 0: they overlap.
3. Fields are floats or arrays; arrays hold one value per candidate and broadcast, so that a search needs no loop.

Rejected: one number and a label. A label cannot be added up over the kernels of a layer.

`docs/calibration.md` holds this against published tables of products and attention. Rejected: an efficiency for each
table's shapes. It explains what was measured and says nothing about the shape between; where a machine was measured
(`cost.profile`), that takes the formula's place.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from antiphon.specs.cluster import ComputeDtype, DeviceSpec, EfficiencySpec
from antiphon.specs.model import PrecisionSpec

FloatArray = NDArray[np.float64]
Number = float | FloatArray
"""One value, or one per candidate."""

BOUND_NAMES = ("compute", "memory bandwidth", "scale-up network", "scale-out network", "fixed cost")
TILE = 128
LEAST_TILE_ROWS = 64
LOST_OF_LAST_WAVE = 0.25  # of the time of a wave of tiles


@dataclass(frozen=True)
class Parts:
    """Seconds spent on arithmetic, on memory traffic, on the two network levels, and whatever the size."""

    compute_s: Number = 0.0
    memory_s: Number = 0.0
    scale_up_s: Number = 0.0
    scale_out_s: Number = 0.0
    fixed_s: Number = 0.0

    __array_ufunc__ = None  # so that `array * parts` asks Parts, instead of making an array of objects

    @property
    def total_s(self) -> Number:
        return self.compute_s + self.memory_s + self.scale_up_s + self.scale_out_s + self.fixed_s

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(*(mine + theirs for mine, theirs in zip(self._values(), other._values(), strict=True)))

    def __mul__(self, factor: Number) -> "Parts":
        return Parts(*(value * factor for value in self._values()))

    __rmul__ = __mul__

    def at(self, index: int) -> "Parts":
        """The parts of one candidate; a field that is one value for all stays what it is."""
        values = np.broadcast_arrays(*self._values())
        return Parts(*(float(value.reshape(-1)[index]) for value in values))

    def bound_by(self) -> str:
        """Name of the largest part of one candidate, out of `BOUND_NAMES`."""
        names = self.bound_by_each()
        assert names.size == 1, "bound_by() is for one candidate: use bound_by_each()"
        return str(names.reshape(-1)[0])

    def bound_by_each(self) -> NDArray[np.str_]:
        """Name of the largest part of each candidate; of equal ones the first in the order of `BOUND_NAMES`."""
        largest = np.argmax(np.stack(np.broadcast_arrays(*self._values())), axis=0)
        names: NDArray[np.str_] = np.asarray(BOUND_NAMES)[largest]
        return names

    def seconds_by_bound(self) -> dict[str, float]:
        """What the time of one candidate is spent on."""
        return dict(zip(BOUND_NAMES, map(float, self._values()), strict=True))

    def _values(self) -> tuple[Number, ...]:
        return self.compute_s, self.memory_s, self.scale_up_s, self.scale_out_s, self.fixed_s


def select(condition: bool | NDArray[np.bool_], then: Parts, otherwise: Parts) -> Parts:
    """By candidate: `then` where the condition holds, else `otherwise`."""
    if isinstance(condition, bool):
        return then if condition else otherwise
    pairs = zip(then._values(), otherwise._values(), strict=True)
    return Parts(
        *(mine if _are_one_value(mine, theirs) else np.where(condition, mine, theirs) for mine, theirs in pairs)
    )


def _are_one_value(mine: Number, theirs: Number) -> bool:
    """Most parts are 0 on both sides; arrays of them would take most of a search's time."""
    return isinstance(mine, float) and isinstance(theirs, float) and mine == theirs


def longest(first: Parts, second: Parts) -> Parts:
    """By candidate: whichever takes longer in total, with its own parts. For two things that run side by side."""
    return select(np.asarray(first.total_s >= second.total_s), first, second)


# --- what a kernel takes


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
