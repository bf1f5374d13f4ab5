"""The choice of copies ahead of a layer in Python, from the steps that `antiphon.placement.split` names: what the
native form is compared with."""

import numpy as np

from antiphon.placement.split import BoolArray, FloatArray, IntArray, Prefetch, split_rows


def choose_prefetches(
    counts_E: IntArray, held_EW: BoolArray, open_W: BoolArray, speeds_W: FloatArray, knee: int
) -> list[Prefetch]:
    """Copies worth having for these rows, beyond those in `held_EW`. `open_W`: workers that may take one. `speeds_W`:
    rows/s, only their ratios count. Empty if the fullest worker cannot be relieved by a knee."""
    parts_EW = split_rows(counts_E, held_EW, speeds_W, knee)
    times_W = np.where(parts_EW > 0, np.maximum(parts_EW, knee), 0).sum(axis=0) / speeds_W
    before = float(times_W.max())
    open_W = open_W.copy()
    chosen: list[tuple[int, int]] = []
    while open_W.any():
        fullest = int(times_W.argmax())
        taker = int(np.where(open_W, times_W, np.inf).argmin())
        if taker == fullest:
            break
        expert = int(np.where(held_EW[:, taker], 0, parts_EW[:, fullest]).argmax())
        rows = _handed(parts_EW[expert, fullest], times_W, speeds_W, fullest, taker, knee)
        if rows < knee or held_EW[expert, taker]:
            break
        parts_EW[expert, fullest] -= rows
        parts_EW[expert, taker] += rows
        times_W[fullest] -= rows / speeds_W[fullest]
        times_W[taker] += rows / speeds_W[taker]
        open_W[taker] = False
        chosen.append((expert, taker))
    gain = (before - float(times_W.max())) * float(speeds_W.mean())
    if gain < knee:
        return []
    return [Prefetch(expert, worker, gain / len(chosen)) for expert, worker in chosen]


def _handed(part: int, times_W: FloatArray, speeds_W: FloatArray, giver: int, taker: int, knee: int) -> int:
    """Rows of a part that make both workers equal, so that what stays is a knee at least, or nothing."""
    difference = float(times_W[giver] - times_W[taker])
    equal = int(difference / (1 / float(speeds_W[giver]) + 1 / float(speeds_W[taker])))
    return int(part) if part <= equal else min(equal, int(part) - knee)
