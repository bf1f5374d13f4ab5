"""MixServe's exchanges between nodes and inside them, one after the other or fused (section III-D, Figures 8, 9, 12).

n nodes, each a tensor-parallel group. In round i (1 to n - 1) node s sends to node s + i, on its outgoing wire.
- dispatch: what arrives is gathered inside the node: n - 1 all-gathers (Algorithm 2)
- combine: own rows and what arrives are reduce-scattered inside and weighted, n times; then one all-gather (Alg. 1)
Fused, the work inside a node on what has arrived runs beside the next round's messages; synchronous, it begins when the
node's own sends and receives are over. The results equal the formulas in `antiphon.cost.exchange`; here it is events
that say so. A message occupies the sender's outgoing and the receiver's incoming wire for its time.
"""

from collections.abc import Sequence

from antiphon.sim.events import EventGraph, Run
from antiphon.sim.resources import InOrder


def simulate_exchange(
    num_nodes: int, inter_s: float, intra_s: float, gather_s: float | None = None, *, fused: bool
) -> Run:
    """When every message and every step inside a node runs. `inter_s`: of a message; `intra_s`: of the work inside on
    what arrived in a round; `gather_s`: of a combine's last all-gather, None for a dispatch. Tracks of node 0:
    ``node[0] out``, ``node[0] in``, ``node[0] inside``."""
    graph = EventGraph()
    nodes = range(num_nodes)
    for node in nodes:
        for part in ("out", "in", "inside"):
            graph.resource(_track(node, part), InOrder() if part == "inside" else None)
    sent, arrived = _messages(graph, num_nodes, inter_s)
    for node in nodes:
        everything = [*sent[node], *arrived[node]]
        waits = [[message] if fused else everything for message in arrived[node]]
        if gather_s is None:
            _inside(graph, node, "all-gather", intra_s, waits)
        else:
            scattered = _inside(graph, node, "reduce-scatter", intra_s, [[] if fused else everything, *waits])
            graph.add("all-gather", gather_s, _track(node, "inside"), after=scattered, kind="all_gather")
    return graph.run()


def _track(node: int, part: str) -> str:
    return f"node[{node}] {part}"


def _messages(graph: EventGraph, num_nodes: int, inter_s: float) -> tuple[list[list[int]], list[list[int]]]:
    """All rounds' messages: (sends of each node, arrivals at each node), each in the order of rounds."""
    sent: list[list[int]] = [[] for _ in range(num_nodes)]
    arrived: list[list[int]] = [[] for _ in range(num_nodes)]
    for round_number in range(1, num_nodes):
        for node in range(num_nodes):
            target, label = (node + round_number) % num_nodes, f"round {round_number}"
            out = graph.add(f"{label} to {target}", inter_s, _track(node, "out"), kind="inter")
            carried = graph.add(
                f"{label} from {node}", inter_s, _track(target, "in"), after_first_start=[out], kind="inter"
            )
            sent[node].append(out)
            arrived[target].append(graph.add("arrived", 0.0, after=[out, carried]))
    return sent, arrived


def _inside(graph: EventGraph, node: int, name: str, intra_s: float, waits: Sequence[Sequence[int]]) -> list[int]:
    """One step inside the node after each of `waits`."""
    track, kind = _track(node, "inside"), name.replace("-", "_")
    return [
        graph.add(f"{name} {number}", intra_s, track, after=after, kind=kind)
        for number, after in enumerate(waits, start=1)
    ]
