"""MixServe's exchanges between nodes and inside them, one after the other or fused (section III-D, Figures 8, 9, 12).

n nodes, each a tensor-parallel group. In round i (1 to n - 1) node s sends to node s + i, on its outgoing wire.
- dispatch: what arrives is gathered inside the node: n - 1 all-gathers (Algorithm 2)
- combine: own rows and what arrives are reduce-scattered inside and weighted, n times; then one all-gather (Alg. 1)
Fused, the work inside a node on what has arrived runs beside the next round's messages; synchronous, it begins when the
node's own sends and receives are over. With equal rounds the results equal the formulas in `antiphon.cost.exchange`;
times of their own for every message and node show what skew does. Rejected: one time for all nodes, which hides skew.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.base.errors import UserError
from antiphon.sim.events import EventGraph, Run
from antiphon.sim.resources import InOrder

Times = float | Sequence[Sequence[float]] | NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """`inter_s`: [node, round] time of the message that a node sends in round 1, 2, ... `intra_s`: [node, round] time
    of the work inside on what arrived in that round; for `combine` one column more, the node's own rows first.
    `weight_s`: weighting after each reduce-scatter; `gather_s`: the last all-gather (both of `combine` only)."""

    num_nodes: int
    combine: bool
    inter_s: Times
    intra_s: Times
    weight_s: float = 0.0
    gather_s: float = 0.0

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise UserError(f"an exchange between {self.num_nodes} nodes: give at least 1")
        if not self.combine and (self.weight_s or self.gather_s):
            raise UserError("weight_s and gather_s belong to combine: a dispatch has neither")
        for name, columns in (("inter_s", self.num_nodes - 1), ("intra_s", self.num_nodes - (not self.combine))):
            self._matrix(name, columns)

    def _matrix(self, name: str, num_columns: int) -> NDArray[np.float64]:
        value = np.asarray(getattr(self, name), dtype=np.float64)
        shape = (self.num_nodes, num_columns)
        if value.ndim and value.shape != shape:
            raise UserError(f"exchange: {name} has shape {value.shape}: give one time or an array of shape {shape}")
        return np.broadcast_to(value, shape)

    def message_s(self, node: int, round_number: int) -> float:
        return float(self._matrix("inter_s", self.num_nodes - 1)[node, round_number - 1])

    def inside_s(self, node: int, position: int) -> float:
        return float(self._matrix("intra_s", self.num_nodes - (not self.combine))[node, position])


def simulate_exchange(exchange: Exchange, *, fused: bool) -> Run:
    """When every message and every step inside a node runs. Tracks of node 0: ``node[0] out``, ``node[0] in``,
    ``node[0] inside``, ``node[0] weights``."""
    graph = EventGraph()
    nodes = range(exchange.num_nodes)
    for node in nodes:
        for part in ("out", "in", "inside", "weights"):
            graph.resource(_track(node, part), InOrder() if part == "inside" else None)
    sent, arrived = _messages(graph, exchange)
    for node in nodes:
        everything = [*sent[node], *arrived[node]]
        waits = [[message] if fused else everything for message in arrived[node]]
        if exchange.combine:
            _reduce(graph, exchange, node, [[] if fused else everything, *waits])
        else:
            for position, after in enumerate(waits):
                graph.add(
                    f"all-gather {position + 1}",
                    exchange.inside_s(node, position),
                    _track(node, "inside"),
                    after=after,
                    kind="all_gather",
                )
    return graph.run()


def _track(node: int, part: str) -> str:
    return f"node[{node}] {part}"


def _messages(graph: EventGraph, exchange: Exchange) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """All rounds' messages: (sends of each node, arrivals at each node), each in the order of rounds.

    A message occupies the sender's outgoing and the receiver's incoming wire for its time; where rounds have drifted
    apart, two messages for one node queue at its incoming wire.
    """
    nodes = range(exchange.num_nodes)
    sent: dict[int, list[int]] = {node: [] for node in nodes}
    arrived: dict[int, list[int]] = {node: [] for node in nodes}
    for round_number in range(1, exchange.num_nodes):
        for node in nodes:
            target, duration_s = (node + round_number) % exchange.num_nodes, exchange.message_s(node, round_number)
            label = f"round {round_number}"
            out = graph.add(f"{label} to {target}", duration_s, _track(node, "out"), kind="inter")
            carried = graph.add(
                f"{label} from {node}", duration_s, _track(target, "in"), after_first_start=[out], kind="inter"
            )
            sent[node].append(out)
            arrived[target].append(graph.add("arrived", 0.0, after=[out, carried]))
    return sent, arrived


def _reduce(graph: EventGraph, exchange: Exchange, node: int, waits: Sequence[Sequence[int]]) -> None:
    """Reduce-scatter and weight each part when it is there, then gather the sums."""
    weighted = []
    for position, after in enumerate(waits):
        scattered = graph.add(
            f"reduce-scatter {position + 1}",
            exchange.inside_s(node, position),
            _track(node, "inside"),
            after=after,
            kind="reduce_scatter",
        )
        weights = graph.add(
            f"weights {position + 1}", exchange.weight_s, _track(node, "weights"), after=[scattered], kind="weights"
        )
        weighted.append(weights)
    graph.add("all-gather", exchange.gather_s, _track(node, "inside"), after=weighted, kind="all_gather")
