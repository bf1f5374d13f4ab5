"""Cuts a step into m micro-batches of about equal duration, so that attention and experts can take turns (ping-pong).

Two loads must be even at once: rows (projections and experts) and cost, which adds attention over the context
(`rows + visible keys / context_tokens_per_row`, in units of one row).

1. Deal sequences, the costliest first, each to the micro-batch whose larger share (of all rows, of all cost) is the
   smallest. An empty micro-batch has share 0, so none stays empty while another gets a second sequence.
2. If the largest share is then more than `TOLERANCE` above 1/m, cut the chunks that cost more than half a fair share
   into row ranges of equal cost for consecutive micro-batches, deal the rest around them, and keep this if it is
   better and leaves no micro-batch empty while another holds two pieces.

Why a chunk may be cut: in layer l, row r of a sequence attends to keys of rows up to r of the same layer, and to
nothing else of other rows. All rows of a part write their layer-l keys before they are read. A worker runs the
micro-batches in order within each layer, (l, 0), (l, 1), …, and later parts lie in later ones, so when a later part
reads layer l, every earlier part has written it. Expert and projection rows are independent anyway. The result is the
one the whole chunk would give, as with chunked prefill over two steps. So one long prompt alone can use ping-pong too.

Rejected: cutting the plan's rows into m contiguous runs. It needs no search, but decodes come first in a plan, so the
first micro-batches would be all attention and the last all expert work.
"""

from collections.abc import Sequence
from itertools import pairwise

from antiphon.serve.policy.request import SequenceStep, chunk_cost, rows_for_cost

TOLERANCE = 1.1
MIN_ROWS_OF_A_PART = 16  # below this a part costs more in launches and weight reads than it evens out


def split_into_micro_batches(
    sequences: Sequence[SequenceStep], num_micro_batches: int, context_tokens_per_row: float
) -> list[list[SequenceStep]]:
    """At most `num_micro_batches` micro-batches, none empty, in the order in which a layer must run them.

    Every row is in exactly one; rows keep the plan's order within each. `context_tokens_per_row`: see `chunk_cost`.
    """
    assert num_micro_batches >= 1, f"{num_micro_batches} micro-batches"
    if not sequences:
        return []
    if num_micro_batches == 1:
        return [list(sequences)]
    costs = [chunk_cost(step.start, len(step.token_ids), context_tokens_per_row) for step in sequences]
    rows = [len(step.token_ids) for step in sequences]
    whole = _Deal(rows, costs, num_micro_batches, {})
    batches = whole.micro_batches(sequences)
    if whole.largest_share * num_micro_batches > TOLERANCE:
        parts = _cut_large_chunks(sequences, costs, num_micro_batches, context_tokens_per_row)
        cut = _Deal(rows, costs, num_micro_batches, parts) if parts else whole
        if cut.largest_share < whole.largest_share:
            cut_batches = cut.micro_batches(sequences)
            batches = batches if _wastes_one(cut_batches, num_micro_batches) else cut_batches
    return batches


def _wastes_one(batches: Sequence[Sequence[SequenceStep]], num_micro_batches: int) -> bool:
    """Whether a micro-batch is empty while another holds two pieces."""
    return len(batches) < num_micro_batches and any(len(batch) > 1 for batch in batches)


def _cut_large_chunks(
    sequences: Sequence[SequenceStep], costs: Sequence[float], num_micro_batches: int, context_tokens_per_row: float
) -> dict[int, list[int]]:
    """Row boundaries (0, …, number of rows) of the chunks above half a fair share, by index into `sequences`."""
    half_share = sum(costs) / num_micro_batches / 2
    parts = {}
    for index, (step, cost) in enumerate(zip(sequences, costs, strict=True)):
        num_parts = min(num_micro_batches, len(step.token_ids) // MIN_ROWS_OF_A_PART)
        if cost > half_share and num_parts > 1:
            parts[index] = _equal_cost_boundaries(step.start, len(step.token_ids), num_parts, context_tokens_per_row)
    return parts


def _equal_cost_boundaries(start: int, num_rows: int, num_parts: int, context_tokens_per_row: float) -> list[int]:
    """Where `chunk_cost(start, r)` reaches 1/n, 2/n, … of the whole."""
    total = chunk_cost(start, num_rows, context_tokens_per_row)
    boundaries = [0]
    for part in range(1, num_parts):
        rows = rows_for_cost(start, total * part / num_parts, context_tokens_per_row)
        lowest, highest = boundaries[-1] + 1, num_rows - (num_parts - part)
        boundaries.append(min(max(round(rows), lowest), highest))
    return [*boundaries, num_rows]


class _Deal:
    """One assignment of sequences to micro-batches. `parts`: sequences that are cut, into consecutive micro-batches."""

    def __init__(
        self, rows: Sequence[int], costs: Sequence[float], num_micro_batches: int, parts: dict[int, list[int]]
    ) -> None:
        self._rows = rows
        self._parts = parts
        self._owners = [-1] * len(rows)
        per_row, per_cost = 1 / sum(rows), 1 / sum(costs)
        self._rows_shares = [0.0] * num_micro_batches
        self._cost_shares = [0.0] * num_micro_batches
        self._first_owner: dict[int, int] = {}
        for index, boundaries in parts.items():
            num_parts = len(boundaries) - 1
            first = self._emptiest_run(num_parts)
            self._first_owner[index] = first
            for part in range(num_parts):
                self._rows_shares[first + part] += (boundaries[part + 1] - boundaries[part]) * per_row
                self._cost_shares[first + part] += costs[index] / num_parts * per_cost
        self.largest_share = self._deal_whole(costs, per_row, per_cost)

    def _emptiest_run(self, length: int) -> int:
        """First of the `length` consecutive micro-batches that hold the fewest rows together."""
        shares = self._rows_shares
        return min(range(len(shares) - length + 1), key=lambda first: sum(shares[first : first + length]))

    def _deal_whole(self, costs: Sequence[float], per_row: float, per_cost: float) -> float:
        """Step 1 for all sequences that are not cut; returns the largest share."""
        rows, owners, row_shares, cost_shares = self._rows, self._owners, self._rows_shares, self._cost_shares
        shares = [max(pair) for pair in zip(row_shares, cost_shares, strict=True)]
        for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
            if index in self._parts:
                continue
            owner = shares.index(min(shares))
            owners[index] = owner
            row_share = row_shares[owner] + rows[index] * per_row
            cost_share = cost_shares[owner] + costs[index] * per_cost
            row_shares[owner], cost_shares[owner] = row_share, cost_share
            shares[owner] = row_share if row_share > cost_share else cost_share
        return max(shares)

    def micro_batches(self, sequences: Sequence[SequenceStep]) -> list[list[SequenceStep]]:
        batches: list[list[SequenceStep]] = [[] for _ in self._rows_shares]
        for index, owner in enumerate(self._owners):
            if owner >= 0:
                batches[owner].append(sequences[index])
                continue
            for part, (begin, end) in enumerate(pairwise(self._parts[index])):
                batches[self._first_owner[index] + part].append(_piece(sequences[index], begin, end))
        return [batch for batch in batches if batch]


def _piece(step: SequenceStep, first_row: int, end_row: int) -> SequenceStep:
    """The part of a step that computes these rows. The last part samples; the first brings the new blocks, the others
    begin where those end (an entry of 0 would say that the table begins anew)."""
    num_rows = end_row - first_row
    begin = min(max(step.logprob_begin - first_row, 0), num_rows)
    end = min(max(step.logprob_end - first_row, 0), num_rows)
    return step._replace(
        token_ids=step.token_ids[first_row:end_row],
        start=step.start + first_row,
        first_new_block=step.first_new_block if first_row == 0 else step.first_new_block + len(step.new_blocks),
        new_blocks=step.new_blocks if first_row == 0 else (),
        samples=step.samples and end_row == len(step.token_ids),
        logprob_begin=begin,
        logprob_end=max(begin, end),
    )
