"""MegaScale-Infer by counting: message sizes, the rules for m, eq. 1-8 with hand-worked numbers, Tables 3 and 4.

Hand-worked numbers are of the printed equation; ours come from the functions the planner uses.
"""

from collections.abc import Callable
from functools import partial

from antiphon.cost.gemm import grouped_gemm
from antiphon.cost.m2n import message_bytes
from antiphon.cost.memory import msi_memory_bytes
from antiphon.cost.network import Link
from antiphon.cost.ping_pong import (
    balanced_attention_workers,
    conditions,
    iteration,
    micro_batch_bounds,
    min_micro_batches,
    throughput_per_cost,
)
from antiphon.cost.roofline import Roof
from antiphon.reproduce import shipped
from antiphon.reproduce.claim import Claim, digit
from antiphon.specs.counts import count_parameters
from antiphon.specs.device import DeviceSpec
from antiphon.specs.precision import PrecisionSpec

# Table 3: price, capacity in GB, GB/s, TFLOP/s; then each per price, as printed.
TABLE_3 = {
    "L20": (48.0, 864.0, 119.5),
    "H800": (15.2, 649.7, 187.3),
    "A800": (35.4, 902.2, 138.1),
    "H20": (51.9, 2214.1, 80.0),
    "L40S": (44.4, 800.0, 335.2),
}
RATIOS: tuple[tuple[str, str, Callable[[DeviceSpec], float]], ...] = (
    ("memory", "GB", lambda device: device.memory_bytes / 1e9),
    ("bandwidth", "GB/s", lambda device: device.memory_bytes_per_s / 1e9),
    ("compute", "TFLOP/s", lambda device: device.flops_per_s["bfloat16"] / 1e12),
)
TABLE_4 = {"mixtral-8x22b": 141e9, "dbrx": 132e9, "scaled-moe": 317e9}


def claims() -> tuple[Claim, ...]:
    return (*_messages(), *_rules(), *_equations(), *_table_3(), *_table_4())


def _messages() -> tuple[Claim, ...]:
    return (
        Claim(
            id="msi-m2n-bytes",
            paper="MSI",
            source="section 7.3",
            what="Mixtral 8x22B, micro-batch 128, tp_a = 2: from an attention GPU to an expert GPU",
            theirs=196_608.0,
            ours=_message_bytes,
            unit="bytes",
            kind="counted",
        ),
        Claim(
            id="msi-roofline-batch",
            paper="MSI",
            source="section 2.3",
            what="rows from which a product on an A100 is bound by compute (312 TFLOP/s, 2 TB/s)",
            theirs=156.0,
            ours=lambda: _dense_threshold(312e12, 2e12),
            unit="rows",
            kind="counted",
        ),
        Claim(
            id="msi-roofline-moe",
            paper="MSI",
            source="section 2.3",
            what="compute utilization of Mixtral's experts at that batch",
            theirs=0.25,
            ours=_expert_utilization,
            tolerance=0.02,
            kind="counted",
            note="rows' own traffic counted too, which the paper leaves out",
        ),
    )


def _message_bytes() -> float:
    model = shipped.model("mixtral-8x22b")
    rows = 128 * model.router.top_k / model.router.num_experts
    return float(message_bytes(rows, model.hidden_size * PrecisionSpec().dispatch_bytes, 2, 1))


def _dense_threshold(flops_per_s: float, bytes_per_s: float) -> float:
    """Rows at which 2 rows h n / F equals 2 h n / B (BF16 weights)."""
    return PrecisionSpec().weight_bytes / 2 * flops_per_s / bytes_per_s


def _expert_utilization() -> float:
    """Arithmetic of one projection of all experts over the time it takes, 156 tokens spread evenly."""
    model = shipped.model("mixtral-8x22b")
    hidden, width, num_experts = model.hidden_size, model.feed_forward.intermediate, model.router.num_experts
    roof, rows = Roof(flops_per_s=312e12, bytes_per_s=2e12), 156 * model.router.top_k
    parts = grouped_gemm(roof, float(rows), num_experts, hidden, width, PrecisionSpec().weight_bytes, 2.0)
    return float(2 * rows * hidden * width / roof.flops_per_s / parts.total_s)


def _rules() -> tuple[Claim, ...]:
    fast, slow = 0.3, 0.8
    cases = (
        ("fast", "T_c < T_f / 2", fast, 3.0),
        ("edge", "T_c = T_f / 2 (the bound itself)", 0.5, 3.0),
        ("slow", "T_f / 2 < T_c < T_f", slow, 4.0),
    )
    return tuple(
        Claim(
            id=f"msi-m-rule-{name}",
            paper="MSI",
            source="section 4.1",
            what=f"fewest micro-batches where {where}",
            theirs=theirs,
            ours=partial(_fewest, ratio),
            unit="micro-batches",
            kind="counted",
        )
        for name, where, ratio, theirs in cases
    )


def _fewest(ratio: float) -> float:
    return float(min_micro_batches(ratio, 1.0))


def _equations() -> tuple[Claim, ...]:
    """T_a = 2 ms, T_e = 1.8 ms, T_c = 0.6 ms, m = 3, L = 56 where nothing else is said."""
    times = (2.0, 1.8, 0.6)
    cases: tuple[tuple[str, str, float | str, Callable[[], float | str], str], ...] = (
        (
            "eq1-3",
            "conditions for T_a 2, T_e 1.8, T_c 1.2 ms, m = 3: balanced, hidden, filled",
            "yes, yes, no",
            lambda: ", ".join("yes" if bool(holds) else "no" for holds in conditions(3, 2.0, 1.8, 1.2)),
            "",
        ),
        ("eq4-low", "least time of a micro-batch, L = 56, m = 4", 445.0, lambda: _bounds(4, *times)[0], "ms"),
        ("eq4-high", "most time of a micro-batch, L = 56, m = 4", 448.0, lambda: _bounds(4, *times)[1], "ms"),
        (
            "eq5",
            "iteration of all micro-batches, L = 56, m = 4",
            451.0,
            lambda: float(iteration(4, 56, *times)),
            "ms",
        ),
        ("eq6", "T_c in bytes: 128 rows, h 6144, K 2, tp_a 2, 25 GB/s, Util 0.8", 78.6432, _eq6_us, "us"),
        (
            "eq7",
            "attention workers that balance k1 = 8, k3 = 4 us, E 8, K 2",
            8.0,
            lambda: float(balanced_attention_workers(8e-6, 4e-6, 8, 2)),
            "workers",
        ),
        (
            "eq8",
            "KV and weights: m 3, b_a 128, s 730, h 6144, L 56, g 6, P_a 5e9",
            74.29868032,
            lambda: float(msi_memory_bytes(3, 128, 730, 6144, 56, 6, 5e9)) / 1e9,
            "GB",
        ),
        (
            "throughput-per-dollar",
            "B 1536, T_total 0.15 s, 16 attention GPUs of 1.85, 8 expert GPUs of 1.08",
            267.78,
            lambda: float(throughput_per_cost(1536, 0.15, 16, 1.85, 8, 1.08)),
            "tokens/s per price",
        ),
    )
    return tuple(
        Claim(
            id=f"msi-{name}",
            paper="MSI",
            source="section 4, eq. 1-8",
            what=what,
            theirs=theirs,
            ours=ours,
            unit=unit,
            tolerance=digit(theirs, 0.01) if name == "throughput-per-dollar" and isinstance(theirs, float) else 0.0,
            kind="counted",
        )
        for name, what, theirs, ours, unit in cases
    )


def _bounds(num_micro_batches: int, t_a: float, t_e: float, t_c: float) -> tuple[float, float]:
    least, most = micro_batch_bounds(num_micro_batches, 56, t_a, t_e, t_c)
    return float(least), float(most)


def _eq6_us() -> float:
    """Eq. 6 of the sending side, in bytes: b_a h K / tp_a over W_a Util; Util 0.8 is a message of 4 times the half."""
    size = message_bytes(128 * 2, 6144 * 2.0, 2, 1)
    link = Link(level="scale_out", bytes_per_s=25e9, latency_s=0.0, half_bytes=size / 4)
    return float(link.send_s(size)) * 1e6


def _table_3() -> tuple[Claim, ...]:
    return tuple(
        Claim(
            id=f"msi-table3-{name.lower()}-{quantity}",
            paper="MSI",
            source="Table 3",
            what=f"{name}: {quantity} per price",
            theirs=TABLE_3[name][index],
            ours=partial(_per_price, name, read),
            unit=f"{unit} per price",
            tolerance=digit(TABLE_3[name][index], 0.1),
            kind="counted",
        )
        for name in TABLE_3
        for index, (quantity, unit, read) in enumerate(RATIOS)
    )


def _per_price(name: str, read: Callable[[DeviceSpec], float]) -> float:
    device = shipped.device(name)
    assert device.price is not None, f"Table 3 prices {name}"
    return read(device) / device.price


def _parameters(name: str) -> float:
    return float(count_parameters(shipped.model(name)).total)


def _table_4() -> tuple[Claim, ...]:
    return tuple(
        Claim(
            id=f"msi-table4-{name}",
            paper="MSI",
            source="section 7.1, Table 4",
            what=f"{name}: parameters",
            theirs=theirs,
            ours=partial(_parameters, name),
            unit="parameters",
            tolerance=digit(theirs, 1e9),
            kind="counted",
        )
        for name, theirs in TABLE_4.items()
    )
