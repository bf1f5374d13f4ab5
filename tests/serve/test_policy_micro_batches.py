"""Micro-batches: every row once, in order, evenly, none empty without need."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.serve.policy.micro_batches import MIN_ROWS_OF_A_PART, MicroBatch, chunk_cost, split_into_micro_batches
from antiphon.serve.policy.step import SequenceStep

CONTEXT = 1024.0


def sequence(start: int, num_rows: int) -> SequenceStep:
    return SequenceStep("r", 0, (1,) * num_rows, start, 0, (), True, 0, 0)


def cost(sequences: list[SequenceStep], batch: MicroBatch) -> float:
    return sum(chunk_cost(sequences[part.sequence].start + part.first_row, part.num_rows, CONTEXT) for part in batch)


def num_rows(batch: MicroBatch) -> int:
    return sum(part.num_rows for part in batch)


SEQUENCES = st.lists(
    st.one_of(
        st.builds(sequence, st.integers(0, 100_000), st.just(1)),
        st.builds(sequence, st.integers(0, 10_000), st.integers(1, 3_000)),
    ),
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(SEQUENCES, st.integers(1, 7))
def test_every_row_is_in_exactly_one_micro_batch_and_rows_keep_their_order(
    sequences: list[SequenceStep], num_micro_batches: int
) -> None:
    batches = split_into_micro_batches(sequences, num_micro_batches, CONTEXT)
    assert len(batches) <= num_micro_batches
    assert all(batches)
    next_row = [0] * len(sequences)
    for batch in batches:
        assert [part.sequence for part in batch] == sorted({part.sequence for part in batch})
        for part in batch:
            assert part.num_rows > 0
            assert part.first_row == next_row[part.sequence], "rows of a sequence must run in order"
            next_row[part.sequence] += part.num_rows
    assert next_row == [len(step.token_ids) for step in sequences]
    if len(batches) < num_micro_batches:
        assert all(len(batch) == 1 for batch in batches), "one is empty while another holds two"
    assert batches == split_into_micro_batches(sequences, num_micro_batches, CONTEXT)


@settings(max_examples=200, deadline=None)
@given(SEQUENCES, st.integers(2, 5))
def test_no_micro_batch_is_above_fair_share_by_more_than_what_cannot_be_cut(
    sequences: list[SequenceStep], num_micro_batches: int
) -> None:
    batches = split_into_micro_batches(sequences, num_micro_batches, CONTEXT)
    if not batches:
        return
    total = sum(chunk_cost(step.start, len(step.token_ids), CONTEXT) for step in sequences)
    total_rows = sum(len(step.token_ids) for step in sequences)
    largest = max(max(cost(sequences, batch) / total, num_rows(batch) / total_rows) for batch in batches)
    whole = [
        max(chunk_cost(step.start, len(step.token_ids), CONTEXT) / total, len(step.token_ids) / total_rows)
        for step in sequences
    ]
    assert largest <= 2 / num_micro_batches + max(whole) + 1e-9


def test_equal_decodes_are_dealt_evenly() -> None:
    batches = split_into_micro_batches([sequence(500, 1)] * 1024, 3, CONTEXT)
    assert sorted(num_rows(batch) for batch in batches) == [341, 341, 342]


def test_long_contexts_are_spread_without_unbalancing_rows() -> None:
    sequences = [sequence(100_000, 1)] * 4 + [sequence(100, 1)] * 60
    batches = split_into_micro_batches(sequences, 4, CONTEXT)
    assert [sum(part.sequence < 4 for part in batch) for batch in batches] == [1, 1, 1, 1]
    assert [num_rows(batch) for batch in batches] == [16, 16, 16, 16]


@pytest.mark.parametrize("num_micro_batches", [2, 3, 4])
def test_one_long_prompt_alone_uses_ping_pong(num_micro_batches: int) -> None:
    sequences = [sequence(4096, 2048)]
    batches = split_into_micro_batches(sequences, num_micro_batches, CONTEXT)
    costs = [cost(sequences, batch) for batch in batches]
    assert len(batches) == num_micro_batches
    assert max(costs) < 1.01 * min(costs)
    assert num_rows(batches[0]) > num_rows(batches[-1]), "later rows see more keys"


def test_a_dominant_chunk_is_cut_and_decodes_dealt_around_it() -> None:
    sequences = [sequence(1000, 1)] * 64 + [sequence(0, 1000)]
    batches = split_into_micro_batches(sequences, 2, CONTEXT)
    total = sum(cost(sequences, batch) for batch in batches)
    for batch in batches:
        assert 0.45 < cost(sequences, batch) / total < 0.55
        assert 0.45 < num_rows(batch) / 1064 < 0.55
    assert [batch[-1].sequence for batch in batches] == [64, 64]


def test_three_equal_chunks_in_two_micro_batches_are_cut() -> None:
    sequences = [sequence(0, 300)] * 3
    first, second = split_into_micro_batches(sequences, 2, CONTEXT)
    assert abs(cost(sequences, first) / cost(sequences, second) - 1) < 0.02


def test_equal_chunks_that_divide_evenly_stay_whole() -> None:
    batches = split_into_micro_batches([sequence(0, 300)] * 4, 2, CONTEXT)
    assert [[part.num_rows for part in batch] for batch in batches] == [[300, 300], [300, 300]]


def test_edges() -> None:
    assert split_into_micro_batches([], 3, CONTEXT) == []
    assert split_into_micro_batches([sequence(5, 1)], 3, CONTEXT) == [((0, 0, 1),)]
    assert len(split_into_micro_batches([sequence(0, 2 * MIN_ROWS_OF_A_PART - 1)], 2, CONTEXT)) == 1
    assert len(split_into_micro_batches([sequence(0, 2 * MIN_ROWS_OF_A_PART)], 2, CONTEXT)) == 2
