"""The limits of a GPU, and its kernels' times beside PyTorch's operators and as fractions of those limits.

Usage: `python benchmarks/gpu_times.py {limits,kernels} [--device cuda] [--json FILE] [--tiny]`.

Method
1. Every case checks its result against the reference back-end first; one that is wrong has no time.
2. Ours and PyTorch's take turns; the median of rounds is printed. A call is timed by events of the device, over as many
   calls as fill a millisecond.
3. Bytes are those that must be read: the weights of the experts that rows chose, keys and values of all contexts.
   Fractions are of a copy's bandwidth, read and written bytes counted, and of the largest product's rate.

Letters as in `antiphon.kernels.api`.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from antiphon.kernels.api import AttentionBatch, ExpertShape, KernelBackend, KVCacheSpec
from antiphon.kernels.reference import ReferenceBackend
from antiphon.kernels.select import make_backend
from antiphon.models.batch import make_attention_batch
from antiphon.specs.model import RouterSpec

ROUNDS = 7
CALL_FILL_S = 1e-3
Row = dict[str, Any]
Kernel = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class TimedSizes:
    """Qwen3-30B-A3B's, or tiny ones."""

    hidden: int = 2048
    experts: int = 128
    top_k: int = 8
    intermediate: int = 768
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    context: int = 4096
    rows: tuple[int, ...] = (1, 8, 64, 256, 4096, 32768)
    sequences: tuple[int, ...] = (1, 8, 64)
    copy_bytes: int = 1 << 30
    product_size: int = 8192


TINY = TimedSizes(32, 8, 2, 16, 4, 2, 16, 48, (1, 5), (1, 3), 1 << 16, 64)


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of one call, over rounds of as many calls as fill a millisecond."""
    call()
    wait_for(device)
    start_s = time.perf_counter()
    call()
    wait_for(device)
    calls = max(1, min(200, int(CALL_FILL_S / max(time.perf_counter() - start_s, 1e-7))))
    found = []
    for _ in range(ROUNDS):
        wait_for(device)
        start_s = time.perf_counter()
        for _ in range(calls):
            call()
        wait_for(device)
        found.append((time.perf_counter() - start_s) / calls)
    return statistics.median(found)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_limits(device: torch.device, sizes: TimedSizes) -> Row:
    """Copy bandwidth (bytes read and written) and the rate of a large bfloat16 product."""
    words = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(words)
    copy_s = seconds_of(lambda: target.copy_(words), device)
    side = sizes.product_size
    factors = torch.randn(2, side, side, device=device).bfloat16()
    product_s = seconds_of(lambda: factors[0] @ factors[1], device)
    return {"copy_bytes_per_s": 2 * sizes.copy_bytes / copy_s, "product_flops_per_s": 2 * side**3 / product_s}


def timed(kernel: str, count: int, sides: Sequence[tuple[KernelBackend, Any]], call: Kernel) -> Row:
    """Times of `call` with each side, which must agree: our back-end and PyTorch's, each with what it has packed."""
    calls = [partial(call, *side) for side in sides]
    found, expected = (each().float() for each in calls)
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2, msg=lambda m: f"{kernel}: {m}")
    ours_s, theirs_s = (seconds_of(each, sides[0][0].device) for each in calls)
    times = {"us": ours_s * 1e6, "PyTorch us": theirs_s * 1e6, "PyTorch / ours": theirs_s / ours_s}
    return {"kernel": kernel, "rows": count, **times}


def gate_rows(ours: KernelBackend, theirs: KernelBackend, sizes: TimedSizes) -> list[Row]:
    router = RouterSpec(num_experts=sizes.experts, top_k=sizes.top_k, scoring="softmax")
    weight = torch.randn(sizes.experts, sizes.hidden) / sizes.hidden**0.5
    sides = [(each, each.pack_linear(weight)) for each in (ours, theirs)]
    rows = []
    for count in sizes.rows[:-1]:
        x_TH = torch.randn(count, sizes.hidden, device=ours.device).to(ours.dtype)
        rows.append(timed("gate with its product", count, sides, lambda b, p, x=x_TH: b.gate(x, p, None, router)[1]))
    return rows


def expert_rows(ours: KernelBackend, theirs: KernelBackend, sizes: TimedSizes, limits: Row) -> list[Row]:
    shape = ExpertShape(sizes.experts, sizes.hidden, sizes.intermediate, "silu")
    sides = [(each, each.new_experts(shape)) for each in (ours, theirs)]
    for expert in range(sizes.experts):
        matrices = [torch.randn(s) / s[1] ** 0.5 for s in ((sizes.intermediate, sizes.hidden),) * 2]
        matrices.append(torch.randn(sizes.hidden, sizes.intermediate) / sizes.intermediate**0.5)
        for _, packed in sides:
            packed.set_expert(expert, *matrices)
    expert_bytes = 3 * sizes.hidden * sizes.intermediate * ours.dtype.itemsize
    rows = []
    for count in sizes.rows:
        x_TH = torch.randn(count, sizes.hidden, device=ours.device).to(ours.dtype)
        ids_TK = torch.rand(count, sizes.experts, device=ours.device).topk(sizes.top_k).indices.int()
        weights_TK = torch.rand(count, sizes.top_k, device=ours.device)
        row = timed("experts", count, sides, lambda b, p, x=x_TH, i=ids_TK, w=weights_TK: b.grouped_ffn(x, i, w, p))
        seconds = row["us"] / 1e6
        touched = int(ids_TK.unique().numel())
        flops = 6 * count * sizes.top_k * sizes.hidden * sizes.intermediate
        rates = {
            "TFLOP/s": flops / seconds / 1e12,
            "of product": flops / seconds / limits["product_flops_per_s"],
            "of copy": touched * expert_bytes / seconds / limits["copy_bytes_per_s"],
        }
        rows.append(row | rates)
    return rows


def attention_rows(ours: KernelBackend, theirs: KernelBackend, sizes: TimedSizes, limits: Row) -> list[Row]:
    block, blocks_each = 16, -(-sizes.context // 16)
    rows = []
    for count in sizes.sequences:
        spec = KVCacheSpec(
            num_layers=1, num_blocks=count * blocks_each, block_size=block, num_kv_heads=sizes.kv_heads,
            key_dim=sizes.head_dim, value_dim=sizes.head_dim,
        )  # fmt: skip
        sides = [(each, each.new_kv_cache(spec)) for each in (ours, theirs)]
        tables = [list(range(i * blocks_each, (i + 1) * blocks_each)) for i in range(count)]
        batch: AttentionBatch = make_attention_batch([1] * count, [sizes.context] * count, tables, block, ours.device)
        fill([cache for _, cache in sides], spec, tables, ours.dtype)
        q_TND = torch.randn(count, sizes.heads, sizes.head_dim, device=ours.device).to(ours.dtype)
        row = timed(
            f"decode attention, {sizes.context} keys", count, sides, lambda b, c, q=q_TND, s=batch: b.paged_attention(
                q, c, 0, s, scale=sizes.head_dim**-0.5, sliding_window=None
            ),
        )  # fmt: skip
        read = count * sizes.context * 2 * sizes.kv_heads * sizes.head_dim * ours.dtype.itemsize
        rows.append(row | {"of copy": read / (row["us"] / 1e6) / limits["copy_bytes_per_s"]})
    return rows


def fill(caches: list[Any], spec: KVCacheSpec, tables: list[list[int]], dtype: torch.dtype) -> None:
    """The same random keys and values in all of them, sequence by sequence."""
    heads = torch.arange(spec.num_kv_heads, dtype=torch.int32)
    num_tokens = len(tables[0]) * spec.block_size
    values = torch.randn(spec.num_kv_heads * num_tokens * (spec.key_dim + spec.value_dim)).to(dtype).view(torch.uint8)
    for number, table in enumerate(tables):
        moved = values.roll(2 * number)  # whole elements
        for cache in caches:
            cache.write_tokens(0, torch.tensor(table, dtype=torch.int32), 0, num_tokens, heads, moved)


@torch.inference_mode()
def measure(what: str, device: torch.device, sizes: TimedSizes) -> list[Row]:
    limits = measure_limits(device, sizes)
    if what == "limits":
        return [limits]
    ours = make_backend("auto" if device.type == "cuda" else "reference", device, torch.bfloat16)
    theirs = ReferenceBackend(device, torch.bfloat16)
    print(f"kernels: {ours.name}")
    return [
        *gate_rows(ours, theirs, sizes),
        *expert_rows(ours, theirs, sizes, limits),
        *attention_rows(ours, theirs, sizes, limits),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Limits of a GPU, and its kernels' times.")
    parser.add_argument("what", choices=("limits", "kernels"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the program")
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.tiny:
        torch.set_num_threads(1)
    rows = measure(given.what, torch.device(given.device), TINY if given.tiny else TimedSizes())
    for row in rows:
        texts = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()}
        print("  ".join(f"{name} {text}" for name, text in texts.items()))
    if given.json is not None:
        given.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
