"""A collective of rows cut into parts, so that work on the first can begin while the others travel (Lina, section 4.2).

The rows that go to a rank are a run; part i has the i-th of `count` even slices of every run. Both ends know the runs,
so they cut alike without a word, whatever the router did.

    sent     runs in order, each whole  ->  `taken`: the rows of one part, runs in order
    there    `part_of` the collective moves them, and later `part_of` the one back moves their results
    back     `joined`: rows of all parts, runs whole again

Rejected: parts with a number of rows each. Ranks would have to agree on how many parts the fullest of them needs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from antiphon.comm.collectives import Collective

Runs = tuple[int, ...]


def part_of(collective: Collective, number: int, count: int) -> Collective:
    """Part `number` of `count` of a collective that brings rows to ranks and back."""
    whole: Any = collective  # each kind says by `send` and `receive`, or by `sizes`, how many rows go where
    names = ("send", "receive") if hasattr(whole, "send") else ("sizes",)
    cut: Collective = replace(whole, **{name: _sizes(getattr(whole, name), number, count) for name in names})
    return cut


def runs_of(there: Collective, *, received: bool) -> Runs:
    """How many rows each run has, in order, of those that `there`, an all-to-all or an all-gather, takes from this rank
    or brings to it."""
    whole: Any = there
    if hasattr(whole, "send"):
        return tuple(whole.receive if received else whole.send)
    return tuple(whole.sizes) if received else (whole.sizes[whole.group.index],)


def taken(x: Tensor, runs: Runs, number: int, count: int) -> Tensor:
    """The rows of part `number` of `count`, of `x` whose rows are these runs."""
    parts = [run[slice(*_bounds(run.shape[0], number, count))] for run in torch.split(x, list(runs))]
    return torch.cat(parts)


def joined(parts: Sequence[Tensor], runs: Runs) -> Tensor:
    """The rows of all parts as these runs."""
    split = [torch.split(part, list(_sizes(runs, number, len(parts)))) for number, part in enumerate(parts)]
    return torch.cat([piece for of_run in zip(*split, strict=True) for piece in of_run])


def _sizes(runs: Runs, number: int, count: int) -> Runs:
    return tuple(stop - start for start, stop in (_bounds(run, number, count) for run in runs))


def _bounds(size: int, number: int, count: int) -> tuple[int, int]:
    return size * number // count, size * (number + 1) // count
