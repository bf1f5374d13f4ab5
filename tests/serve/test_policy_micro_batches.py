"""Micro-batches: every row once, in order, evenly, none empty without need. A step that is cut is still the same."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.serve.policy.micro_batches import MIN_ROWS_OF_A_PART, split_into_micro_batches
from antiphon.serve.policy.request import SequenceStep, chunk_cost

CONTEXT = 1024.0


def sequence(start: int, num_rows: int) -> SequenceStep:
    return SequenceStep("r", 0, (1,) * num_rows, start, 0, (), True, 0, 0)


def cut(sequences: list[SequenceStep], num_micro_batches: int) -> list[list[SequenceStep]]:
    """The micro-batches; a piece's slot is the number of its sequence."""
    numbered = [step._replace(slot=index) for index, step in enumerate(sequences)]
    return split_into_micro_batches(numbered, num_micro_batches, CONTEXT)


def cost(batch: list[SequenceStep]) -> float:
    return sum(chunk_cost(part.start, len(part.token_ids), CONTEXT) for part in batch)


def num_rows(batch: list[SequenceStep]) -> int:
    return sum(len(part.token_ids) for part in batch)


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
    batches = cut(sequences, num_micro_batches)
    assert len(batches) <= num_micro_batches
    assert all(batches)
    next_row = [0] * len(sequences)
    for batch in batches:
        assert [part.slot for part in batch] == sorted({part.slot for part in batch})
        for part in batch:
            assert part.token_ids
            first_row = part.start - sequences[part.slot].start
            assert first_row == next_row[part.slot], "rows of a sequence must run in order"
            next_row[part.slot] += len(part.token_ids)
    assert next_row == [len(step.token_ids) for step in sequences]
    if len(batches) < num_micro_batches:
        assert all(len(batch) == 1 for batch in batches), "one is empty while another holds two"
    assert batches == cut(sequences, num_micro_batches)


@settings(max_examples=200, deadline=None)
@given(SEQUENCES, st.integers(2, 5))
def test_no_micro_batch_is_above_fair_share_by_more_than_what_cannot_be_cut(
    sequences: list[SequenceStep], num_micro_batches: int
) -> None:
    batches = cut(sequences, num_micro_batches)
    if not batches:
        return
    total = sum(chunk_cost(step.start, len(step.token_ids), CONTEXT) for step in sequences)
    total_rows = sum(len(step.token_ids) for step in sequences)
    largest = max(max(cost(batch) / total, num_rows(batch) / total_rows) for batch in batches)
    whole = [
        max(chunk_cost(step.start, len(step.token_ids), CONTEXT) / total, len(step.token_ids) / total_rows)
        for step in sequences
    ]
    assert largest <= 2 / num_micro_batches + max(whole) + 1e-9


def test_equal_decodes_are_dealt_evenly() -> None:
    batches = cut([sequence(500, 1)] * 1024, 3)
    assert sorted(num_rows(batch) for batch in batches) == [341, 341, 342]


def test_long_contexts_are_spread_without_unbalancing_rows() -> None:
    sequences = [sequence(100_000, 1)] * 4 + [sequence(100, 1)] * 60
    batches = cut(sequences, 4)
    assert [sum(part.slot < 4 for part in batch) for batch in batches] == [1, 1, 1, 1]
    assert [num_rows(batch) for batch in batches] == [16, 16, 16, 16]


@pytest.mark.parametrize("num_micro_batches", [2, 3, 4])
def test_one_long_prompt_alone_uses_ping_pong(num_micro_batches: int) -> None:
    sequences = [sequence(4096, 2048)]
    batches = cut(sequences, num_micro_batches)
    costs = [cost(batch) for batch in batches]
    assert len(batches) == num_micro_batches
    assert max(costs) < 1.01 * min(costs)
    assert num_rows(batches[0]) > num_rows(batches[-1]), "later rows see more keys"


def test_a_dominant_chunk_is_cut_and_decodes_dealt_around_it() -> None:
    sequences = [sequence(1000, 1)] * 64 + [sequence(0, 1000)]
    batches = cut(sequences, 2)
    total = sum(cost(batch) for batch in batches)
    for batch in batches:
        assert 0.45 < cost(batch) / total < 0.55
        assert 0.45 < num_rows(batch) / 1064 < 0.55
    assert [batch[-1].slot for batch in batches] == [64, 64]


def test_three_equal_chunks_in_two_micro_batches_are_cut() -> None:
    sequences = [sequence(0, 300)] * 3
    first, second = cut(sequences, 2)
    assert abs(cost(first) / cost(second) - 1) < 0.02


def test_equal_chunks_that_divide_evenly_stay_whole() -> None:
    batches = cut([sequence(0, 300)] * 4, 2)
    assert [[len(part.token_ids) for part in batch] for batch in batches] == [[300, 300], [300, 300]]


def test_edges() -> None:
    assert cut([], 3) == []
    assert cut([sequence(5, 1)], 3) == [[sequence(5, 1)]]
    assert len(cut([sequence(0, 2 * MIN_ROWS_OF_A_PART - 1)], 2)) == 1
    assert len(cut([sequence(0, 2 * MIN_ROWS_OF_A_PART)], 2)) == 2


@st.composite
def sequence_steps(draw: st.DrawFn) -> list[SequenceStep]:
    steps = []
    for index in range(draw(st.integers(1, 6))):
        num_rows = draw(st.one_of(st.just(1), st.integers(1, 200)))
        start = draw(st.sampled_from([0, 0, 16, 333]))
        begin = draw(st.integers(0, num_rows))
        steps.append(
            SequenceStep(
                request_id=f"r{index}",
                slot=index,
                token_ids=tuple(range(start, start + num_rows)),
                start=start,
                first_new_block=start // 16,
                new_blocks=tuple(range(100, 100 + (start + num_rows - 1) // 16 - start // 16 + 1)),
                samples=draw(st.booleans()),
                logprob_begin=begin,
                logprob_end=draw(st.integers(begin, num_rows)),
            )
        )
    return steps


@settings(max_examples=300, deadline=None)
@given(steps=sequence_steps(), num_micro_batches=st.integers(1, 4))
def test_pieces_in_order_make_up_each_sequence(steps: list[SequenceStep], num_micro_batches: int) -> None:
    batches = split_into_micro_batches(steps, num_micro_batches, CONTEXT)
    assert 1 <= len(batches) <= num_micro_batches
    assert all(batches)
    for whole in steps:
        pieces = [piece for batch in batches for piece in batch if piece.request_id == whole.request_id]
        assert all(piece.slot == whole.slot for piece in pieces)
        assert [token for piece in pieces for token in piece.token_ids] == list(whole.token_ids)
        assert [piece.samples for piece in pieces] == [False] * (len(pieces) - 1) + [whole.samples]
        position, blocks = whole.start, whole.first_new_block
        reported: list[int] = []
        for piece in pieces:
            assert piece.start == position, "no gap"
            assert piece.first_new_block == blocks, "no piece says that the table begins anew, but the first"
            reported += range(piece.start + piece.logprob_begin, piece.start + piece.logprob_end)
            position += len(piece.token_ids)
            blocks += len(piece.new_blocks)
        assert blocks == whole.first_new_block + len(whole.new_blocks)
        assert reported == list(range(whole.start + whole.logprob_begin, whole.start + whole.logprob_end))


def test_an_uncut_step_is_passed_on_as_it_is() -> None:
    step = SequenceStep("r", 0, (5,), 7, 1, (), True, 0, 0)
    assert split_into_micro_batches([step], 3, CONTEXT) == [[step]]
    assert split_into_micro_batches([], 3, CONTEXT) == []
