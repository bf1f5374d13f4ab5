"""The placement as the table that the exchange indexes: which worker serves an expert, for which rows.

With replicas, rows take turns among an expert's owners by their index: the split is even and needs no random numbers.
"""

import math

from antiphon.specs.placement import ExpertPlacement


def owner_table(placement: ExpertPlacement) -> list[list[int]]:
    """`table[turn][expert]`: the worker for rows whose index is `turn` modulo the number of turns."""
    num_turns = math.lcm(*(len(workers) for workers in placement.owners))
    return [[workers[turn % len(workers)] for workers in placement.owners] for turn in range(num_turns)]
