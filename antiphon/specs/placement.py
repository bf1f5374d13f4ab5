"""Which expert worker owns which experts: plain data, the same map on every worker.

Contiguous by default; uneven splits and replicas are allowed. Placement functions produce it, engines obey it.
"""

import math
from dataclasses import dataclass

from antiphon.base.errors import UserError


@dataclass(frozen=True)
class ExpertPlacement:
    """`owners[e]` lists the workers that hold a copy of expert e, each between 0 and `num_workers` - 1."""

    num_workers: int
    owners: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for expert, workers in enumerate(self.owners):
            if not workers:
                raise UserError(
                    f"expert {expert} is placed on no worker: give it at least one of 0..{self.num_workers - 1}"
                )
            if len(set(workers)) != len(workers) or not all(0 <= w < self.num_workers for w in workers):
                raise UserError(
                    f"expert {expert} is placed on {workers}: use distinct workers from 0 to {self.num_workers - 1}"
                )
        if idle := set(range(self.num_workers)) - {w for workers in self.owners for w in workers}:
            raise UserError(f"expert workers {sorted(idle)} hold no expert: use at most {len(self.owners)} workers")

    @property
    def num_experts(self) -> int:
        return len(self.owners)

    def experts_of(self, worker: int) -> tuple[int, ...]:
        """The experts held by `worker`, ascending; their position in this tuple is their local index there."""
        return tuple(e for e, workers in enumerate(self.owners) if worker in workers)

    def owner_table(self) -> list[list[int]]:
        """`table[turn][expert]`: the worker for rows whose index is `turn` modulo the number of turns.

        Rows take turns among an expert's owners by their index: the split is even and needs no random numbers."""
        num_turns = math.lcm(*(len(workers) for workers in self.owners))
        return [[workers[turn % len(workers)] for workers in self.owners] for turn in range(num_turns)]


def contiguous_placement(num_experts: int, num_workers: int) -> ExpertPlacement:
    """Split experts into `num_workers` contiguous runs whose lengths differ by at most one."""
    if not 1 <= num_workers <= num_experts:
        raise UserError(f"{num_workers} expert workers for {num_experts} experts: use 1 to {num_experts}")
    base, extra = divmod(num_experts, num_workers)
    owners: list[tuple[int, ...]] = []
    for worker in range(num_workers):
        owners.extend([(worker,)] * (base + (worker < extra)))
    return ExpertPlacement(num_workers=num_workers, owners=tuple(owners))
