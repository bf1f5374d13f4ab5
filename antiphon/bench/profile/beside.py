"""What two workers on different cores cost each other: they share memory, and some caches and clocks.

One process is timed while the other repeats its own work. Rejected: a bandwidth model. Whether two readers share one
bandwidth, and two multipliers one clock, differs from machine to machine and, on virtual ones, from hour to hour.
"""

from statistics import median

from antiphon.bench.profile.crew import RigHandle
from antiphon.bench.profile.measure import Bench, curve
from antiphon.bench.profile.orders import Times, Work
from antiphon.cost.local_times import Slowdowns, flat

NO_SLOWDOWNS = Slowdowns(
    attention_beside_experts=flat(1.0),
    experts_beside_attention=flat(1.0),
    attention_beside_attention=flat(1.0),
    experts_beside_experts=flat(1.0),
    replica_beside_replica=flat(1.0),
)


def slowdowns(bench: Bench, one: RigHandle, other: RigHandle, num_threads: int) -> Slowdowns:
    """Two workers of `num_threads` threads on cores of their own; `one` is timed, `other` kept busy."""
    one.settle(num_threads, bench.cores[:num_threads])
    other.settle(num_threads, bench.cores[num_threads : 2 * num_threads])
    short, held = bench.effort.contexts[0], -(-bench.spec.router.num_experts // 2)
    ratios: dict[str, dict[int, float]] = {name: {} for name in vars(NO_SLOWDOWNS)}
    for rows in bench.beside_rows:
        attention = Work(kind="attention", rows=rows, context=short)
        whole = Work(kind="experts", rows=rows, context=short, num_held=bench.spec.router.num_experts)
        half = Work(kind="experts", rows=rows, context=short, num_held=held)
        replica = Work(kind="colocated", rows=rows, context=short)
        for name, own, others in (
            ("attention_beside_experts", attention, whole),
            ("experts_beside_attention", whole, attention),
            ("attention_beside_attention", attention, attention),
            ("experts_beside_experts", half, half),
            ("replica_beside_replica", replica, replica),
        ):
            alone = _compute_s(bench, bench.time(one, own))
            if name == "replica_beside_replica":  # against the pieces that a prediction adds up, which were timed alone
                alone = _pieces_s(bench, one, rows)
            other.keep_busy(others)
            beside = _compute_s(bench, bench.time(one, own))
            other.settle(num_threads, bench.cores[num_threads : 2 * num_threads])  # any order ends its work
            ratios[name][rows] = max(1.0, beside / alone)
        bench.advance()
    return Slowdowns(**{name: curve(values, may_fall=True) for name, values in ratios.items()})


def _compute_s(bench: Bench, times: Times) -> float:
    """Attention, experts and head of one step."""
    total = bench.spec.num_layers * median(times.attention) if times.attention else 0.0
    if times.experts:
        total += bench.spec.num_moe_layers * median(times.experts)
    return total + (median(times.head) if times.head and times.experts else 0.0)


def _pieces_s(bench: Bench, handle: RigHandle, rows: int) -> float:
    short = bench.effort.contexts[0]
    attention = bench.time(handle, Work(kind="attention", rows=rows, context=short))
    experts_s = bench.experts_s(handle, rows, bench.spec.router.num_experts)
    layers_s = bench.spec.num_layers * median(attention.attention) + bench.spec.num_moe_layers * experts_s
    return layers_s + median(attention.head)
