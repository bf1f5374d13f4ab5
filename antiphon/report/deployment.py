"""A drawing of one instance of a phase: its nodes, the devices in them, which part of the model each holds, the links.

1. workers fill nodes in the order in which the planner packs them: the wider ones first, none split over nodes that a
   node could hold
2. a device shows its worker's number; its tip says the worker, its place in it, and the experts it holds
3. many nodes that look alike are drawn once and counted

Rejected: a drawing of the whole cluster. Devices that the plan does not use hide those it does.
"""

from dataclasses import dataclass

from antiphon.base.units import number
from antiphon.report.charts import FREE, ROLE_COLOURS, Drawing
from antiphon.report.draw import WIDTH, element, label, picture, width_of
from antiphon.report.words import PHASE_TITLES, plural
from antiphon.specs.cluster import ClusterSpec, NodeGroup
from antiphon.specs.plan import PhaseName, PhasePlan

MOST_NODES = 6
"""Nodes of a kind that are drawn."""
MOST_EXPERTS = 12
"""Experts that a tip names."""
CELL, GAP, EDGE = 34.0, 4.0, 8.0
HEAD = 46.0
TIP_OF_IDLE = "not used by this instance"


@dataclass(frozen=True, kw_only=True)
class DeviceSeat:
    """What one device of a node does. `number`: what it shows."""

    role: str
    number: int
    tip: str


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
    roles = dict.fromkeys(seat.role for filled in nodes.values() for node in filled for seat in node)
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
            found.setdefault(use.device, []).append([DeviceSeat(role=use.role, number=worker, tip=tip) for tip in tips])
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
                seats.append(DeviceSeat(role="both", number=stage + 1 if parallel.pp > 1 else rank, tip=tip))
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
        idle = [DeviceSeat(role="", number=0, tip=TIP_OF_IDLE)] * (group.devices_per_node - len(node))
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
    colour = ROLE_COLOURS.get(seat.role, FREE)
    square = element("rect", x=x, y=y, width=CELL, height=CELL, rx=3, fill=colour, tip=seat.tip)
    if not seat.role or width_of(str(seat.number)) > CELL:
        return square
    middle = {"x": x + CELL / 2, "y": y + CELL / 2 + 4}
    return square + label(**middle, words=str(seat.number), text_anchor="middle", fill="white", pointer_events="none")


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
