"""The serving benchmark: Antiphon's layouts and its peers on the same prompts, interleaved, beside the limits.

1. measure the limits (read bandwidth, bf16 products) before and after: the machine drifts
2. start all contestants; each is stopped (SIGSTOP) while another runs
3. for each workload repeat rounds over all contestants until each has three repetitions with little foreign CPU
4. one row per contestant and workload: medians, best, fraction of the bound, foreign share
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from antiphon.bench.antiphon_engine import AntiphonEngine
from antiphon.bench.limits import (
    DecoderSizes,
    MachineLimits,
    decode_bound_tokens_per_s,
    measure_device_limits,
    measure_machine_limits,
    prefill_bound_tokens_per_s,
)
from antiphon.bench.peers.api import Peer, PeerUnavailableError, RunResult, Workload
from antiphon.bench.quiet import Repetitions, repeat_until_quiet

Say = Callable[[str], None]
_NO_SIZES = dict.fromkeys(("layout", "attention", "experts", "micro_batches"))


@dataclass(frozen=True)
class WorkloadSize:
    """`concurrency` requests at once, each of `input_tokens`, each generating `output_tokens`."""

    concurrency: int
    input_tokens: int
    output_tokens: int


def make_workload(size: WorkloadSize, vocab_size: int, seed: int = 0) -> Workload:
    """Random prompts, the same for everybody."""
    generator = random.Random(seed)
    prompts = [[generator.randrange(vocab_size) for _ in range(size.input_tokens)] for _ in range(size.concurrency)]
    return Workload(prompts, size.output_tokens)


def bench_serve(
    model: Path,
    peers: Sequence[Peer],
    sizes: Sequence[WorkloadSize],
    *,
    max_rounds: int,
    say: Say,
    device: str = "cpu",
) -> tuple[list[dict[str, Any]], MachineLimits]:
    """Rows of `bench serve`, and the machine's limits (the better of two measurements, before and after)."""
    config = json.loads((model / "config.json").read_text())
    decoder = DecoderSizes.from_config(config)
    say("measuring the machine's limits")
    limits = measure_limits(device)
    running = _start(peers, say)
    rows: list[dict[str, Any]] = []
    try:
        for size in sizes:
            workload = make_workload(size, int(config["vocab_size"]))
            say(f"{size.concurrency} x {size.input_tokens} + {size.output_tokens} tokens")
            pids = [peer.pid for peer in running if peer.pid is not None]
            contestants = {peer.name: partial(_run_alone, peer, workload) for peer in running}
            results = repeat_until_quiet(contestants, max_rounds=max_rounds, extra_root_pids=pids)
            rows.extend(_row(peer, size, results[peer.name]) for peer in running)
    finally:
        for peer in peers:
            peer.close()
    limits = better_limits(limits, measure_limits(device))
    for row in rows:
        row.update(_bounds(row, decoder, limits))
    return rows, limits


def measure_limits(device: str) -> MachineLimits:
    """What the device that computes could do at best."""
    return measure_machine_limits() if device == "cpu" else measure_device_limits(device)


def better_limits(before: MachineLimits, after: MachineLimits) -> MachineLimits:
    """The measurement with the higher bandwidth: limits are what the machine can do undisturbed."""
    return max(before, after, key=lambda limits: limits.read_bytes_per_s)


def _start(peers: Sequence[Peer], say: Say) -> list[Peer]:
    """Start everybody in turn; a peer that is not installed is named and left out."""
    running = []
    for peer in peers:
        say(f"starting {peer.name}")
        try:
            details = peer.start()
        except PeerUnavailableError as error:
            say(f"without {peer.name}: {error}")
            continue
        say(f"{peer.name}: " + ", ".join(f"{key} {value}" for key, value in details.items()))
        peer.pause()
        running.append(peer)
    return running


def _run_alone(peer: Peer, workload: Workload) -> RunResult:
    peer.resume()
    try:
        return peer.run(workload)
    finally:
        peer.pause()


def _row(peer: Peer, size: WorkloadSize, results: Repetitions[RunResult]) -> dict[str, Any]:
    best = results.best(lambda result: result.output_tokens_per_s)
    itl_s = sorted(value for repetition in results.counted for value in repetition.value.itl_s)
    ttft_s = [value for repetition in results.counted for value in repetition.value.ttft_s]
    decode_rates = [r.value.decode_tokens_per_s for r in results.counted if r.value.decode_tokens_per_s is not None]
    return {
        "engine": peer.name,
        **(peer.sizes() if isinstance(peer, AntiphonEngine) else _NO_SIZES),
        "concurrency": size.concurrency,
        "input_tokens": size.input_tokens,
        "output_tokens": size.output_tokens,
        "output_tokens_per_s": results.median(lambda result: result.output_tokens_per_s),
        "output_tokens_per_s_best": best.output_tokens_per_s,
        "decode_tokens_per_s": median(decode_rates) if decode_rates else None,
        "prefill_tokens_per_s": results.median(lambda result: result.prefill_tokens_per_s),
        "ttft_s_median": median(ttft_s) if ttft_s else None,
        "itl_s_median": median(itl_s) if itl_s else None,
        "itl_s_p99": quantiles(itl_s, n=100)[-1] if len(itl_s) > 1 else None,
        "peak_rss_bytes": best.peak_rss_bytes,
        "foreign_cpu_share": results.foreign_share,
        "repetitions": len(results.counted),
        "quiet": results.is_quiet,
    }


def _bounds(row: dict[str, Any], decoder: DecoderSizes, limits: MachineLimits) -> dict[str, Any]:
    """The physical limit of a row's workload and what fraction of it was reached."""
    context = row["input_tokens"] + row["output_tokens"] // 2
    prefill = prefill_bound_tokens_per_s(decoder, limits, row["concurrency"], row["input_tokens"])
    bounds = {"prefill_bound_tokens_per_s": prefill, "prefill_fraction_of_bound": row["prefill_tokens_per_s"] / prefill}
    if row["decode_tokens_per_s"] is not None:
        decode = decode_bound_tokens_per_s(decoder, limits, row["concurrency"], context)
        bounds |= {"decode_bound_tokens_per_s": decode, "decode_fraction_of_bound": row["decode_tokens_per_s"] / decode}
    return bounds
