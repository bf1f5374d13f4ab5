"""The serving benchmark: Antiphon's layouts and its peers on the same prompts, interleaved, beside the limits.

1. start all contestants; each is stopped (SIGSTOP) while another runs
2. for each workload repeat rounds over all contestants, and over the measurement of the machine's limits (read
   bandwidth, products), until each has three repetitions with little foreign CPU
3. one row per contestant and workload: medians, best, fraction of the bound, foreign share

A peer that cannot be started, or fails later, is named in one line and left out: the others' rows are worth having.

The limits are one contestant among others because machines drift: virtual ones may give two cores at one minute and two
threads of one core at the next, and a bound measured at another minute says nothing.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
from antiphon.bench.peers.api import Peer, PeerError, RunResult, Workload
from antiphon.bench.quiet import Repetitions, repeat_until_quiet
from antiphon.models.config import load_model_spec, read_config
from antiphon.models.families.defaults import completed
from antiphon.models.load import open_checkpoint

Say = Callable[[str], None]
Outcome = RunResult | MachineLimits | PeerError
_LIMITS = "the machine's limits"
_NO_SIZES = dict.fromkeys(("layout", "attention", "experts", "micro_batches"))


@dataclass(frozen=True)
class WorkloadSize:
    """`concurrency` requests at once, each of `input_tokens`, each generating `output_tokens`."""

    concurrency: int
    input_tokens: int
    output_tokens: int


def make_workload(size: WorkloadSize, vocab_size: int) -> Workload:
    """Random prompts, the same for everybody."""
    generator = random.Random(0)
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
    """Rows of `bench serve`, and the machine's limits as measured between the runs (the last workload's median).

    No rows if no engine could be started. What Antiphon itself refuses (`UserError`) ends the benchmark."""
    open_checkpoint(model, load_model_spec(model))  # what is wrong with it is said before anybody starts
    config = completed(read_config(model))
    decoder = DecoderSizes.from_config(config)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        for peer in peers:
            stack.callback(peer.close)
        running = _start(peers, say)
        limits = measure_limits(device)
        for size in sizes:
            if not running:
                break
            workload = make_workload(size, int(config["vocab_size"]))
            say(f"{size.concurrency} x {size.input_tokens} + {size.output_tokens} tokens")
            pids = [peer.pid for peer in running if peer.pid is not None]
            contestants: dict[str, Callable[[], Outcome]] = {_LIMITS: partial(measure_limits, device)}
            contestants |= {peer.name: partial(_run_alone, peer, workload) for peer in running}
            outcomes = repeat_until_quiet(contestants, max_rounds=max_rounds, extra_root_pids=pids)
            limits = median_limits(outcomes[_LIMITS])
            running = _still_running(running, outcomes, say)
            for peer in running:
                row = _row(peer, size, outcomes[peer.name])
                rows.append(row | _bounds(row, decoder, limits))
    return rows, limits


def measure_limits(device: str) -> MachineLimits:
    """What the device that computes could do at best."""
    return measure_machine_limits(num_passes=4) if device == "cpu" else measure_device_limits(device)


def median_limits(repetitions: Repetitions[Outcome]) -> MachineLimits:
    """The measurement with the median bandwidth."""
    measured = [r.value for r in repetitions.counted if isinstance(r.value, MachineLimits)]
    return sorted(measured, key=lambda limits: limits.read_bytes_per_s)[len(measured) // 2]


def _start(peers: Sequence[Peer], say: Say) -> list[Peer]:
    """Start everybody in turn; a peer that cannot be started is named, with the reason, and left out."""
    running = []
    for peer in peers:
        say(f"starting {peer.name}")
        try:
            details = peer.start()
            peer.pause()
        except PeerError as error:
            say(f"without {_one_line(peer, error)}")
            continue
        say(f"{peer.name}: " + ", ".join(f"{key} {value}" for key, value in details.items()))
        running.append(peer)
    return running


def _still_running(peers: Sequence[Peer], outcomes: dict[str, Repetitions[Outcome]], say: Say) -> list[Peer]:
    """The peers that did not fail in these repetitions; the others are named, with the reason."""
    running = []
    for peer in peers:
        failures = [each.value for each in outcomes[peer.name].all if isinstance(each.value, PeerError)]
        if failures:
            say(f"from here on without {_one_line(peer, failures[0])}")
        else:
            running.append(peer)
    return running


def _one_line(peer: Peer, error: PeerError) -> str:
    """The peer and the reason: what the error says first, and the last line of the engine's own output, if any."""
    first, *rest = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = first.removeprefix(f"{peer.name}: ")
    if rest:  # an engine that could say itself what is wrong has said it at the end of its output too
        reason = reason.removesuffix("; its last lines:") if rest[-1] in reason else f"{reason} {rest[-1]}"
    return f"{peer.name}: {reason}"


def _run_alone(peer: Peer, workload: Workload) -> RunResult | PeerError:
    """A run while everybody else is stopped; a failure is a result too, and costs little when it is repeated."""
    try:
        peer.resume()
        try:
            return peer.run(workload)
        finally:
            peer.pause()
    except PeerError as error:
        return error


def _row(peer: Peer, size: WorkloadSize, outcomes: Repetitions[Outcome]) -> dict[str, Any]:
    runs = [repetition.value for repetition in outcomes.counted if isinstance(repetition.value, RunResult)]
    itl_s = sorted(value for run in runs for value in run.itl_s)
    ttft_s = [value for run in runs for value in run.ttft_s]
    decode_rates = [run.decode_tokens_per_s for run in runs if run.decode_tokens_per_s is not None]
    return {
        "engine": peer.name,
        **(peer.sizes() if isinstance(peer, AntiphonEngine) else _NO_SIZES),
        "concurrency": size.concurrency,
        "input_tokens": size.input_tokens,
        "output_tokens": size.output_tokens,
        "output_tokens_per_s": median(run.output_tokens_per_s for run in runs),
        "output_tokens_per_s_best": max(run.output_tokens_per_s for run in runs),
        "decode_tokens_per_s": median(decode_rates) if decode_rates else None,
        "prefill_tokens_per_s": median(run.prefill_tokens_per_s for run in runs),
        "ttft_s_median": median(ttft_s) if ttft_s else None,
        "itl_s_median": median(itl_s) if itl_s else None,
        "itl_s_p99": quantiles(itl_s, n=100)[-1] if len(itl_s) > 1 else None,
        "peak_rss_bytes": max(run.peak_rss_bytes for run in runs),
        "foreign_cpu_share": outcomes.foreign_share,
        "repetitions": len(runs),
        "quiet": outcomes.is_quiet,
    }


def _bounds(row: dict[str, Any], decoder: DecoderSizes, limits: MachineLimits) -> dict[str, Any]:
    """The physical limit of a row's workload and what fraction of it was reached."""
    context = row["input_tokens"] + row["output_tokens"] // 2
    prefill = prefill_bound_tokens_per_s(decoder, limits, row["concurrency"], row["input_tokens"])
    bounds = {
        "read_bytes_per_s": limits.read_bytes_per_s,
        "gemm_flops_per_s": limits.gemm_flops_per_s,
        "prefill_bound_tokens_per_s": prefill,
        "prefill_fraction_of_bound": row["prefill_tokens_per_s"] / prefill,
    }
    if row["decode_tokens_per_s"] is not None:
        decode = decode_bound_tokens_per_s(decoder, limits, row["concurrency"], context)
        bounds |= {"decode_bound_tokens_per_s": decode, "decode_fraction_of_bound": row["decode_tokens_per_s"] / decode}
    return bounds
