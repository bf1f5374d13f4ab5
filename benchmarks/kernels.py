"""Micro-benchmark of the cpu back-end beside PyTorch and beside what the memory and the cores give.

Usage: `python benchmarks/kernels.py [--threads N] [--repeat N] [--only experts,formats,linear,decode,prefill]`.

Method
1. Every case checks its result against PyTorch first.
2. Ours, PyTorch's and a plain read of memory run in turn, one short call each a round after a pause and a call that
   wakes the threads; best and median of many rounds are printed. On a shared machine single rounds mean nothing, and
   only neighbours in time compare.
3. Expert weights are cold: calls rotate over 200 MB, four experts a call. The bound is a sum of 16 MB out of 256 MB; of
   the roofline: the longer of that and of the operations at the rate of the call with most rows, over the time.
   A round goes through all numbers of rows. Where the machine's read rate flips between two values, each call is
   counted with the read before it, and there is a table for the slow and one for the fast state.
4. Formats: the same experts in 4 and 8 bits, beside bfloat16 in the same round; GB/s are of packed bytes.
5. Products are warm; their bound is the best of PyTorch's own large product and ours, whichever is higher.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from antiphon import _native
from antiphon.base.allowance import share_of_threads
from antiphon.kernels.api import AttentionBatch, ExpertFormats, ExpertShape, HeadRows, KVCacheSpec, RotaryTable
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.cpu_weights import CpuExperts
from antiphon.kernels.quantized import WeightFormat
from antiphon.models.batch import make_attention_batch
from antiphon.models.rounding import quantize

HIDDEN, INTERMEDIATE, NUM_EXPERTS, EXPERTS_PER_CALL = 1024, 512, 64, 4
EXPERT_BYTES = 3 * HIDDEN * INTERMEDIATE * 2
READ_BYTES, NUM_READS = 16 << 20, 16
SETTLE_S = 0.01  # the other library's threads spin for a while after its last region
EXPERT_ROWS = (256, 64, 32, 24, 20, 16, 13, 12, 11, 10, 8, 7, 6, 4, 2, 1)
STATES_APART = 1.25  # between the slow and the fast tenth of the reads, if they are of two states
LINEAR_SIZES = ((64, 1024, 1024), (512, 1024, 1536), (512, 1024, 1024), (2048, 2048, 2048), (512, 4096, 4096))
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 4, 64, 16


def timed(action: Callable[[int], object], number: int) -> float:
    """Seconds of one call, after a pause and a call that wakes the threads."""
    time.sleep(SETTLE_S)
    action(number)
    start = time.perf_counter()
    action(number + 1)
    return time.perf_counter() - start


def interleaved(actions: dict[str, Callable[[int], object]], repeat: int) -> dict[str, tuple[float, float]]:
    """Best and median seconds of each action, one after another in every round; each is given the round's number."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for action in actions.values():
        action(0)
    for number in range(repeat):
        for name, action in actions.items():
            times[name].append(timed(action, number))
    return {name: (min(values), statistics.median(values)) for name, values in times.items()}


def cold_read() -> Callable[[int], object]:
    """Sums READ_BYTES of memory that the last rounds did not touch."""
    words = torch.ones(NUM_READS, READ_BYTES // 8, dtype=torch.int64)
    return lambda number: words[number % NUM_READS].sum()


def check(ours: Tensor, theirs: Tensor) -> None:
    error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
    if error > 0.03:
        raise SystemExit(f"wrong result: relative error {error:.3g}")


def rates(work: float, seconds: tuple[float, float]) -> str:
    return f"{work / seconds[0] / 1e9:.1f} / {work / seconds[1] / 1e9:.1f}"


def read_states(read_s: list[float]) -> list[str]:
    """The state of the machine at each read: "slow" or "fast" if the rates are of two kinds, else "steady"."""
    fast_s, *_, slow_s = statistics.quantiles(read_s, n=10)
    if slow_s < STATES_APART * fast_s:
        return ["steady"] * len(read_s)
    return ["slow" if seconds > (slow_s * fast_s) ** 0.5 else "fast" for seconds in read_s]


def bench_experts(backend: CpuBackend, repeat: int, console: Console) -> None:
    """GB/s of cold expert weights for M rows an expert and the share of the roofline, by state of the machine."""
    experts = backend.new_experts(ExpertShape(NUM_EXPERTS, HIDDEN, INTERMEDIATE, "silu"))
    gate_up = (torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN) * HIDDEN**-0.5).bfloat16()
    down = (torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE) * INTERMEDIATE**-0.5).bfloat16()
    for e in range(NUM_EXPERTS):
        experts.set_expert(e, gate_up[e, :INTERMEDIATE], gate_up[e, INTERMEDIATE:], down[e])
    read = cold_read()
    num_calls = NUM_EXPERTS // EXPERTS_PER_CALL

    def ours(number: int, x: Tensor) -> Tensor:
        ids = torch.arange(EXPERTS_PER_CALL, dtype=torch.int32) + number % num_calls * EXPERTS_PER_CALL
        return backend.grouped_ffn(x, ids.repeat(len(x), 1), torch.full((len(x), EXPERTS_PER_CALL), 0.25), experts)

    def theirs(number: int, x: Tensor) -> Tensor:
        y = torch.zeros(x.shape)
        first = number % num_calls * EXPERTS_PER_CALL
        for e in range(first, first + EXPERTS_PER_CALL):
            gate, up = F.linear(x, gate_up[e]).chunk(2, dim=-1)
            y += 0.25 * F.linear(F.silu(gate) * up, down[e])
        return y

    rows = {num_rows: torch.randn(num_rows, HIDDEN).bfloat16() for num_rows in EXPERT_ROWS}
    for x in rows.values():
        check(ours(1, x), theirs(1, x))
    samples = [
        (num_rows, timed(read, number), timed(partial(ours, x=x), number), timed(partial(theirs, x=x), number))
        for number in range(repeat)
        for num_rows, x in rows.items()
    ]
    work = EXPERTS_PER_CALL * EXPERT_BYTES
    peak = max(work * num_rows / ours_s for num_rows, _, ours_s, _ in samples)  # operations a second
    states = read_states([read_s for _, read_s, _, _ in samples])
    for state in sorted(set(states)):
        table = Table("rows an expert", "rounds", "ours GB/s", "PyTorch GB/s", "read GB/s", "ours GFLOP/s",
                      "of roofline", title=f"grouped experts, cold; best / median; read rate: {state}")  # fmt: skip
        for num_rows in EXPERT_ROWS:
            own = [sample for sample, of in zip(samples, states, strict=True) if sample[0] == num_rows and of == state]
            if not own:
                continue
            _, *times = zip(*own, strict=True)
            read_s, ours_s, theirs_s = ((min(each), statistics.median(each)) for each in times)
            least_s = [max(work / READ_BYTES * seconds, work * num_rows / peak) for seconds in read_s]
            roofline = " / ".join(f"{least / seconds:.0%}" for least, seconds in zip(least_s, ours_s, strict=True))
            table.add_row(str(num_rows), str(len(own)), rates(work, ours_s), rates(work, theirs_s),
                          rates(READ_BYTES, read_s), rates(work * num_rows, ours_s), roofline)  # fmt: skip
        console.print(table)


FORMATS = {
    "bfloat16": None,
    "int8 row": WeightFormat(codes="int8", columns_per_scale=None),
    "int8 g32": WeightFormat(codes="int8", columns_per_scale=32, scale_dtype=torch.bfloat16),
    "fp8 g128": WeightFormat(codes="fp8", columns_per_scale=128),
    "int4 g32": WeightFormat(codes="int4", columns_per_scale=32, scale_dtype=torch.bfloat16),
    "int4 g128 zeros": WeightFormat(codes="int4", columns_per_scale=128, scale_dtype=torch.float16, offset="zeros"),
    "mxfp4": WeightFormat(codes="mxfp4", columns_per_scale=32, scale_dtype=torch.float8_e8m0fnu),
}


def bench_formats(backend: CpuBackend, repeat: int, console: Console) -> None:
    """Cold experts in every format: GB/s of packed bytes, and the time beside that of bfloat16."""
    sizes = ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    gate, up, down = (torch.randn(size) * HIDDEN**-0.5 for size in sizes)
    shape = ExpertShape(NUM_EXPERTS, HIDDEN, INTERMEDIATE, "silu")
    held = {}
    for name, form in FORMATS.items():
        held[name] = backend.new_experts(shape, ExpertFormats(gate_up=form, down=form))
        matrices = [part if form is None else quantize(part, form) for part in (gate, up, down)]
        for e in range(NUM_EXPERTS):
            held[name].set_expert(e, *matrices)
    read = cold_read()
    table = Table("rows an expert", "format", "packed GB/s", "read GB/s", "of read", "GFLOP/s", "times bfloat16",
                  title="grouped experts by format, cold; best / median")  # fmt: skip
    num_calls = NUM_EXPERTS // EXPERTS_PER_CALL
    for num_rows in (1, 2, 4, 8, 16, 64, 256):
        x = torch.randn(num_rows, HIDDEN).bfloat16()
        ids = torch.arange(NUM_EXPERTS, dtype=torch.int32).view(num_calls, 1, -1).repeat(1, num_rows, 1)
        weights = torch.full((num_rows, EXPERTS_PER_CALL), 0.25)

        def run(number: int, experts: CpuExperts, x=x, ids=ids, weights=weights) -> Tensor:  # type: ignore[no-untyped-def]
            return backend.grouped_ffn(x, ids[number % num_calls], weights, experts)

        calls = {name: partial(run, experts=experts) for name, experts in held.items()}
        seconds = interleaved({**calls, "read": read}, repeat)
        for name, experts in held.items():
            work = experts.num_bytes * EXPERTS_PER_CALL / NUM_EXPERTS
            fraction = (work / seconds[name][0]) / (READ_BYTES / seconds["read"][0])
            flops = 3 * 2 * HIDDEN * INTERMEDIATE * num_rows * EXPERTS_PER_CALL
            table.add_row(str(num_rows), name, rates(work, seconds[name]), rates(READ_BYTES, seconds["read"]),
                          f"{fraction:.0%}", rates(flops, seconds[name]),
                          f"{seconds['bfloat16'][1] / seconds[name][1]:.2f}")  # fmt: skip
    console.print(table)


def bench_linear(backend: CpuBackend, repeat: int, console: Console) -> None:
    """GFLOP/s of warm products."""
    table = Table("rows x in x out", "ours GFLOP/s", "PyTorch GFLOP/s", title="linear; best / median")
    for rows, inner, outer in LINEAR_SIZES:
        x, weight = torch.randn(rows, inner).bfloat16(), (torch.randn(outer, inner) * inner**-0.5).bfloat16()
        packed = backend.pack_linear(weight)
        ours, theirs = partial(backend.linear, x, packed), partial(F.linear, x, weight)
        check(ours(), theirs())
        seconds = interleaved({"ours": lambda _, call=ours: call(), "theirs": lambda _, call=theirs: call()}, repeat)
        work = 2.0 * rows * inner * outer
        table.add_row(f"{rows} x {inner} x {outer}", rates(work, seconds["ours"]), rates(work, seconds["theirs"]))
    console.print(table)


def filled_cache(backend: CpuBackend, num_sequences: int, context: int, query_len: int):  # type: ignore[no-untyped-def]
    """(cache, batch, queries, keys, values): every sequence stored whole, `query_len` last rows asked for."""
    blocks = -(-context // BLOCK_SIZE)
    spec = KVCacheSpec(
        num_layers=1, num_blocks=num_sequences * blocks, block_size=BLOCK_SIZE, num_kv_heads=NUM_KV_HEADS,
        key_dim=HEAD_DIM, value_dim=HEAD_DIM,
    )  # fmt: skip
    cache = backend.new_kv_cache(spec)
    tables = torch.randperm(num_sequences * blocks).view(num_sequences, blocks)
    rotary = RotaryTable(cos=torch.ones(context, 0), sin=torch.zeros(context, 0), interleaved=False)

    def batch_of(length: int) -> AttentionBatch:
        lengths, contexts = [length] * num_sequences, [context] * num_sequences
        return make_attention_batch(lengths, contexts, tables.tolist(), BLOCK_SIZE, "cpu")

    qkv = torch.randn(num_sequences * context, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM).bfloat16()
    q = backend.rotate_and_store(qkv, cache, 0, batch_of(context), HeadRows(num_heads=NUM_HEADS, rotary=rotary))
    split = [NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM]
    _, k, v = (
        part.view(num_sequences, context, -1, HEAD_DIM).transpose(1, 2).contiguous() for part in qkv.split(split, 1)
    )
    q = q.view(num_sequences, context, NUM_HEADS, HEAD_DIM)[:, context - query_len :]
    return cache, batch_of(query_len), q.reshape(-1, NUM_HEADS, HEAD_DIM).contiguous(), k, v


def bench_attention(backend: CpuBackend, repeat: int, console: Console, *, prefill: bool) -> None:
    """Decode: GB/s of keys and values. Prefill: GFLOP/s of the causal half."""
    title = "prefill attention" if prefill else "decode attention"
    table = Table("sequences x context", "ours", "PyTorch SDPA", "read GB/s", title=f"{title}; best / median")
    read = cold_read()
    cases = ((1, 512), (1, 2048), (8, 512)) if prefill else ((1, 4096), (1, 32768), (8, 4096), (32, 512), (64, 1024))
    for num_sequences, context in cases:
        query_len = context if prefill else 1
        cache, batch, q, k, v = filled_cache(backend, num_sequences, context, query_len)
        theirs_q = q.view(num_sequences, query_len, NUM_HEADS, HEAD_DIM).transpose(1, 2)

        def ours(_: int, q: Tensor = q, cache=cache, batch: AttentionBatch = batch) -> Tensor:  # type: ignore[no-untyped-def]
            return backend.paged_attention(q, cache, 0, batch, scale=HEAD_DIM**-0.5, sliding_window=None)

        def theirs(_: int, q: Tensor = theirs_q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=prefill, enable_gqa=True)

        check(ours(0), theirs(0).transpose(1, 2).reshape(-1, NUM_HEADS, HEAD_DIM))
        seconds = interleaved({"ours": ours, "theirs": theirs, "read": read}, repeat)
        keys = num_sequences * context
        work = 2.0 * keys * context * NUM_HEADS * HEAD_DIM if prefill else 4.0 * keys * NUM_KV_HEADS * HEAD_DIM
        unit = " GFLOP/s" if prefill else " GB/s"
        table.add_row(f"{num_sequences} x {context}", rates(work, seconds["ours"]) + unit,
                      rates(work, seconds["theirs"]) + unit, rates(READ_BYTES, seconds["read"]))  # fmt: skip
    console.print(table)


CASES: dict[str, Callable[[CpuBackend, int, Console], None]] = {
    "experts": bench_experts,
    "formats": bench_formats,
    "linear": bench_linear,
    "decode": partial(bench_attention, prefill=False),
    "prefill": partial(bench_attention, prefill=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=share_of_threads())
    parser.add_argument("--repeat", type=int, default=64)
    parser.add_argument("--only", default=",".join(CASES))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    _native.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    console = Console(width=120)
    console.print(f"{arguments.threads} threads, instruction set {_native.isa()}")
    backend = CpuBackend(torch.bfloat16)
    for name in arguments.only.split(","):
        if name not in CASES:
            parser.error(f"--only {name!r} is not one of {', '.join(CASES)}")
        CASES[name](backend, arguments.repeat, console)


if __name__ == "__main__":
    main()
