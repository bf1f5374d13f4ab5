"""What a report says of each contestant and case: blocks reduced to medians, ratios to the baselines of the same run.

Median and 99th percentile are of operations, one of each timed process and round. The slowest operation of each round
has figures of its own. Throughput is the bytes of all rounds over the time they took together, which is not the sum
of those slowest ones: where processes outnumber cores, a sender whose credits are all back may wait for its core while
its neighbours are copying the next round.

A ratio is this contestant's figure over the baseline's, so below 1 is faster; `speedup_over_gloo_*` is the inverse, for
people. Medians and 99th percentiles are taken per block and then the median over blocks: one disturbed block moves
neither.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.base.units import format_bytes, format_seconds
from antiphon.bench.m2n.api import Traffic
from antiphon.bench.m2n.contestants import Contestant
from antiphon.bench.quiet import Repetitions, foreign_words

COLUMNS = (
    "transport",
    "M x N",
    "message",
    "median",
    "p99",
    "slowest",
    "GB/s",
    "gloo/this",
    "p99 gloo/this",
    "this/memcpy",
    "foreign",
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of rounds: median, 99th percentile and shortest of all operations, the same of each round's slowest
    one, and the time from the first start to the last end."""

    median_s: float
    p99_s: float
    best_s: float
    slowest_median_s: float
    slowest_p99_s: float
    elapsed_s: float
    num_rounds: int

    @classmethod
    def of(cls, operations_s: NDArray[np.float64], elapsed_s: float) -> "Block":
        """`operations_s`: [rounds, timed processes]."""
        slowest_s = operations_s.max(axis=1)
        return cls(
            median_s=float(np.median(operations_s)),
            p99_s=float(np.percentile(operations_s, 99)),
            best_s=float(operations_s.min()),
            slowest_median_s=float(np.median(slowest_s)),
            slowest_p99_s=float(np.percentile(slowest_s, 99)),
            elapsed_s=elapsed_s,
            num_rounds=len(operations_s),
        )


def make_rows(
    traffic: Traffic, contestants: Sequence[Contestant], results: Mapping[str, Repetitions[Block]]
) -> list[dict[str, Any]]:
    """One row per contestant; a ratio is None where its baseline did not take part."""
    gloo, memcpy = results.get("gloo"), results.get("memcpy")
    return [_row(traffic, contestant, results[contestant.name], gloo, memcpy) for contestant in contestants]


def _row(
    traffic: Traffic,
    contestant: Contestant,
    blocks: Repetitions[Block],
    gloo: Repetitions[Block] | None,
    memcpy: Repetitions[Block] | None,
) -> dict[str, Any]:
    median_s, p99_s = _median_s(blocks), _p99_s(blocks)
    return {
        "transport": contestant.transport,
        "in_place": contestant.in_place,
        "touched": traffic.touched,
        "direction": "both ways" if traffic.both_ways else "one way",
        "senders": traffic.num_senders,
        "receivers": traffic.num_receivers,
        "message_bytes": traffic.message_bytes,
        "receiver_bytes": list(traffic.receiver_bytes),
        "median_s": median_s,
        "p99_s": p99_s,
        "best_median_s": min(repetition.value.median_s for repetition in blocks.counted),
        "best_s": min(repetition.value.best_s for repetition in blocks.counted),
        "slowest_median_s": blocks.median(lambda block: block.slowest_median_s),
        "slowest_p99_s": blocks.median(lambda block: block.slowest_p99_s),
        "throughput_bytes_per_s": traffic.round_bytes * blocks.median(lambda block: block.num_rounds / block.elapsed_s),
        "iterations": sum(repetition.value.num_rounds for repetition in blocks.counted),
        "repetitions": len(blocks.counted),
        "ratio_to_gloo_median": median_s / _median_s(gloo) if gloo else None,
        "ratio_to_gloo_p99": p99_s / _p99_s(gloo) if gloo else None,
        "speedup_over_gloo_median": _median_s(gloo) / median_s if gloo else None,
        "speedup_over_gloo_p99": _p99_s(gloo) / p99_s if gloo else None,
        "ratio_to_memcpy_median": median_s / _median_s(memcpy) if memcpy else None,
        "foreign_cpu_share": blocks.foreign_share,
        "quiet": blocks.is_quiet,
        "waiting": contestant.options.get("waiting"),
    }


def _median_s(blocks: Repetitions[Block]) -> float:
    return blocks.median(lambda block: block.median_s)


def _p99_s(blocks: Repetitions[Block]) -> float:
    return blocks.median(lambda block: block.p99_s)


def table_cells(rows: Sequence[Mapping[str, Any]]) -> list[tuple[object, ...]]:
    """Cells under `COLUMNS`; the rows have more."""
    return [
        (
            row["transport"] + (" in place" if row["in_place"] else ""),
            f"{row['senders']} x {row['receivers']}",
            _message(row),
            format_seconds(row["median_s"]),
            format_seconds(row["p99_s"]),
            format_seconds(row["slowest_median_s"]),
            row["throughput_bytes_per_s"] / 1e9,
            _times(row["speedup_over_gloo_median"]),
            _times(row["speedup_over_gloo_p99"]),
            _times(row["ratio_to_memcpy_median"]),
            foreign_words(row),
        )
        for row in rows
    ]


def _message(row: Mapping[str, Any]) -> str:
    text = format_bytes(row["message_bytes"])
    if len(set(row["receiver_bytes"])) > 1:
        text = f"{format_bytes(min(row['receiver_bytes']))} to {format_bytes(max(row['receiver_bytes']))}"
    return text + (" <->" if row["direction"] == "both ways" else "") + (" touched" if row["touched"] else "")


def _times(ratio: float | None) -> str | None:
    return None if ratio is None else f"{ratio:.3g}x"
