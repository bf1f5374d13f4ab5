"""Dispatch and combine over two levels, beside the same sums in one process, for all shapes of a topology."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.comm.device_group import DeviceRankGroup
from antiphon.comm.rank_group import NativeRankGroup
from antiphon.comm.two_level import hybrid
from antiphon.comm.two_level.exchange import Dispatch, message_bytes
from antiphon.comm.two_level.hybrid import HybridExchange
from antiphon.comm.two_level.levels import Levels, TwoLevel, open_levels
from antiphon.placement.split import split_rows
from antiphon.specs.placement import ExpertPlacement, Owners, contiguous_placement
from tests.comm.m2n.backends import PATIENCE_S, Backend, by_name
from tests.comm.test_device_group import CPU, over_gloo

HIDDEN, TOP_K, MAX_ROWS = 12, 3, 9
INSIDE, ACROSS = by_name("shm", "loopback")
TOPOLOGIES = {
    "d_DP = d_EP": TwoLevel(num_nodes=3, attention_tp=2, expert_tp=2),
    "d_DP > d_EP": TwoLevel(num_nodes=2, attention_tp=1, expert_tp=2),
    "d_DP > d_EP, sharded": TwoLevel(num_nodes=2, attention_tp=2, expert_tp=4),
    "d_DP < d_EP": TwoLevel(num_nodes=2, attention_tp=4, expert_tp=2),
    "plain expert parallelism": TwoLevel(num_nodes=2, attention_tp=2, expert_tp=1),
    "plain tensor parallelism": TwoLevel(num_nodes=1, attention_tp=3, expert_tp=3),
    "data parallelism": TwoLevel(num_nodes=3),
}
Result = TypeVar("Result")


class Box:
    """All ranks of a topology in one process, a thread each."""

    def __init__(
        self,
        topology: TwoLevel,
        inside: Backend = INSIDE,
        across: Backend = ACROSS,
        inner_group: Callable[..., NativeRankGroup] = NativeRankGroup,
    ) -> None:
        self.topology = topology
        largest = message_bytes(topology, MAX_ROWS, HIDDEN, TOP_K, torch.float32)
        self.levels = [
            open_levels(
                topology,
                rank,
                inside=inside.endpoint,
                across=across.endpoint,
                message_bytes=largest,
                num_micro_batches=2,
                timeout_s=PATIENCE_S,
                inner_group=inner_group,
            )
            for rank in range(topology.size)
        ]
        self._pool = ThreadPoolExecutor(topology.size)

    def each(self, call: Callable[[Levels], Result]) -> list[Result]:
        futures = [self._pool.submit(call, levels) for levels in self.levels]
        return [future.result() for future in futures]

    def reset(self, epoch: int) -> None:
        tickets = [levels.ticket for levels in self.levels]
        self.each(lambda levels: levels.reset(epoch, tickets))

    def close(self) -> None:
        for levels in self.levels:
            levels.abort(1 << 14)
        self._pool.shutdown()
        for levels in self.levels:
            levels.close()


@contextmanager
def box(topology: TwoLevel, inner_group: Callable[..., NativeRankGroup] = NativeRankGroup) -> Iterator[Box]:
    made = Box(topology, inner_group=inner_group)
    try:
        made.reset(0)
        yield made
    finally:
        made.close()


BY_DEVICE = ("d_DP > d_EP, sharded", "d_DP < d_EP")


@pytest.fixture(scope="module", params=[*TOPOLOGIES, *(f"{name}, by device" for name in BY_DEVICE)], ids=str)
def ranks(request: pytest.FixtureRequest) -> Iterator[Box]:
    """`by device`: the groups inside a node are those of GPUs, over gloo."""
    name = request.param.removesuffix(", by device")
    inner_group: Callable[..., NativeRankGroup] = NativeRankGroup
    if name != request.param:
        numbers = itertools.count()
        inner_group = partial(
            DeviceRankGroup, device=CPU, host="127.0.0.1", make=over_gloo, identity=lambda device: str(next(numbers))
        )
    with box(TOPOLOGIES[name], inner_group) as made:
        yield made


class Case:
    """Rows of every attention group and a table of experts."""

    def __init__(self, topology: TwoLevel, counts: list[int], top_k: int, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.topology, self.dtype = topology, dtype
        self.num_experts = topology.expert_ep + 3
        self.placed: Owners = tuple((e % topology.expert_ep,) for e in range(self.num_experts))
        self.rows, self.ids, self.weights = [], [], []
        for group in range(topology.attention_dp):
            num_rows = counts[group % len(counts)]
            self.rows.append(torch.randn(num_rows, HIDDEN, generator=generator).to(dtype))
            order = torch.rand(num_rows, self.num_experts, generator=generator).argsort(dim=1)
            self.ids.append(order[:, :top_k].to(torch.int32))
            self.weights.append(torch.rand(num_rows, top_k, generator=generator))

    def parts_of(self, ids: Tensor) -> Tensor:
        """The part that serves each choice: of an expert with copies they get shares of its rows in their order, as the
        split says."""
        parts, held = torch.empty_like(ids), np.zeros((len(self.placed), self.topology.expert_ep), dtype=bool)
        for expert, owners in enumerate(self.placed):
            held[expert, list(owners)] = True
        counts = np.bincount(ids.flatten().numpy(), minlength=len(self.placed))
        for expert, rows in enumerate(split_rows(counts, held)):
            parts[ids == expert] = torch.tensor([part for part, n in enumerate(rows) for _ in range(n)]).int()
        return parts

    def of(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        group = rank // self.topology.attention_tp
        return self.rows[group], self.ids[group], self.weights[group]

    def partial(self, rank: int, rows_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
        """What one rank of an expert group makes of rows, -1 being no expert: every rank and expert does another."""
        total = torch.zeros(rows_RH.shape)
        for k in range(ids_RK.shape[1]):
            output = torch.tanh(rows_RH.float() * (1.0 + ids_RK[:, k : k + 1])) + 0.1 * (rank % self.topology.expert_tp)
            total += torch.where(ids_RK[:, k : k + 1] >= 0, weights_RK[:, k : k + 1] * output, 0.0)
        return total.to(self.dtype)

    def expected(self, rank: int) -> Tensor:
        """Plain collectives in one process: sum over expert groups' ranks, over nodes, over groups of a node."""
        topology = self.topology
        rows, ids, weights = self.of(rank)
        total = torch.zeros(rows.shape)
        for place in range(topology.parts_per_node):
            over_nodes = torch.zeros(rows.shape)
            for node in range(topology.num_nodes):
                part = node * topology.parts_per_node + place
                here = self.parts_of(ids) == part
                own = torch.where(here, ids, -1)
                ranks = range(part * topology.expert_tp, (part + 1) * topology.expert_tp)
                summed = torch.zeros(rows.shape)
                for other in ranks:
                    summed += self.partial(other, rows, own, weights).float()
                over_nodes += summed.to(self.dtype).float()
            total += over_nodes.to(self.dtype).float()
        return total.to(self.dtype)

    def dispatch(self, levels: Levels, fused: bool) -> Dispatch:
        rows, ids, weights = self.of(levels.rank)
        return Dispatch(levels, self.parts_of(ids), rows, ids, weights, fused=fused)

    def finish(self, levels: Levels, dispatch: Dispatch) -> Tensor:
        arrived = dispatch.wait()
        assert arrived.rows.shape[0] == sum(map(sum, dispatch.counts))
        return dispatch.combine(self.partial(levels.rank, arrived.rows, arrived.ids_RK, arrived.weights_RK))

    def run(self, levels: Levels, fused: bool) -> Tensor:
        return self.finish(levels, self.dispatch(levels, fused))


@settings(max_examples=8, deadline=None)
@given(
    counts=st.lists(st.integers(0, MAX_ROWS), min_size=1, max_size=6),
    top_k=st.integers(1, TOP_K),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    fused=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_rows_reach_their_experts_and_return(
    ranks: Box, counts: list[int], top_k: int, dtype: torch.dtype, fused: bool, seed: int
) -> None:
    case = Case(ranks.topology, counts, top_k, dtype, seed)
    for rank, result in enumerate(ranks.each(lambda levels: case.run(levels, fused))):
        assert torch.equal(result, case.expected(rank)), f"rank {rank}"


def test_two_micro_batches_may_be_under_way(ranks: Box) -> None:
    first, second = (Case(ranks.topology, counts, TOP_K, torch.float32, 7) for counts in ([4, 0], [0, 9, 1]))

    def both(levels: Levels) -> tuple[Tensor, Tensor]:
        one, two = first.dispatch(levels, True), second.dispatch(levels, True)
        return first.finish(levels, one), second.finish(levels, two)

    for rank, (one, two) in enumerate(ranks.each(both)):
        assert torch.equal(one, first.expected(rank))
        assert torch.equal(two, second.expected(rank))


def test_a_new_epoch_forgets_what_was_dispatched(ranks: Box) -> None:
    case = Case(ranks.topology, [5, 2], TOP_K, torch.float32, 8)
    ranks.each(lambda levels: case.dispatch(levels, True))
    for levels in ranks.levels:
        levels.abort(1)
    ranks.reset(1)
    for rank, result in enumerate(ranks.each(lambda levels: case.run(levels, True))):
        assert torch.equal(result, case.expected(rank))


def test_the_exchange_serves_layers_and_replicas_of_experts(ranks: Box) -> None:
    case = Case(ranks.topology, [7, 0, 3], TOP_K, torch.bfloat16, 9)
    parts = case.topology.expert_ep
    if parts > 1:  # expert 0 is on two parts, which share its rows
        case.placed = ((0, 1), *case.placed[1:])

    def serve(levels: Levels) -> Tensor:
        def experts(layer: int, *arrived: Tensor) -> Tensor:
            return case.partial(levels.rank, *arrived) * layer

        exchange = HybridExchange(levels, ExpertPlacement(parts, dict.fromkeys((1, 2), case.placed)), experts)
        exchange.begin_step(0, [[0]])
        results = []
        for layer in (1, 2):
            exchange.dispatch(layer, 0, *case.of(levels.rank))
            results.append(exchange.combine(layer, 0, PATIENCE_S))
        assert torch.equal(results[1], results[0] * 2)
        assert len(exchange.traffic().pairs) == sum(group.size - 1 for group in levels.groups())
        return results[0]

    for rank, result in enumerate(ranks.each(serve)):
        assert torch.equal(result, case.expected(rank))


@pytest.mark.parametrize("topology", [TwoLevel(num_nodes=3), TwoLevel(num_nodes=2, attention_tp=2, expert_tp=2)])
def test_requests_for_copies_ride_before_the_rows(topology: TwoLevel) -> None:
    """Every rank of a part hears what each node asks of it, itself included, also from nodes without rows."""
    with box(topology) as made:
        case = Case(topology, [4, 0], TOP_K, torch.float32, 3)
        placement = ExpertPlacement(topology.expert_ep, {0: case.placed, 1: case.placed})
        exchanges: list[HybridExchange] = []

        def serve(levels: Levels) -> list[list[tuple[int, int, int]]]:
            heard: list[list[tuple[int, int, int]]] = []
            experts = partial(drop_layer, case, levels.rank)
            exchange = HybridExchange(levels, placement, experts, fetch=heard.append)
            exchange.prefetch(1, {0: levels.node})
            for _ in range(2):  # the second dispatch asks for nothing
                exchange.dispatch(0, 0, *case.of(levels.rank))
                assert torch.equal(exchange.combine(0, 0, PATIENCE_S), case.expected(levels.rank))
            assert exchange.prefetched(1) == {0: levels.node}
            exchanges.append(exchange)
            return heard

        for rank, heard in enumerate(made.each(serve)):
            asked = [sorted(each) for each in heard]
            assert asked == (
                [[(node, 1, node) for node in range(topology.num_nodes)]] if topology.part_of(rank) == 0 else []
            )
        made.reset(1)  # the groups, as a worker's links do: expert workers have let go of all copies
        assert [dict(exchange.prefetched(1)) for exchange in exchanges] == [{}] * topology.size


def drop_layer(case: Case, rank: int, layer: int, *arrived: Tensor) -> Tensor:
    return case.partial(rank, *arrived)


def test_the_form_of_an_exchange_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is dispatched after `fused` was set goes that way; the result is the same."""
    seen: list[bool] = []

    class Seen(Dispatch):
        def __init__(self, *arguments: Any, fused: bool, **others: Any) -> None:
            seen.append(fused)
            super().__init__(*arguments, fused=fused, **others)

    monkeypatch.setattr(hybrid, "Dispatch", Seen)
    with box(TOPOLOGIES["d_DP = d_EP"]) as made:
        case = Case(made.topology, [5], TOP_K, torch.float32, 3)

        def serve(levels: Levels) -> list[Tensor]:
            placement = ExpertPlacement(case.topology.expert_ep, {0: case.placed})
            exchange = HybridExchange(levels, placement, lambda layer, *arrived: case.partial(levels.rank, *arrived))
            results = []
            for exchange.fused in (True, False):
                exchange.dispatch(0, 0, *case.of(levels.rank))
                results.append(exchange.combine(0, 0, PATIENCE_S))
            return results

        for rank, results in enumerate(made.each(serve)):
            assert all(torch.equal(result, case.expected(rank)) for result in results)
    assert sorted(seen) == [False] * made.topology.size + [True] * made.topology.size


def test_a_placement_for_another_topology() -> None:
    with box(TwoLevel()) as alone, pytest.raises(UserError, match="placed on 2 groups of ranks, the topology has 1"):
        HybridExchange(alone.levels[0], contiguous_placement(4, 2, [0]), lambda layer, *arrived: arrived[0])


def counted_bytes(topology: TwoLevel, rows: int, fused: bool = True) -> list[dict[str, int]]:
    """What each rank sends where every row has one expert in every part: k = `expert_ep`."""
    with box(topology) as made:
        case = Case(topology, [rows], 1, torch.float32, 3)
        case.placed = tuple((part,) for part in range(topology.expert_ep))
        every = torch.arange(topology.expert_ep, dtype=torch.int32).repeat(rows, 1)
        case.ids = [every] * topology.attention_dp
        case.weights = [torch.ones(every.shape)] * topology.attention_dp
        made.each(lambda levels: case.run(levels, fused))
        return [dict(levels.ledger.sent_bytes) for levels in made.levels]


def test_bytes_between_nodes_are_those_of_equation_13() -> None:
    """Hybrid, TP inside and EP between n nodes of m ranks. b s rows of a node with k = n experts, h wide: dispatch and
    combine are A2A(b s h k / m, n) each, which is (n - 1) / n of that size. Inside: an all-gather of the shards that
    arrived, and the combine's reduce-scatter and all-gather."""
    nodes, m, rows = 3, 2, 6
    row_bytes, k = 4 * HIDDEN, 3
    for sent in counted_bytes(TwoLevel(num_nodes=nodes, attention_tp=m, expert_tp=m), rows):
        size = rows * row_bytes * k // m
        assert sent["across.dispatch"] == sent["across.combine"] == size * (nodes - 1) // nodes
        assert sent["inside.dispatch"] == (m - 1) * size * (nodes - 1) // nodes
        assert sent["inside.combine"] == (m - 1) * (rows * k + rows) * row_bytes // m


def test_bytes_between_nodes_are_those_of_equation_12() -> None:
    """Plain expert parallelism, one expert group a rank, all-to-all between the ranks. The ranks of a node send
    A2A(b s h k, n) between them for dispatch and for combine: each drops the copies that its neighbours send."""
    nodes, m, rows = 2, 2, 6
    row_bytes, k = 4 * HIDDEN, nodes * m
    counted = counted_bytes(TwoLevel(num_nodes=nodes, attention_tp=m, expert_tp=1), rows)
    for node in range(nodes):
        sent = counted[node * m : node * m + m]
        expected = rows * row_bytes * k * (nodes - 1) // nodes
        assert sum(each["across.dispatch"] for each in sent) == expected
        assert sum(each["across.combine"] for each in sent) == expected


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(UserError, match="attention_tp 2 and expert_tp 3 on 3 ranks: one must divide the other"):
        TwoLevel(attention_tp=2, expert_tp=3)
    with pytest.raises(UserError, match=r"attention_tp 2 and expert_tp 4 on 6 ranks: .* and the larger the number of"):
        TwoLevel.of_ranks(6, 2, 4)
    assert TwoLevel.of_ranks(8, 2, 4) == TwoLevel(num_nodes=2, attention_tp=2, expert_tp=4)
    with pytest.raises(UserError, match="num_nodes is 0: use at least 1"):
        TwoLevel(num_nodes=0)
    with pytest.raises(UserError, match="a hidden size of 12 cannot be cut into 5 equal shards"):
        message_bytes(TwoLevel(attention_tp=5, expert_tp=5), 1, 12, 1, torch.float32)
