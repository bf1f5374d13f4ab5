"""The figures of a serving plan's page.

1. latency against the objective's rate where the choice is made: what each layout reaches at most, the chosen plan, the
   best of every other layout, the target
2. the chosen pipeline over time: a row of bars per worker and link, micro-batches in colours, layers as numbers
3. stacked bars: what lies in a device's memory, and what the time of each part is spent on
4. what the best plan of each layout gives when one thing changes: the target, the lengths, the network
5. one instance of a phase: its nodes, the devices in them, which part of the model each holds, the links. Workers fill
   nodes in the order in which the planner packs them: the wider ones first, none split over nodes that a node could
   hold. A device shows its worker's number; its tip says the worker, its place in it, and the experts it holds. Many
   nodes that look alike are drawn once and counted

Rejected: all candidates as dots. Thousands of them hide the few that anybody could choose. Rejected: a drawing of the
whole cluster. Devices that the plan does not use hide those it does.
"""

from antiphon.base.units import milliseconds, number
from antiphon.cost.roofline import Parts
from antiphon.report.document import (
    BATCH_COLOURS,
    FREE,
    LAYOUT_COLOURS,
    MARK,
    MEMORY_COLOURS,
    PART_COLOURS,
    ROLE_COLOURS,
    Axis,
    BlockChart,
    ChartBlock,
    ChartLine,
    Drawing,
    LineChart,
    Spot,
    stacked,
)
from antiphon.report.draw import WIDTH, element, label, picture, width_of
from antiphon.report.gather import MemoryUse, PhaseContents, Points, Sensitivity
from antiphon.report.words import (
    LAYOUT_TITLES,
    OBJECTIVE_UNITS,
    PHASE_TITLES,
    latency_s,
    plural,
    short_degrees,
    time_unit,
)
from antiphon.sim.gantt import Bar, span_s
from antiphon.specs.cluster import ClusterSpec, NodeGroup
from antiphon.specs.plan import LATENCIES, Layout, Objective, Parallel, PhaseName, PhasePlan, Predicted
from antiphon.specs.workload import SloSpec

WINDOW = (0.5, 1.5)
"""What is shown of the latencies: these parts of the target, and the marked points."""
HIGHEST = 1.5
"""What is shown of the rates, of the best marked point: beyond the target some layouts reach many times as much."""
MOST_NODES = 6
"""Nodes of a kind that are drawn."""
MOST_EXPERTS = 12
"""Experts that a tip names."""
CELL, GAP, EDGE = 34.0, 4.0, 8.0
HEAD = 46.0
TIP_OF_IDLE = "not used by this instance"


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
    losers = [
        (loser.layout, loser.parallel, loser.predicted)
        for loser in phase.rejected
        if loser.predicted is not None and loser.parallel is not None
    ]
    losers.sort(key=lambda loser: -(loser[2].score(objective) or 0.0))
    found = [_spot("chosen: ", phase.layout, phase.parallel, phase.predicted, objective)]
    found += [_spot("" if index else "runner-up: ", *loser, objective) for index, loser in enumerate(losers)]
    return [spot for spot in found if spot is not None]


def _spot(head: str, layout: Layout, parallel: Parallel, predicted: Predicted, objective: Objective) -> Spot | None:
    seconds, rate = latency_s(predicted), predicted.score(objective)
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
        name: {bound: seconds / scale_s for bound, seconds in part.seconds_by_bound().items()}
        for name, part in parts.items()
    }
    title = f"Time of one layer and micro-batch ({unit})"
    return BlockChart(x=Axis(title=title), blocks=stacked(rows, unit), colours=PART_COLOURS)


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


DeviceSeat = tuple[str, int, str]
"""What one device of a node does: its role, the number that it shows, its tip."""
Node = list[DeviceSeat]


def deployment_drawing(name: PhaseName, phase: PhasePlan, cluster: ClusterSpec) -> Drawing:
    """Nodes of each kind beside each other."""
    groups = {group.device.name: group for group in cluster.groups}
    nodes = {device: _packed(workers, groups[device]) for device, workers in _workers(phase).items()}
    columns = len(nodes)
    column_width = (WIDTH - 40 * (columns - 1)) / columns
    parts, bottom = [], 0.0
    for index, (device, filled) in enumerate(nodes.items()):
        drawn, height = _column(filled, groups[device], index * (column_width + 40), column_width)
        parts.append(drawn)
        bottom = max(bottom, height)
    words = _between(phase, [groups[device] for device in nodes])
    link = _wire([(column_width + 40) * index + column_width / 2 for index in range(columns)], bottom) if words else ""
    said = label(WIDTH / 2, bottom + 32, words, text_anchor="middle", css="soft") if words else ""
    which = "" if phase.num_instances == 1 else f", one of {phase.num_instances:,} instances"
    title = f"{PHASE_TITLES[name]}: devices and links{which}"
    roles = dict.fromkeys(role for filled in nodes.values() for node in filled for role, _, _ in node)
    return Drawing(
        name=f"{name}-deployment",
        title=title,
        caption=_caption(phase),
        svg=picture(bottom + (42 if words else 8), link + "".join(parts) + said, title),
        legend=tuple((role if role != "both" else "attention and experts", ROLE_COLOURS[role]) for role in roles),
    )


def _wire(places: list[float], top: float) -> str:
    """The network between nodes, a branch to each kind."""
    trunk = element("line", x1=0.0, x2=float(WIDTH), y1=top + 14, y2=top + 14, css="wire")
    branches = (element("line", x1=place, x2=place, y1=top + 2, y2=top + 14, css="wire") for place in places)
    return trunk + "".join(branches)


def _caption(phase: PhasePlan) -> str:
    if phase.layout == "disaggregated":
        shown = "workers; equal neighbours share a worker by tensor parallelism"
    else:
        shown = "stages of the pipeline" if phase.parallel.pp > 1 else "expert ranks"
    return f"Numbers are {shown}. Point at a device for what it holds."


def _workers(phase: PhasePlan) -> dict[str, list[list[DeviceSeat]]]:
    """Workers by device kind, each a list of its devices; the wider ones first."""
    parallel, experts = phase.parallel, experts_of_workers(phase)
    found: dict[str, list[list[DeviceSeat]]] = {}
    for use in phase.devices:
        if use.role == "attention":
            tp, count, role = parallel.attention_tp, parallel.attention_dp, "attention worker"
        elif use.role == "experts":
            tp, count, role = parallel.expert_tp, parallel.expert_workers, "expert worker"
        else:
            found.setdefault(use.device, []).extend(_colocated(phase, experts))
            continue
        held = experts if use.role == "experts" else {}
        for worker in range(count):
            tips = (f"{role} {worker}{_of(place, tp)}{_held(held.get(worker))}" for place in range(tp))
            found.setdefault(use.device, []).append([(use.role, worker, tip) for tip in tips])
    return {device: sorted(workers, key=len, reverse=True) for device, workers in found.items()}


def _colocated(phase: PhasePlan, experts: dict[int, list[int]]) -> list[list[DeviceSeat]]:
    """Attention's tensor-parallel groups, stage by stage; their devices numbered by stage, or by expert rank
    where there is one stage."""
    parallel = phase.parallel
    groups = []
    for stage in range(parallel.pp):
        for copy in range(parallel.attention_dp):
            seats = []
            for place in range(parallel.attention_tp):
                rank = (copy * parallel.attention_tp + place) // parallel.expert_tp
                head = f"stage {stage + 1}, " if parallel.pp > 1 else ""
                attention = f"attention copy {copy}{_of(place, parallel.attention_tp)}"
                share = (copy * parallel.attention_tp + place) % parallel.expert_tp
                tip = f"{head}{attention}\nexpert rank {rank}{_of(share, parallel.expert_tp)}{_held(experts.get(rank))}"
                seats.append(("both", stage + 1 if parallel.pp > 1 else rank, tip))
            groups.append(seats)
    return groups


def _of(place: int, tp: int) -> str:
    return f", device {place + 1} of {tp}" if tp > 1 else ""


def experts_of_workers(phase: PhasePlan) -> dict[int, list[int]]:
    """Which experts each worker (or expert rank) holds."""
    found: dict[int, list[int]] = {}
    for expert, owners in enumerate(phase.placement):
        for worker, _ in owners:
            found.setdefault(worker, []).append(expert)
    return found


def _held(experts: list[int] | None) -> str:
    """``experts 0-24``, ``experts 3, 7, 11``."""
    if not experts:
        return ""
    if len(experts) > 1 and experts[-1] - experts[0] == len(experts) - 1:
        return f"\nexperts {experts[0]} to {experts[-1]}"
    shown = ", ".join(map(str, experts[:MOST_EXPERTS]))
    more = f" and {len(experts) - MOST_EXPERTS} more" if len(experts) > MOST_EXPERTS else ""
    return f"\n{'expert' if len(experts) == 1 else 'experts'} {shown}{more}"


def _packed(workers: list[list[DeviceSeat]], group: NodeGroup) -> list[Node]:
    """Nodes filled one after the other; a worker that a node could hold is not split."""
    size = group.devices_per_node
    nodes: list[Node] = [[]]
    for seats in workers:
        if len(nodes[-1]) + len(seats) > size and (len(seats) <= size or nodes[-1]):
            nodes.append([])
        for start in range(0, len(seats), size):
            if start:
                nodes.append([])
            nodes[-1].extend(seats[start : start + size])
    return nodes


def _column(nodes: list[Node], group: NodeGroup, left: float, width: float) -> tuple[str, float]:
    """The nodes of one kind, and where they end."""
    used = sum(map(len, nodes))
    head = f"{group.device.name}: {plural(used, 'device')} on {plural(len(nodes), 'node')} of {group.devices_per_node}"
    per_row = min(4, group.devices_per_node)
    rows = -(-group.devices_per_node // per_row)
    node_width = 2 * EDGE + per_row * (CELL + GAP) - GAP
    node_height = 2 * EDGE + rows * (CELL + GAP) - GAP
    across = max(1, int((width + 14) // (node_width + 14)))
    shown = nodes if len(nodes) <= MOST_NODES else nodes[: MOST_NODES - 1]
    parts = [label(left, 14, head, font_weight="600"), label(left, 33, _inside(group), css="soft")]
    for index, node in enumerate(shown):
        x = left + (index % across) * (node_width + 14)
        y = HEAD + (index // across) * (node_height + 14)
        parts.append(element("rect", x=x, y=y, width=node_width, height=node_height, rx=6, css="node"))
        idle = [("", 0, TIP_OF_IDLE)] * (group.devices_per_node - len(node))
        parts += [_device(seat, x + EDGE, y + EDGE, place, per_row) for place, seat in enumerate([*node, *idle])]
    drawn_rows = -(-len(shown) // across)
    bottom = HEAD + drawn_rows * (node_height + 14) - 14
    if len(shown) < len(nodes):
        parts.append(label(left, bottom + 20, f"and {plural(len(nodes) - len(shown), 'node')} more", css="soft"))
        bottom += 26
    return "".join(parts), bottom


def _inside(group: NodeGroup) -> str:
    """What joins the devices of a scale-up domain."""
    if group.scale_up_domain == 1:
        return "no link between devices of a node"
    rate = number(group.scale_up_bytes_per_s / 1e9)
    how = ", a wire between each pair," if group.device.scale_up_mesh else ""
    return f"{group.scale_up_domain} devices joined{how} at {rate} GB/s each, each way"


def _device(seat: DeviceSeat, left: float, top: float, place: int, per_row: int) -> str:
    x, y = left + (place % per_row) * (CELL + GAP), top + (place // per_row) * (CELL + GAP)
    role, number_shown, tip = seat
    square = element("rect", x=x, y=y, width=CELL, height=CELL, rx=3, fill=ROLE_COLOURS.get(role, FREE), tip=tip)
    if not role or width_of(str(number_shown)) > CELL:
        return square
    middle = {"x": x + CELL / 2, "y": y + CELL / 2 + 4}
    return square + label(**middle, words=str(number_shown), text_anchor="middle", fill="white", pointer_events="none")


def _between(phase: PhasePlan, groups: list[NodeGroup]) -> str:
    """What goes between nodes, and how fast; empty where one node holds everything."""
    rates = ", ".join(
        f"{number(group.scale_out_bytes_per_s / 1e9)} GB/s a device of {group.device.name}" for group in groups
    )
    if phase.layout == "disaggregated":
        return f"rows of tokens to experts and back, M to N, between nodes: {rates}, each way"
    devices = sum(use.num_devices for use in phase.devices) / phase.num_instances
    together = max(groups[0].devices_per_node, groups[0].scale_up_domain)
    return f"between nodes: {rates}, each way" if devices > together else ""
