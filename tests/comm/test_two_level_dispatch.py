"""Rows that travel across nodes first and then inside, on four ranks that are two nodes: values and gradients of the
straight way, and fewer bytes between nodes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.base.split_evenly import split_evenly
from antiphon.comm.dispatch import AllToAllWay, Dispatcher, two_level_ways
from antiphon.comm.float8 import RowFormat
from antiphon.comm.mesh import Sizes, connect
from antiphon.comm.replicas import connect_levels
from tests.comm.ranks import on_ranks

RANKS, NODE, ROWS, WIDTH, EXPERTS, TOP_K = 4, 2, 40, 8, 10, 5


def drawn(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, choices, some of them absent, and weights."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(ROWS, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    ids[::7, 1] = -1
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, ids, torch.rand(ROWS, TOP_K, generator=generator, dtype=torch.float64)


def both(rank: int) -> tuple[float, bool, dict[str, int]]:
    """How far two levels are from the straight way, whether a second time has the same bits, and bytes by name."""
    mesh = connect(Sizes(world_size=RANKS, expert=RANKS), rank, 60)
    group, experts = mesh.group("expert"), split_evenly(EXPERTS, RANKS)
    inside, across = connect_levels(mesh, group, NODE)
    first, last = experts[rank]
    levels = tuple(two_level_ways(inside, across, experts, RowFormat("plain", torch.float64), weights_inside=False))
    straight = (AllToAllWay(group, experts, deduplicate=True, formats=RowFormat("plain", torch.float64)),)
    results, sent = [], {}

    def multiply(rows: torch.Tensor, counts: tuple[int, ...], _: torch.Tensor | None) -> torch.Tensor:
        return rows * (torch.arange(first, last).repeat_interleave(torch.tensor(counts)).unsqueeze(1) + 1.0)

    for ways in (straight, levels, levels):
        x, ids, weights = drawn(rank)
        leaves = x.requires_grad_(), weights.requires_grad_()
        mesh.ledger.take()
        out = Dispatcher(last - first, ways).through(multiply, leaves[0], ids, leaves[1])
        sent = dict(mesh.ledger.take().sent_bytes)
        results.append([out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)])
    off = max(float((a - b).abs().max()) for a, b in zip(results[0], results[1], strict=True))
    return off, all(map(torch.equal, results[1], results[2])), sent


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(RANKS, tmp_path_factory.mktemp("ranks"), both)


def test_values_and_gradients_are_those_of_the_straight_way(of_ranks: list[Any]) -> None:
    for off, same, _ in of_ranks:
        assert off < 1e-12
        assert same


def test_a_row_crosses_once_to_a_node(of_ranks: list[Any]) -> None:
    """Fewer rows than go straight to the ranks there."""
    experts = split_evenly(EXPERTS, RANKS)
    for rank, (_, _, sent) in enumerate(of_ranks):
        _, ids, _ = drawn(rank)
        chosen = torch.stack([((ids >= first) & (ids < last)).any(1) for first, last in experts], dim=1)
        there = [each for each in range(RANKS) if each // NODE != rank // NODE]
        crossing, straight = int(chosen[:, there].any(1).sum()), int(chosen[:, there].sum())
        assert sent["dispatch_across.all_to_all"] == crossing * WIDTH * 8
        assert crossing < 0.8 * straight
        assert {"dispatch_inside.all_to_all", "combine_inside.all_to_all", "combine_across.all_to_all"} <= sent.keys()
