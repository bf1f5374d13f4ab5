"""Which attention workers send to which expert workers: sparse, for exact barriers over tens of thousands of pairs.

Compressed rows in both directions, so that "the last of my senders" is one gather and one `reduceat`. Rejected: a dense
matrix of pairs, 200 MB at 6,000 x 4,000 and most of the time of a simulation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.base.errors import UserError

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class _Rows:
    """Row r refers to `columns[bounds[r]:bounds[r + 1]]`; empty rows allowed."""

    bounds: Indices
    columns: Indices

    @property
    def used(self) -> NDArray[np.bool_]:
        return np.diff(self.bounds) > 0

    def reduce(self, operation: np.ufunc, values: Floats, empty: float) -> Floats:
        """`operation` over each row's values; `empty` for rows without any."""
        used = self.used
        result = np.full(len(used), empty)
        if used.any():
            result[used] = operation.reduceat(values[self.columns], self.bounds[:-1][used])
        return result


class Destinations:
    """`targets[a]` lists the expert workers that attention worker a sends to (in any order, each once)."""

    def __init__(self, targets: Sequence[Sequence[int]], num_expert_workers: int) -> None:
        lengths = [len(row) for row in targets]
        columns = np.fromiter((e for row in targets for e in row), dtype=np.int64, count=sum(lengths))
        rows = np.repeat(np.arange(len(targets), dtype=np.int64), lengths)
        self._set(rows, columns, len(targets), num_expert_workers)

    @classmethod
    def from_pairs(
        cls, attention: Indices, experts: Indices, num_attention_workers: int, num_expert_workers: int
    ) -> "Destinations":
        """Pair i is (`attention[i]`, `experts[i]`)."""
        made = cls.__new__(cls)
        made._set(
            np.asarray(attention, np.int64), np.asarray(experts, np.int64), num_attention_workers, num_expert_workers
        )
        return made

    def _set(self, rows: Indices, columns: Indices, num_attention: int, num_experts: int) -> None:
        for name, values, limit in (("attention", rows, num_attention), ("expert", columns, num_experts)):
            if len(values) and (values.min() < 0 or values.max() >= limit):
                raise UserError(f"destinations name {name} worker {values.max()}: use 0 to {limit - 1}")
        by_attention = np.sort(rows * num_experts + columns)  # values sort several times faster than their order
        if (np.diff(by_attention) == 0).any():
            raise UserError("destinations name a pair of workers twice: one message carries all its rows")
        self._by_attention = _compress(by_attention, num_attention, num_experts)
        self._by_experts = _compress(np.sort(columns * num_attention + rows), num_experts, num_attention)

    @property
    def num_attention_workers(self) -> int:
        return len(self._by_attention.bounds) - 1

    @property
    def num_expert_workers(self) -> int:
        return len(self._by_experts.bounds) - 1

    def targets(self, attention_worker: int) -> list[int]:
        return _row(self._by_attention, attention_worker)

    def sources(self, expert_worker: int) -> list[int]:
        return _row(self._by_experts, expert_worker)

    @property
    def has_targets(self) -> NDArray[np.bool_]:
        """[attention workers] whether it sends at all."""
        return self._by_attention.used

    @property
    def has_sources(self) -> NDArray[np.bool_]:
        """[expert workers] whether anything comes."""
        return self._by_experts.used

    def over_sources(self, operation: np.ufunc, values: Floats, empty: float) -> Floats:
        """[expert workers] of `values` [attention workers], reduced over each one's senders."""
        return self._by_experts.reduce(operation, values, empty)

    def over_targets(self, operation: np.ufunc, values: Floats, empty: float) -> Floats:
        """[attention workers] of `values` [expert workers], reduced over each one's receivers."""
        return self._by_attention.reduce(operation, values, empty)


def _compress(codes: Indices, num_rows: int, num_columns: int) -> _Rows:
    """`codes`: row * num_columns + column, ascending."""
    rows = codes // num_columns
    bounds = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=num_rows), out=bounds[1:])
    return _Rows(bounds, codes - rows * num_columns)


def _row(rows: _Rows, row: int) -> list[int]:
    return [int(column) for column in rows.columns[rows.bounds[row] : rows.bounds[row + 1]]]
