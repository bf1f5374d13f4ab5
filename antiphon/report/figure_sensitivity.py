"""What the best plan of each layout gives when one thing changes: the target, the lengths, the network."""

from typing import Any

from antiphon.report.contents import Sensitivity
from antiphon.report.figure_style import LAYOUT_COLOURS, Figure, axis, figure, vertical_line
from antiphon.report.words import LAYOUT_TITLES, OBJECTIVE_UNITS
from antiphon.specs.plan import Objective


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
