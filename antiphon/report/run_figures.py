"""The figures of a training run's page, as dictionaries that plotly.js draws.

1. curves over steps: loss, learning rate, gradient norm; a long run's are thinned to means over blocks of steps
2. heat maps: the fullest expert of each layer over steps, every expert of each layer in the end
3. bars: time by operator, bytes by collective
"""

from typing import Any

from antiphon.report.figure_style import BATCH_COLOURS, MARK, Figure, axis, figure
from antiphon.report.run_record import RunRecord
from antiphon.report.words import time_unit

MOST_POINTS = 1000
MOST_COLUMNS = 300
LEAST_SHARE = 0.002
LINE_HEIGHT = 26
BACKWARD = " backward"
TRAIN_COLOUR, HELD_OUT_COLOUR = BATCH_COLOURS[0], MARK
FORWARD_COLOUR, BACKWARD_COLOUR = BATCH_COLOURS[0], BATCH_COLOURS[1]
# From even use to a collapsed router, readable on white and on dark grey.
SCALE = [[0.0, "#2c7bb6"], [0.35, "#abd9e9"], [0.5, "#ffffbf"], [0.7, "#fdae61"], [1.0, "#d7191c"]]


def loss_figure(record: RunRecord) -> Figure:
    traces = [_line("train", *record.curve("loss"), TRAIN_COLOUR)]
    if record.held_out:
        steps, values = zip(*record.held_out, strict=True)
        traces.append(_line("held out", list(steps), list(values), HELD_OUT_COLOUR, mode="lines+markers"))
    return figure(traces, x=axis("Step"), y=axis("Loss (nats a token)"), height=380)


def curve_figure(record: RunRecord, name: str, title: str, *, logarithmic: bool = False) -> Figure:
    """One metric over steps."""
    y = axis(title, type="log", tickformat=",~r") if logarithmic else axis(title, rangemode="tozero")
    return figure([_line(name, *record.curve(name), TRAIN_COLOUR)], x=axis("Step"), y=y, height=260, showlegend=False)


def balance_figure(record: RunRecord) -> Figure:
    """Layers over steps; a block of steps shows its worst."""
    rows = [row for row in record.steps if "fullest_expert_ratio" in row]
    size = -(-len(rows) // MOST_COLUMNS) or 1
    blocks = [rows[first : first + size] for first in range(0, len(rows), size)]
    worst = [
        [max(values) for values in zip(*(row["fullest_expert_ratio"] for row in block), strict=True)]
        for block in blocks
    ]
    limit = record.facts["num_experts"] / record.facts["top_k"]
    return _heat_map(
        x=[block[-1]["step"] for block in blocks],
        y=_layers(record),
        z=[list(values) for values in zip(*worst, strict=True)],
        most=min(limit, 4.0),
        x_axis=axis("Step"),
        hover="step %{x}, %{y}: %{z:.2f} × the mean",
    )


def load_figure(record: RunRecord) -> Figure:
    """Experts of each layer at the last logged step: rows over the mean."""
    last = [row for row in record.steps if "expert_rows" in row][-1]["expert_rows"]
    z = [[count * len(counts) / max(1, sum(counts)) for count in counts] for counts in last]
    return _heat_map(
        x=list(range(record.facts["num_experts"])),
        y=_layers(record),
        z=z,
        most=2.0,
        x_axis=axis("Expert"),
        hover="%{y}, expert %{x}: %{z:.2f} × the mean",
    )


def time_figure(record: RunRecord) -> Figure:
    """A bar an operator, forward and backward; what no operator took is the last, with what took next to nothing."""
    step_s = _mean_step_s(record)
    whole = record.mean("operator_s")
    names = sorted({name.removesuffix(BACKWARD) for name in whole}, key=lambda name: -_both(whole, name))
    names = [name for name in names if _both(whole, name) > LEAST_SHARE * step_s]
    seconds = {name + way: whole.get(name + way, 0.0) for name in names for way in ("", BACKWARD)}
    rest_s = max(0.0, step_s - sum(seconds.values()))
    scale_s, unit = time_unit(step_s)
    forward = [*(seconds[name] for name in names), rest_s]
    backward = [*(seconds[name + BACKWARD] for name in names), 0.0]
    lines = [
        f"{name} ({share:.0%})"
        for name, share in zip(
            [*names, "the rest"], ((a + b) / step_s for a, b in zip(forward, backward, strict=True)), strict=True
        )
    ]
    traces = [
        _bars(name, colour, lines, [value / scale_s for value in values], unit)
        for name, colour, values in (("forward", FORWARD_COLOUR, forward), ("backward", BACKWARD_COLOUR, backward))
    ]
    return figure(
        traces,
        x=axis(f"Time of one step ({unit})", tickformat=",~r"),
        y=axis("", autorange="reversed"),
        height=130 + LINE_HEIGHT * len(lines),
        barmode="stack",
        bargap=0.3,
    )


def bytes_figure(record: RunRecord) -> Figure:
    """A bar a collective: what a rank sends in one step."""
    sent = dict(sorted(record.mean("collective_bytes").items(), key=lambda item: -item[1]))
    trace = _bars("sent", FORWARD_COLOUR, list(sent), [num_bytes / 1e6 for num_bytes in sent.values()], "MB")
    x, y = axis("Bytes a rank sends in one step (MB)"), axis("", autorange="reversed")
    return figure([trace], x=x, y=y, height=110 + LINE_HEIGHT * len(sent), bargap=0.3)


def dropped_figure(record: RunRecord) -> Figure:
    """Rows that no expert had room for, a line a layer."""
    rows = [row for row in record.steps if "dropped_rows" in row]
    steps = [row["step"] for row in rows]
    by_layer = zip(*(row["dropped_rows"] for row in rows), strict=True)
    traces = [
        _line(name, steps, list(values), BATCH_COLOURS[index % len(BATCH_COLOURS)])
        for index, (name, values) in enumerate(zip(_layers(record), by_layer, strict=True))
    ]
    return figure(traces, x=axis("Step"), y=axis("Rows dropped", rangemode="tozero"), height=300)


def _both(seconds: dict[str, float], name: str) -> float:
    return seconds.get(name, 0.0) + seconds.get(name + BACKWARD, 0.0)


def _mean_step_s(record: RunRecord) -> float:
    """Over the steps whose operators are counted."""
    values = [row["step_s"] for row in record.steps if "operator_s" in row]
    values = values[1:] or values
    return float(sum(values) / len(values))


def _layers(record: RunRecord) -> list[str]:
    return [f"layer {layer}" for layer in record.facts["moe_layers"]]


def _line(name: str, steps: list[int], values: list[float], colour: str, mode: str = "lines") -> dict[str, Any]:
    size = -(-len(steps) // MOST_POINTS) or 1
    blocks = [range(first, min(first + size, len(steps))) for first in range(0, len(steps), size)]
    return {
        "type": "scatter",
        "mode": mode if len(steps) > 1 else "markers",
        "name": name,
        "x": [steps[block[-1]] for block in blocks],
        "y": [sum(values[index] for index in block) / len(block) for block in blocks],
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 6},
        "hovertemplate": "step %{x}: %{y:.4g}<extra>" + name + "</extra>",
    }


def _bars(name: str, colour: str, lines: list[str], values: list[float], unit: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": lines,
        "x": values,
        "marker": {"color": colour},
        "hovertemplate": f"%{{y}}, {name}: %{{x:.4g}} {unit}<extra></extra>",
    }


def _heat_map(
    *, x: list[int], y: list[str], z: list[list[float]], most: float, x_axis: dict[str, Any], hover: str
) -> Figure:
    trace = {
        "type": "heatmap",
        "x": x,
        "y": y,
        "z": z,
        "zmin": 0.0 if most <= 2 else 1.0,
        "zmax": most,
        "colorscale": SCALE,
        "colorbar": {"title": {"text": "× mean"}, "thickness": 14},
        "hovertemplate": hover + "<extra></extra>",
    }
    height = min(1400, 150 + max(LINE_HEIGHT, 200 // max(1, len(y))) * len(y))
    return figure([trace], x=x_axis, y=axis("", autorange="reversed", type="category"), height=height)
