"""The figures of a training run's page.

1. curves over steps: loss, learning rate, gradient norm; a long run's are thinned to means over blocks of steps
2. heat maps: the fullest expert of each layer over steps, every expert of each layer in the end
3. bars: time by operator, bytes by collective
"""

from antiphon.report.chart import Axis, Block, BlockChart, HeatMap, Line, LineChart
from antiphon.report.colours import BATCH_COLOURS, MARK
from antiphon.report.run_record import RunRecord
from antiphon.report.words import time_unit

MOST_POINTS = 1000
MOST_COLUMNS = 300
LEAST_SHARE = 0.002
ROW_HEIGHT = 26
BACKWARD = " backward"
TRAIN_COLOUR, HELD_OUT_COLOUR = BATCH_COLOURS[0], MARK
FORWARD_COLOUR, BACKWARD_COLOUR = BATCH_COLOURS[0], BATCH_COLOURS[1]
STEPS = Axis(title="Step", low=None)


def loss_chart(record: RunRecord) -> LineChart:
    lines = [_line("train", *record.curve("loss"), TRAIN_COLOUR)]
    if record.held_out:
        steps, values = zip(*record.held_out, strict=True)
        lines.append(_line("held out", list(steps), list(values), HELD_OUT_COLOUR, has_dots=True))
    return LineChart(x=STEPS, y=Axis(title="Loss (nats a token)", low=None), lines=tuple(lines), height=380)


def curve_chart(record: RunRecord, name: str, title: str, *, logarithmic: bool = False) -> LineChart:
    """One metric over steps."""
    y = Axis(title=title, low=None, is_logarithmic=True) if logarithmic else Axis(title=title)
    return LineChart(x=STEPS, y=y, lines=(_line(name, *record.curve(name), TRAIN_COLOUR),), height=260)


def balance_chart(record: RunRecord) -> HeatMap:
    """Layers over steps; a block of steps shows its worst."""
    rows = [row for row in record.steps if "fullest_expert_ratio" in row]
    size = -(-len(rows) // MOST_COLUMNS) or 1
    blocks = [rows[first : first + size] for first in range(0, len(rows), size)]
    worst = [
        [max(values) for values in zip(*(row["fullest_expert_ratio"] for row in block), strict=True)]
        for block in blocks
    ]
    limit = record.facts["num_experts"] / record.facts["top_k"]
    most = min(limit, 4.0)
    return HeatMap(
        column_name="step",
        columns=tuple(block[-1]["step"] for block in blocks),
        rows=_layers(record),
        values=tuple(tuple(values) for values in zip(*worst, strict=True)),
        low=0.0 if most <= 2 else 1.0,
        high=most,
        unit="× the mean",
    )


def load_chart(record: RunRecord) -> HeatMap:
    """Experts of each layer at the last logged step: rows over the mean."""
    last = [row for row in record.steps if "expert_rows" in row][-1]["expert_rows"]
    return HeatMap(
        column_name="expert",
        columns=tuple(range(record.facts["num_experts"])),
        rows=_layers(record),
        values=tuple(tuple(count * len(counts) / max(1, sum(counts)) for count in counts) for counts in last),
        low=0.0,
        high=2.0,
        unit="× the mean",
    )


def time_chart(record: RunRecord) -> BlockChart:
    """A bar an operator, forward and backward; what no operator took is the last, with what took next to nothing."""
    step_s = _mean_step_s(record)
    whole = record.mean("operator_s")
    names = sorted({name.removesuffix(BACKWARD) for name in whole}, key=lambda name: -_both(whole, name))
    names = [name for name in names if _both(whole, name) > LEAST_SHARE * step_s]
    both_ways = {name: (whole.get(name, 0.0), whole.get(name + BACKWARD, 0.0)) for name in names}
    rest_s = max(0.0, step_s - sum(map(sum, both_ways.values())))
    scale_s, unit = time_unit(step_s)
    blocks: list[Block] = []
    for name, (forward_s, backward_s) in (both_ways | {"the rest": (rest_s, 0.0)}).items():
        row, start = f"{name} ({(forward_s + backward_s) / step_s:.0%})", 0.0
        for way, seconds in (("forward", forward_s), ("backward", backward_s)):
            length = seconds / scale_s
            tip = f"{row}, {way}: {length:.4g} {unit}"
            blocks.append(Block(row=row, start=start, length=length, group=way, tip=tip))
            start += length
    colours = {"forward": FORWARD_COLOUR, "backward": BACKWARD_COLOUR}
    x = Axis(title=f"Time of one step ({unit})")
    return BlockChart(x=x, blocks=tuple(blocks), colours=colours, row_height=ROW_HEIGHT)


def bytes_chart(record: RunRecord) -> BlockChart:
    """A bar a collective: what a rank sends in one step."""
    sent = dict(sorted(record.mean("collective_bytes").items(), key=lambda item: -item[1]))
    blocks = tuple(
        Block(row=name, start=0.0, length=num_bytes / 1e6, group="sent", tip=f"{name}: {num_bytes / 1e6:.4g} MB")
        for name, num_bytes in sent.items()
    )
    x = Axis(title="Bytes a rank sends in one step (MB)")
    return BlockChart(x=x, blocks=blocks, colours={"sent": FORWARD_COLOUR}, row_height=ROW_HEIGHT)


def dropped_chart(record: RunRecord) -> LineChart:
    """Rows that no expert had room for, a line a layer."""
    rows = [row for row in record.steps if "dropped_rows" in row]
    steps = [row["step"] for row in rows]
    by_layer = zip(*(row["dropped_rows"] for row in rows), strict=True)
    lines = tuple(
        _line(name, steps, list(values), BATCH_COLOURS[index % len(BATCH_COLOURS)])
        for index, (name, values) in enumerate(zip(_layers(record), by_layer, strict=True))
    )
    return LineChart(x=STEPS, y=Axis(title="Rows dropped"), lines=lines)


def _both(seconds: dict[str, float], name: str) -> float:
    return seconds.get(name, 0.0) + seconds.get(name + BACKWARD, 0.0)


def _mean_step_s(record: RunRecord) -> float:
    """Over the steps whose operators are counted."""
    values = [row["step_s"] for row in record.steps if "operator_s" in row]
    values = values[1:] or values
    return float(sum(values) / len(values))


def _layers(record: RunRecord) -> tuple[str, ...]:
    return tuple(f"layer {layer}" for layer in record.facts["moe_layers"])


def _line(name: str, steps: list[int], values: list[float], colour: str, *, has_dots: bool = False) -> Line:
    size = -(-len(steps) // MOST_POINTS) or 1
    blocks = [range(first, min(first + size, len(steps))) for first in range(0, len(steps), size)]
    x = tuple(float(steps[block[-1]]) for block in blocks)
    y = tuple(sum(values[index] for index in block) / len(block) for block in blocks)
    tips = tuple(f"{name}, step {step:.0f}: {value:.4g}" for step, value in zip(x, y, strict=True))
    return Line(name=name, colour=colour, x=x, y=y, tips=tips, has_dots=has_dots or len(steps) == 1)
