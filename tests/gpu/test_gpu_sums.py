"""Sums over ranks on their GPUs: by NCCL, with the bits of the host's form, in the order of the device's stream."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.comm.device_group import DeviceRankGroup, why_no_device_sums
from antiphon.comm.rank_group import NativeRankGroup
from tests.comm.m2n.backends import PATIENCE_S, by_name
from tests.comm.rank_harness import Ranks
from tests.comm.test_device_group import DTYPES, every_collective

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
SHM = by_name("shm")[0]


class NcclRanks(Ranks):
    """A GPU each."""

    def __init__(self, size: int) -> None:
        if (why := why_no_device_sums(torch.device("cuda", 0))) or torch.cuda.device_count() < size:
            pytest.skip(why or f"{size} ranks need a GPU each, this machine has {torch.cuda.device_count()}")
        super().__init__(SHM, size, timeout_s=PATIENCE_S)

    def _make(self, rank: int, size: int, mark: str) -> NativeRankGroup:
        endpoint = self.backend.endpoint(f"rank[{rank}]{mark}")
        device = torch.device("cuda", rank)
        return DeviceRankGroup(endpoint, rank, size, device=device, host="127.0.0.1", **self.options)

    def each(self, call: Callable[[NativeRankGroup], Any]) -> list[Any]:
        def on_its_gpu(end: NativeRankGroup) -> Any:
            torch.cuda.set_device(end.rank)
            return call(end)

        return super().each(on_its_gpu)


@pytest.fixture(params=[1, 2, 4])
def ends(request: pytest.FixtureRequest) -> Any:
    made = NcclRanks(request.param)
    try:
        made.reset(0)
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collectives_give_the_bits_of_the_hosts_form(ends: NcclRanks, dtype: torch.dtype) -> None:
    assert all(end.takes(torch.device("cuda", end.rank)) for end in ends.groups), "NCCL moves them"
    by_device = ends.each(
        lambda end: [each.cpu() for each in every_collective(end, torch.device("cuda", end.rank), dtype)]
    )
    hosts = Ranks(SHM, len(ends.groups), timeout_s=PATIENCE_S)
    try:
        hosts.reset(0)
        by_host = hosts.each(lambda end: every_collective(end, torch.device("cpu"), dtype))
    finally:
        hosts.close()
    for ours, theirs in zip(by_device, by_host, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_sum_waits_for_what_is_on_the_stream_before_it(ends: NcclRanks) -> None:
    def late(end: NativeRankGroup) -> Tensor:
        part = torch.zeros(100_000, device=torch.device("cuda", end.rank))
        torch.cuda._sleep(50_000_000)
        part += end.rank + 1
        end.all_reduce(part)  # returns before the device has come here
        part *= 2
        return part.cpu()

    size = len(ends.groups)
    for found in ends.each(late):
        assert torch.equal(found, torch.full((100_000,), float(size * (size + 1))))


def test_a_new_epoch_has_a_group_of_its_own(ends: NcclRanks) -> None:
    ends.reset(1)
    for found in ends.each(lambda end: every_collective(end, torch.device("cuda", end.rank), torch.float32)[0]):
        assert found.is_cuda
