"""Which tiles of the grouped product are quickest on this GPU; or, without one, what each needs of a GPU.

For each batch bucket every candidate that compiles without spills is checked against the default tile, then timed.
`inputs` of a tile has to be the same for all buckets of a weight (see `tiles`): it is the one whose best tiles take the
least time over the buckets, by geometric mean.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.testing import do_bench

from antiphon.kernels.api import ExpertShape
from antiphon.kernels.triton.grouped import GroupedRows, gated_product, weighed_product
from antiphon.kernels.triton.launch import CompiledLaunch, compiling
from antiphon.kernels.triton.rows import count, place
from antiphon.kernels.triton.tiles import ProductTile, default_tile
from antiphon.kernels.triton.weights import StackedWeight

Report = Callable[[float, float], object]


@dataclass(frozen=True, kw_only=True)
class TunedBucket:
    """The quickest tile for up to `most_rows` rows, its time, and the default tile's."""

    most_rows: int
    tile: ProductTile
    time_s: float
    default_time_s: float


def candidates(weight: StackedWeight, num_rows: int) -> list[ProductTile]:
    """Tiles worth trying for so many rows over all experts, the default's neighbours."""
    if weight.dtype == torch.float32:
        return [default_tile(weight, num_rows, 90)]
    around = default_tile(weight, num_rows, 90).rows
    heights = sorted({max(16, around // 2), around, min(128, around * 2)})
    widths = (32, 64) if weight.format is not None else (64, 128)
    return [
        ProductTile(rows=rows, columns=columns, inputs=inputs, warps=8 if rows * columns > 4096 else 4, stages=stages)
        for rows, columns, inputs, stages in itertools.product(heights, widths, (64, 128), (3, 4))
    ]


def compile_candidates(
    weight: StackedWeight, row_counts: Sequence[int], capability: int, report: Report
) -> list[tuple[ProductTile, CompiledLaunch]]:
    """What each candidate needs of a GPU of that compute capability. Needs none."""
    tiles = list(dict.fromkeys(tile for rows in row_counts for tile in candidates(weight, rows)))
    found = []
    for number, tile in enumerate(tiles):
        with compiling(capability) as compiled:
            _product(weight, _no_rows(weight), tile)
        found.append((tile, next(iter(compiled.values()))))
        report(number + 1, len(tiles))
    return found


def tune(weight: StackedWeight, token_counts: Sequence[int], top_k: int, report: Report) -> list[TunedBucket]:
    """The quickest tiles for this weight, which is on a GPU, one for each number of tokens."""
    times: dict[tuple[int, ProductTile], float] = {}
    defaults: list[float] = []
    for number, num_tokens in enumerate(token_counts):
        x, rows = _random_rows(weight, num_tokens, top_k)
        expected = _product(weight, (x, rows), None)
        defaults.append(_time_s(weight, x, rows, None))
        for tile in candidates(weight, num_tokens * top_k):
            if _fits(weight, x, rows, tile, expected):
                times[number, tile] = _time_s(weight, x, rows, tile)
        report(number + 1, len(token_counts))
    best: dict[int, list[tuple[float, ProductTile]]] = {}
    for inputs in {tile.inputs for _, tile in times}:
        quickest = [
            min(((time, tile) for (at, tile), time in times.items() if at == number and tile.inputs == inputs),
                key=lambda pair: pair[0], default=None)
            for number in range(len(token_counts))
        ]  # fmt: skip
        if None not in quickest:
            best[inputs] = [pair for pair in quickest if pair is not None]
    if not best:
        return []
    chosen = min(best.values(), key=lambda pairs: sum(math.log(time) for time, _ in pairs))
    return [
        TunedBucket(most_rows=num_tokens * top_k, tile=tile, time_s=time, default_time_s=default)
        for num_tokens, (time, tile), default in zip(token_counts, chosen, defaults, strict=True)
    ]


def _product(weight: StackedWeight, given: tuple[Tensor, GroupedRows], tile: ProductTile | None) -> Tensor:
    x, rows = given
    if weight.num_parts == 1:
        return weighed_product(x, weight, rows, tile=tile)
    shape = ExpertShape(weight.num_experts, weight.num_columns, weight.num_rows, "silu")
    return gated_product(x, weight, shape, rows, tile=tile)


def _no_rows(weight: StackedWeight) -> tuple[Tensor, GroupedRows]:
    places = torch.empty(8, dtype=torch.int32)
    rows = GroupedRows(starts_E1=places, order_R=places, weights_TK=torch.empty(1, 8))
    return torch.empty((8, weight.num_columns), dtype=weight.dtype), rows


def _random_rows(weight: StackedWeight, num_tokens: int, top_k: int) -> tuple[Tensor, GroupedRows]:
    device = weight.codes.device
    scores_TE = torch.rand(num_tokens, weight.num_experts, device=device)
    ids_TK = scores_TE.topk(min(top_k, weight.num_experts)).indices.int()
    starts_E1, order_R, _ = place(ids_TK, count(ids_TK, weight.num_experts))
    num_rows = num_tokens if weight.num_parts == 2 else ids_TK.numel()
    x = torch.randn(num_rows, weight.num_columns, device=device).to(weight.dtype)
    weights_TK = torch.rand(ids_TK.shape, device=device)
    return x, GroupedRows(starts_E1=starts_E1, order_R=order_R, weights_TK=weights_TK)


def _fits(weight: StackedWeight, x: Tensor, rows: GroupedRows, tile: ProductTile, expected: Tensor) -> bool:
    """Whether the GPU takes the tile and gives what the default tile gives."""
    try:
        found = _product(weight, (x, rows), tile)
    except Exception as error:  # of Triton's compiler or of the driver: too much shared memory, too many registers
        if "OutOfResources" not in type(error).__name__:
            raise
        return False
    scale = expected.float().abs().max().clamp(min=1e-6)
    return bool(((found.float() - expected.float()).abs().max() / scale) < 2e-2)


def _time_s(weight: StackedWeight, x: Tensor, rows: GroupedRows, tile: ProductTile | None) -> float:
    return float(do_bench(lambda: _product(weight, (x, rows), tile), warmup=5, rep=20, return_mode="median")) / 1e3
