"""A MoE layer's rows to their experts and back over two levels: fused, synchronous, plain EP and plain TP.

n nodes of m ranks, all processes of this machine; inside a node ranks talk over one transport, between nodes over
another. Every node has rows of its own, which choose experts uniformly. Nodes may be those of a cluster in a box
(`bench/box`), whose links are as slow as configured; what a link carries in a round trip is then counted.

| contestant | attention | experts |
|---|---|---|
| fused, synchronous | TP m, DP n | TP m, EP n (MixServe's hybrid) |
| expert parallel | TP m, DP n | EP n m: all-to-all, whole rows |
| tensor parallel | TP n m | TP n m: all-reduce of all rows, over the transport between nodes |

Experts return what they are given, so this is the price of communication. Results are checked first; then the
contestants take turns. A time is the slowest rank's, bytes are those that a rank sends on each level.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor
from typer import Option

from antiphon import _m2n
from antiphon.base.errors import ResourceError, UserError
from antiphon.base.progress import Report
from antiphon.base.units import format_bytes, format_seconds
from antiphon.bench.box import Box
from antiphon.bench.harness.children import Children, seconds_of_calls
from antiphon.bench.harness.columns import PATIENCE, ContestColumns, Row, UpTo, foreign_words, num_bytes, seconds, times
from antiphon.bench.harness.processes import box_of_ranks, check_mbit, enter_network, require_box
from antiphon.bench.harness.quiet import take_turns
from antiphon.bench.m2n.cases import TRANSPORTS
from antiphon.comm.m2n.native import SPIN_S
from antiphon.comm.two_level.exchange import message_bytes
from antiphon.comm.two_level.hybrid import HybridExchange
from antiphon.comm.two_level.levels import Levels, TwoLevel, open_levels
from antiphon.specs.placement import contiguous_placement

FUSED, SYNCHRONOUS, EXPERT, TENSOR = "fused", "synchronous", "expert parallel", "tensor parallel"
CONTESTANTS = (FUSED, SYNCHRONOUS, EXPERT, TENSOR)


@dataclass(frozen=True, kw_only=True)
class TwoLevelCase:
    """`tokens` of each node. `calls`: round trips of one turn of a contestant. `mbit`: of each node's link each way, in
    a box; None: nodes are this machine's loopback. `inner_mbit`: of each rank's link to the others of its node; then
    every rank is a host of its own, and `mbit` is of its link to the other nodes."""

    nodes: Annotated[int, Option(metavar="N", help="Nodes."), UpTo(16)] = 2
    ranks_per_node: Annotated[int, Option(metavar="M", help="Ranks of a node."), UpTo(16)] = 2
    tokens: Annotated[int, Option(metavar="T", help="Rows of each node."), UpTo(65_536)] = 64
    hidden: Annotated[int, Option(metavar="H", help="Width of a row."), UpTo(65_536)] = 2048
    num_experts: Annotated[int, Option("--experts", metavar="E", help="Experts in all."), UpTo(4096)] = 16
    top_k: Annotated[int, Option(metavar="K", help="Experts of a row.")] = 4
    inside: Annotated[str, Option(metavar="T", help="Transport inside a node."), TRANSPORTS] = "shm"
    across: Annotated[str, Option(metavar="T", help="Transport between nodes."), TRANSPORTS] = "tcp"
    mbit: Annotated[
        float | None, Option(metavar="R", show_default="no box", help="Nodes in a box, links of R 10^6 bits/s.")
    ] = None
    inner_mbit: Annotated[
        float | None, Option(metavar="R", show_default="shared memory", help="In a box: between ranks of a node, too.")
    ] = None
    only: Annotated[
        str, Option(metavar="C,C", show_default="all", help="Of: fused, synchronous, expert parallel, tensor parallel.")
    ] = ",".join(CONTESTANTS)
    calls: Annotated[int, Option(metavar="N", help="Round trips of a turn."), UpTo(100_000)] = 20
    repetitions: Annotated[int, Option(metavar="N", help="Turns of every contestant."), UpTo(1000)] = 5
    timeout: Annotated[float, Option(metavar="S", help="Patience of every wait."), PATIENCE] = 30.0

    def check(self) -> None:
        """`UserError` for what does not go together."""
        if wrong := [name for name in self._named if name not in CONTESTANTS]:
            raise UserError(f"--only has {wrong[0]!r}: use some of {', '.join(CONTESTANTS)}")
        if not 1 <= self.top_k <= self.num_experts:
            raise UserError(f"--top-k is {self.top_k}: it must be 1 to {self.num_experts}")
        if self.mbit is not None:
            check_mbit("--mbit", self.mbit)
            if self.across == "shm":
                raise UserError("--across shm passes no link: with --mbit use tcp or libfabric")
        if self.inner_mbit is not None:
            if self.mbit is None or self.inside == "shm":
                raise UserError(
                    f"--inner-mbit {self.inner_mbit:g} needs --mbit, and --inside tcp: shared memory passes no link"
                )
            check_mbit("--inner-mbit", self.inner_mbit)
        if self.hidden % self.num_ranks:
            raise UserError(
                f"--hidden is {self.hidden}: it must be a multiple of the {self.num_ranks} ranks, which share each row"
            )
        if self.num_experts < self.num_ranks:
            raise UserError(f"--experts is {self.num_experts}: give each of the {self.num_ranks} ranks one at least")

    @property
    def contestants(self) -> list[str]:
        """Those that `only` names, in the order of the table."""
        return [name for name in CONTESTANTS if name in self._named]

    @property
    def _named(self) -> list[str]:
        return [name.strip() for name in self.only.split(",")]

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def topology(self, contestant: str) -> TwoLevel:
        if contestant == TENSOR:
            return TwoLevel(attention_tp=self.num_ranks, expert_tp=self.num_ranks)
        expert_tp = 1 if contestant == EXPERT else self.ranks_per_node
        return TwoLevel(num_nodes=self.nodes, attention_tp=self.ranks_per_node, expert_tp=expert_tp)


def bench_two_level(case: TwoLevelCase, report: Report) -> list[dict[str, Any]]:
    """One row per contestant. `ChildFailed` or `PeerLost` names a rank that fails or has a wrong result,
    `ResourceError` says why there can be no box."""
    with ExitStack() as stack:
        box = None
        if case.mbit is not None:
            require_box("--mbit")
            box = stack.enter_context(box_of_ranks(case.nodes, case.ranks_per_node, case.mbit, case.inner_mbit))
        places = () if box is None else tuple((box.network(node), box.address(node)) for node in range(box.num_nodes))
        ranks = stack.enter_context(Children())
        ranks.start_ranks(case.num_ranks, partial(TwoLevelRank, case, places))
        ranks.introduce()
        sent, carried = {}, {}
        for name in case.contestants:
            before = _carried(box)
            sent[name] = ranks.ask("check", name)
            carried[name] = max((now - then for now, then in zip(_carried(box), before, strict=True)), default=None)
        turns = {name: partial(ranks.slowest_median_s, "run", name) for name in case.contestants}
        report(1, 2)
        blocks = take_turns(turns, case.repetitions)
    synchronous_s = blocks[SYNCHRONOUS].median(float) if SYNCHRONOUS in blocks else None
    return [
        {
            "contestant": name,
            "nodes": case.nodes,
            "ranks_per_node": case.ranks_per_node,
            "tokens": case.tokens,
            "hidden": case.hidden,
            "top_k": case.top_k,
            "median_s": blocks[name].median(float),
            "synchronous_to_this": None if synchronous_s is None else synchronous_s / blocks[name].median(float),
            "across_bytes": max(level["across"] for level in sent[name]),
            "inside_bytes": max(level["inside"] for level in sent[name]),
            "mbit": case.mbit,
            "inner_mbit": case.inner_mbit,
            "link_bytes": carried[name],
            "link_s": None if case.mbit is None else (carried[name] or 0) * 8e-6 / case.mbit,
            "foreign_cpu_share": blocks[name].foreign_share,
            "quiet": blocks[name].is_quiet,
        }
        for name in case.contestants
    ]


def _link(row: Row) -> str:
    return "" if row["mbit"] is None else f"{format_bytes(row['link_bytes'])}, {format_seconds(row['link_s'])}"


COLUMNS = ContestColumns(
    (
        ("contestant", "contestant"),
        ("median", seconds("median_s")),
        ("synchronous/this", times("synchronous_to_this")),
        ("across a rank", num_bytes("across_bytes")),
        ("inside a rank", num_bytes("inside_bytes")),
        ("on a link", _link),
        ("foreign", foreign_words),
    ),
    title="dispatch and combine; slowest rank, medians",
)


def _carried(box: Box | None) -> list[int]:
    """Bytes that each node's link has carried away from it."""
    return [] if box is None else [box.counters(node).up_bulk_bytes for node in range(box.num_nodes)]


class TwoLevelRank:
    """One rank of all contestants; fused and synchronous share their groups."""

    def __init__(self, case: TwoLevelCase, places: tuple[tuple[str, str], ...], rank: int) -> None:
        """`places`: of each node (or rank), if it is one of a box; the process enters it before it opens anything."""
        self._case, self._rank, self._host = case, rank, "127.0.0.1"
        if places:
            network, self._host = places[rank * len(places) // case.num_ranks]
            enter_network(network)
        self._levels = {name: self._open(name) for name in (FUSED, EXPERT, TENSOR)}
        self._exchanges = {name: self._exchange(name) for name in CONTESTANTS}

    def introduction(self) -> dict[str, bytes]:
        return {name: levels.ticket for name, levels in self._levels.items()}

    def connect(self, introductions: list[dict[str, bytes]]) -> None:
        for name, levels in self._levels.items():
            levels.reset(0, [each[name] for each in introductions])

    def check(self, name: str) -> dict[str, int]:
        """One round trip with its result compared; the bytes this rank sent on each level."""
        ledger = self._levels_of(name).ledger
        ledger.take()
        rows_TH, ids_TK, weights_TK = self._inputs(name)
        found_TH = self._round_trip(name, rows_TH, ids_TK, weights_TK)
        expected_TH = rows_TH * weights_TK.sum(dim=1, keepdim=True)
        if not torch.allclose(found_TH, expected_TH, rtol=1e-4, atol=1e-4):
            raise ResourceError(f"{name}: a wrong result, off by {float((found_TH - expected_TH).abs().max()):.1e}")
        sent = ledger.take().sent_bytes
        across = sum(count for purpose, count in sent.items() if purpose.startswith("across."))
        inside = sum(count for purpose, count in sent.items() if purpose.startswith("inside."))
        return {"across": inside, "inside": 0} if name == TENSOR else {"across": across, "inside": inside}

    def run(self, name: str) -> list[float]:
        """Seconds of each round trip."""

        def barrier() -> None:
            for group in self._levels[TENSOR].groups():
                group.barrier()

        return seconds_of_calls(partial(self._round_trip, name, *self._inputs(name)), self._case.calls, barrier)

    def _round_trip(self, name: str, *inputs: Tensor) -> Tensor:
        exchange = self._exchanges[name]
        exchange.dispatch(0, 0, *inputs)
        return exchange.combine(0, 0, self._case.timeout)

    def _levels_of(self, name: str) -> Levels:
        return self._levels[FUSED if name == SYNCHRONOUS else name]

    def _open(self, name: str) -> Levels:
        case, topology = self._case, self._case.topology(name)
        return open_levels(
            topology,
            self._rank,
            inside=partial(self._endpoint, case.across if name == TENSOR else case.inside),
            across=partial(self._endpoint, case.across),
            message_bytes=message_bytes(topology, case.tokens, case.hidden, case.top_k, torch.float32),
            timeout_s=case.timeout,
        )

    def _endpoint(self, transport: str, name: str) -> _m2n.Endpoint:
        processes = self._case.num_ranks
        return _m2n.Endpoint(
            name, transport, host=self._host, local_processes=processes, spin_s=SPIN_S, dead_after_s=10.0
        )

    def _exchange(self, name: str) -> HybridExchange:
        levels = self._levels_of(name)
        placement = contiguous_placement(self._case.num_experts, levels.topology.expert_ep, [0])
        return HybridExchange(levels, placement, partial(_share, levels.topology), fused=name != SYNCHRONOUS)

    def _inputs(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of this rank's node; of all nodes where all ranks are one attention group."""
        case = self._case
        nodes = range(case.nodes) if name == TENSOR else [self._rank // case.ranks_per_node]
        rows, ids, weights = [], [], []
        for node in nodes:
            generator = torch.Generator().manual_seed(node)
            rows.append(torch.randn(case.tokens, case.hidden, generator=generator))
            order_TE = torch.rand(case.tokens, case.num_experts, generator=generator).argsort(dim=1)
            ids.append(order_TE[:, : case.top_k].to(torch.int32))
            weights.append(torch.rand(case.tokens, case.top_k, generator=generator))
        return torch.cat(rows), torch.cat(ids), torch.cat(weights)


def _share(topology: TwoLevel, layer: int, rows_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
    """An expert returns its row; each rank of its group gives an equal share of that."""
    weights_R1 = torch.where(ids_RK >= 0, weights_RK, 0.0).sum(dim=1, keepdim=True)
    return rows_RH * (weights_R1 / topology.expert_tp)
