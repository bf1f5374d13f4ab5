"""Which node each worker goes to: everybody fits, sides stay apart where they can, threads fill the nodes."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.serve.ray_cluster import ClusterNode, WorkerNeeds
from antiphon.serve.ray_placement import Placed, choose_node, choose_nodes, most_cpus

ONE = WorkerNeeds(num_cpus=1)


def nodes(*num_cpus: float) -> list[ClusterNode]:
    return [ClusterNode(node=f"n{index}", num_cpus=cpus) for index, cpus in enumerate(num_cpus)]


def by_side(placed: list[Placed] | None) -> tuple[list[str], list[str]]:
    assert placed is not None
    return [node for side, node in placed if side == "attention"], [node for side, node in placed if side == "experts"]


clusters = st.lists(st.integers(0, 7), max_size=6)
counts = st.integers(1, 5)


@settings(max_examples=200, deadline=None)
@given(clusters, counts, counts, st.integers(1, 3))
def test_everybody_fits_or_nobody_is_placed(cpus: list[int], num_attention: int, num_experts: int, each: int) -> None:
    needs = WorkerNeeds(num_cpus=each)
    placed = choose_nodes(nodes(*cpus), num_attention, num_experts, needs)
    has_room = sum(have // each for have in cpus) >= num_attention + num_experts
    assert (placed is not None) == has_room
    if placed is not None:
        assert [side for side, _ in placed] == ["attention"] * num_attention + ["experts"] * num_experts
        used = Counter(node for _, node in placed)
        assert all(used[f"n{index}"] * each <= have for index, have in enumerate(cpus))


@settings(max_examples=200, deadline=None)
@given(clusters, counts, counts)
def test_sides_share_no_node_where_some_split_has_room(cpus: list[int], num_attention: int, num_experts: int) -> None:
    splits = range(2 ** len(cpus))
    possible = any(
        sum(have for index, have in enumerate(cpus) if split >> index & 1) >= num_attention
        and sum(have for index, have in enumerate(cpus) if not split >> index & 1) >= num_experts
        for split in splits
    )
    placed = choose_nodes(nodes(*cpus), num_attention, num_experts, ONE)
    if placed is not None:
        attention, experts = by_side(placed)
        assert bool(set(attention) & set(experts)) == (not possible)


def test_workers_of_one_side_spread() -> None:
    attention, experts = by_side(choose_nodes(nodes(4, 4, 4, 4, 4), 2, 3, ONE))
    assert len({*attention, *experts}) == 5
    assert by_side(choose_nodes(nodes(1, 5), 1, 5, ONE)) == (["n0"], ["n1"] * 5)
    assert by_side(choose_nodes(nodes(8), 1, 2, ONE)) == (["n0"], ["n0", "n0"])


@pytest.mark.parametrize(
    ("cpus", "num_attention", "num_experts", "threads"),
    [((8, 8), 1, 1, 8), ((8, 8), 2, 1, 4), ((8, 6, 7), 1, 2, 6), ((8,), 1, 2, 2), ((1, 1), 2, 1, 0), ((), 1, 1, 0)],
)
def test_threads_fill_the_nodes_that_keep_sides_apart(
    cpus: tuple[int, ...], num_attention: int, num_experts: int, threads: int
) -> None:
    assert most_cpus(nodes(*cpus), num_attention, num_experts, ONE) == threads


def test_gpus_count_too() -> None:
    some = [ClusterNode(node="a", num_cpus=16, num_gpus=2), ClusterNode(node="b", num_cpus=16)]
    needs = WorkerNeeds(num_cpus=2, num_gpus=1)
    assert by_side(choose_nodes(some, 1, 1, needs)) == (["a"], ["a"])
    assert choose_nodes(some, 1, 2, needs) is None
    assert most_cpus(some, 1, 1, needs) == 8
    with pytest.raises(UserError, match="at least 1 and 0"):
        WorkerNeeds(num_cpus=0)


def test_a_lost_worker_goes_to_its_own_side_first() -> None:
    taken = [("attention", "n0"), ("experts", "n1")]
    assert choose_node(nodes(4, 2), taken, "experts", ONE) == "n1"
    assert choose_node(nodes(4, 2), [*taken, ("experts", "n1")], "experts", ONE) == "n0"
    assert choose_node(nodes(4, 2, 1), taken, "experts", ONE, frozenset({"n1"})) == "n2"
    assert choose_node(nodes(4), taken[:1], "experts", ONE, frozenset({"n0"})) == "n0"
    assert choose_node(nodes(1), taken[:1], "experts", ONE) is None


def test_ranks_of_a_worker_share_a_node() -> None:
    """Attention workers of two ranks, an expert worker of three: a node of five has room for one of each."""
    needs = WorkerNeeds(num_cpus=1, attention_ranks=2, expert_ranks=3)
    assert by_side(choose_nodes(nodes(3, 2, 2), 2, 1, needs)) == (["n1", "n2"], ["n0"])
    assert by_side(choose_nodes(nodes(5), 1, 1, needs)) == (["n0"], ["n0"])
    assert choose_nodes(nodes(1, 1, 3), 1, 1, needs) is None
    assert most_cpus(nodes(9, 6), 1, 1, needs) == 3
    taken = [("attention", "n0")]
    assert choose_node(nodes(4, 2), taken, "experts", needs) is None
    assert choose_node(nodes(5, 2), taken, "experts", needs) == "n0"
