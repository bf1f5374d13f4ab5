"""Every collective of the cost model is run over gloo with a counter on each send: result and bytes must agree.

Ranks are threads of this process, each with its own gloo process group over real sockets.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from antiphon.cost.network import CollectiveName, collective_bytes

if not dist.is_gloo_available():  # a build without it cannot count
    pytest.skip("this torch has no gloo", allow_module_level=True)


@dataclass
class CountingRank:
    """One rank: sends and receives point to point, and adds up what it sends inside its domain and across."""

    group: dist.ProcessGroup
    rank: int
    degree: int
    together: int
    inside: int = 0
    across: int = 0

    def domain_of(self, rank: int) -> int:
        return rank // self.together

    def exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
        """One round: all sends and receives at once, by peer."""
        works = []
        for peer, tensor in sends.items():
            size = tensor.numel() * tensor.element_size()
            if self.domain_of(peer) == self.domain_of(self.rank):
                self.inside += size
            else:
                self.across += size
            works.append(self.group.send([tensor.contiguous()], peer, 0))
        for peer, tensor in receives.items():
            works.append(self.group.recv([tensor], peer, 0))
        for work in works:
            work.wait()


def ring_reduce_scatter(rank: CountingRank, ring: list[int], tensor: Tensor) -> Tensor:
    """Sum over the ring; place p keeps chunk p."""
    place, size = ring.index(rank.rank), len(ring)
    chunks = [chunk.clone() for chunk in tensor.chunk(size)]
    for step in range(size - 1):
        to_send, to_add = (place - step - 1) % size, (place - step - 2) % size
        received = torch.empty_like(chunks[to_add])
        rank.exchange({ring[(place + 1) % size]: chunks[to_send]}, {ring[(place - 1) % size]: received})
        chunks[to_add] += received
    return chunks[place]


def ring_all_gather(rank: CountingRank, ring: list[int], chunk: Tensor) -> Tensor:
    place, size = ring.index(rank.rank), len(ring)
    chunks = [torch.empty_like(chunk) for _ in ring]
    chunks[place] = chunk
    for step in range(size - 1):
        to_send, to_get = (place - step) % size, (place - step - 1) % size
        rank.exchange({ring[(place + 1) % size]: chunks[to_send]}, {ring[(place - 1) % size]: chunks[to_get]})
    return torch.cat(chunks)


def direct_reduce_scatter(rank: CountingRank, ranks: list[int], tensor: Tensor) -> Tensor:
    """One round: everybody sends everybody its chunk."""
    chunks = list(tensor.chunk(len(ranks)))
    mine = chunks[ranks.index(rank.rank)].clone()
    others = [peer for peer in ranks if peer != rank.rank]
    received = {peer: torch.empty_like(mine) for peer in others}
    rank.exchange({peer: chunks[ranks.index(peer)] for peer in others}, received)
    for chunk in received.values():
        mine += chunk
    return mine


def direct_all_gather(rank: CountingRank, ranks: list[int], chunk: Tensor) -> Tensor:
    others = [peer for peer in ranks if peer != rank.rank]
    chunks = {peer: torch.empty_like(chunk) for peer in others}
    rank.exchange(dict.fromkeys(others, chunk), chunks)
    return torch.cat([chunks.get(peer, chunk) for peer in ranks])


def levels(rank: CountingRank) -> tuple[list[int], list[int]]:
    """(ranks of my domain, ranks of my place in all domains)."""
    first = rank.domain_of(rank.rank) * rank.together
    neighbours = list(range(first, first + rank.together))
    return neighbours, list(range(rank.rank % rank.together, rank.degree, rank.together))


def reduce_scatter(rank: CountingRank, tensor: Tensor) -> Tensor:
    if rank.degree % rank.together:
        return ring_reduce_scatter(rank, list(range(rank.degree)), tensor)
    neighbours, places = levels(rank)
    return ring_reduce_scatter(rank, places, direct_reduce_scatter(rank, neighbours, tensor))


def all_gather(rank: CountingRank, chunk: Tensor) -> Tensor:
    if rank.degree % rank.together:
        return ring_all_gather(rank, list(range(rank.degree)), chunk)
    neighbours, places = levels(rank)
    return direct_all_gather(rank, neighbours, ring_all_gather(rank, places, chunk))


def shard_place(rank: CountingRank) -> int:
    """Which 1 / degree of the tensor `reduce_scatter` leaves here."""
    if rank.degree % rank.together:
        return rank.rank
    return rank.rank % rank.together * (rank.degree // rank.together) + rank.domain_of(rank.rank)


def all_to_all(rank: CountingRank, tensor: Tensor) -> Tensor:
    chunks = list(tensor.chunk(rank.degree))
    others = [peer for peer in range(rank.degree) if peer != rank.rank]
    received = {peer: torch.empty_like(chunks[peer]) for peer in others}
    rank.exchange({peer: chunks[peer] for peer in others}, received)
    return torch.cat([received.get(peer, chunks[rank.rank]) for peer in range(rank.degree)])


def check_all_reduce(rank: CountingRank, tensor: Tensor) -> None:
    expected = tensor.clone()
    rank.group.allreduce([expected]).wait()
    assert torch.equal(all_gather(rank, reduce_scatter(rank, tensor)), expected)


def check_reduce_scatter(rank: CountingRank, tensor: Tensor) -> None:
    expected = tensor.clone()
    rank.group.allreduce([expected]).wait()
    assert torch.equal(reduce_scatter(rank, tensor), expected.chunk(rank.degree)[shard_place(rank)])


def check_all_gather(rank: CountingRank, tensor: Tensor) -> None:
    gathered = [torch.empty_like(chunk) for chunk in tensor.chunk(rank.degree)]
    mine = tensor.chunk(rank.degree)[0].clone()
    rank.group.allgather([gathered], [mine]).wait()
    places = {shard_place(_at(rank, other)): other for other in range(rank.degree)}
    expected = torch.cat([gathered[places[place]] for place in range(rank.degree)])
    assert torch.equal(all_gather(rank, mine), expected)


def check_all_to_all(rank: CountingRank, tensor: Tensor) -> None:
    expected = torch.empty_like(tensor)
    rank.group.alltoall_base(expected, tensor.clone(), [], []).wait()
    assert torch.equal(all_to_all(rank, tensor), expected)


def _at(rank: CountingRank, number: int) -> CountingRank:
    return CountingRank(rank.group, number, rank.degree, rank.together)


CHECKS: dict[CollectiveName, Callable[[CountingRank, Tensor], None]] = {
    "all_reduce": check_all_reduce,
    "reduce_scatter": check_reduce_scatter,
    "all_gather": check_all_gather,
    "all_to_all": check_all_to_all,
}


def count(name: CollectiveName, degree: int, together: int, num_elements: int) -> tuple[int, int]:
    """The most bytes a rank sends inside its domain, and across, when the collective really runs."""
    store = dist.HashStore()
    start = threading.Barrier(degree)

    def run(number: int) -> tuple[int, int]:
        group = dist.ProcessGroupGloo(store, number, degree, timedelta(seconds=20))
        rank = CountingRank(group, number, degree, together)
        # Whole numbers: sums are exact in any order.
        tensor = torch.arange(num_elements, dtype=torch.float32) * (number + 1) % 97
        start.wait(20)
        CHECKS[name](rank, tensor)
        start.wait(20)
        return rank.inside, rank.across

    with ThreadPoolExecutor(degree) as pool:
        sent = [future.result(timeout=60) for future in [pool.submit(run, number) for number in range(degree)]]
    return max(inside for inside, _ in sent), max(across for _, across in sent)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(
    ("degree", "together"), [(2, 2), (2, 1), (3, 3), (3, 1), (3, 2), (4, 4), (4, 2), (4, 1), (5, 3), (6, 3), (7, 4)]
)
def test_bytes_sent_are_the_bytes_counted(name: CollectiveName, degree: int, together: int) -> None:
    num_elements = 840  # divides by 2 to 8
    counted = count(name, degree, together, num_elements)
    expected = collective_bytes(name, num_elements * 4, degree, together)
    assert counted == pytest.approx(tuple(map(float, expected)))


@pytest.mark.parametrize("degree", [2, 3, 7])
def test_in_one_domain_nothing_goes_across(degree: int) -> None:
    for name in CHECKS:
        assert float(collective_bytes(name, 840.0, degree)[1]) == 0
