"""Which expert worker holds which experts, layer by layer: plain data, the same map on every worker.

Contiguous by default; uneven splits and copies are allowed. Placement functions and files produce it, engines obey it.
An engine numbers the maps that it goes through: `version` grows with each and travels in every message's header, so
that a worker notices rows that were sent by a map it does not hold.

The file of a placement (`POST /placement`, `antiphon placement`) is JSON:

    {"num_workers": 2, "owners": {"1": [[0], [0, 1], [1]], ...}}       layer -> expert -> workers with a copy
"""

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from antiphon.base.errors import UserError, shortened
from antiphon.base.split_evenly import split_evenly
from antiphon.specs.catalog import a_file_of
from antiphon.specs.checked import parse_json, read_bytes

Owners = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ExpertPlacement:
    """`owners[layer][e]` lists the workers that hold a copy of expert e in an MoE layer, each between 0 and
    `num_workers` - 1. Layers without experts are not in it.

    How a layer's rows are split over copies follows from `speeds`, the workers' rows per second (only ratios count;
    none: all are equal), and `knee`, the rows up to which an expert takes no longer than for one (fewer stay together).
    `UserError` for a map that leaves an expert homeless or names a worker that is not there."""

    num_workers: int
    owners: dict[int, Owners]
    version: int = 0
    speeds: tuple[float, ...] = ()
    knee: int = 1

    def __post_init__(self) -> None:
        if self.num_workers < 1 or self.knee < 1:
            raise UserError(
                f"a placement on {self.num_workers} workers with a knee of {self.knee}: both are at least 1"
            )
        speeds_fit = len(self.speeds) in (0, self.num_workers) and all(0 < speed < math.inf for speed in self.speeds)
        if not speeds_fit:
            raise UserError(
                f"speeds {_some(self.speeds)} of {self.num_workers} workers: give each a finite number above 0, or none"
            )
        for layer, of_layer in self.owners.items():
            for expert, workers in enumerate(of_layer):
                where = f"expert {expert} of layer {layer}"
                if not workers:
                    raise UserError(
                        f"{where} is placed on no worker: give it at least one of 0..{self.num_workers - 1}"
                    )
                if len(set(workers)) != len(workers) or not all(0 <= w < self.num_workers for w in workers):
                    raise UserError(
                        f"{where} is placed on {_some(workers)}: use distinct workers from 0 to {self.num_workers - 1}"
                    )

    def experts_of(self, worker: int) -> dict[int, tuple[int, ...]]:
        """By layer the experts that `worker` holds, ascending."""
        return {
            layer: tuple(expert for expert, workers in enumerate(of_layer) if worker in workers)
            for layer, of_layer in self.owners.items()
        }

    def without(self, workers: Collection[int]) -> "ExpertPlacement | None":
        """The same map with these workers gone; None if an expert has no other."""
        if not workers:
            return self
        left = {
            layer: tuple(tuple(w for w in owners if w not in workers) for owners in of_layer)
            for layer, of_layer in self.owners.items()
        }
        homeless = any(not owners for of_layer in left.values() for owners in of_layer)
        return None if homeless else replace(self, owners=left)

    def most_held(self) -> int:
        """The most experts that a worker holds in a layer: the slots it needs."""
        held = (len(ids) for worker in range(self.num_workers) for ids in self.experts_of(worker).values())
        return max(held, default=0)

    def check_fits(self, moe_layers: Sequence[int], num_experts: int, num_workers: int, slots: int) -> None:
        """`UserError` unless it is a map of this model for `num_workers` with `slots` in each layer."""
        if sorted(self.owners) != sorted(moe_layers):
            raise UserError(
                f"the placement is for layers {_short(self.owners)}, this model has experts in {_short(moe_layers)}: "
                f"make a placement of this model"
            )
        for layer, of_layer in self.owners.items():
            if len(of_layer) != num_experts:
                raise UserError(
                    f"the placement has {len(of_layer)} experts in layer {layer}, this model has {num_experts}: make a "
                    f"placement of this model"
                )
        if self.num_workers != num_workers:
            raise UserError(
                f"the placement is for {self.num_workers} expert workers, {num_workers} run: make one for them"
            )
        for worker in range(num_workers):
            for layer, ids in self.experts_of(worker).items():
                if len(ids) > slots:
                    raise UserError(
                        f"the placement puts {len(ids)} experts of layer {layer} on worker {worker}, which has {slots} "
                        f"slots: use fewer copies, or start the server with --expert-slots {len(ids)}"
                    )


def _short(layers: Iterable[int]) -> str:
    numbers = sorted(layers)
    return f"{numbers[0]} to {numbers[-1]}" if numbers else "none"


def contiguous_placement(num_experts: int, num_workers: int, moe_layers: Sequence[int]) -> ExpertPlacement:
    """In every one of `moe_layers`, `num_workers` contiguous runs of experts whose lengths differ by at most one."""
    if not 1 <= num_workers <= num_experts:
        raise UserError(f"{num_workers} expert workers for {num_experts} experts: use 1 to {num_experts}")
    runs = enumerate(split_evenly(num_experts, num_workers))
    owners = tuple((worker,) for worker, (first, last) in runs for _ in range(first, last))
    return ExpertPlacement(num_workers, dict.fromkeys(moe_layers, owners))


class _File(msgspec.Struct, forbid_unknown_fields=True):
    num_workers: int
    owners: dict[str, list[list[int]]]


def _layer(name: str) -> int:
    """The number that a layer is named by; `ValueError` for other ways to write it, of which two could collide."""
    if not (name.isascii() and name.isdecimal()) or str(int(name)) != name:
        raise ValueError(f"a layer is named {shortened(name)!r}, not by a number such as 0 or 12")
    return int(name)


def placement_from_json(text: bytes, where: str) -> ExpertPlacement:
    """The placement that a file or a request holds; `UserError` says where and why it is none."""
    try:
        file = msgspec.convert(parse_json(text, unique_keys=True), type=_File)
        owners = {_layer(name): tuple(map(tuple, of_layer)) for name, of_layer in file.owners.items()}
    except (msgspec.ValidationError, ValueError) as error:
        raise UserError(
            f'{where} is no placement: {error}: write {{"num_workers": N, "owners": {{"layer": [[worker, ...], ...]}}}}'
        ) from error
    return ExpertPlacement(file.num_workers, owners)


def read_placement(path: Path) -> ExpertPlacement:
    """The placement in a file."""
    with a_file_of("placement", path):
        return placement_from_json(read_bytes(path), str(path))


def placement_to_json(placement: ExpertPlacement) -> str:
    """What `read_placement` reads."""
    owners = {str(layer): [list(workers) for workers in of_layer] for layer, of_layer in placement.owners.items()}
    return json.dumps({"num_workers": placement.num_workers, "owners": owners})


def _some(workers: Sequence[float]) -> str:
    """A list for an error's line: a client's may have millions."""
    return f"[{', '.join(map(str, workers[:8]))}{', ...' if len(workers) > 8 else ''}]"
