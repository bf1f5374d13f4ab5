"""`antiphon profile` without the command line: everything measured of this machine with one model, in three shapes.

- `LocalTimes`: the engine's own tables, which predict what it does here (`benchmarks/predict.py`)
- `Profile`: what the planner's cost model reads in place of its roofline (`cost.profile`)
- `ClusterSpec`: this machine as a cluster of one node, a device for each core (`this_machine`)

Two workers on different cores share memory, and some caches and clocks. What that costs is measured: one process is
timed while the other repeats its own work. Rejected: a bandwidth model. Whether two readers share one bandwidth, and
two multipliers one clock, differs from machine to machine and, on virtual ones, from hour to hour.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count, pairwise
from pathlib import Path
from statistics import median

from antiphon.base.allowance import allowance
from antiphon.base.errors import UserError
from antiphon.base.progress import Report
from antiphon.base.system import cpu_name
from antiphon.bench.harness.children import Child, Children
from antiphon.bench.harness.contest import FOREIGN_SHARE_LIMIT, CpuWatch
from antiphon.bench.profile.exchange import row_calls
from antiphon.bench.profile.measure import (
    PROCESSES,
    Bench,
    Effort,
    curve,
    engine_turns,
    exchange_times,
    limits_of,
    open_rigs,
    thread_times,
)
from antiphon.bench.profile.rig import PartSeconds, RigWork
from antiphon.cost.curves import Curve, Surface
from antiphon.cost.profile import (
    AttentionTable,
    EngineTimes,
    ExpertTable,
    HostTimes,
    LocalTimes,
    MachineFacts,
    MessageTable,
    Profile,
    Slowdowns,
    ThreadTimes,
    flat,
)
from antiphon.kernels.select import check_backend, resolve_device, resolve_dtype
from antiphon.models.config import load_model_spec, read_config
from antiphon.models.load import open_checkpoint
from antiphon.specs.cluster import ClusterSpec, ComputeDtype, DeviceSpec, EfficiencySpec, equal_nodes
from antiphon.specs.model import ModelSpec

NO_SLOWDOWNS = Slowdowns(
    attention_beside_experts=flat(1.0),
    experts_beside_attention=flat(1.0),
    attention_beside_attention=flat(1.0),
    experts_beside_experts=flat(1.0),
    replica_beside_replica=flat(1.0),
)


def slowdowns(bench: Bench, one: Child, other: Child, num_threads: int) -> Slowdowns:
    """Two workers of `num_threads` threads on cores of their own; `one` is timed, `other` kept busy."""
    one.ask("settle", num_threads, bench.cores[:num_threads])
    other.ask("settle", num_threads, bench.cores[num_threads : 2 * num_threads])
    short, held = bench.effort.contexts[0], -(-bench.spec.router.num_experts // 2)
    ratios: dict[str, dict[int, float]] = {name: {} for name in vars(NO_SLOWDOWNS)}
    for rows in bench.beside_rows:
        attention = RigWork(kind="attention", rows=rows, context=short)
        whole = RigWork(kind="experts", rows=rows, context=short, num_held=bench.spec.router.num_experts)
        half = RigWork(kind="experts", rows=rows, context=short, num_held=held)
        replica = RigWork(kind="colocated", rows=rows, context=short)
        for name, own, others in (
            ("attention_beside_experts", attention, whole),
            ("experts_beside_attention", whole, attention),
            ("attention_beside_attention", attention, attention),
            ("experts_beside_experts", half, half),
            ("replica_beside_replica", replica, replica),
        ):
            alone = _compute_s(bench, bench.time(one, own))
            other.ask("keep_busy", others)
            beside = _compute_s(bench, bench.time(one, own))
            other.ask("settle", num_threads, bench.cores[num_threads : 2 * num_threads])  # any order ends its work
            ratios[name][rows] = max(1.0, beside / alone)
        bench.advance()
    return Slowdowns(**{name: curve(values, may_fall=True) for name, values in ratios.items()})


def _compute_s(bench: Bench, times: PartSeconds) -> float:
    """Attention, experts and head of one step."""
    total = bench.spec.num_layers * median(times.attention) if times.attention else 0.0
    if times.experts:
        total += bench.spec.num_moe_layers * median(times.experts)
    return total + (median(times.head) if times.head and times.experts else 0.0)


ALONE, APART, TOGETHER = "colocated", "1+1/m1", "2+1/m1"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to measure. `threads`: numbers of threads of a worker; empty: all cores, and half of them. `max_context`:
    None: the model's own."""

    model: Path
    effort: Effort
    threads: tuple[int, ...] = ()
    max_rows: int = 256
    max_context: int | None = None
    dtype: str = "auto"
    kernels: str = "auto"


def default_threads(num_cores: int) -> tuple[int, ...]:
    """A worker alone has all cores, one of two has half of them."""
    return tuple(sorted({num_cores, max(1, num_cores // 2)}, reverse=True))


def measure(wanted: Wanted, report: Report) -> LocalTimes:
    """Blocks for a minute or so. `UserError` if the model or the machine is at fault."""
    spec = load_model_spec(wanted.model)
    dtype = spec.dtype if wanted.dtype == "auto" else wanted.dtype
    check_backend(wanted.kernels, resolve_device("cpu", 0), resolve_dtype(dtype))
    checkpoint = open_checkpoint(wanted.model, spec)
    weight_bytes = sum(checkpoint.stored_bytes(name) for name in checkpoint.names)
    effort = wanted.effort.bounded(wanted.max_rows, wanted.max_context or spec.max_position)
    done = count(1)

    def advance() -> None:
        number = next(done)
        report(number, max(number, _num_points(bench, len(workers))))

    bench = Bench(wanted.model, spec, dtype, wanted.kernels, effort, advance)
    threads = wanted.threads or default_threads(len(bench.cores))
    workers = [
        (count, both_sides)
        for count in threads
        for both_sides in ((False, True) if effort.apart and count < len(bench.cores) else (True,))
    ]
    watch = CpuWatch()
    notes = []
    with Children(PROCESSES) as crew:
        first, second, has_both, kernels = open_rigs(bench, crew, weight_bytes)
        by_threads = tuple(thread_times(bench, first, count, both_sides=both_sides) for count, both_sides in workers)
        beside = NO_SLOWDOWNS
        if has_both:
            beside = slowdowns(bench, first, second, max(1, len(bench.cores) // 2))
        elif effort.beside_rows:
            notes.append("one worker only: no memory or no core for a second one, so nothing was timed beside another")
        exchange = exchange_times(bench, first, second)
    engine = _engine_times(bench, min(by_threads, key=lambda each: each.num_threads))
    limits = limits_of(bench)
    foreign = watch.foreign_share()
    if foreign > FOREIGN_SHARE_LIMIT:
        notes.append(f"other programs used {foreign:.0%} of the CPU meanwhile: the times are too long by about as much")
    return LocalTimes(
        model=wanted.model.resolve().name,
        model_config=read_config(wanted.model),
        dtype=dtype,
        kernels=kernels,
        cpu=cpu_name(),
        num_cores=len(bench.cores),
        threads=by_threads,
        slowdowns=beside,
        exchange=exchange,
        engine=engine,
        row_calls=row_calls(spec, dtype, effort.exchange_rows, effort.exchange_rounds),
        read_bytes_per_s=limits.read_by_threads if limits else {},
        gemm_flops_per_s=limits.gemm_by_threads if limits else {},
        foreign_share=foreign,
        spread=median(bench.spreads) if bench.spreads else 0.0,
        notes=tuple(notes),
    )


def _num_points(bench: Bench, num_workers: int) -> int:
    effort = bench.effort
    return (
        1
        + num_workers * (len(bench.rows) + len(effort.prompts))
        + len(bench.beside_rows)
        + len(effort.exchange_rows)
        + (1 + 2 * effort.together) * len(effort.engine_rows)
    )


def _engine_times(bench: Bench, worker: ThreadTimes) -> EngineTimes:
    """`worker`: the times alone of one worker of two."""
    rows, steps = bench.effort.engine_rows, bench.effort.engine_steps
    model = Path(bench.model)
    alone = engine_turns(ALONE, model, rows, steps, bench.advance)
    apart, further, head_ratio = alone, flat(0.0), flat(1.0)
    if bench.effort.together:
        apart = engine_turns(APART, model, rows, steps, bench.advance)
        together = engine_turns(TOGETHER, model, rows, steps, bench.advance)
        further = curve({count: max(0.0, together[count]["engine"] - apart[count]["engine"]) for count in rows})
        head_ratio = curve(
            {count: max(1.0, apart[count]["head"] / worker.head_s.value(count)) for count in rows}, may_fall=True
        )
    return EngineTimes(
        alone_s=curve({count: turn["engine"] for count, turn in alone.items()}),
        bookkeeping_s=curve({count: max(0.0, turn["bookkeeping"]) for count, turn in alone.items()}),
        apart_s=curve({count: turn["engine"] for count, turn in apart.items()}),
        apart_bookkeeping_s=curve({count: max(0.0, turn["bookkeeping"]) for count, turn in apart.items()}),
        apart_head_ratio=head_ratio,
        per_further_worker_s=further,
    )


# --- this machine
# From what was measured to what the planner reads: a `Profile`, and this machine as a cluster of one node.
#
# A device is one core with its share of memory: that is what a worker of the engine has when workers share the machine,
# and `antiphon serve --plan` can obey a plan made of such devices. Rejected: the whole machine as one device. It could
# then not be split between attention and experts.


THIS_CORE = "this-core"
CONTEXTS = (1.0, 128.0, 512.0, 2048.0, 8192.0)
ASSUMED_WATTS_PER_CORE = 10.0
_POWER_LIMIT = Path("/sys/class/powercap/intel-rapl:0/constraint_0_power_limit_uw")


def cost_profile(times: LocalTimes, model: ModelSpec, command: str, host: HostTimes | None = None) -> Profile:
    """The tables of the cost model; the fewest threads come first, because that is what a device here has. The head
    is that of a worker with experts."""
    ascending = sorted(times.threads, key=lambda each: each.num_threads)
    whole = next((each for each in ascending if each.both_sides), ascending[0])
    attention = [_decode_table(each) for each in ascending] + [_prefill_table(each) for each in ascending]
    smallest, largest = times.engine.alone_s.sizes[0], times.engine.alone_s.sizes[-1]
    per_sequence = (times.engine.alone_s.seconds[-1] - times.engine.alone_s.seconds[0]) / max(1.0, largest - smallest)
    return Profile(
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=MachineFacts(
            name=times.cpu,
            num_cores=times.num_cores,
            memory_bytes=allowance().memory.most_bytes,
            memory_bytes_per_s=max(times.read_bytes_per_s.values(), default=0.0),
            flops_per_s=max(times.gemm_flops_per_s.values(), default=0.0),
        ),
        model=times.model,
        dtype=times.dtype,
        attention=tuple(attention),
        experts=tuple(_expert_table(each, model) for each in ascending),
        head=Curve(whole.head_s.sizes, whole.head_s.seconds),
        messages=(MessageTable(transport="shm", times=_message_times(times)),),
        step_s=times.engine.alone_s.seconds[0] + times.engine.bookkeeping_s.seconds[0],
        step_per_sequence_s=max(0.0, per_sequence),
        model_config=dict(times.model_config),
        engine=replace(times, model_config={}),
        host=host,
    )


def training_profile(model: Path, name: str, command: str) -> Profile:
    """A profile of this machine that holds nothing yet."""
    return Profile(
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=MachineFacts(
            name=cpu_name(),
            num_cores=allowance().num_cores,
            memory_bytes=allowance().memory.most_bytes,
        ),
        model=name,
        dtype="float32",
        attention=(),
        experts=(),
        model_config=read_config(model),
    )


def _decode_table(times: ThreadTimes) -> AttentionTable:
    rows = times.attention_s.sizes
    seconds = tuple(tuple(times.attention_layer_s(each, context) for context in CONTEXTS) for each in rows)
    surface = Surface(rows, CONTEXTS, seconds)
    return AttentionTable(
        phase="decode", layer="moe", times=surface, num_threads=times.num_threads, both_sides=times.both_sides
    )


def _prefill_table(times: ThreadTimes) -> AttentionTable:
    """Prompts were timed one at a time; several take as many times as long, a part of one what it takes itself."""
    sizes = times.prompt_attention_s.sizes
    seconds = tuple(
        tuple(max(1.0, total / each) * times.prompt_attention_s.value(min(total, each)) for each in sizes)
        for total in sizes
    )
    surface = Surface(sizes, sizes, seconds)
    return AttentionTable(
        phase="prefill",
        layer="moe",
        times=surface,
        num_threads=times.num_threads,
        bound="compute",
        per_cached_s=times.per_cached_s,
        both_sides=times.both_sides,
    )


def _expert_table(times: ThreadTimes, model: ModelSpec) -> ExpertTable:
    """By (token, expert) pairs instead of rows: a worker that holds h of E experts gets h K / E pairs of a row."""
    held = sorted(times.experts_s)
    router = model.router
    pairs = sorted({rows * router.top_k for count in held for rows in times.experts_s[count].sizes})
    seconds = tuple(
        tuple(times.experts_s[count].value(each * router.num_experts / (router.top_k * count)) for each in pairs)
        for count in held
    )
    surface = Surface(tuple(map(float, held)), tuple(pairs), seconds)
    return ExpertTable(times=surface, num_threads=times.num_threads, both_sides=times.both_sides)


def _message_times(times: LocalTimes) -> Curve:
    """One way of a message with the calls at both its ends, by bytes."""
    exchange = times.exchange
    sizes = exchange.message_bytes
    seconds = [
        exchange.dispatch_s.value(rows) + exchange.one_way_s.value(rows) + exchange.receive_s.value(rows)
        for rows in sizes.sizes
    ]
    return Curve(sizes.seconds, tuple(seconds))


def this_cluster(times: LocalTimes, model: ModelSpec) -> ClusterSpec:
    """One node, a device for each core. `UserError` where bandwidth or products could not be measured."""
    if not times.read_bytes_per_s or not times.gemm_flops_per_s:
        raise UserError("the machine's bandwidth was not measured (too little memory free): measure again, then plan")
    cores = times.num_cores
    watts, source = _power_w(cores)
    message_rate = _message_rate(times)
    dtype: ComputeDtype = "float32" if times.dtype == "float32" else "bfloat16"
    measured = "antiphon profile"
    device = DeviceSpec(
        name=THIS_CORE,
        kind="cpu",
        memory_bytes=allowance().memory.most_bytes // cores,
        memory_bytes_per_s=max(times.read_bytes_per_s.values()) / cores,
        flops_per_s={dtype: max(times.gemm_flops_per_s.values()) / cores},
        scale_up_bytes_per_s=message_rate,
        scale_up_domain=cores,
        scale_out_bytes_per_s=message_rate,
        power_w=watts,
        price=None,
        sources={
            "memory_bytes": "this machine, an even share",
            "memory_bytes_per_s": f"{measured}: reading 1 GiB, an even share",
            "flops_per_s": f"{measured}: a product of 4096 x 4096 x 4096 in bf16, an even share",
            "scale_up_bytes_per_s": f"{measured}: the exchange over shared memory",
            "scale_out_bytes_per_s": "as the scale-up link: there is one node",
            "power_w": source,
        },
    )
    return ClusterSpec(
        name="this-machine",
        groups=(equal_nodes(device, 1, cores, cores),),
        efficiency=_efficiency(times, model, device),
        source=f"{times.cpu}, {cores} cores, measured with {times.model} by antiphon profile",
    )


def _efficiency(times: LocalTimes, model: ModelSpec, device: DeviceSpec) -> EfficiencySpec:
    """One calibration from the experts of the worker with the fewest threads: reading at one row, products at most."""
    fewest = min(times.threads, key=lambda each: each.num_threads)
    experts = fewest.experts_s[model.router.num_experts]
    share = fewest.num_threads
    weights = 3 * model.hidden_size * model.feed_forward.intermediate
    itemsize = 4 if times.dtype == "float32" else 2
    read = model.router.top_k * weights * itemsize / experts.seconds[0] / (device.memory_bytes_per_s * share)
    products = 2 * weights * model.router.top_k * experts.sizes[-1] / experts.seconds[-1]
    products /= max(device.flops_per_s.values()) * share
    one_row = (
        times.exchange.dispatch_s.seconds[0] + times.exchange.one_way_s.seconds[0] + times.exchange.receive_s.seconds[0]
    )
    return EfficiencySpec(
        gemm=_fraction(products),
        attention=_fraction(products),
        memory=_fraction(read),
        scale_up=1.0,
        scale_out=1.0,
        scale_up_half_bytes=0.0,
        scale_out_half_bytes=0.0,
        kernel_s=0.0,
        collective_s=one_row,
        exchange_s=one_row,
        round_s=one_row,  # a collective of its own
        layer_overhead_s=fewest.step_s.seconds[0] / model.num_layers,
        source=f"antiphon profile of {times.model}: experts at {experts.sizes[0]:.0f} and {experts.sizes[-1]:.0f} rows",
    )


def _fraction(value: float) -> float:
    """Within what a fraction can be: caches can make a small model's weights come faster than memory."""
    return min(1.0, max(0.01, value))


def _message_rate(times: LocalTimes) -> float:
    """Bytes per second of one way, from the best stretch between two message sizes; of the largest if none rises."""
    curve = _message_times(times)
    points = list(zip(curve.sizes, curve.seconds, strict=True))
    rises = [(b - a) / (t - s) for (a, s), (b, t) in pairwise(points) if t > s and b > a]
    return max(rises, default=points[-1][0] / points[-1][1])


def _power_w(cores: int) -> tuple[float, str]:
    try:
        return int(_POWER_LIMIT.read_text(encoding="utf-8")) * 1e-6 / cores, f"{_POWER_LIMIT}, an even share"
    except (OSError, ValueError):
        return ASSUMED_WATTS_PER_CORE, "assumed: this machine does not tell its power limit"
