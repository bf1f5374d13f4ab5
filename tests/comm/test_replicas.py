"""Sums over ranks that hold the same: values, and bytes against MegaScale-MoE's section 5 and Appendix A.1, on four
ranks that are two nodes."""

from typing import Any

import pytest
import torch

from antiphon.comm import replicas
from antiphon.comm.launcher import CollectiveLauncher
from antiphon.comm.ledger import Ledger
from antiphon.comm.mesh import Group, Sizes, connect
from antiphon.comm.micro_ops import MicroOpScheduler
from antiphon.comm.replicas import NarrowSum, ReplicaGroups, has_levels
from tests.comm.ranks import on_ranks

RANKS, NODE = 4, 2
COUNT = 96
UNEVEN = (10, 0, 61, 25)


def number_of(rank: int) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(rank))


def in_small_chunks() -> None:
    """Of this rank: levels hide each other whatever the size."""
    replicas.LEAST_CHUNK_BYTES = 100


def sums(rank: int) -> dict[tuple[bool, bool], Any]:
    """By (two levels, narrow): worst distance of the sum, of uneven shards and of what is gathered of them, how many
    numbers ranks disagree on, and the bytes of each."""
    launcher = CollectiveLauncher(MicroOpScheduler())
    mesh = connect(Sizes(world_size=RANKS), rank, 60, launcher)
    in_small_chunks()
    expected = torch.stack([number_of(each) for each in range(RANKS)]).double().sum(0)
    found = {}
    for levels in (False, True):
        for narrow in (False, True):
            of = ReplicaGroups(mesh, node_size=NODE if levels else 0, narrow=narrow).of(mesh.world)
            launcher.ledger.take()
            total = of.sum(number_of(rank))
            whole = launcher.ledger.take().sent_bytes
            shard = of.sum_shard(number_of(rank), (COUNT // RANKS,) * RANKS)
            cut = launcher.ledger.take().sent_bytes
            uneven = of.sum_shard(number_of(rank), UNEVEN)
            begin = sum(UNEVEN[: of.place])
            mesh.ledger.take()
            gathered = of.gather(uneven, UNEVEN)
            if levels:  # one after the other: the same bits
                one = ReplicaGroups(mesh, node_size=NODE, narrow=narrow, chunks=1).of(mesh.world)
                assert torch.equal(one.gather(one.sum_shard(number_of(rank), UNEVEN), UNEVEN), gathered)
            others = ReplicaGroups(mesh).of(mesh.world).sum(total.clone()) - RANKS * total
            found[levels, narrow] = (
                float((total - expected).abs().max()),
                float((uneven - expected[begin : begin + UNEVEN[of.place]]).abs().sum() / max(1, uneven.shape[0])),
                float((gathered - expected).abs().max()),
                float(others.abs().max()),
                whole,
                cut,
                shard.shape[0],
            )
    return found


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(RANKS, tmp_path_factory.mktemp("ranks"), sums)


def test_sums_and_shards(of_ranks: list[Any]) -> None:
    for found in of_ranks:
        for (levels, narrow), (total, uneven, gathered, others, *_, size) in found.items():
            band = (0.08 if levels else 0.05) if narrow else 1e-5
            assert total < band
            assert uneven < band
            assert gathered < band
            assert others == 0, "every rank has the same bits"
            assert size == COUNT // RANKS


def test_bytes_are_those_of_the_formulas(of_ranks: list[Any]) -> None:
    """In float32; a narrow sum sends exactly half."""
    whole, nodes = 4 * COUNT, RANKS // NODE
    for found in of_ranks:
        one_way = whole * (RANKS - 1) // RANKS
        assert found[False, False][4] == {"gradients.all_reduce": 2 * one_way}
        assert found[False, False][5] == {"gradients.reduce_scatter": one_way}
        assert found[False, True][5] == {"gradients.all_to_all": one_way // 2}
        assert sum(found[False, True][4].values()) == one_way
        inside, across = whole * (NODE - 1) // NODE, whole // NODE * (nodes - 1) // nodes  # eq. 10: P and P / n
        assert found[True, False][5] == {
            "gradients_inside.reduce_scatter": inside,
            "gradients_across.reduce_scatter": across,
        }
        assert by_level(found[True, False][4]) == {"gradients_inside": 2 * inside, "gradients_across": 2 * across}
        assert by_level(found[True, True][4]) == {"gradients_inside": inside, "gradients_across": across}


def by_level(sent: dict[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, num_bytes in sent.items():
        level = name.split(".")[0]
        found[level] = found.get(level, 0) + num_bytes
    return found


def test_chunks_of_two_levels_hide_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a chunk is between nodes the next is inside (Figure 5b), and on the way back the other way round."""
    said: list[str] = []

    class Told:
        def __init__(self, collective: Any, x: torch.Tensor) -> None:
            said.append(f"start {collective.purpose.rpartition('_')[2]}")
            self.collective, self.x = collective, x

        def wait(self) -> torch.Tensor:
            said.append(f"wait {self.collective.purpose.rpartition('_')[2]}")
            own = self.collective.sizes[self.collective.group.index]
            return self.x[:own] if "gradients" in self.collective.purpose else self.x.repeat(2)

    monkeypatch.setattr(replicas, "start", Told)
    ranks = [Group((0, 1), 0, Ledger(), None)] * 2
    levels = tuple(replicas.Level(group, suffix) for group, suffix in zip(ranks, ("_inside", "_across"), strict=True))
    of = replicas.Replicas(ranks[0], levels, levels)
    count, sizes = 4 * replicas.LEAST_CHUNK_BYTES, (replicas.LEAST_CHUNK_BYTES,) * 4
    of.sum_shard(torch.zeros(count), sizes)
    assert said[:6] == ["start inside", "wait inside", "start across", "start inside", "wait inside", "start across"]
    assert said[-4:] == ["wait across"] * 4
    said.clear()
    assert of.gather(torch.zeros(sizes[0]), sizes).shape == (count,)
    assert said[:5] == ["start across", "wait across", "start across", "start inside", "wait across"]


def test_which_groups_have_levels() -> None:
    assert has_levels([[0, 1, 2, 3]], 2)
    assert has_levels([[0, 1, 4, 5], [2, 3, 6, 7]], 4)
    assert not has_levels([[0, 1, 2, 3]], 4), "one node"
    assert not has_levels([[0, 2], [1, 3]], 2), "one rank on each node"
    assert not has_levels([[0, 1, 2], [3, 4, 5]], 2), "uneven nodes"
    assert not has_levels([[0, 1, 2, 3]], 0)


def test_a_rank_whose_part_of_a_sum_is_empty() -> None:
    """Muon's shards end between matrices, so with many ranks some have none."""
    collective = NarrowSum(Group((0, 1), 1, Ledger(), None), "gradients", (3, 0), torch.float32)
    assert collective.finish(torch.empty(0, dtype=torch.bfloat16)).tolist() == []
    first = NarrowSum(Group((0, 1), 0, Ledger(), None), "gradients", (3, 0), torch.float32)
    assert first.finish(torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.bfloat16)).tolist() == [5.0, 7.0, 9.0]
