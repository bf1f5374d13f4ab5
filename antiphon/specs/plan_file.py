"""`plan.json`: a `Plan` to JSON and back, strictly. What reads it obeys it, so nothing in it is guessed or skipped.

A phase holds its parallel sizes beside `layout`, as plain keys (`attention_tp`, ..., `pp`), and

    "placement": {"0": {"3": 0.5, "4": 0.5}, "1": {"0": 1.0}, ...}     expert -> worker -> fraction of its tokens

with every expert from 0 on, workers from 0 on, fractions above 0 that add up to 1. `rejected` lists the best
candidate of every other layout. A plan without `precision` is in bfloat16. Unknown keys and other versions are refused
by name.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

from antiphon.base.errors import UserError
from antiphon.specs.plan import (
    LAYOUTS,
    Layout,
    Parallel,
    PhaseName,
    PhasePlan,
    Plan,
    Rejected,
)
from antiphon.specs.strict_table import Table, read_json, write_json

VERSION = 1
PHASES: tuple[PhaseName, ...] = get_args(PhaseName)
FRACTION_TOLERANCE = 1e-6
Placement = tuple[tuple[tuple[int, float], ...], ...]


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Plain JSON values in the shape above; what has no value is left out."""
    return {
        "version": plan.version,
        "model": plan.model,
        "cluster": plan.cluster,
        "workload": plan.workload,
        "objective": plan.objective,
        "precision": asdict(plan.precision),
        "phases": {name: _phase_to_json(phase) for name, phase in plan.phases.items()},
        "model_config": dict(plan.model_config),
        "num_candidates": plan.num_candidates,
        "search_s": plan.search_s,
    }


def plan_from_json(mapping: Mapping[str, Any], where: str = "plan") -> Plan:
    """The plan a mapping holds; `UserError` names the key, its value and the mend."""
    return _plan(Table(mapping, where))


def read_plan(path: str | Path) -> Plan:
    return _plan(read_json(Path(path)))


def write_plan(plan: Plan, path: str | Path) -> None:
    """Replaces the file at `path`."""
    write_json(plan_to_json(plan), Path(path))


def _phase_to_json(phase: PhasePlan) -> dict[str, Any]:
    return {
        "layout": phase.layout,
        **asdict(phase.parallel),
        "num_instances": phase.num_instances,
        "micro_batches": phase.micro_batches,
        "batch": phase.batch,
        "devices": [asdict(use) for use in phase.devices],
        "placement": {
            str(expert): {str(worker): fraction for worker, fraction in shares}
            for expert, shares in enumerate(phase.placement)
        },
        "predicted": _without_none(asdict(phase.predicted)),
        "rejected": [_rejected_to_json(rejected) for rejected in phase.rejected],
        "notes": list(phase.notes),
    }


def _rejected_to_json(rejected: Rejected) -> dict[str, Any]:
    written: dict[str, Any] = {
        "layout": rejected.layout,
        "reason": rejected.reason,
        "micro_batches": rejected.micro_batches,
        "batch": rejected.batch,
        "devices": [asdict(use) for use in rejected.devices],
        "predicted": None if rejected.predicted is None else _without_none(asdict(rejected.predicted)),
    }
    parallel = {} if rejected.parallel is None else asdict(rejected.parallel)
    return _without_none({**written, **parallel})


def _without_none(mapping: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if value is not None}


def _plan(table: Table) -> Plan:
    version = table.whole("version", at_least=0)
    if version != VERSION:
        raise table.error("version", f"this program reads version {VERSION}: make the plan again with `antiphon plan`")
    if table.has("phase"):
        raise table.error(
            "phase", "this is a plan to train, not to serve: make one with --phase decode, prefill or both"
        )
    phases = table.table("phases")
    by_name = {name: _phase(phases.table(name)) for name in PHASES if phases.has(name)}
    phases.finish()
    if not by_name:
        raise table.error("phases", f"give at least one of {', '.join(PHASES)}")
    return table.read(Plan, version=version, phases=by_name)


def _phase(table: Table) -> PhasePlan:
    layout = table.choice("layout", LAYOUTS)
    parallel = _parallel(table, layout)
    placement = _placement(table.table("placement"), layout, parallel)
    rejected = tuple(_rejected(entry) for entry in table.tables("rejected")) if table.has("rejected") else ()
    return table.read(PhasePlan, parallel=parallel, placement=placement, rejected=rejected)


def _parallel(table: Table, layout: Layout) -> Parallel:
    sizes = {
        field.name: table.whole(field.name, field.default, at_least=0 if field.name == "expert_workers" else 1)
        for field in fields(Parallel)
        if isinstance(field.default, int)
    }
    if layout == "disaggregated" and not sizes["expert_workers"]:
        raise table.error("expert_workers", "a disaggregated layout needs at least 1")
    return Parallel(**sizes)


def _placement(table: Table, layout: Layout, parallel: Parallel) -> Placement:
    num_workers = parallel.expert_workers if layout == "disaggregated" else parallel.expert_ep
    experts = table.names()
    if expected := [str(expert) for expert in range(len(experts)) if str(expert) not in experts]:
        raise UserError(f"{table.where}: expert {expected[0]} is missing: place every expert from 0 to the last")
    return tuple(_shares(table.table(str(expert)), num_workers) for expert in range(len(experts)))


def _shares(table: Table, num_workers: int) -> tuple[tuple[int, float], ...]:
    shares = []
    for worker in table.names():
        if not worker.isdecimal() or str(int(worker)) != worker or int(worker) >= num_workers:
            raise UserError(f"{table.where}: worker {worker!r} does not exist: use 0 to {num_workers - 1}")
        shares.append((int(worker), table.number(worker, above=0)))
    total = sum(fraction for _, fraction in shares)
    if abs(total - 1) > FRACTION_TOLERANCE:
        raise UserError(f"{table.where}: the fractions add up to {total:.6g}: make them add up to 1")
    return tuple(shares)


def _rejected(table: Table) -> Rejected:
    layout = table.choice("layout", LAYOUTS)
    given = [field.name for field in fields(Parallel) if table.has(field.name)]
    return table.read(Rejected, parallel=_parallel(table, layout) if given else None)
