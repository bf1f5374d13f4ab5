"""Paged memory: reference counts, prefix chain, order of eviction."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.serve.policy.block_book import BlockPool, extend_block_digests
from tests.serve.policy_harness import check_blocks


def digests_of(tokens: list[int], block_size: int) -> list[bytes]:
    digests: list[bytes] = []
    extend_block_digests(digests, tokens, block_size, len(tokens) // block_size)
    return digests


def published_sequence(pool: BlockPool, tokens: list[int]) -> list[int]:
    digests = digests_of(tokens, pool.block_size)
    table = pool.allocate(len(digests))
    for block, digest in zip(table, digests, strict=True):
        pool.offer(block, digest)
    return table


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4))
def test_digests_agree_exactly_where_histories_do(left: list[int], right: list[int], block_size: int) -> None:
    pairs = zip(digests_of(left, block_size), digests_of(right, block_size), strict=False)
    for index, (a, b) in enumerate(pairs):
        end = (index + 1) * block_size
        assert (a == b) == (left[:end] == right[:end])


def test_digests_grow_as_they_would_at_once() -> None:
    tokens = list(range(100, 120))
    grown: list[bytes] = []
    for num_blocks in (0, 1, 1, 4, 5):
        extend_block_digests(grown, tokens, 4, num_blocks)
        assert len(grown) == num_blocks
    assert grown == digests_of(tokens, 4)


def test_a_released_block_is_found_until_its_memory_is_needed() -> None:
    pool = BlockPool(3, 2)
    table = published_sequence(pool, [1, 2, 3, 4])
    pool.release(table)
    assert pool.num_free == 3
    digests = digests_of([1, 2, 3, 4, 9, 9], 2)
    assert pool.match(digests, 3) == table
    assert pool.match(digests, 1) == table[:1]
    assert pool.num_idle(table) == 2
    pool.allocate(1)  # the block that never held anything goes first
    assert pool.match(digests, 3) == table
    pool.allocate(1)  # then the tail of the chain, so that its head is still of use
    assert pool.match(digests, 3) == table[:1]


def test_shared_blocks_are_free_when_the_last_holder_lets_go() -> None:
    pool = BlockPool(4, 2)
    table = published_sequence(pool, [1, 2, 3, 4])
    pool.share(table)
    pool.release(table)
    assert pool.num_free == 2
    check_blocks(pool, [table])
    pool.release(table)
    assert pool.num_free == 4
    check_blocks(pool, [])


def test_the_same_content_is_published_once() -> None:
    pool = BlockPool(4, 2)
    first = published_sequence(pool, [1, 2])
    second = published_sequence(pool, [1, 2])
    assert len(pool._block_of) == 1
    assert pool.match(digests_of([1, 2], 2), 1) == first
    pool.release(second)
    check_blocks(pool, [first])


def test_nothing_is_found_after_the_memory_is_lost() -> None:
    pool = BlockPool(4, 2)
    pool.release(published_sequence(pool, [1, 2]))
    pool.clear_offered()
    assert pool.match(digests_of([1, 2], 2), 1) == []
    check_blocks(pool, [])


def test_misuse_is_a_bug_not_a_silence() -> None:
    pool = BlockPool(2, 2)
    table = pool.allocate(2)
    with pytest.raises(AssertionError, match="3 blocks wanted, 0 free"):
        pool.allocate(3)
    pool.release(table)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(table)
    with pytest.raises(AssertionError, match="not on offer"):
        pool.share([0])


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10)), max_size=60))
def test_blocks_are_conserved_under_any_order_of_operations(num_blocks: int, operations: list[tuple[int, int]]) -> None:
    pool = BlockPool(num_blocks, 1)
    tables: list[list[int]] = []
    for kind, value in operations:
        if kind == 0 and pool.num_free >= 1 + value % 3:
            tables.append(published_sequence(pool, [value % 4, value % 3, value % 2][: 1 + value % 3]))
        elif kind == 1 and tables:
            pool.release(tables.pop(value % len(tables)))
        elif kind == 2:
            found = pool.match(digests_of([value % 4, value % 3], 1), 2)
            pool.share(found)
            tables.append(found)
        check_blocks(pool, tables)
        assert pool.num_free + pool.num_used == num_blocks
