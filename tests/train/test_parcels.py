"""Tensors between two ranks: in any order, counted, and who is silent is named."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from antiphon.base.errors import PeerLost
from antiphon.comm.ledger import Ledger
from antiphon.comm.mesh import Group
from antiphon.train.pipeline import start_receive, start_send
from tests.comm.ranks import on_ranks


def group_of(rank: int, timeout_s: float) -> Group:
    made = dist.new_group([0, 1], timeout=timedelta(seconds=timeout_s))
    return Group((0, 1), rank, Ledger(), made)


def both_ways(rank: int) -> tuple[float, float, int]:
    """Both send two tensors before either receives, and take them in the reverse order."""
    group = group_of(rank, 60)
    sent = [start_send(group, 1 - rank, tag, "rows", torch.full((3, 5), 10.0 * rank + tag)) for tag in (0, 1)]
    taken = [start_receive(group, 1 - rank, tag, "rows", torch.empty(3, 5)).wait() for tag in (1, 0)]
    for parcel in sent:
        parcel.wait()
    return float(taken[0].mean()), float(taken[1].mean()), group.ledger.sent_bytes["pipeline.send"]


def test_tags_tell_tensors_apart(tmp_path: Path) -> None:
    bytes_sent = 2 * 15 * 4
    assert on_ranks(2, tmp_path, both_ways) == [(11, 10, bytes_sent), (1, 0, bytes_sent)]


def silent(rank: int) -> str:
    """Rank 1 never sends what rank 0 waits for."""
    group = group_of(rank, 2)
    message = ""
    if rank == 0:
        try:
            start_receive(group, 1, 7, "from the forward of micro-batch 3 in stage 1", torch.empty(4)).wait()
        except PeerLost as error:
            message = str(error)
    dist.barrier()
    return message


def test_a_silent_peer_is_named(tmp_path: Path) -> None:
    message, _ = on_ranks(2, tmp_path, silent)
    assert message.startswith("lost rank 1: pipeline.receive, from the forward of micro-batch 3 in stage 1: ")
