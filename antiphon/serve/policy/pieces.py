"""Applies a split: the rows of a plan's sequences, as the steps of each micro-batch. See `micro_batches.py`."""

from collections.abc import Sequence

from antiphon.serve.policy.micro_batches import RowRange, split_into_micro_batches
from antiphon.serve.policy.step import SequenceStep


def micro_batch_steps(sequences: Sequence[SequenceStep], num_micro_batches: int) -> list[list[SequenceStep]]:
    """The steps of each micro-batch, at most `num_micro_batches`, none empty."""
    return [
        [_piece(sequences[rows.sequence], rows) for rows in micro_batch]
        for micro_batch in split_into_micro_batches(sequences, num_micro_batches)
    ]


def _piece(step: SequenceStep, rows: RowRange) -> SequenceStep:
    """The part of a step that computes `rows`. The last part samples; the first brings the new blocks, the others
    begin where those end (an entry of 0 would say that the table begins anew)."""
    if rows.num_rows == len(step.token_ids):
        return step
    is_first = rows.first_row == 0
    end_row = rows.first_row + rows.num_rows
    begin = min(max(step.logprob_begin - rows.first_row, 0), rows.num_rows)
    end = min(max(step.logprob_end - rows.first_row, 0), rows.num_rows)
    return step._replace(
        token_ids=step.token_ids[rows.first_row : end_row],
        start=step.start + rows.first_row,
        first_new_block=step.first_new_block if is_first else step.first_new_block + len(step.new_blocks),
        new_blocks=step.new_blocks if is_first else (),
        samples=step.samples and end_row == len(step.token_ids),
        logprob_begin=begin,
        logprob_end=max(begin, end),
    )
