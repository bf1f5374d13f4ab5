"""Collectives of ranks on devices: the bits of the host's form. gloo stands for NCCL, the CPU for a GPU; and without
memory, on `meta`, which calls are made with which sizes."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from antiphon.comm.device_group import DeviceRankGroup, why_no_device_sums
from antiphon.comm.rank_group import NativeRankGroup
from tests.comm.m2n.backends import BACKENDS, PATIENCE_S
from tests.comm.rank_harness import Ranks

CPU = torch.device("cpu")
SHM = BACKENDS[0]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def over_gloo(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


class DeviceRanks(Ranks):
    """Groups over gloo; `identities`: of the ranks' devices."""

    def __init__(self, size: int, identities: list[str]) -> None:
        self._identities = identities
        super().__init__(SHM, size)

    def _make(self, rank: int, size: int, mark: str) -> NativeRankGroup:
        return DeviceRankGroup(
            self.backend.endpoint(f"rank[{rank}]{mark}"),
            rank,
            size,
            device=CPU,
            host="127.0.0.1",
            make=over_gloo,
            identity=lambda device: self._identities[rank],
            **self.options,
        )


@pytest.fixture
def both() -> Any:
    """Three ranks by gloo and three by the library alone."""
    made = DeviceRanks(3, ["a", "b", "c"]), Ranks(SHM, 3, timeout_s=PATIENCE_S)
    try:
        for each in made:
            each.reset(0)
        yield made
    finally:
        for each in made:
            each.close()


def random(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def every_collective(end: NativeRankGroup, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """What each gives one of any number of ranks whose tensors are on `device`; ranks have 2, 0, 3, 1, ... rows."""
    size, rank = end.size, end.rank
    rows = [(2, 0, 3, 1)[other % 4] for other in range(size)]
    found = []
    for elements in (0, 1, 2, 7, 1000):
        total = random((elements,), rank, dtype).to(device)
        end.all_reduce(total)
        found.append(total)
    found.append(end.all_gather(random((rows[rank], 5), rank, dtype).to(device), rows))
    found.append(end.reduce_scatter(random((sum(rows), 4), rank, dtype).to(device), rows))
    # from one rank to another: as many rows as the difference of their numbers says, at most two
    to = [(other - rank) % size % 3 for other in range(size)]
    source = [(rank - other) % size % 3 for other in range(size)]
    found.append(end.all_to_all(random((sum(to), 3), rank, dtype).to(device), to, source))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collectives_give_the_bits_of_the_hosts_form(both: tuple[Ranks, Ranks], dtype: torch.dtype) -> None:
    by_device, by_host = (each.each(lambda end: every_collective(end, CPU, dtype)) for each in both)
    for ours, theirs in zip(by_device, by_host, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_rank_alone_has_its_own_sums() -> None:
    """What `make gpu-check` can run on a machine with one GPU."""
    ends = DeviceRanks(1, ["a"])
    try:
        ends.reset(0)
        (found,) = ends.each(lambda end: every_collective(end, CPU, torch.bfloat16))
        assert torch.equal(found[4], random((1000,), 0, torch.bfloat16))
        assert torch.equal(found[5], random((2, 5), 0, torch.bfloat16))
    finally:
        ends.close()


def test_an_epoch_has_a_process_group_of_its_own(both: tuple[Ranks, Ranks]) -> None:
    ends, _ = both
    before = [end._group for end in ends.groups]
    ends.each(lambda end: end.reset(0, [other.ticket for other in ends.groups]))
    assert [end._group for end in ends.groups] == before  # asked again: nothing happens
    ends.replace(1)
    ends.reset(1)
    assert all(old is not end._group for old, end in zip(before, ends.groups, strict=True))
    parts = [torch.full((4,), float(rank)) for rank in range(3)]
    ends.each(lambda end: end.all_reduce(parts[end.rank]))
    assert all(part.tolist() == [3.0] * 4 for part in parts)


def test_ranks_that_share_a_device_add_in_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    ends = DeviceRanks(2, ["same", "same"])
    try:
        with caplog.at_level("WARNING"):
            ends.reset(0)
        assert "rank[0]: sums are made in host memory: ranks share a GPU (same, same)" in caplog.text
        assert not any(end.takes(torch.device("meta")) for end in ends.groups)
        parts = [torch.ones(3), torch.ones(3)]
        ends.each(lambda end: end.all_reduce(parts[end.rank]))
        assert parts[0].tolist() == [2.0] * 3
    finally:
        ends.close()


class _Recorded:
    """A process group that moves nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def alltoall_base(self, out: Tensor, given: Tensor, source: list[int], to: list[int]) -> "_Recorded":
        self.calls.append(("all to all", out.device.type, source, to))
        return self

    def _allgather_base(self, out: Tensor, given: Tensor) -> "_Recorded":
        self.calls.append(("all gather", out.device.type, len(out), len(given)))
        return self

    def wait(self) -> None: ...

    def abort(self) -> None:
        self.calls.append(("abort",))


def test_calls_on_a_device() -> None:
    """Tensors of the device go by the process group, those of the host by the library; nothing is read back."""
    meta = torch.device("meta")
    end = DeviceRankGroup(SHM.endpoint("rank[0]"), 0, 2, device=meta, host="127.0.0.1", timeout_s=1.0)
    end._group = group = _Recorded()
    assert end.takes(meta)
    assert end.takes(CPU)
    assert not end.takes(torch.device("cuda", 0))
    x_TH = torch.empty(3, 5, dtype=torch.bfloat16, device=meta)
    end.all_reduce(x_TH)
    assert end.all_gather(x_TH, [3, 2]).shape == (5, 5)
    assert end.reduce_scatter(x_TH, [1, 2]).shape == (1, 5)
    assert end.all_to_all(x_TH, [1, 2], [4, 0]).shape == (4, 5)
    assert group.calls == [
        ("all to all", "meta", [16, 16], [16, 16]),  # 15 numbers, 8 a rank
        ("all gather", "meta", 32, 16),
        ("all gather", "meta", 60, 30),
        ("all to all", "meta", [10, 10], [10, 20]),
        ("all to all", "meta", [40, 0], [10, 20]),
    ]
    end.abort(1)
    assert group.calls[-1] == ("abort",)
    end.close()


def test_where_sums_are_made() -> None:
    assert why_no_device_sums(CPU) == "their tensors are there"
    if not dist.is_nccl_available():
        assert "has no NCCL for cuda" in why_no_device_sums(torch.device("cuda", 0))
