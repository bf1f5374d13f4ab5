"""Latency against the objective's rate: every layout's candidates, its front, the chosen plan, the target."""

import math
from typing import Any

from antiphon.report.contents import PhaseContents, Points
from antiphon.report.figure_style import LAYOUT_COLOURS, MARK, Figure, figure, log_axis, vertical_line
from antiphon.report.words import LAYOUT_TITLES, OBJECTIVE_UNITS, milliseconds, score
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


def _trace(points: Points, **more: Any) -> dict[str, Any]:
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
    return _trace(points, name=LAYOUT_TITLES[points.layout], mode="markers", marker=marker, showlegend=False)


def _front(points: Points) -> dict[str, Any]:
    """A staircase: until the next point is reached, nothing better than this one can be had."""
    colour = LAYOUT_COLOURS[points.layout]
    return _trace(
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
