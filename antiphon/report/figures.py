"""The figures of a serving plan's page, as dictionaries that plotly.js draws.

1. latency against the objective's rate: every layout's candidates, its front, the chosen plan, the target
2. the chosen pipeline over time: a line of bars per worker and link, micro-batches in colours, layers as numbers
3. stacked bars: what lies in a device's memory, and what the time of each part is spent on
4. what the best plan of each layout gives when one thing changes: the target, the lengths, the network
"""

import math
from typing import Any

from antiphon.cost.parts import BOUND_NAMES, Parts
from antiphon.report.contents import MemoryUse, PhaseContents, Points, Sensitivity
from antiphon.report.figure_style import (
    BATCH_COLOURS,
    LAYOUT_COLOURS,
    MARK,
    MEMORY_COLOURS,
    PART_COLOURS,
    Figure,
    axis,
    figure,
    log_axis,
    vertical_line,
)
from antiphon.report.words import LAYOUT_TITLES, OBJECTIVE_UNITS, milliseconds, score, time_unit
from antiphon.sim.gantt import Bar, span_s, tracks
from antiphon.specs.plan import Objective
from antiphon.specs.workload import SloSpec

FRONT = "front"
CHOSEN = "chosen plan"
DECADES_SHOWN = 300
"""Highest rate over the lowest that is shown at first; double click shows all."""


def pareto_figure(contents: PhaseContents, objective: Objective, slo: SloSpec) -> Figure:
    """Both axes logarithmic: candidates span orders of magnitude. Latencies in milliseconds, of prefill in seconds."""
    is_decode = contents.name == "decode"
    traces = [_cloud(points) for points in contents.clouds if points.scores]
    traces += [_front(points) for points in contents.fronts if points.scores]
    predicted = contents.phase.predicted
    latency_s, rate = predicted.tpot_s if is_decode else predicted.ttft_s, score(predicted, objective)
    if latency_s is not None and rate is not None:
        traces.append(_chosen(latency_s, rate))
    target_s = slo.tpot_s if is_decode else slo.ttft_s
    marks = {} if target_s is None else vertical_line(target_s * 1e3, f"target {milliseconds(target_s)}")
    name = "Time per output token (ms)" if is_decode else "Time to first token (ms)"
    rate_name = OBJECTIVE_UNITS[objective][0].upper() + OBJECTIVE_UNITS[objective][1:]
    x_range, y_range = _window(contents, [value for value in (latency_s, target_s) if value is not None])
    return figure(traces, x=log_axis(name, range=x_range), y=log_axis(rate_name, range=y_range), height=480, **marks)


def _window(contents: PhaseContents, marked_s: list[float]) -> tuple[list[float], list[float]]:
    """What is shown at first, in exponents: all fronts but for rates that no one would take, and what is marked."""
    latencies_s = [latency_s for points in contents.fronts for latency_s in points.latency_s] + marked_s
    scores = [value for points in contents.fronts for value in points.scores]
    if not latencies_s or not scores:
        return [0.0, 3.0], [0.0, 3.0]
    x = [math.log10(min(latencies_s) * 1e3 / 1.2), math.log10(max(latencies_s) * 1e3 * 1.5)]
    return x, [math.log10(max(scores) / DECADES_SHOWN), math.log10(max(scores) * 1.4)]


def _points_trace(points: Points, **more: Any) -> dict[str, Any]:
    return {
        "type": "scatter",
        "x": [latency_s * 1e3 for latency_s in points.latency_s],
        "y": list(points.scores),
        "text": list(points.labels),
        "legendgroup": points.layout,
        "hovertemplate": "%{text}<br>%{x:.3g} ms, %{y:.4g}<extra></extra>",
        **more,
    }


def _cloud(points: Points) -> dict[str, Any]:
    marker = {"color": LAYOUT_COLOURS[points.layout], "size": 4, "opacity": 0.35}
    return _points_trace(points, name=LAYOUT_TITLES[points.layout], mode="markers", marker=marker, showlegend=False)


def _front(points: Points) -> dict[str, Any]:
    """A staircase: until the next point is reached, nothing better than this one can be had."""
    colour = LAYOUT_COLOURS[points.layout]
    return _points_trace(
        points,
        name=LAYOUT_TITLES[points.layout],
        meta=FRONT,
        mode="lines+markers",
        line={"color": colour, "width": 2, "shape": "hv"},
        marker={"color": colour, "size": 6},
    )


def _chosen(latency_s: float, rate: float) -> dict[str, Any]:
    return {
        "type": "scatter",
        "x": [latency_s * 1e3],
        "y": [rate],
        "name": CHOSEN,
        "mode": "markers",
        "marker": {"symbol": "star", "size": 18, "color": MARK, "line": {"width": 1, "color": "white"}},
        "hovertemplate": f"{CHOSEN}<br>%{{x:.3g}} ms, %{{y:.4g}}<extra></extra>",
    }


TRACK_HEIGHT = 34


def gantt_figure(bars: tuple[Bar, ...]) -> Figure:
    """Time from the first bar; first track on top."""
    start_s, end_s = span_s(bars)
    scale_s, unit = time_unit(end_s - start_s)
    order = tracks(bars)
    traces = [
        _bars_trace(name, colour, [bar for bar in bars if _group(bar) == name], start_s, scale_s, unit)
        for name, colour in _groups(bars).items()
    ]
    lines = axis("", autorange="reversed", categoryorder="array", categoryarray=order)
    height = 130 + TRACK_HEIGHT * len(order)
    return figure(
        traces, x=axis(f"Time ({unit})", tickformat=",~r"), y=lines, height=height, barmode="overlay", bargap=0.25
    )


def _group(bar: Bar) -> str:
    """Bars of one colour: those of a micro-batch where there are several, else those of a kind."""
    return f"micro-batch {bar.micro_batch + 1}" if bar.micro_batch >= 0 else bar.kind or bar.label


def _groups(bars: tuple[Bar, ...]) -> dict[str, str]:
    names = list(dict.fromkeys(_group(bar) for bar in sorted(bars, key=lambda bar: (bar.micro_batch, bar.start_s))))
    return {name: BATCH_COLOURS[index % len(BATCH_COLOURS)] for index, name in enumerate(names)}


def _bars_trace(name: str, colour: str, bars: list[Bar], start_s: float, scale_s: float, unit: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [bar.track for bar in bars],
        "base": [(bar.start_s - start_s) / scale_s for bar in bars],
        "x": [bar.duration_s / scale_s for bar in bars],
        "text": [str((bar.layer if bar.layer >= 0 else bar.micro_batch) + 1) for bar in bars],
        "customdata": [bar.label for bar in bars],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"color": "white"},
        "constraintext": "none",
        "marker": {"color": colour, "line": {"width": 1, "color": "rgba(255,255,255,0.7)"}},
        "hovertemplate": "%{customdata}<br>from %{base:.4g} "
        + unit
        + ", %{x:.4g} "
        + unit
        + " long<extra>"
        + name
        + "</extra>",
    }


BAR_HEIGHT = 46
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
        height=140 + BAR_HEIGHT * num_bars,
        barmode="stack",
        bargap=0.35,
    )


def sensitivity_figure(sensitivity: Sensitivity, objective: Objective) -> Figure:
    """A line per layout; a gap where the layout cannot run. The plan's own value is marked."""
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "name": LAYOUT_TITLES[layout],
            "mode": "lines+markers",
            "connectgaps": False,
            "x": list(sensitivity.values),
            "y": list(scores),
            "line": {"color": LAYOUT_COLOURS[layout], "width": 2},
            "marker": {"size": 6},
            "hovertemplate": "%{x:.4g}: %{y:.4g}<extra>" + LAYOUT_TITLES[layout] + "</extra>",
        }
        for layout, scores in sensitivity.scores.items()
    ]
    marks = {} if sensitivity.current is None else vertical_line(sensitivity.current, "this plan")
    rate = OBJECTIVE_UNITS[objective][0].upper() + OBJECTIVE_UNITS[objective][1:]
    x = axis(sensitivity.axis, type="log", tickvals=list(sensitivity.values), tickformat=",.3~r")
    return figure(traces, x=x, y=axis(rate, rangemode="tozero", tickformat=",~r"), height=360, **marks)
