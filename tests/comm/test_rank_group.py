"""Collectives of a group of ranks, over every transport, beside the same sums and slices in plain torch."""

import re
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from antiphon.base.errors import PeerLost, PeerTimeout, UserError
from antiphon.comm.m2n.api import StepAborted
from antiphon.comm.rank_group import NativeRankGroup, RankGroup
from tests.comm.m2n.backends import BACKENDS, Backend, need
from tests.comm.rank_harness import Ranks, ranks

SIZES = (1, 2, 3, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SLOT_BYTES = 1024  # small, so that usual tensors take many chunks
ELEMENTS = (0, 1, 2, 31, 256, 257, 5000, 40_000)  # the last ones are shared out among ranks


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size} ranks")
def group(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with ranks(request.param, slot_bytes=SLOT_BYTES) as made:
        yield made


def random(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sum_in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_gives_every_rank_the_same_bits(group: Ranks, dtype: torch.dtype) -> None:
    for elements in ELEMENTS:
        parts = [random((elements,), rank, dtype) for rank in range(len(group.groups))]
        results = [part.clone() for part in parts]
        group.each(lambda end, results=results: end.all_reduce(results[end.rank]))
        for result in results:
            assert torch.equal(result, sum_in_order(parts)), f"{elements} elements"


def test_sums_beside_other_work_have_the_bits_of_one(group: Ranks) -> None:
    """Blocks of rows, of which there are at most four; few rows are one block."""
    with ranks(len(group.groups), slot_bytes=SLOT_BYTES, in_blocks=True) as made:
        assert [len(made.groups[0].row_blocks(rows)) for rows in (0, 1, 255, 256, 600, 5000)] == [1, 1, 1, 2, 4, 4]
        assert group.groups[0].row_blocks(5000) == [(0, 5000)], "not asked for"
        parts = [random((601, 33), rank, torch.bfloat16) for rank in range(len(made.groups))]
        results = [part.clone() for part in parts]

        def add(end: NativeRankGroup) -> None:
            for first, last in end.row_blocks(601):
                end.begin_sum(results[end.rank][first:last])
            end.finish_sums()
            end.finish_sums()  # none is under way

        made.each(add)
        for result in results:
            assert torch.equal(result, sum_in_order(parts))


def test_a_lost_rank_ends_all_sums_under_way() -> None:
    """With the error of the first; after a reset the group sums again."""
    with ranks(2, in_blocks=True) as made:
        rows = torch.ones(600, 4)

        def add(end: NativeRankGroup) -> None:
            for first, last in end.row_blocks(600):
                end.begin_sum(rows[first:last].clone())
            end.finish_sums()

        made.replace(1)
        with pytest.raises(PeerLost, match=re.escape("rank[1]")):
            add(made.groups[0])
        made.reset(1)
        made.each(add)


def test_sums_keep_what_is_not_a_number(group: Ranks) -> None:
    parts = [torch.ones(40, dtype=torch.bfloat16) for _ in group.groups]
    parts[-1][3], parts[-1][4] = torch.nan, torch.inf
    group.each(lambda end: end.all_reduce(parts[end.rank]))
    assert all(part[3].isnan() and part[4].isinf() for part in parts)


sizes_of_rows = st.lists(st.integers(0, 40), min_size=8, max_size=8)


@settings(max_examples=12, deadline=None)
@given(rows=sizes_of_rows, width=st.integers(1, 40), dtype=st.sampled_from(DTYPES))
def test_rows_are_gathered_and_sums_scattered(group: Ranks, rows: list[int], width: int, dtype: torch.dtype) -> None:
    size = len(group.groups)
    rows = rows[:size]
    own = [random((count, width), rank, dtype) for rank, count in enumerate(rows)]
    for gathered in group.each(lambda end: end.all_gather(own[end.rank], rows)):
        assert torch.equal(gathered, torch.cat(own))
    full = [random((sum(rows), width), rank, dtype) for rank in range(size)]
    scattered = group.each(lambda end: end.reduce_scatter(full[end.rank], rows))
    for part, expected in zip(scattered, sum_in_order(full).split(rows), strict=True):
        assert torch.equal(part, expected)


@settings(max_examples=12, deadline=None)
@given(counts=st.lists(sizes_of_rows, min_size=8, max_size=8), width=st.integers(1, 40))
def test_all_to_all_of_uneven_sizes(group: Ranks, counts: list[list[int]], width: int) -> None:
    size = len(group.groups)
    to = [row[:size] for row in counts[:size]]
    sent = [random((sum(row), width), rank) for rank, row in enumerate(to)]
    came = group.each(lambda end: end.all_to_all(sent[end.rank], to[end.rank], [row[end.rank] for row in to]))
    parts = [part.split(row) for part, row in zip(sent, to, strict=True)]
    for rank, rows in enumerate(came):
        assert torch.equal(rows, torch.cat([parts[source][rank] for source in range(size)]))


def test_small_messages_reach_all_ranks_from_any_root(group: Ranks) -> None:
    for root in {0, len(group.groups) - 1}:
        for payload in (b"", b"x", bytes(range(256)) * 9):
            got = group.each(
                lambda end, payload=payload, root=root: end.broadcast_bytes(
                    payload if end.rank == root else None, root=root
                )
            )
            assert got == [payload] * len(group.groups)
    group.each(lambda end: end.barrier())


def test_bytes_sent_are_those_of_the_form() -> None:
    """Shared out: each rank sends its addends and its sums once. Direct: everything to everybody."""
    with ranks(4, slot_bytes=1 << 16) as group:
        for elements, expected in ((1 << 18, 2 * 3 * (1 << 18)), (1 << 10, 3 * 4 * (1 << 10))):
            before = [end.bytes_sent for end in group.groups]
            group.each(lambda end, elements=elements: end.all_reduce(torch.zeros(elements)))
            assert [end.bytes_sent - first for end, first in zip(group.groups, before, strict=True)] == [expected] * 4


@pytest.mark.parametrize("backend", BACKENDS[1:], ids=lambda backend: backend.name)
def test_every_transport_gives_the_same_bits(backend: Backend) -> None:
    with ranks(3, need(backend), slot_bytes=SLOT_BYTES) as group:
        for elements in (1, 700, 90_000):
            parts = [random((elements,), rank, torch.bfloat16) for rank in range(3)]
            results = [part.clone() for part in parts]
            group.each(lambda end, results=results: end.all_reduce(results[end.rank]))
            assert all(torch.equal(result, sum_in_order(parts)) for result in results)
        rows = [3, 0, 50]
        own = [random((count, 40), rank) for rank, count in enumerate(rows)]
        gathered = group.each(lambda end: end.all_gather(own[end.rank], rows))
        assert all(torch.equal(each, torch.cat(own)) for each in gathered)


@pytest.mark.parametrize("backend", [BACKENDS[0], BACKENDS[1]], ids=lambda backend: backend.name)
def test_a_lost_rank_is_named_and_the_group_goes_on_with_its_successor(backend: Backend) -> None:
    with ranks(3, backend, slot_bytes=SLOT_BYTES) as group:
        for epoch in (1, 2):
            group.replace(1)
            raised = group.outcomes(lambda end: end.all_reduce(torch.ones(3000)) if end.rank != 1 else None)
            for rank in (0, 2):
                error = raised[rank]
                assert isinstance(error, PeerLost)
                assert error.peer.startswith("rank[1]")
            with pytest.raises(UserError, match="reset the group first"):
                group.groups[0].all_reduce(torch.ones(3))
            group.reset(epoch)
            results = [torch.full((3000,), float(rank)) for rank in range(3)]
            group.each(lambda end, results=results: end.all_reduce(results[end.rank]))
            assert all(torch.equal(result, torch.full((3000,), 3.0)) for result in results)


def test_abort_ends_a_wait_and_late_messages_of_the_old_epoch_are_dropped() -> None:
    with ranks(3, slot_bytes=SLOT_BYTES) as group:
        waiting = threading.Barrier(3)

        def begin(index: int) -> None:
            waiting.wait()
            group.groups[index].all_reduce(torch.ones(100))

        raised: list[BaseException] = []

        def guarded(index: int) -> None:
            try:
                begin(index)
            except StepAborted as error:
                raised.append(error)

        threads = [threading.Thread(target=guarded, args=(index,)) for index in (0, 2)]
        for thread in threads:
            thread.start()
        waiting.wait()  # rank 1 never joins in
        for end in group.groups:
            end.abort(1)
        for thread in threads:
            thread.join()
        assert len(raised) == 2
        group.reset(1)
        results = [torch.full((100,), float(rank)) for rank in range(3)]
        group.each(lambda end: end.all_reduce(results[end.rank]))
        assert all(torch.equal(result, torch.full((100,), 3.0)) for result in results)


def test_a_rank_that_stays_away_is_named() -> None:
    with ranks(3, timeout_s=0.05) as group:
        with pytest.raises(PeerTimeout) as caught:
            group.groups[0].all_reduce(torch.ones(3))
        assert caught.value.peers == ["rank[1]", "rank[2]"]


def test_an_idle_follower_may_listen_again() -> None:
    with ranks(2) as group:
        leader, follower = group.groups
        for _ in range(2):
            with pytest.raises(PeerTimeout):
                follower.broadcast_bytes(None, timeout_s=0.001)
        leader.broadcast_bytes(b"step")
        assert follower.broadcast_bytes(None) == b"step"


def test_calls_that_do_not_fit_each_other_are_refused() -> None:
    with ranks(2) as group:
        raised = group.outcomes(lambda end: end.all_reduce(torch.ones(3 + end.rank)))
        assert all(isinstance(error, UserError) and "make the same calls" in str(error) for error in raised)
        with pytest.raises(UserError, match="1 tickets for a group of 2 ranks"):
            group.groups[0].reset(1, [b""])


def test_ranks_of_several_do_nothing_as_a_group_of_one_does() -> None:
    """A call that is not there would be that of `RankGroup`, where nothing travels."""
    calls = {name for name in vars(RankGroup) if not name.startswith("_")} - {"rank", "size"}
    assert calls <= set(vars(NativeRankGroup))


def test_what_a_collective_cannot_take_is_refused_before_anything_is_sent(group: Ranks) -> None:
    if len(group.groups) == 1:
        pytest.skip("one rank has all rows")

    def refused(ranks: NativeRankGroup) -> None:
        two, counts = torch.ones(2, 2), [1] * ranks.size
        calls: list[Callable[[], object]] = [
            lambda: ranks.all_reduce(torch.ones(4, device="meta")),
            lambda: ranks.all_reduce(torch.ones(4, 4).T[1:]),
            lambda: ranks.all_gather(two, counts),
            lambda: ranks.all_gather(two, [2]),
            lambda: ranks.all_gather(torch.tensor(1.0), counts),
            lambda: ranks.reduce_scatter(two, [500] * ranks.size),
            lambda: ranks.all_to_all(two, [-1] * ranks.size, counts),
            lambda: ranks.broadcast_bytes(b"" if ranks.rank else None),
            lambda: ranks.begin_sum(two),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=r"on meta|strides|rows|payload|one block"):
                call()
        numbers = np.full(ranks.size, 1, dtype=np.int8)  # a number of bytes that 8 bits do not hold
        assert ranks.all_gather(torch.ones(1, 200), numbers).shape == (ranks.size, 200)
        with torch.device("meta"):
            assert ranks.all_gather(two[:1], (count for count in counts)).is_cpu

    group.each(refused)
