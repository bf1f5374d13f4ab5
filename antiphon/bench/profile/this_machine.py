"""From what was measured to what the planner reads: a `Profile`, and this machine as a cluster of one node.

A device is one core with its share of memory: that is what a worker of the engine has when workers share the machine,
and `antiphon serve --plan` can obey a plan made of such devices. Rejected: the whole machine as one device. It could
then not be split between attention and experts.
"""

from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from antiphon.base.allowance import allowance
from antiphon.base.errors import UserError
from antiphon.base.system import cpu_name
from antiphon.cost.curves import Curve, Surface
from antiphon.cost.profile import (
    AttentionTable,
    ExpertTable,
    HostTimes,
    LocalTimes,
    MachineFacts,
    MessageTable,
    Profile,
    ThreadTimes,
)
from antiphon.models.config import read_config
from antiphon.specs.cluster import ClusterSpec, ComputeDtype, DeviceSpec, EfficiencySpec, equal_nodes
from antiphon.specs.model import ModelSpec

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
