"""How rows reach their experts, as far as times measured in the run itself decide it.

**Expert packing** (`communication.packing`; Lina, sections 4.2 and 6.1): how many ranks share the experts, chosen while
a run goes on. It begins with `parallel.expert` ranks. Behind step 10, and every 4 steps after that, the search of
`comm.micro_ops` learns how long the experts work on a part of their rows and how long that part travels. While working
is shorter, half as many ranks share the experts: each holds twice as many, fewer rows leave it, and every expert has
twice the replicas. A time is the mean of the slowest rank since the last decision. Without a time of both on every rank
nothing is decided, and the search asks again; where one rank has all experts no rows travel, so there is nothing left
to decide. What was decided stands in `OUTPUT/packing.json`. A run that goes on, or one that is given this file, takes
its decisions from there: they depend on times, and another division rounds in another way. What Lina keeps in host
memory when a device is short is there anyway on a CPU. Where a larger part does not fit, packing ends.

**The way of rows** (`parallel.dispatch = "auto"`): the one that is faster here, measured before the first step. Every
layer sends rows of one size to as many experts, so one measurement stands for all. Each way takes rows of the run's own
number, width and dtype there and back, forward and backward, on all ranks at once and in turns. A time is the slowest
rank's; all ranks see all times, so they choose the same. Experts do nothing in between: all ways give them the same
rows. Over two levels is tried where the ranks that share experts span nodes. A run that goes on with the same sizes
keeps what it chose, which `run.json` has: ways add up in different orders, and a run that was killed is to have the
bits of one that was not. Rejected: the formulas of the planner. They know a cluster's links, not what this machine does
with messages of this size.
"""

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from antiphon.base.errors import ResourceError, UserError
from antiphon.base.logging import get_logger
from antiphon.base.split_evenly import split_evenly
from antiphon.base.system import replace_text
from antiphon.base.units import format_seconds
from antiphon.comm.collectives import AllGather, barrier, run
from antiphon.comm.mesh import Mesh
from antiphon.comm.micro_ops import ExpertPacking
from antiphon.specs.model import ModelSpec
from antiphon.train.config import TrainConfig
from antiphon.train.device import HOST, moved, settle
from antiphon.train.memory import check_memory, setup_of
from antiphon.train.model import dispatcher_of
from antiphon.train.operators import whole_name
from antiphon.train.ranks import expert_levels, largest, local_ranks, sizes_of, world_size
from antiphon.train.run_folder import read_run_facts

FILE = "packing.json"
FIRST_STEP, EVERY = 10, 4
_EXPERTS = ("fc1", "activation", "weigh", "fc2")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """From `step` on, `expert` ranks share the experts; why: seconds of a part's work and of its way."""

    step: int
    expert: int
    ffn_s: float
    all_to_all_s: float


class Packing:
    """The packing of a run that begins as `config` says."""

    def __init__(self, config: TrainConfig, spec: ModelSpec) -> None:
        if config.parallel.expert % 2:
            raise UserError(
                f"communication.packing is true and parallel.expert is {config.parallel.expert}: packing halves it, so "
                "make it even, or packing false"
            )
        self._config = config
        self._spec = spec
        self._file = Path(config.output.folder) / FILE
        self._known = _read(self._file, config.parallel.expert)
        self._search = ExpertPacking(config.parallel.expert)
        for each in self._known:
            self._search.observe(each.ffn_s, each.all_to_all_s)
        self._worked_s: list[float] = []
        self._travelled_s: list[float] = []

    def expert_at(self, step: int) -> int:
        """How many ranks share the experts in step `step`."""
        return next((each.expert for each in reversed(self._known) if each.step <= step), self._config.parallel.expert)

    def is_measured(self, step: int) -> bool:
        """Whether times of step `step` are wanted."""
        return step > 0 and not self._is_decided(step + 1)

    def observe(self, operator_s: Mapping[str, float], travelled_s: Mapping[str, Sequence[float]]) -> None:
        """Take note of one step of this rank: seconds by operator, and of each exchange by name."""
        exchanges = {name: each for name, each in travelled_s.items() if not name.endswith("backward")}
        for name, each in exchanges.items():
            self._travelled_s += each if name.startswith(("dispatch.", "combine.")) else []
        parts = sum(len(each) for name, each in exchanges.items() if name.startswith("combine."))
        forward_s = {name: seconds for name, seconds in operator_s.items() if not name.endswith("backward")}
        worked_s = [forward_s[name] for name in forward_s if whole_name(name) in _EXPERTS]
        if parts and worked_s:
            self._worked_s.append(sum(worked_s) / parts)

    def decide(self, step: int, mesh: Mesh) -> int:
        """How many ranks share the experts from `step` on. All ranks call it together, behind every step."""
        is_due = step >= FIRST_STEP and (step - FIRST_STEP) % EVERY == 0
        if is_due and not self._is_decided(step) and (decision := self._decision(step, mesh)) is not None:
            self._known.append(decision)
            if mesh.rank == 0:
                self._write()
        return self.expert_at(step)

    def _is_decided(self, step: int) -> bool:
        """Whether no search is needed at `step`: it has ended, or an earlier life of the run went further."""
        if self.expert_at(step) == 1:
            return True
        if not self._known:
            return False
        *before, last = [self._config.parallel.expert, *(each.expert for each in self._known)]
        return self._search.has_ended or last == before[-1] or step <= self._known[-1].step

    def _decision(self, step: int, mesh: Mesh) -> Decision | None:
        """The slowest rank's times count, and the one with the least memory; None: a rank has no time."""
        now = self.expert_at(step)
        own = torch.tensor(
            [_mean(self._worked_s), _mean(self._travelled_s), float(not self._fits(now // 2))], device=HOST
        )
        ffn_s, travelled_s, is_short = largest(mesh.world, "packing", own).tolist()
        self._worked_s, self._travelled_s = [], []
        if math.isnan(ffn_s + travelled_s):
            if mesh.rank == 0:
                _log.warning(
                    "step %d: no time of experts and of an exchange on every rank: packing is decided %d steps later",
                    step,
                    EVERY,
                )
            return None
        self._search.observe(ffn_s, travelled_s)
        expert = now if self._search.has_ended or is_short else now // 2
        return Decision(step=step, expert=expert, ffn_s=ffn_s, all_to_all_s=travelled_s)

    def _fits(self, expert: int) -> bool:
        """Whether a rank has memory for its experts when this many ranks share them."""
        if expert < 1:
            return True
        config = with_expert(self._config, expert)
        setup = setup_of(config, sizes_of(config, self._spec, world_size()))
        try:
            check_memory(self._spec, config, setup, ranks_here=local_ranks())
        except ResourceError as error:
            _log.warning("experts are not packed further: %s", error)
            return False
        return True

    def _write(self) -> None:
        last = self._known[-1]
        _log.info(
            "a part keeps experts busy for %s and travels for %s: from step %d on %d ranks share the experts",
            format_seconds(last.ffn_s),
            format_seconds(last.all_to_all_s),
            last.step,
            last.expert,
        )
        replace_text(self._file, json.dumps([asdict(each) for each in self._known], indent=1) + "\n")


def with_expert(config: TrainConfig, expert: int) -> TrainConfig:
    """`config` with this many ranks for the experts."""
    return replace(config, parallel=replace(config.parallel, expert=expert))


def _mean(values: Sequence[float]) -> float:
    """nan: nothing was measured."""
    return sum(values) / len(values) if values else math.nan


def _read(file: Path, most: int) -> list[Decision]:
    """`most`: ranks that share the experts at first."""
    if not file.is_file():
        return []
    try:
        found = [Decision(**each) for each in json.loads(file.read_text(encoding="utf-8"))]
        for each in found:
            if not (type(each.expert) is int and type(each.step) is int and each.expert >= 1):
                raise ValueError(f"expert {each.expert!r} from step {each.step!r} on")
            if most % each.expert:
                raise ValueError(f"{each.expert} ranks share the experts, which are made for {most}")
    except (ValueError, TypeError) as error:
        raise UserError(f"{file}: no decisions about packing ({error}): remove it") from error
    return found


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
    whole = whole and communication.sums != "between"  # see `TrainConfig`
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
            out_TH = dispatcher.through(lambda rows_RH, *_: rows_RH * 1, x_TH, ids_TK, weights_TK)
            torch.autograd.grad(out_TH, (x_TH, weights_TK), torch.ones_like(out_TH))
            settle(device)
            own[number, index] = time.perf_counter() - began_s
    slowest = largest(mesh.world, "dispatch choice", own)[1:]  # the first round warms up
    return {way: statistics.median(slowest[:, index].tolist()) for index, way in enumerate(ways)}
