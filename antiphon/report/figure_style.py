"""What all figures of a page have in common: colours, axes, and the small dictionaries that plotly.js draws.

Figures are plain dictionaries in plotly's own format. Rejected: building them with plotly's Python classes. They check
every attribute, which takes longer than the search they report on; a test does that instead.
"""

import math
from typing import Any

from antiphon.specs.plan import Layout

Figure = dict[str, Any]
"""``{"data": [...], "layout": {...}}`` as plotly.js takes it."""

# Okabe and Ito's palette: kept apart by colour-blind readers, on white and on dark grey.
LAYOUT_COLOURS: dict[Layout, str] = {
    "disaggregated": "#0088cc",
    "hybrid": "#e69f00",
    "tp_pp": "#009e73",
    "dp_ep": "#cc79a7",
}
PART_COLOURS = {
    "compute": "#0088cc",
    "memory bandwidth": "#e69f00",
    "scale-up network": "#009e73",
    "scale-out network": "#d55e00",
    "fixed cost": "#999999",
}
MEMORY_COLOURS = {"weights": "#0088cc", "KV cache": "#e69f00", "reserve": "#999999", "free": "rgba(150,150,150,0.25)"}
BATCH_COLOURS = ("#0088cc", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#b8a800", "#999999")
MARK = "#d62728"
LEGEND = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with its title; units stand in the title."""
    return {"title": {"text": title}, "automargin": True, **more}


def log_axis(title: str, **more: Any) -> dict[str, Any]:
    """A logarithmic axis with plain numbers, also between powers of ten."""
    plain = {"type": "log", "tickformat": ",~r", "dtick": "D2", "minor": {"showgrid": False}}
    return axis(title, **plain, **more)


def figure(
    traces: list[dict[str, Any]], *, x: dict[str, Any], y: dict[str, Any], height: int = 420, **layout: Any
) -> Figure:
    """A figure with one pair of axes and its legend above."""
    shared = {
        "height": height,
        "margin": {"l": 70, "r": 24, "t": 48, "b": 56},
        "legend": LEGEND,
        "hoverlabel": {"align": "left"},
    }
    return {"data": traces, "layout": {**shared, "xaxis": x, "yaxis": y, **layout}}


def vertical_line(x: float, text: str) -> dict[str, Any]:
    """A dashed line over the whole height at `x` of a logarithmic axis, and its words beside it, as layout entries.

    plotly places the shape by the value, but the annotation by its exponent."""
    shape = {
        "type": "line",
        "x0": x,
        "x1": x,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"color": MARK, "dash": "dash", "width": 1.5},
    }
    words = {
        "x": math.log10(x),
        "y": 1,
        "yref": "paper",
        "yanchor": "top",
        "xanchor": "left",
        "xshift": 4,
        "text": text,
        "showarrow": False,
        "font": {"color": MARK},
    }
    return {"shapes": [shape], "annotations": [words]}
