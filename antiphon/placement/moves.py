"""From one placement to another in steps that an engine can take while it serves: which experts move first.

A step gives a worker at most one new expert a layer. It is loaded into an unused slot while the old map is in force;
then the new map takes over, and what it no longer names is freed. So a worker needs one slot more than it holds
experts, no row ever waits for weights, and an expert has an owner at every moment.

1. Each worker adds one expert that it lacks, first those that others wait to be rid of.
2. It drops the experts that it should not keep and that another worker will have.
3. A worker that would then hold more than `slots` adds nothing, and step 2 is done again.

Rejected: all at once. It needs memory for both maps, and rows of the new one wait until everything is read.
"""

from dataclasses import replace

from antiphon.base.errors import UserError
from antiphon.specs.placement import ExpertPlacement, Owners

Held = list[set[int]]  # by worker the experts of one layer


def next_placement(now: ExpertPlacement, target: ExpertPlacement, slots: int) -> ExpertPlacement | None:
    """The next map on the way to `target`, with the version after `now`'s; None if nothing is left to do, or nothing
    can be done because all slots are taken. `slots`: experts a worker may hold in a layer; one more is loaded."""
    _check_alike(now, target)
    owners = {
        layer: _next_layer(of_layer, target.owners[layer], now.num_workers, slots)
        for layer, of_layer in now.owners.items()
    }
    if owners == now.owners and (now.speeds, now.knee) == (target.speeds, target.knee):
        return None
    return replace(target, owners=owners, version=now.version + 1)


def num_moves(now: ExpertPlacement, target: ExpertPlacement) -> int:
    """Experts that have to be loaded somewhere, over all layers."""
    _check_alike(now, target)
    return sum(
        len(set(wanted) - set(held))
        for layer, of_layer in now.owners.items()
        for held, wanted in zip(of_layer, target.owners[layer], strict=True)
    )


def _check_alike(now: ExpertPlacement, target: ExpertPlacement) -> None:
    """`UserError` for maps of different models or numbers of workers, between which there is no way."""
    sizes = [
        (each.num_workers, {layer: len(of_layer) for layer, of_layer in each.owners.items()}) for each in (now, target)
    ]
    if sizes[0] != sizes[1]:
        raise UserError("two placements that differ in workers, layers or experts: make both for one model and server")


def _next_layer(now: Owners, target: Owners, num_workers: int, slots: int) -> Owners:
    held, wanted = _held(now, num_workers), _held(target, num_workers)
    added = [_first_to_add(now, target, held[w], wanted[w]) for w in range(num_workers)]
    while True:
        after = _drop(held, wanted, added)
        full = [w for w in range(num_workers) if len(after[w]) > slots and added[w] is not None]
        if not full:
            break
        added[full[0]] = None
    if all(expert is None for expert in added) and after == held:
        return now
    workers_of: list[list[int]] = [[] for _ in now]
    for worker, experts in enumerate(after):
        for expert in experts:
            workers_of[expert].append(worker)
    return tuple(map(tuple, workers_of))


def _held(owners: Owners, num_workers: int) -> Held:
    held: Held = [set() for _ in range(num_workers)]
    for expert, workers in enumerate(owners):
        for worker in workers:
            held[worker].add(expert)
    return held


def _first_to_add(now: Owners, target: Owners, held: set[int], wanted: set[int]) -> int | None:
    """An expert that none of its future owners has is added first: others wait for that."""
    missing = sorted(wanted - held, key=lambda expert: (bool(set(now[expert]) & set(target[expert])), expert))
    return missing[0] if missing else None


def _drop(held: Held, wanted: Held, added: list[int | None]) -> Held:
    after = [own | ({new} if new is not None else set()) for own, new in zip(held, added, strict=True)]
    for worker, own in enumerate(after):
        for expert in sorted(own - wanted[worker]):
            if any(expert in other for place, other in enumerate(after) if place != worker):
                own.discard(expert)
    return after
