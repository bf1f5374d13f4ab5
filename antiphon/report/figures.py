"""The figures of a serving plan's page.

1. latency against the objective's rate where the choice is made: what each layout reaches at most, the chosen plan, the
   best of every other layout, the target
2. the chosen pipeline over time: a row of bars per worker and link, micro-batches in colours, layers as numbers
3. stacked bars: what lies in a device's memory, and what the time of each part is spent on
4. what the best plan of each layout gives when one thing changes: the target, the lengths, the network

Rejected: all candidates as dots. Thousands of them hide the few that anybody could choose.
"""

from antiphon.base.units import milliseconds, number
from antiphon.cost.parts import BOUND_NAMES, Parts
from antiphon.report.charts import (
    BATCH_COLOURS,
    LAYOUT_COLOURS,
    MARK,
    MEMORY_COLOURS,
    PART_COLOURS,
    Axis,
    BlockChart,
    ChartBlock,
    ChartLine,
    LineChart,
    Spot,
    stacked,
)
from antiphon.report.contents import MemoryUse, PhaseContents, Points, Sensitivity
from antiphon.report.words import LAYOUT_TITLES, OBJECTIVE_UNITS, latency_s, score, short_degrees, time_unit
from antiphon.sim.gantt import Bar, span_s
from antiphon.specs.plan import LATENCIES, Layout, Objective, Parallel, Predicted
from antiphon.specs.workload import SloSpec

WINDOW = (0.5, 1.5)
"""What is shown of the latencies: these parts of the target, and the marked points."""
HIGHEST = 1.5
"""What is shown of the rates, of the best marked point: beyond the target some layouts reach many times as much."""


def frontier_chart(contents: PhaseContents, objective: Objective, slo: SloSpec) -> LineChart:
    """Both axes linear, cut where no marked point is near. Latencies in milliseconds; a rate per device where the
    objective is a latency itself."""
    objective = rate_objective(objective)
    target_s = slo.ttft_s if contents.name == "prefill" else slo.tpot_s
    spots = _spots(contents, objective)
    centre = target_s * 1e3 if target_s else max((spot.x for spot in spots), default=1.0)
    shown = tuple(spot for spot in spots if spot.is_chosen or spot.x <= WINDOW[1] * centre)
    low = min([WINDOW[0] * centre, *(0.8 * spot.x for spot in shown)])
    high = max([WINDOW[1] * centre, *(1.1 * spot.x for spot in shown)])
    latency = "Time to first token (ms)" if contents.name == "prefill" else "Time per output token (ms)"
    lines = tuple(_front(points, high) for points in contents.fronts if points.scores)
    reached = [rate for line in lines for x, rate in zip(line.x, line.y, strict=True) if rate and x <= high]
    best = max((spot.y for spot in shown), default=0.0)
    lowest = min((spot.y for spot in shown), default=0.0)
    top = min(max([*reached, best]), HIGHEST * best) if best else max(reached, default=1.0)
    return LineChart(
        x=Axis(title=latency, low=low, high=high),
        y=Axis(title=rate_title(objective), low=max(0.0, min(2 * lowest - best, 0.8 * lowest)), high=1.12 * top),
        lines=lines,
        spots=shown,
        mark=None if target_s is None else (target_s * 1e3, f"target {milliseconds(target_s)}"),
        height=430,
    )


def rate_objective(objective: Objective) -> Objective:
    """The rate that is drawn against a latency."""
    return "per-gpu" if objective in LATENCIES else objective


def rate_title(objective: Objective) -> str:
    return OBJECTIVE_UNITS[objective][0].upper() + OBJECTIVE_UNITS[objective][1:]


def _front(points: Points, high: float) -> ChartLine:
    """A staircase: until the next point is reached, nothing better than this one can be had."""
    x = tuple(seconds * 1e3 for seconds in points.latency_s)
    tips = tuple(
        f"{label}\n{milliseconds(seconds)}, {number(value)}"
        for label, seconds, value in zip(points.labels, points.latency_s, points.scores, strict=True)
    )
    kept = max(1, sum(value <= high for value in x))
    return ChartLine(
        name=LAYOUT_TITLES[points.layout],
        colour=LAYOUT_COLOURS[points.layout],
        x=x[:kept],
        y=points.scores[:kept],
        tips=tips[:kept],
        style="steps",
    )


def _spots(contents: PhaseContents, objective: Objective) -> list[Spot]:
    """The chosen plan, then the best of every other layout, the runner-up first."""
    phase = contents.phase
    losers = [loser for loser in phase.rejected if loser.predicted is not None and loser.parallel is not None]
    losers.sort(key=lambda loser: -(score(loser.predicted, objective) or 0.0 if loser.predicted else 0.0))
    found = [_spot("chosen: ", phase.layout, phase.parallel, phase.predicted, objective)]
    for index, loser in enumerate(losers):
        assert loser.predicted is not None
        assert loser.parallel is not None
        head = "" if index else "runner-up: "
        found.append(_spot(head, loser.layout, loser.parallel, loser.predicted, objective))
    return [spot for spot in found if spot is not None]


def _spot(head: str, layout: Layout, parallel: Parallel, predicted: Predicted, objective: Objective) -> Spot | None:
    seconds, rate = latency_s(predicted), score(predicted, objective)
    if seconds is None or rate is None:
        return None
    is_chosen = head.startswith("chosen")
    return Spot(
        x=seconds * 1e3,
        y=rate,
        words=f"{head}{LAYOUT_TITLES[layout]}, {short_degrees(layout, parallel)}: {number(rate)}",
        colour=MARK if is_chosen else LAYOUT_COLOURS[layout],
        is_chosen=is_chosen,
        low=None if predicted.band is None else rate * (1 - predicted.band),
        high=None if predicted.band is None else rate * (1 + predicted.band),
    )


def pipeline_chart(bars: tuple[Bar, ...]) -> BlockChart:
    """Time from the first bar; first track on top."""
    start_s, end_s = span_s(bars)
    scale_s, unit = time_unit(end_s - start_s)
    blocks = tuple(
        ChartBlock(
            row=bar.track,
            start=(bar.start_s - start_s) / scale_s,
            length=bar.duration_s / scale_s,
            group=_group(bar),
            text=str((bar.layer if bar.layer >= 0 else bar.micro_batch) + 1),
            tip=f"{bar.label}\nfrom {(bar.start_s - start_s) / scale_s:.4g} {unit}, "
            f"{bar.duration_s / scale_s:.4g} {unit} long",
        )
        for bar in bars
    )
    names = dict.fromkeys(_group(bar) for bar in sorted(bars, key=lambda bar: (bar.micro_batch, bar.start_s)))
    colours = {name: BATCH_COLOURS[index % len(BATCH_COLOURS)] for index, name in enumerate(names)}
    return BlockChart(x=Axis(title=f"Time ({unit})"), blocks=blocks, colours=colours)


def _group(bar: Bar) -> str:
    """Bars of one colour: those of a micro-batch where there are several, else those of a kind."""
    return f"micro-batch {bar.micro_batch + 1}" if bar.micro_batch >= 0 else bar.kind or bar.label


def memory_chart(memory: tuple[MemoryUse, ...]) -> BlockChart:
    """One bar per role of device, in GB, as long as the device's memory."""
    rows = {
        f"{use.role}, {use.device}": {
            "weights": use.weight_bytes / 1e9,
            "KV cache": use.kv_bytes / 1e9,
            "reserve": use.reserve_bytes / 1e9,
            "free": use.free_bytes / 1e9,
        }
        for use in memory
    }
    return BlockChart(x=Axis(title="Memory of one device (GB)"), blocks=stacked(rows, "GB"), colours=MEMORY_COLOURS)


def parts_chart(parts: dict[str, Parts]) -> BlockChart:
    """One bar per part of a layer; the widest colour is what bounds it."""
    scale_s, unit = time_unit(max((float(part.total_s) for part in parts.values()), default=0.0))
    rows = {
        name: {bound: seconds / scale_s for bound, seconds in seconds_by_bound(part).items()}
        for name, part in parts.items()
    }
    title = f"Time of one layer and micro-batch ({unit})"
    return BlockChart(x=Axis(title=title), blocks=stacked(rows, unit), colours=PART_COLOURS)


def seconds_by_bound(part: Parts) -> dict[str, float]:
    """What a part's time is spent on."""
    times = (part.compute_s, part.memory_s, part.scale_up_s, part.scale_out_s, part.fixed_s)
    return dict(zip(BOUND_NAMES, map(float, times), strict=True))


def sensitivity_chart(sensitivity: Sensitivity, objective: Objective) -> LineChart:
    """A line per layout; a gap where the layout cannot run. The plan's own value is marked."""
    lines = tuple(
        ChartLine(
            name=LAYOUT_TITLES[layout],
            colour=LAYOUT_COLOURS[layout],
            x=sensitivity.values,
            y=scores,
            tips=tuple(
                f"{LAYOUT_TITLES[layout]}\n{number(value)}: {'cannot run' if rate is None else number(rate)}"
                for value, rate in zip(sensitivity.values, scores, strict=True)
            ),
            has_dots=True,
        )
        for layout, scores in sensitivity.scores.items()
    )
    x = Axis(title=sensitivity.axis, low=None, is_logarithmic=True, ticks=sensitivity.values)
    mark = None if sensitivity.current is None else (sensitivity.current, "this plan")
    return LineChart(x=x, y=Axis(title=rate_title(objective)), lines=lines, mark=mark, height=300)
