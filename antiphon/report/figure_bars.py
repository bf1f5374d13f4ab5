"""Two stacked bar figures: what lies in a device's memory, and what the time of each part is spent on."""

from typing import Any

from antiphon.cost.parts import BOUND_NAMES, Parts
from antiphon.report.contents import MemoryUse
from antiphon.report.figure_style import MEMORY_COLOURS, PART_COLOURS, Figure, axis, figure
from antiphon.report.words import time_unit

LINE_HEIGHT = 46
PART_FIELDS = ("compute_s", "memory_s", "scale_up_s", "scale_out_s", "fixed_s")


def memory_figure(memory: tuple[MemoryUse, ...]) -> Figure:
    """One bar per role of device, in GB, as long as the device's memory."""
    names = [f"{use.role}, {use.device}" for use in memory]
    columns = {
        "weights": [use.weight_bytes / 1e9 for use in memory],
        "KV cache": [use.kv_bytes / 1e9 for use in memory],
        "reserve": [use.reserve_bytes / 1e9 for use in memory],
        "free": [use.free_bytes / 1e9 for use in memory],
    }
    traces = [_stack(name, MEMORY_COLOURS[name], names, values, "GB") for name, values in columns.items()]
    return _stacked(traces, len(names), "Memory of one device (GB)")


def parts_figure(parts: dict[str, Parts]) -> Figure:
    """One bar per part of a layer; the widest colour is what bounds it."""
    names = list(parts)
    scale_s, unit = time_unit(max((float(part.total_s) for part in parts.values()), default=0.0))
    traces = [
        _stack(
            bound, PART_COLOURS[bound], names, [float(getattr(part, name)) / scale_s for part in parts.values()], unit
        )
        for bound, name in zip(BOUND_NAMES, PART_FIELDS, strict=True)
    ]
    return _stacked(traces, len(names), f"Time of one layer and micro-batch ({unit})")


def _stack(name: str, colour: str, categories: list[str], values: list[float], unit: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": categories,
        "x": values,
        "marker": {"color": colour},
        "hovertemplate": f"%{{y}}<br>{name}: %{{x:.4g}} {unit}<extra></extra>",
    }


def _stacked(traces: list[dict[str, Any]], num_bars: int, title: str) -> Figure:
    lines = axis("", autorange="reversed")
    return figure(
        traces,
        x=axis(title, tickformat=",~r"),
        y=lines,
        height=140 + LINE_HEIGHT * num_bars,
        barmode="stack",
        bargap=0.35,
    )
