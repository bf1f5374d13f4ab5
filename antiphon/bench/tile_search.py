"""Which tiles of the grouped product are quickest on this GPU, and what else could do the work (`kernels.choices`); or,
without a GPU, what each tile, or any launch of a kernel, needs of one.

For each batch bucket every candidate that the GPU takes is checked against the rule's tile, on random weights, then
timed.
`inputs` of a tile has to be the same for all buckets of a weight (see `tiles`): it is the one whose best tiles take the
least time over the buckets, by geometric mean. The rule's tile is a candidate too.

Launches compiled for a GPU that is not there have the types, alignments and tiles of a real launch
(`kernels.triton.launch`), so what is checked is what would run. Registers and spills are read from the assembler's own
output.
"""

import itertools
import math
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.testing import do_bench

from antiphon.base.progress import Report
from antiphon.kernels import packages
from antiphon.kernels.api import ExpertShape, KVCacheSpec
from antiphon.kernels.choices import OWN, Candidate, ProductTile, Tiles, near
from antiphon.kernels.reference_attention import ReferenceCache
from antiphon.kernels.stacked import StackedWeight, TritonExperts
from antiphon.kernels.triton import interprets
from antiphon.kernels.triton.attention import RowPlan, attend_rows
from antiphon.kernels.triton.grouped import (
    GroupedRows,
    default_tile,
    expert_products,
    gated_product,
    tuned_tile,
    weighed_product,
)
from antiphon.kernels.triton.launch import capability_of, launching
from antiphon.kernels.triton.rows import count, place


@dataclass(frozen=True, kw_only=True)
class TunedBucket:
    """The quickest tile for up to `most_rows` rows over all experts, its time, and that of the rule's tile."""

    most_rows: int
    tile: ProductTile
    time_s: float
    default: ProductTile
    default_time_s: float


def candidates(weight: StackedWeight, num_rows: int, capability: int) -> list[ProductTile]:
    """Tiles worth trying for `num_rows` rows over all experts: the rule's, then its neighbours."""
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
) -> "list[tuple[ProductTile, CompiledLaunch]]":
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
                times[number, tile] = measure_s(partial(_product, weight, (x, rows), tile))
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


def product_candidates(
    experts: TritonExperts, token_counts: Sequence[int], top_k: int, gate_up: Tiles, down: Tiles
) -> list[Candidate]:
    """Products of experts on random rows, a case for each number of tokens: our own with these tiles, then others."""
    device, shape, cases = experts.gate_up.codes.device, experts.shape, []
    for num_tokens in token_counts:
        scores_TE = torch.rand(num_tokens, shape.num_experts, device=device)
        weights_TK, ids_TK = scores_TE.topk(min(top_k, shape.num_experts))
        x_TH = torch.randn(num_tokens, shape.hidden, device=device).to(experts.gate_up.dtype)
        cases.append((x_TH, ids_TK.int(), weights_TK))

    def own(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        weights = ((gate_up, experts.gate_up), (down, experts.down))
        both = [tuned_tile(tuned, weight, ids_TK.numel(), device) for tuned, weight in weights]
        return expert_products(x_TH, ids_TK, weights_TK, experts, tiles=(both[0], both[1]))

    ways: dict[str, Callable[..., Tensor]] = {OWN: own}
    ways |= {name: partial(packages.products, name, experts=experts) for name in packages.PRODUCTS}
    return [
        _candidate(name, way, cases, "" if name == OWN else packages.why_no_products(name, experts))
        for name, way in ways.items()
    ]


def attention_candidates(
    spec: KVCacheSpec, num_heads: int, contexts: Sequence[tuple[int, int]], device: torch.device, dtype: torch.dtype
) -> tuple[ReferenceCache, list[Candidate]]:
    """Attention of single rows over a random cache, a case for each (rows, keys of the longest row): our own, then
    others. The cache too, which the choice's key is made of. `spec` has the blocks that the largest case needs."""
    cache, scale = ReferenceCache(spec, device, dtype), spec.key_dim**-0.5
    for table in (*cache.keys, *cache.values):
        table.normal_() if spec.storage == "auto" else table.view(torch.uint8).random_(0, 64)
    cases = []
    for num_rows, longest in contexts:
        blocks = -(-longest // spec.block_size)
        tables_SB = torch.randint(spec.num_blocks, (num_rows, blocks), dtype=torch.int32, device=device)
        contexts_S = torch.randint(1, longest + 1, (num_rows,), dtype=torch.int32, device=device)
        q_SND = torch.randn(num_rows, num_heads, spec.key_dim, device=device).to(dtype)
        cases.append((q_SND, tables_SB, contexts_S))

    def own(q_SND: Tensor, tables_SB: Tensor, contexts_S: Tensor) -> Tensor:
        out_SNV = q_SND.new_empty(*q_SND.shape[:2], spec.value_dim)
        rows_S = torch.arange(len(q_SND), dtype=torch.int32, device=device)
        plan = RowPlan(None, rows_S, tables_SB, contexts_S, [])
        attend_rows(q_SND, out_SNV, cache, 0, plan, scale=scale, sinks_N=None)
        return out_SNV

    def others(name: str, q_SND: Tensor, tables_SB: Tensor, contexts_S: Tensor) -> Tensor:
        return packages.attend(name, q_SND, cache, 0, tables_SB, contexts_S, scale=scale, window=None)

    ways: dict[str, Callable[..., Tensor]] = {OWN: own}
    ways |= {name: partial(others, name) for name in packages.ATTENTIONS}
    found = []
    for name, way in ways.items():
        why_not = "" if name == OWN else packages.why_no_attention(name, spec, dtype, has_sinks=False)
        found.append(_candidate(name, way, cases, why_not))
    return cache, found


def _candidate(name: str, way: Callable[..., Tensor], cases: Sequence[tuple[Tensor, ...]], why_not: str) -> Candidate:
    """`way` over the tensors of each case, whose first dimension is rows."""
    return Candidate(
        name=name,
        run=lambda case: way(*cases[case]),
        alone=lambda case: way(*(each[-1:] for each in cases[case])),
        why_not=why_not,
    )


def table_entry(weight: StackedWeight, buckets: Sequence[TunedBucket]) -> Tiles:
    """What the table keeps: no tiles if the rule's are as quick in all buckets together."""
    if all(each.tile == each.default for each in buckets):
        return []
    return [(each.most_rows / weight.num_experts, each.tile) for each in buckets]


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
    return near(found, expected)


def measure_s(way: Callable[[], Tensor]) -> float:
    """Seconds of one call on the current stream."""
    return float(do_bench(way, warmup=5, rep=20, return_mode="median")) / 1e3


# --- launches compiled for a GPU that is not there


MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # of one block, CUDA C Programming Guide, table 27


@dataclass(frozen=True, kw_only=True)
class CompiledLaunch:
    """What one launch needs of a GPU. `stack_bytes`: local memory a thread, 0 if no register is spilled."""

    kernel: str
    capability: int
    num_registers: int
    stack_bytes: int
    shared_bytes: int
    num_wgmma: int

    @property
    def fits(self) -> bool:
        return self.stack_bytes == 0 and self.shared_bytes <= MAX_SHARED_BYTES[self.capability]


@contextmanager
def compiling(capability: int) -> Iterator[dict[str, CompiledLaunch]]:
    """Launches within are compiled for `capability` (80 or 90) and listed, not run. Needs no driver."""
    assert not interprets(), "with TRITON_INTERPRET=1 nothing is compiled"
    drivers = triton.runtime.driver
    found: dict[str, CompiledLaunch] = {}

    def compiled(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        binary = kernel.warmup(*arguments, grid=tuple(max(1, size) for size in grid), **options)
        if binary.hash not in found:
            found[binary.hash] = _needs_of(kernel.__name__.strip("_"), capability, binary)

    asked = {  # by Triton, before it compiles
        "get_current_target": lambda: GPUTarget("cuda", capability, 32),
        "get_current_device": lambda: capability,
        "get_current_stream": lambda device: 0,
    }
    drivers.set_active(SimpleNamespace(**asked))
    try:
        with launching(capability, compiled):
            yield found
    finally:
        with suppress(RuntimeError):  # there is no other driver
            drivers.reset_active()


def _needs_of(name: str, capability: int, binary: Any) -> CompiledLaunch:
    """Registers and stack as the assembler wrote them into the binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    cubin = _written(binary)
    shown = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", shown))
    return CompiledLaunch(
        kernel=name,
        capability=capability,
        num_registers=int(usage["REG"]),
        stack_bytes=int(usage["STACK"]) + int(usage["LOCAL"]),
        shared_bytes=int(binary.metadata.shared),
        num_wgmma=len(re.findall(r"wgmma\.mma_async", binary.asm["ptx"])),
    )


def _written(binary: Any) -> Path:
    """The file that Triton's cache keeps the binary in."""
    name = f"{binary.metadata.name}.cubin"
    return Path(next(path for key, path in binary.metadata_group.items() if key == name))
