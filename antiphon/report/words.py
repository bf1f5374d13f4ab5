"""How layouts, sizes and rates are called wherever a plan is shown: one wording for terminal, page and manifests."""

from collections.abc import Sequence

from antiphon.base.units import milliseconds
from antiphon.specs.plan import DeviceUse, Layout, Objective, Parallel, PhaseName, Predicted

LAYOUT_TITLES: dict[Layout, str] = {
    "disaggregated": "disaggregated",
    "hybrid": "hybrid TP-EP",
    "tp_pp": "TP + PP",
    "dp_ep": "DP + EP",
}
PHASE_TITLES: dict[PhaseName, str] = {"prefill": "Prefill", "decode": "Decode", "serve": "Serve"}
OBJECTIVE_UNITS: dict[Objective, str] = {
    "per-gpu": "tokens/s per device",
    "per-cost": "tokens/s per unit of price",
    "per-power": "tokens/s per watt",
    "ttft": "prompts/s of one request",
    "tpot": "tokens/s of one request",
}


def plural(count: int, one: str, many: str = "") -> str:
    """``plural(2, "worker")`` -> ``"2 workers"``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def latency_s(predicted: Predicted) -> float | None:
    """The latency that a phase promises: seconds a token in decode, to the first token in prefill."""
    return predicted.ttft_s if predicted.tpot_s is None else predicted.tpot_s


def latency_text(predicted: Predicted) -> str:
    """``12.3 ms a token`` or ``1.2 s to the first token``."""
    return f"{milliseconds(latency_s(predicted))} {'to the first token' if predicted.tpot_s is None else 'a token'}"


def time_unit(longest_s: float) -> tuple[float, str]:
    """The unit in which an axis up to `longest_s` has numbers one can read: (seconds of one unit, its sign)."""
    if longest_s >= 10:
        return 1.0, "s"
    return (1e-3, "ms") if longest_s >= 10e-3 else (1e-6, "µs")


def gigabytes(num_bytes: float) -> str:
    """``24e9`` -> ``"24.0 GB"``: device memories are sold in powers of ten. Small amounts in MB; nothing is ``"-"``."""
    if num_bytes < 1:
        return "-"
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 100e6 else f"{num_bytes / 1e6:.3g} MB"


def devices_text(devices: Sequence[DeviceUse]) -> str:
    """``8 × H20 attention, 16 × L40S experts``; the role is left out where there is only one."""
    if not devices:
        return "-"
    return ", ".join(
        f"{use.num_devices:,} × {use.device}{'' if use.role == 'both' else ' ' + use.role}" for use in devices
    )


def degrees_text(layout: Layout, parallel: Parallel) -> str:
    """The parallel sizes of one instance, in the terms of its layout."""
    if layout == "disaggregated":
        attention = f"{plural(parallel.attention_dp, 'attention worker')}{_tp(parallel.attention_tp)}"
        return f"{attention}, {plural(parallel.expert_workers, 'expert worker')}{_tp(parallel.expert_tp)}"
    attention = f"attention DP {parallel.attention_dp} × TP {parallel.attention_tp}"
    experts = f"experts EP {parallel.expert_ep} × TP {parallel.expert_tp}"
    return f"{attention}, {experts}" + (f", PP {parallel.pp}" if parallel.pp > 1 else "")


def short_degrees(layout: Layout, parallel: Parallel) -> str:
    """The same in a few columns: ``8×TP2 + 16×TP1`` or ``A 8×TP1, E 4×TP2, PP 2``."""
    if layout == "disaggregated":
        return f"{parallel.attention_dp}×TP{parallel.attention_tp} + {parallel.expert_workers}×TP{parallel.expert_tp}"
    stages = f", PP{parallel.pp}" if parallel.pp > 1 else ""
    return f"A {parallel.attention_dp}×TP{parallel.attention_tp}, E {parallel.expert_ep}×TP{parallel.expert_tp}{stages}"


def _tp(degree: int) -> str:
    return f" of TP {degree}" if degree > 1 else ""


def commented(*lines: str) -> str:
    """Lines of a shell script or YAML file that are comments."""
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)
