"""Collectives of a launcher on gloo ranks: order, values, and errors that reach whoever waits."""

from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import PrefixStore

from antiphon.base.errors import ResourceError
from antiphon.comm.collectives import AllReduce, AllToAll, run, start
from antiphon.comm.launcher import CollectiveLauncher
from antiphon.comm.mesh import Sizes, connect
from antiphon.comm.micro_ops import MicroOpScheduler
from antiphon.comm.replicas import ReplicaGroups
from antiphon.comm.roll_call import RollCall
from tests.comm.ranks import on_ranks

RANKS, ROUNDS = 3, 4


def rounds(rank: int) -> dict[str, Any]:
    """All-to-alls with sums beside them, a few times, then what was sent."""
    launcher = CollectiveLauncher(MicroOpScheduler(64))
    mesh = connect(Sizes(world_size=RANKS, expert=RANKS), rank, 60, launcher, first=True)
    group, sums = mesh.group("expert"), ReplicaGroups(mesh).of(mesh.world)
    flat, pieces, received = torch.full((40,), float(rank), dtype=torch.float64), [], []
    for _ in range(ROUNDS):
        totals: list[torch.Tensor] = []

        def sum_piece(number: int, num_pieces: int, totals: list[torch.Tensor] = totals) -> None:
            pieces.append((number, num_pieces))
            totals.append(sums.sum(flat[number * 8 : number * 8 + 8].clone()))

        ticket = launcher.all_reduce("flat", flat.numel() * 8, sum_piece)
        for send in ((1,) * RANKS, (2,) * RANKS):
            x = torch.arange(sum(send)).double() + 100 * rank
            received.append(run(AllToAll(group, "rows", send, send), x).tolist())
        ticket.wait()
        assert torch.cat(totals).tolist() == [float(sum(range(RANKS)))] * 40
    launcher.close()
    return {
        "pieces": pieces,
        "received": received,
        "sent": launcher.ledger.take().sent_bytes,
        "rows": mesh.ledger.take().sent_bytes["rows.all_to_all"],
        "timed": {name: len(each) for name, each in launcher.take_all_to_all_s().items()},
    }


def death(rank: int) -> str:
    """A rank ends without a word while others wait for its rows; what they are told."""
    launcher = CollectiveLauncher(MicroOpScheduler())
    mesh = connect(Sizes(world_size=RANKS, expert=RANKS), rank, 2, launcher, first=True)
    group = mesh.group("expert")
    run(AllToAll(group, "rows", (1,) * RANKS, (1,) * RANKS), torch.zeros(RANKS))
    if rank == 1:
        return ""
    pending = start(AllReduce(group, "counts"), torch.zeros(1))
    try:
        pending.wait()
    except RuntimeError as error:
        with pytest.raises(RuntimeError):
            start(AllReduce(group, "counts"), torch.zeros(1))  # what comes behind is refused at once
        return str(error)
    return "nothing happened"


def test_sums_run_beside_all_to_alls(tmp_path_factory: pytest.TempPathFactory) -> None:
    for rank, found in enumerate(on_ranks(RANKS, tmp_path_factory.mktemp("ranks"), rounds)):
        assert found["pieces"] == [(number, 5) for number in range(5)] * ROUNDS
        one, two = found["received"][:2]
        assert one == [100.0 * source + rank for source in range(RANKS)]
        assert two == [100.0 * source + 2 * rank + each for source in range(RANKS) for each in range(2)]
        assert found["sent"] == {"gradients.all_reduce": ROUNDS * 5 * (2 * (RANKS - 1) * 64 // RANKS)}
        assert found["rows"] == ROUNDS * (RANKS - 1) * 3 * 8
        assert found["timed"] == {"rows.all_to_all": 2 * ROUNDS}


def test_an_error_reaches_those_that_wait(tmp_path_factory: pytest.TempPathFactory) -> None:
    first, _, last = on_ranks(RANKS, tmp_path_factory.mktemp("ranks"), death)
    for said in (first, last):
        assert "nothing happened" not in said
        assert said


def hang(rank: int) -> tuple[str, str]:
    """The second rank does nothing; what others are told, whether they wait for an all-to-all or for a sum."""
    default = torch.distributed.distributed_c10d._get_default_store()
    told = []
    for first in (True, False):
        launcher = CollectiveLauncher(MicroOpScheduler())
        store = PrefixStore(f"hang {first}", default)
        roll = RollCall(store, rank, RANKS, 4.0)
        mesh = connect(Sizes(world_size=RANKS, expert=RANKS), rank, 4.0, launcher, roll, first=first)
        if rank == 1:
            continue
        with pytest.raises(ResourceError) as caught:
            run(AllReduce(mesh.group("expert"), "counts"), torch.zeros(1))
        told.append(str(caught.value))
    return told[0] if told else "", told[1] if told else ""


def test_a_rank_that_hangs_is_named_by_all_others(tmp_path_factory: pytest.TempPathFactory) -> None:
    for rank, told in enumerate(on_ranks(RANKS, tmp_path_factory.mktemp("ranks"), hang)):
        for words in told if rank != 1 else ():
            assert f"rank {rank} waited 4 s for counts.all_reduce: ranks 1 do not wait for anybody" in words


def test_the_end_of_another_rank_is_said_with_what_to_do() -> None:
    """The words are those of gloo where a connection ends; another error stays as it is."""
    roll = RollCall(torch.distributed.HashStore(), 0, 2, 30.0)
    for end in ("Connection closed by peer", "Read error: Connection reset by peer"):
        with pytest.raises(ResourceError, match="and another rank ended: see what"), roll.waiting("counts"):
            raise RuntimeError(end)
    with pytest.raises(RuntimeError, match="shape"), roll.waiting("counts"):
        raise RuntimeError("shape")
