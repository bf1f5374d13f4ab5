"""A step cut into micro-batches is still the same step."""

from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.serve.policy.micro_batches import micro_batch_steps
from antiphon.serve.policy.step import SequenceStep


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
    batches = micro_batch_steps(steps, num_micro_batches, 1024.0)
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
    assert micro_batch_steps([step], 3, 1024.0) == [[step]]
    assert micro_batch_steps([], 3, 1024.0) == []
