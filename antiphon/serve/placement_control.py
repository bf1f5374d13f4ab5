"""Experts of a group on the move: from the placement that rows are sent by to the one that is wanted, while it serves.

    aim       a target is set: by a client (`POST /placement`) or by the balancer
    prepare   the holders of experts load what the next map on the way wants there, beside serving (`placement/moves`)
    switch    all have it: between two steps attention workers begin to send rows by the new map
    retire    the holders of experts free what only older maps named, once no step runs that began before the switch

Where replicas share experts (layout hybrid), every rank prepares, and each step says by which map its rows go, because
all ranks have to change in the same one. Elsewhere attention workers are sent the map, and their rows name it.

Each map on the way gives a worker at most one new expert a layer, so a worker needs one spare slot. A worker that dies
changes nothing: it starts again with the present map, then prepares what it missed.

A copy is a spare: while an expert worker is gone, `present` leaves it out, if every expert has another owner.
"""

from collections.abc import Collection
from dataclasses import replace

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.placement.moves import next_placement, num_moves
from antiphon.serve.fleet import Fleet
from antiphon.serve.statistics import EngineStatistics
from antiphon.serve.worker.messages import Place, Prepared, PreparePlacement, Retire
from antiphon.serve.worker_process import WorkerName, WorkerProcess
from antiphon.specs.model import ModelSpec
from antiphon.specs.placement import ExpertPlacement

_log = get_logger("engine")


class PlacementControl:
    """Driven by the engine's thread; `current` and `check` may be used by any. `absent`: expert workers left out.

    `slots`: experts that a worker may hold in a layer. `may_move`: it has a spare slot for one on its way."""

    def __init__(
        self,
        spec: ModelSpec,
        placement: ExpertPlacement,
        slots: int,
        fleet: Fleet,
        statistics: EngineStatistics,
        *,
        may_move: bool,
    ) -> None:
        self._may_move = may_move
        self.current = placement
        self.slots = slots
        self._moe_layers = list(spec.expert_layers)
        self._num_experts = spec.router.num_experts
        self._fleet = fleet
        self._statistics = statistics
        self._target: ExpertPlacement | None = None
        self._coming: ExpertPlacement | None = None
        self._waiting_for: set[WorkerName] = set()
        self._old_steps: set[int] | None = None  # begun before the last switch; None: retired
        self.absent: frozenset[int] = frozenset()
        self._newest = placement.version

    def check(self, target: ExpertPlacement) -> None:
        """`UserError` unless `target` can be served: of this model, for these workers, within their slots."""
        target.check_fits(self._moe_layers, self._num_experts, self.current.num_workers, self.slots)
        if not self._may_move and num_moves(self.current, target):
            raise UserError(
                "experts cannot move: no worker has a spare slot; start the server with --expert-slots "
                f"{self.slots} or more, or with --balance"
            )

    @property
    def moving(self) -> bool:
        """A target has not been reached."""
        return self._target is not None

    def aim_at_owners(self, target: ExpertPlacement) -> None:
        """As `aim`, with the workers' speeds as they are known here: a client's file does not say them."""
        self.aim(replace(target, speeds=self.current.speeds, knee=self.current.knee))

    def aim(self, target: ExpertPlacement) -> None:
        """Go to `target`, which was checked, from wherever things are now. Replaces an earlier target."""
        self._target = target

    def advance(
        self,
        attention: Collection[WorkerName],
        experts: Collection[WorkerName],
        running: Collection[int] = (),
    ) -> None:
        """Take the next step of a move, if one is due. Call when all these processes are ready: attention workers'
        leaders, unless their steps say it, and all processes that hold experts for others. `running`: the steps under
        way, which may still send rows by the old map."""
        if self._coming is not None and not self._waiting_for:
            self._switch(attention, running)
        if self._old_steps is not None and not self._old_steps:
            self._old_steps = None
            for name in experts:
                self._fleet.send(self._fleet.workers[name], Retire(self.current.version))
        if self._target is not None and self._coming is None and self._old_steps is None and not self.absent:
            self._prepare(experts)

    def note_step_over(self, step: int) -> None:
        """The step has ended, or has come to nothing: what begins from now on goes by the present map."""
        if self._old_steps is not None:
            self._old_steps.discard(step)

    def _prepare(self, experts: Collection[WorkerName]) -> None:
        assert self._target is not None
        coming = next_placement(self.current, self._target, self.slots)
        if coming is None:
            if num_moves(self.current, self._target):
                _log.error("experts cannot move any further: every slot is taken; give --expert-slots more")
            self._target = None
            return
        self._newest += 1
        self._coming = replace(coming, version=self._newest)
        self._waiting_for = set(experts)
        for name in experts:
            self._fleet.send(self._fleet.workers[name], PreparePlacement(self._coming))

    def _switch(self, attention: Collection[WorkerName], running: Collection[int]) -> None:
        assert self._coming is not None
        before, self.current, self._coming = self.current, self._coming, None
        self._send_place(attention)
        self._old_steps = set(running)
        if before.owners != self.current.owners:  # else only the workers' speeds are new
            self._statistics.record_placement(self.current.version, num_moves(before, self.current))

    def on_prepared(self, worker: WorkerProcess, message: Prepared) -> None:
        """An expert worker has loaded what a coming map wants of it, or cannot."""
        if self._coming is None or message.version != self._coming.version:
            return
        if message.failure is None:
            self._waiting_for.discard(worker.name)
            return
        _log.error("%s: placement given up: %s", worker.name, message.failure)
        self._coming, self._target, self._waiting_for = None, None, set()

    def on_ready(self, worker: WorkerProcess, *, is_loaded: bool) -> None:
        """A process has started with the map that was in force then: tell it what has changed since. `is_loaded`: all
        ranks of its worker are up, so that from now on a new map reaches it as it does all others."""
        if worker.name.role == "attention" and is_loaded:
            self._fleet.send(self._fleet.workers[worker.name.leader], Place(self._without_absent()))
        elif worker.name.role != "attention" and self._coming is not None:
            self._waiting_for.add(worker.name)
            self._fleet.send(worker, PreparePlacement(self._coming))

    # --- workers that are gone ---------------------------------------------------------------------------------------

    def spares(self, absent: Collection[int]) -> bool:
        """Whether all experts have an owner without these expert workers."""
        return self.current.without(absent) is not None

    def leave_out(self, absent: Collection[int], attention: Collection[WorkerName]) -> None:
        """Send no rows to these expert workers, and to all others again. Between two steps."""
        if frozenset(absent) != self.absent:
            self.absent = frozenset(absent)
            self._send_place(attention)

    def _send_place(self, attention: Collection[WorkerName]) -> None:
        message = Place(self._without_absent())
        for name in attention:
            self._fleet.send(self._fleet.workers[name], message)

    def _without_absent(self) -> ExpertPlacement:
        left = self.current.without(self.absent)
        assert left is not None, "every expert has an owner that is there"
        return left
