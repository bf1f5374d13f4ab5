"""Exchanges in tiles: their order, and over the M2N library on ranks the results and bytes of the same collectives."""

import random
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.base.errors import PeerLost, PeerTimeout, UserError
from antiphon.bench.box import box_unavailable
from antiphon.bench.box.topology import plan_ranks
from antiphon.comm.collectives import AllGather, AllToAll, Collective, Flight, ReduceScatter, barrier
from antiphon.comm.float8 import Float8Rows
from antiphon.comm.m2n.tile_links import TileLinks
from antiphon.comm.mesh import Group, Sizes, connect
from antiphon.comm.tile_flight import boundaries, check_tile_rows, in_turns, launch_in_tiles, outgoing, tiles_of
from antiphon.train.config_tables import OverlapConfig
from antiphon.train.tiled import Parts, works
from tests.comm.ranks import on_ranks
from tests.serve.forking_box import ForkingBox

RANKS, WIDTH, TILE_ROWS = 3, 16, 128
MOVED = ((5, 0, 400), (129, 128, 1), (0, 300, 0))  # by sender and receiver: none, one, and rows beyond whole tiles
UNEVEN, EVEN = (300, 0, 129), (257, 257, 257)


@pytest.mark.parametrize("rows", [(0, 0, 0), (1, 0, 5), (7, 8, 9)])
def test_every_row_is_in_one_tile(rows: tuple[int, ...]) -> None:
    for own in range(len(rows)):
        order = outgoing(rows, own, 3)
        for rank, count in enumerate(rows):
            mine = [tile for tile in order if tile.rank == rank]
            assert mine == tiles_of(rank, count, 3)
            assert [row for tile in mine for row in range(tile.first, tile.last)] == list(range(count))
    bounds = boundaries(rows, 3)
    assert bounds[-1] == sum(rows)
    assert len(bounds) - 1 == sum(len(tiles_of(rank, count, 3)) for rank, count in enumerate(rows))
    assert all(0 < end - begin <= 3 for begin, end in pairwise(bounds))


def test_ranks_begin_with_different_ones_and_end_with_their_own() -> None:
    firsts = [outgoing((9, 9, 9, 9), own, 3)[0].rank for own in range(4)]
    assert firsts == [1, 2, 3, 0]
    order = outgoing((9, 9, 9, 9), 2, 3)
    assert [tile.rank for tile in order] == [3, 0, 1] * 3 + [2] * 3


def test_tiles_of_the_same_rows_take_turns_in_whichever_order_they_come() -> None:
    tiles = [tile for rank in range(4) for tile in tiles_of(rank, 8, 3)]
    for seed in range(20):
        come = random.Random(seed).sample(tiles, len(tiles))
        found = list(in_turns(come, 2, 4))
        assert sorted(found, key=str) == sorted(tiles, key=str)
        for number in range(3):
            assert [tile.rank for tile in found if tile.number == number] == [2, 1, 0, 3]
    own = iter(tiles_of(2, 8, 3))
    assert next(in_turns(own, 2, 4)).number == 0
    assert next(own).number == 1, "a tile whose turn it is does not wait for others"


def test_own_rows_are_multiplied_together() -> None:
    """Those of others tile by tile; an expert without rows in one of the own tiles has them in the others."""
    tiles = [tile for rank in range(2) for tile in tiles_of(rank, 8, 3)]
    own: list[Parts] = [[(0, slice(4, 6)), (1, slice(20, 21))], [(0, slice(6, 8))], [(1, slice(21, 23))]]
    parts = dict(zip(tiles, [[(0, slice(0, 1))], [], [(1, slice(10, 12))], *own], strict=True))
    for order in (outgoing((8, 8), 1, 3), [*tiles[3:], *tiles[:3]]):
        found = list(works(order, parts, 1))
        assert [each for each, _ in found if each[0].rank == 0] == [[tile] for tile in tiles[:3]]
        assert (tiles[3:], [(0, slice(4, 8)), (1, slice(20, 23))]) in found
        assert len(found) == 4
    waited = works(iter([*tiles[3:]]), parts, 1)
    assert next(waited)[0] == tiles[3:], "own rows do not wait for others"


@pytest.mark.parametrize("rows", [0, -128, 100, 129])
def test_tiles_that_cut_groups_of_scales_are_refused(rows: int) -> None:
    with pytest.raises(UserError, match=rf"tile_rows is {rows}: it must be a multiple of 128"):
        check_tile_rows(rows)
    with pytest.raises(UserError, match="tile_rows"):
        OverlapConfig(tile_rows=rows)


IN_A_BOX = """
import os, sys, torch
from antiphon.comm.collectives import AllToAll, barrier
from antiphon.comm.m2n.tile_links import TileLinks
from antiphon.comm.mesh import Sizes, connect
from antiphon.comm.tile_flight import launch_in_tiles
torch.distributed.init_process_group("gloo")
rank = int(os.environ["RANK"])
group = connect(Sizes(world_size=2, expert=2), rank, 60).group("expert")
links = TileLinks.connect(group, 128, 4096, 60, first=sys.argv[1] == "first")
x = torch.full((1024, 1024), float(rank))
got = launch_in_tiles(AllToAll(group, "dispatch", (512, 512), (512, 512)), links, x).land()
assert got[:512].eq(0).all() and got[512:].eq(1).all()
barrier(group)
links.close()
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("first", [False, True])
def test_tiles_that_go_first_are_marked(first: bool) -> None:
    """In the priority queue of a node's link are the bytes of 512 rows, or next to none of them."""
    if reason := box_unavailable():
        pytest.skip(reason)
    command = [sys.executable, "-c", IN_A_BOX, "first" if first else "beside"]
    with ForkingBox(num_nodes=2, mbit=1000) as box:
        ranks = [
            box.fork(plan.node, plan.args, plan.env)
            for plan in plan_ranks(num_nodes=2, num_local_ranks=1, command=command)
        ]
        assert [each.wait(120) for each in ranks] == [0, 0]
        for node in range(2):
            counted = box.counters(node)
            assert (counted.up_control_bytes > 512 * 4096) == first
            assert (counted.up_bulk_bytes > 512 * 4096) != first


def test_marks_without_tiles_are_refused() -> None:
    with pytest.raises(UserError, match="tiles_first is true and inside is false"):
        OverlapConfig(tiles_first=True)


def test_a_search_beside_tiles_is_refused() -> None:
    with pytest.raises(UserError, match="inside is true: a search measures exchanges and products apart"):
        OverlapConfig(inside=True, search=True)


def collectives(group: Group) -> list[tuple[Collective, int]]:
    """With the rows that this rank gives each."""
    send, receive = MOVED[group.index], tuple(row[group.index] for row in MOVED)
    out = torch.float32
    found: list[tuple[Collective, int]] = [
        (plain := AllToAll(group, "dispatch", send, receive), sum(send)),
        (Float8Rows(plain, out), sum(send)),
        (Float8Rows(plain, out, by_channel=True), sum(send)),
    ]
    for sizes in (UNEVEN, EVEN):
        own, total = sizes[group.index], sum(sizes)
        found += [
            (AllGather(group, "dispatch", sizes), own),
            (Float8Rows(AllGather(group, "dispatch", sizes), out), own),
            (ReduceScatter(group, "combine", sizes), total),
            (Float8Rows(ReduceScatter(group, "combine", sizes), out, by_channel=True), total),
        ]
    return found


def compared(rank: int) -> list[tuple[str, float, bool]]:
    """By collective: how far its result in tiles is from the plain one, and whether bytes and losses are the same. All
    are under way at once and landed in the reverse order, through slots too few for one of them."""
    group = connect(Sizes(world_size=RANKS, expert=RANKS), rank, 60).group("expert")
    links = TileLinks.connect(group, TILE_ROWS, (64 << 20) // 4 // TILE_ROWS, 60)
    group.ledger.take()
    given = [(each, rows_of(rank, rows)) for each, rows in collectives(group)]
    expected = list[tuple[Tensor, Any]]()
    for collective, x in given:
        flight = Flight(collective)
        flight.launch(x, backward=False)
        result = flight.land()
        expected.append((result, group.ledger.take()))
    flights, counted = [], []
    for collective, x in given:
        flights.append(launch_in_tiles(collective, links, x))
        counted.append(group.ledger.take())
    results = [each.land() for each in reversed(flights)][::-1]
    barrier(group)  # one that closes is lost to those that still wait
    links.close()
    found = []
    for (collective, _), (wanted, ledger), result, own in zip(given, expected, results, counted, strict=True):
        off = float((result - wanted).abs().max()) if wanted.numel() else 0.0
        same = own.sent_bytes == ledger.sent_bytes and own.lost_numbers == ledger.lost_numbers
        found.append((f"{type(collective).__name__} {result.shape == wanted.shape}", off, same))
    return found


def rows_of(rank: int, rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rank))


def test_results_and_bytes_are_those_of_the_collectives(tmp_path: Any) -> None:
    for of_rank in on_ranks(RANKS, tmp_path, compared):
        for number, (name, off, same) in enumerate(of_rank):
            assert name.endswith("True"), name
            assert off < 2e-6, name
            # Uneven rows are padded in gathers and scatters of the process group, and not in tiles.
            assert same or 3 <= number < 7, name


def lonely(rank: int) -> list[str]:
    """What rank 0 is told of a rank that sends nothing, and of one that has left."""
    group = connect(Sizes(world_size=2, expert=2), rank, 60).group("expert")
    links = TileLinks.connect(group, TILE_ROWS, 4 * WIDTH, 0.2 if rank == 0 else 60)
    x, said = torch.zeros(6, WIDTH), []
    if rank == 0:
        try:
            launch_in_tiles(AllToAll(group, "dispatch", (3, 3), (3, 3)), links, x).land()
        except PeerTimeout as error:
            said.append(str(error))
        links._timeout_s = 60
    torch.distributed.barrier()
    if rank == 1:
        links.close()
    else:
        try:
            launch_in_tiles(AllToAll(group, "dispatch", (0, 3), (0, 3)), links, x[:3]).land()
        except PeerLost as error:
            said.append(str(error))
    return said


def test_who_does_not_answer_is_named(tmp_path: Any) -> None:
    said = on_ranks(2, tmp_path, lonely)[0]
    assert said[0] == "rank 0, dispatch.all_to_all: nothing from rank 1 within 0.2 s"
    assert "lost rank 1" in said[1]
