"""The chosen pipeline over time: a line of bars per worker and link, micro-batches in colours, layers as numbers."""

from typing import Any

from antiphon.report.figure_style import BATCH_COLOURS, Figure, axis, figure
from antiphon.report.words import time_unit
from antiphon.sim.gantt import Bar, span_s, tracks

LINE_HEIGHT = 34


def gantt_figure(bars: tuple[Bar, ...]) -> Figure:
    """Time from the first bar; first track on top."""
    start_s, end_s = span_s(bars)
    scale_s, unit = time_unit(end_s - start_s)
    order = tracks(bars)
    traces = [
        _trace(name, colour, [bar for bar in bars if _group(bar) == name], start_s, scale_s, unit)
        for name, colour in _groups(bars).items()
    ]
    lines = axis("", autorange="reversed", categoryorder="array", categoryarray=order)
    height = 130 + LINE_HEIGHT * len(order)
    return figure(
        traces, x=axis(f"Time ({unit})", tickformat=",~r"), y=lines, height=height, barmode="overlay", bargap=0.25
    )


def _group(bar: Bar) -> str:
    """Bars of one colour: those of a micro-batch where there are several, else those of a kind."""
    return f"micro-batch {bar.micro_batch + 1}" if bar.micro_batch >= 0 else bar.kind or bar.label


def _groups(bars: tuple[Bar, ...]) -> dict[str, str]:
    names = list(dict.fromkeys(_group(bar) for bar in sorted(bars, key=lambda bar: (bar.micro_batch, bar.start_s))))
    return {name: BATCH_COLOURS[index % len(BATCH_COLOURS)] for index, name in enumerate(names)}


def _trace(name: str, colour: str, bars: list[Bar], start_s: float, scale_s: float, unit: str) -> dict[str, Any]:
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
