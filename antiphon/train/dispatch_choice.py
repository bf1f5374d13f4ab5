"""`parallel.dispatch = "auto"`: the way of rows to their experts that is faster here, measured before the first step.

Every layer sends rows of one size to as many experts, so one measurement stands for all. Each way takes rows of the
run's own number, width and dtype there and back, forward and backward, on all ranks at once and in turns. A time is the
slowest rank's; all ranks see all times, so they choose the same. Experts do nothing in between: all ways give them the
same rows. Over two levels is tried where the ranks that share experts span nodes.

A run that goes on with the same sizes keeps what it chose, which `run.json` has: ways add up in different
orders, and a run that was killed is to have the bits of one that was not. Rejected: the formulas of the planner. They
know a cluster's links, not what this machine does with messages of this size.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from antiphon.base.logging import get_logger
from antiphon.base.sharing import split_evenly
from antiphon.base.units import format_seconds
from antiphon.comm.collectives import AllGather, barrier, run
from antiphon.comm.mesh import Mesh
from antiphon.specs.model import ModelSpec
from antiphon.train.config import TrainConfig
from antiphon.train.device import HOST, moved, settle
from antiphon.train.metrics import read_run_facts
from antiphon.train.model import dispatcher_of
from antiphon.train.ranks import expert_levels, largest

Way = Literal["all_to_all", "gather_scatter", "two_level"]
WAYS: tuple[Way, ...] = ("all_to_all", "gather_scatter", "two_level")
ROUNDS = 5
_log = get_logger("train")


@dataclass(frozen=True, kw_only=True)
class DispatchChoice:
    """`times_s`: by way, there and back. `sizes`: what was measured, and on which ranks."""

    way: Way
    times_s: Mapping[str, float]
    sizes: Mapping[str, Any]


def choose_dispatch(
    spec: ModelSpec, config: TrainConfig, mesh: Mesh, device: torch.device = HOST
) -> DispatchChoice | None:
    """The faster way for rows on `device`; None where nothing is to be chosen: one rank has all experts, or the
    configuration says which. All ranks call it together."""
    if config.parallel.dispatch != "auto" or mesh.sizes.expert == 1:
        return None
    sequences = config.batch // config.micro_batches // mesh.sizes.data
    positions = split_evenly(config.sequence_length, mesh.sizes.sequence * mesh.sizes.tensor)[0]
    sizes = asdict(mesh.sizes) | {
        "rows": sequences * (positions[1] - positions[0]),
        "hidden_size": spec.hidden_size,
        "num_experts": spec.router.num_experts,
        "top_k": spec.router.top_k,
        "dtype": config.dtype,
        "deduplicate": config.parallel.deduplicate,
    }
    ways = _possible(config, mesh)
    if len(ways) == len(WAYS):
        sizes["node_ranks"] = config.communication.node_ranks
    known = _former(Path(config.output.folder), sizes) if mesh.rank == 0 else None
    number = torch.tensor([-1 if known is None else WAYS.index(known.way)], device=HOST)
    former = int(run(AllGather(mesh.world, "dispatch choice", (1,) * mesh.sizes.world_size), number)[0])
    if former >= 0:
        choice = DispatchChoice(way=WAYS[former], times_s={} if known is None else known.times_s, sizes=sizes)
        _say(mesh, "dispatch: %s, as before", choice.way)
        return choice
    times_s = _measure(config, ways, sizes, mesh, device)
    choice = DispatchChoice(way=min(ways, key=lambda way: times_s[way]), times_s=times_s, sizes=sizes)
    words = ", ".join(f"{way} {format_seconds(each)}" for way, each in times_s.items())
    _say(mesh, "dispatch: %s (%s there and back)", choice.way, words)
    return choice


def with_choice(config: TrainConfig, choice: DispatchChoice | None) -> TrainConfig:
    """The configuration as it runs."""
    if config.parallel.dispatch != "auto":
        return config
    way: Way = "all_to_all" if choice is None else choice.way
    return replace(config, parallel=replace(config.parallel, dispatch=way))


def _say(mesh: Mesh, text: str, *values: object) -> None:
    if mesh.rank == 0:
        _log.info(text, *values)


def _former(folder: Path, sizes: Mapping[str, Any]) -> DispatchChoice | None:
    """What a former run in this folder chose for the same sizes."""
    found = read_run_facts(folder).get("dispatch")
    return DispatchChoice(**found) if found and found["sizes"] == dict(sizes) else None


def _possible(config: TrainConfig, mesh: Mesh) -> tuple[Way, ...]:
    """The ways that this run may take."""
    parallel, communication = config.parallel, config.communication
    whole = parallel.expert_tensor == 1 and parallel.deduplicate and not config.overlap.inside
    whole = whole and communication.sums != "between"  # see `check_dispatch`
    if whole and not communication.pipeline_experts and expert_levels(mesh.sizes, communication):
        return WAYS
    return WAYS[:2]


def _measure(
    config: TrainConfig, ways: Sequence[Way], sizes: Mapping[str, Any], mesh: Mesh, device: torch.device
) -> dict[str, float]:
    """Seconds by way: the median over rounds of the slowest rank's."""
    generator, dtype = torch.Generator().manual_seed(mesh.rank), getattr(torch, config.dtype)
    scores_TE = moved(torch.rand(sizes["rows"], sizes["num_experts"], generator=generator, device=HOST), device)
    weights_TK, ids_TK = scores_TE.topk(sizes["top_k"], dim=1)  # even use, as the balance loss wants it
    drawn_TH = torch.randn(sizes["rows"], sizes["hidden_size"], generator=generator, device=HOST)
    x_TH = moved(drawn_TH.to(dtype), device).requires_grad_()
    weights_TK = weights_TK.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    dispatchers = [
        dispatcher_of(mesh, sizes["num_experts"], replace(config.parallel, dispatch=way), config.communication, dtype)
        for way in ways
    ]
    own = torch.zeros(ROUNDS + 1, len(ways), dtype=torch.float64, device=HOST)
    for number in range(ROUNDS + 1):
        for index, dispatcher in enumerate(dispatchers):
            barrier(mesh.world)
            began_s = time.perf_counter()
            dispatched = dispatcher.start_dispatch(x_TH, ids_TK, weights_TK)
            rows_RH, _ = dispatched.wait()
            out_TH = dispatched.start_combine(rows_RH * 1).wait()
            torch.autograd.grad(out_TH, (x_TH, weights_TK), torch.ones_like(out_TH))
            settle(device)
            own[number, index] = time.perf_counter() - began_s
    slowest = largest(mesh.world, "dispatch choice", own)[1:]  # the first round warms up
    return {way: statistics.median(slowest[:, index].tolist()) for index, way in enumerate(ways)}
