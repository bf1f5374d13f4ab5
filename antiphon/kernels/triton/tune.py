"""Which tiles of the grouped product are quickest on this GPU, and whether PyTorch's product is quicker; or, without a
GPU, what each tile needs of one.

For each batch bucket every candidate that the GPU takes is checked against the rule's tile, on random weights, then
timed.
`inputs` of a tile has to be the same for all buckets of a weight (see `tiles`): it is the one whose best tiles take the
least time over the buckets, by geometric mean. The rule's tile is a candidate too.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from triton.testing import do_bench

from antiphon.kernels.api import ExpertShape
from antiphon.kernels.reference import grouped_products, has_grouped_mm
from antiphon.kernels.triton.grouped import GroupedRows, expert_products, gated_product, weighed_product
from antiphon.kernels.triton.launch import CompiledLaunch, capability_of, compiling
from antiphon.kernels.triton.rows import count, place
from antiphon.kernels.triton.tiles import ProductTile, TunedWeight, default_tile
from antiphon.kernels.triton.weights import StackedWeight, TritonExperts

Report = Callable[[float, float], object]


@dataclass(frozen=True, kw_only=True)
class TunedBucket:
    """The quickest tile for up to `most_rows` rows over all experts, its time, and that of the rule's tile."""

    most_rows: int
    tile: ProductTile
    time_s: float
    default: ProductTile
    default_time_s: float


def candidates(weight: StackedWeight, num_rows: int, capability: int) -> list[ProductTile]:
    """Tiles worth trying for so many rows over all experts: the rule's, then its neighbours."""
    default = default_tile(weight, num_rows, capability)
    if weight.dtype == torch.float32:
        return [default]
    heights = sorted({max(16, default.rows // 2), default.rows, min(128, default.rows * 2)})
    widths = (32, 64) if weight.format is not None else (64, 128)
    around = [
        ProductTile(rows=rows, columns=columns, inputs=inputs, warps=8 if rows * columns > 4096 else 4, stages=stages)
        for rows, columns, inputs, stages in itertools.product(heights, widths, (64, 128), (3, 4))
    ]
    return list(dict.fromkeys([default, *around]))


def compile_candidates(
    weight: StackedWeight, row_counts: Sequence[int], capability: int, report: Report
) -> list[tuple[ProductTile, CompiledLaunch]]:
    """What each candidate needs of a GPU of that compute capability. Needs none."""
    tiles = list(dict.fromkeys(tile for rows in row_counts for tile in candidates(weight, rows, capability)))
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
    defaults: list[ProductTile] = []
    capability = capability_of(weight.codes.device)
    for number, num_tokens in enumerate(token_counts):
        x, rows = _random_rows(weight, num_tokens, top_k)
        tiles = candidates(weight, num_tokens * top_k, capability)
        expected = _product(weight, (x, rows), tiles[0])
        defaults.append(tiles[0])
        for tile in tiles:
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
    chosen = min(best.values(), key=lambda pairs: sum(math.log(time) for time, _ in pairs))
    return [
        TunedBucket(
            most_rows=num_tokens * top_k, tile=tile, time_s=time, default=default, default_time_s=times[number, default]
        )
        for number, (num_tokens, (time, tile), default) in enumerate(zip(token_counts, chosen, defaults, strict=True))
    ]


@dataclass(frozen=True, kw_only=True)
class ProductTime:
    """Times of both products of experts for so many tokens; `grouped_mm_s` is None where it cannot or gives others."""

    num_tokens: int
    triton_s: float
    grouped_mm_s: float | None


def compare_products(
    experts: TritonExperts, token_counts: Sequence[int], top_k: int, gate_up: TunedWeight, down: TunedWeight
) -> list[ProductTime]:
    """Triton's product of experts with these tiles and PyTorch's; none if that does not take these experts."""
    if not has_grouped_mm(experts):
        return []
    device, shape, found = experts.gate_up.codes.device, experts.shape, []
    for num_tokens in token_counts:
        scores_TE = torch.rand(num_tokens, shape.num_experts, device=device)
        weights_TK, ids_TK = scores_TE.topk(min(top_k, shape.num_experts))
        given = torch.randn(num_tokens, shape.hidden, device=device).bfloat16(), ids_TK.int(), weights_TK, experts
        weights = ((gate_up, experts.gate_up), (down, experts.down))
        both = [tuned.tile_for(weight, ids_TK.numel(), device) for tuned, weight in weights]
        triton_way = partial(expert_products, *given, tiles=(both[0], both[1]))
        torch_way = partial(grouped_products, *given)
        torch_s = None
        with suppress(RuntimeError, NotImplementedError):  # not on every card
            torch_s = measure_s(torch_way) if _near(torch_way(), triton_way()) else None
        found.append(ProductTime(num_tokens=num_tokens, triton_s=measure_s(triton_way), grouped_mm_s=torch_s))
    return found


def quickest_product(times: Sequence[ProductTime]) -> str:
    """By geometric mean over the buckets; "triton" if grouped_mm cannot or gave other numbers in any."""
    ratios = [math.log(each.grouped_mm_s / each.triton_s) if each.grouped_mm_s else math.inf for each in times]
    return "grouped_mm" if ratios and sum(ratios) < 0 else "triton"


def table_entry(weight: StackedWeight, buckets: Sequence[TunedBucket]) -> TunedWeight:
    """What the table keeps: no tiles if the rule's are as quick in all buckets together."""
    if all(each.tile == each.default for each in buckets):
        return TunedWeight()
    return TunedWeight(tiles=[(each.most_rows / weight.num_experts, each.tile) for each in buckets])


def fill_at_random(weight: StackedWeight) -> None:
    """Codes that differ, scales near 1: without them a wrong tile gives the same numbers as a right one."""
    if weight.format is None:
        weight.codes.normal_(std=0.02)
        return
    assert weight.scales is not None
    weight.codes.random_(0, 256)
    if weight.format.codes == "fp8":
        weight.codes.bitwise_and_(0xBF)  # below 2, and so no NaN
    if weight.scales.dtype == torch.uint8:
        weight.scales.random_(126, 129)  # exponents with bias 127
    else:
        weight.scales.uniform_(0.5, 1.5)


def _product(weight: StackedWeight, given: tuple[Tensor, GroupedRows], tile: ProductTile) -> Tensor:
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
    """Whether the GPU takes the tile and gives what the rule's tile gives."""
    try:
        found = _product(weight, (x, rows), tile)
    except Exception as error:  # of Triton's compiler or of the driver: too much shared memory, too many registers
        if "OutOfResources" not in type(error).__name__:
            raise
        return False
    return _near(found, expected)


def _near(found: Tensor, expected: Tensor) -> bool:
    """Up to two roundings to bfloat16."""
    scale = expected.float().abs().max().clamp(min=1e-6)
    return bool(((found.float() - expected.float()).abs().max() / scale) < 2e-2)


def _time_s(weight: StackedWeight, x: Tensor, rows: GroupedRows, tile: ProductTile) -> float:
    return measure_s(lambda: _product(weight, (x, rows), tile))


def measure_s(way: Callable[[], Tensor]) -> float:
    """Seconds of one call on the current stream."""
    return float(do_bench(way, warmup=5, rep=20, return_mode="median")) / 1e3
