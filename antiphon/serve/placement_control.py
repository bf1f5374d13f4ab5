"""Where the experts of a group are while it serves: what decides it (`Balancer`), and how they get there
(`PlacementControl`).

The balancer decides where experts should be (never, once, or again and again) from the rows that gates counted lately.

    off       placement stays as it is (a client may still change it, `POST /placement`)
    static    once, from the first `WINDOW_STEPS` steps
    window    every `PERIOD_S`, from the last `WINDOW_STEPS` steps, the newest counting most
    predict   as `window`; besides, attention workers ask for copies in the middle of a step, which the next layer's
              router foresees (`worker/expert_prefetch`)
    paths     the same, foreseen by the sample paths of a profile (Lina section 5.2)

A plan is made on a thread of its own: steps go on meanwhile. It is taken only if it gains enough (`placement.place`):

1. Its moves must pay. An expert worker loads in the time of `load_rows` rows, and a placement is expected to stay for
   as long as the present one has stayed. Where load drifts, moves are not worth their loads; where one expert has been
   hot for long, even the last bit of it is. Nothing is known of the first plan's placement: it is expected to stay.
2. It must gain more than chance makes of even counts, and than further copies cost: each reads its weights, too.

While it is made, threads of this process take shorter turns. Otherwise each answer of a worker may wait 5 ms for the
interpreter's lock. Plans of large models take long, so the thread rests in proportion.
Rejected: a process for the plan. It costs memory and a start, and with short turns steps hardly notice the thread.
With any policy but `off` expert workers' speeds are measured, too (`WorkerSpeeds`): a slow one gets fewer rows.

Experts move from the placement that rows are sent by to the one that is wanted:

    aim       a target is set: by a client (`POST /placement`) or by the balancer
    prepare   the holders of experts load what the next map on the way wants there, beside serving (`specs/placement`)
    switch    all have it: between two steps attention workers begin to send rows by the new map
    retire    the holders of experts free what only older maps named, once no step runs that began before the switch

Where replicas share experts (layout hybrid), every rank prepares, and each step says by which map its rows go, because
all ranks have to change in the same one. Elsewhere attention workers are sent the map, and their rows name it.

Each map on the way gives a worker at most one new expert a layer, so a worker needs one spare slot. A worker that dies
changes nothing: it starts again with the present map, then prepares what it missed.

A copy is a spare: while an expert worker is gone, `present` leaves it out, if every expert has another owner.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

import numpy as np

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.placement.moves import next_placement, num_moves
from antiphon.placement.place import chance_of, matrix_of, owners_of, place, recent_loads
from antiphon.placement.split import FloatArray
from antiphon.serve.fleet import Fleet
from antiphon.serve.statistics import EngineStatistics
from antiphon.serve.worker.messages import ExpertReport, Place, Prepared, PreparePlacement, Retire
from antiphon.serve.worker_handle import WorkerName, WorkerProcess
from antiphon.specs.model import ModelSpec
from antiphon.specs.placement import ExpertPlacement

_NEWS = 0.8  # a share of another number above this is chance
_FASTER = 0.9  # above this, if it is so all the time
_LOWEST = 0.1
_LEAST_S = 1.0  # a few hundred halts of some milliseconds
_LEAST_OF_PEER_S = 0.2
_WINDOW_S = 10.0
_PATIENCE_S = 20.0
_log = get_logger("engine")
Policy = Literal["off", "static", "window", "predict", "paths"]
POLICIES: tuple[Policy, ...] = ("off", "static", "window", "predict")  # those that need nothing else
FORECASTING = ("predict", "paths")
WINDOW_STEPS = 40
PERIOD_S = 5.0
PLANNING_SHARE = 0.05  # of the time, at most
_TURN_S, _SHORT_TURN_S = sys.getswitchinterval(), 5e-4
NEW_SPEED = 0.1  # of the fastest worker's speed; less is no news
HALF_LIFE_STEPS = 20.0  # a step counts half of one that is this much newer: single steps are noisy
FIRST_LIFE_STEPS = 1000  # of the first plan's placement
LEAST_LIFE_STEPS = 2 * WINDOW_STEPS  # of a later one's
WORTH = 0.05  # of an even load, which the busiest worker must gain at least
NOISE = 2.0  # standard deviations of an even load, at least as well: of many workers one is busy by chance


class WorkerSpeeds:
    """How fast each of `num_workers` computes, compared with the others, from what it was sent and for how long it was
    busy. `knee`: rows up to which an expert takes no longer than for one.

        work = max(t, knee x touched),   touched = held (1 - exp(-t / held)),   speed = batches x work / busy time

    t are the rows of all its experts in a mean batch. An expert costs as much as `knee` rows however few it gets, since
    its weights are read, and a batch of t rows touches `touched` of the `held` experts. Without this one that gets few
    rows would look slow, get fewer, and look slower still.

    The formula is not the truth. With twice the work a batch takes more than twice as long on a part of a core, which
    is halted in the middle, and less where each batch has fixed costs. So shares follow rules that always hold:

    - A worker counts as slow if its batches take longer than those of a peer that has at least about as much work. The
      worker of a hot expert is not slow for its load, and one with few rows is not slow for its fixed costs. A slower
      one is no peer.
    - A slow worker gets less work, and may look fast with that. It stays slow until it has looked faster all through
      `_PATIENCE_S` of busy time, and twice as long each further time. A worker with too little work costs the others a
      little, one with too much holds up all of them.
    - When loads change, what was measured before is forgotten.

    Shares are of the fastest peer's speed. A worker that was busy for less than `_LEAST_S` counts as before; its peers
    may have idled more. Numbers fade by half whenever `_WINDOW_S` of busy time has come together. Rejected: a line of
    time over rows, fitted to each worker's reports. Its load is the same for minutes, and a prompt differs in more than
    its rows."""

    def __init__(self, num_workers: int, knee: int) -> None:
        self._knee = knee
        self._work = [0.0] * num_workers
        self._batches = [0.0] * num_workers
        self._busy_s = [0.0] * num_workers
        self._shares = [1.0] * num_workers
        self._fast_s = [0.0] * num_workers  # busy time since it began to look faster than its share
        self._patience_s = [_PATIENCE_S] * num_workers

    def add(self, worker: int, num_batches: int, rows: Collection[Collection[int]], busy_s: float) -> None:
        """What one worker did since its last report; `rows` of each expert that it holds, by layer."""
        if not num_batches or not any(rows):
            return
        of_batch, held = sum(map(sum, rows)) / num_batches, sum(map(len, rows)) / len(rows)
        touched = held * (1 - math.exp(-of_batch / held))
        self._work[worker] += num_batches * max(of_batch, self._knee * touched)
        self._batches[worker] += num_batches
        self._busy_s[worker] += busy_s
        self._fast_s[worker] += busy_s
        if max(self._busy_s) > _WINDOW_S:
            for numbers in (self._work, self._batches, self._busy_s):
                numbers[:] = [number / 2 for number in numbers]

    def forget(self) -> None:
        """Loads have changed: experts have moved, or rows are split anew."""
        for numbers in (self._work, self._batches, self._busy_s):
            numbers[:] = [0.0] * len(numbers)

    def shares(self) -> tuple[float, ...]:
        """Each worker's speed over that of the fastest of its peers; 1 where nothing is known."""
        known = [
            worker for worker, busy_s in enumerate(self._busy_s) if busy_s >= _LEAST_OF_PEER_S and self._work[worker]
        ]
        for worker in known:
            if self._busy_s[worker] >= _LEAST_S:
                share = self._shares[worker]
                self._judge(worker, [each for each in known if each != worker and self._shares[each] >= share])
        return tuple(self._shares)

    def _judge(self, worker: int, others: list[int]) -> None:
        """Against those that have about as much work in a batch, or more."""
        work, time_s = self._of_batch(worker)
        peers = [each for each in map(self._of_batch, others) if each[0] >= _NEWS * work]
        seen = min((work / time_s * peer_s / peer_work for peer_work, peer_s in peers), default=0.0)
        slower = [work / time_s * peer_s / peer_work for peer_work, peer_s in peers if peer_s <= _NEWS * time_s]
        share = self._shares[worker]
        if seen < share / _FASTER:
            self._fast_s[worker] = 0.0
        if slower and min(slower) <= _NEWS * share:
            self._shares[worker] = max(_LOWEST, min(slower))
        elif share < 1.0 and self._fast_s[worker] >= self._patience_s[worker]:
            self._shares[worker] = seen if seen < _NEWS else 1.0
            self._patience_s[worker] *= 2
            self._fast_s[worker] = 0.0

    def _of_batch(self, worker: int) -> tuple[float, float]:
        """Work, and seconds."""
        return self._work[worker] / self._batches[worker], self._busy_s[worker] / self._batches[worker]


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


class Balancer:
    """Used by the engine's thread. `first`: the placement that it starts with. `load_rows`: rows that an expert worker
    computes in the time of one load."""

    def __init__(self, policy: Policy, first: ExpertPlacement, num_micro_batches: int, load_rows: int) -> None:
        self._policy = policy
        self._load_rows = load_rows
        # Rows of a step: each micro-batch reads an expert's weights.
        self._floor = float(first.knee * num_micro_batches)
        self._layers = tuple(first.owners)
        num_experts = len(first.owners[self._layers[0]])
        self._shape = (len(self._layers), num_experts)
        self._speeds = WorkerSpeeds(first.num_workers, first.knee)
        self._window: deque[list[bytes]] = deque(maxlen=WINDOW_STEPS)  # by step, of each attention worker
        self._step = 0
        self._num_steps = 0  # since the last plan
        self._age_steps = 0  # of the present placement
        self._planned_from = self._current = first
        self._planned_s = 0.0
        self._planning_s = 0.0  # what the last plan took of a core
        self._plan: Future[ExpertPlacement | None] | None = None
        self._thread = ThreadPoolExecutor(1, "balancer")

    def count(self, step: int, expert_rows: bytes) -> None:
        """The rows of a step, as one of its attention workers counted them; where those step each for itself, the rows
        of a period with as many results as one step of all workers has. They are added up when a plan is made: this is
        between two steps."""
        if not expert_rows:
            return
        if self._window and step == self._step:
            self._window[-1].append(expert_rows)
        else:
            self._window.append([expert_rows])
            self._num_steps += 1
            self._age_steps += 1
            self._step = step

    def note_busy(self, report: ExpertReport) -> None:
        """What an expert worker did since its last report."""
        rows = [of_layer.values() for of_layer in report.rows_per_expert.values()]
        self._speeds.add(report.index, report.num_batches, rows, report.busy_s)

    def advance(self, placing: PlacementControl) -> None:
        """Begin a plan if it is time for one; hand over one that is ready. Never waits."""
        if placing.current is not self._current:
            if (placing.current.owners, placing.current.speeds) != (self._current.owners, self._current.speeds):
                self._speeds.forget()
                self._age_steps = 0
            self._current = placing.current
        if self._plan is not None and self._plan.done():
            target = self._take_plan(self._plan)
            self._plan = None
            if target is not None and not placing.moving and placing.current is self._planned_from:
                placing.aim(target)  # else a client has moved experts meanwhile
        elif self._is_due() and not placing.moving and self._plan is None:
            life_steps = max(LEAST_LIFE_STEPS, self._age_steps) if self._planned_s else FIRST_LIFE_STEPS
            self._planned_s, self._num_steps, self._planned_from = time.monotonic(), 0, placing.current
            speeds = self._speeds.shares()
            try:
                self._plan = self._thread.submit(
                    self._plan_beside, list(self._window), placing.current, placing.slots, speeds, life_steps
                )
            except RuntimeError as error:
                _log.warning("no plan for the experts, the present one stays: %s", error)  # no memory for a thread

    def _take_plan(self, plan: Future[ExpertPlacement | None]) -> ExpertPlacement | None:
        try:
            return plan.result()
        except (OSError, MemoryError) as error:
            _log.warning("no plan for the experts, the present one stays: %s", error or type(error).__name__)
            return None

    def _is_due(self) -> bool:
        if self._policy == "off" or self._num_steps < WINDOW_STEPS:
            return False
        if self._policy == "static":
            return self._planned_s == 0.0
        return time.monotonic() - self._planned_s > max(PERIOD_S, self._planning_s / PLANNING_SHARE)

    def _plan_beside(
        self, window: list[list[bytes]], now: ExpertPlacement, slots: int, speeds: tuple[float, ...], life_steps: int
    ) -> ExpertPlacement | None:
        """`_make_plan` while steps go on."""
        started_s = time.thread_time()
        sys.setswitchinterval(_SHORT_TURN_S)
        try:
            return self._make_plan(window, now, slots, speeds, life_steps)
        finally:
            sys.setswitchinterval(_TURN_S)
            self._planning_s = time.thread_time() - started_s

    def _make_plan(
        self, window: list[list[bytes]], now: ExpertPlacement, slots: int, speeds: tuple[float, ...], life_steps: int
    ) -> ExpertPlacement | None:
        loads = recent_loads(self._rows_of(window), HALF_LIFE_STEPS)
        held = np.stack([matrix_of(now.owners[layer], now.num_workers) for layer in self._layers])
        even = float(loads.sum(axis=1).mean()) / now.num_workers
        even_cost = float(np.maximum(loads, self._floor).sum(axis=1).mean()) / now.num_workers
        wanted = place(
            loads,
            now.num_workers,
            slots,
            speeds=np.array(speeds),
            floor=self._floor,
            present=held,
            move_cost=self._load_rows / life_steps,
            noise=max(WORTH * even_cost, NOISE * chance_of(even, len(window), HALF_LIFE_STEPS)),
        )
        if (wanted == held).all() and not _differ(speeds, now.speeds):
            return None
        owners = {layer: owners_of(wanted[number]) for number, layer in enumerate(self._layers)}
        return ExpertPlacement(now.num_workers, owners, speeds=speeds, knee=now.knee)

    def _rows_of(self, window: list[list[bytes]]) -> FloatArray:
        """[steps, layers, experts], of all attention workers together."""
        counts = [np.sum([np.frombuffer(rows, dtype=np.uint32) for rows in step], axis=0) for step in window]
        return np.array(counts, dtype=np.float64).reshape(-1, *self._shape)


def _differ(speeds: tuple[float, ...], known: tuple[float, ...]) -> bool:
    """Whether the change is worth a message to the senders. `known` to them now; empty: all are equal."""
    pairs = zip(speeds, known or (1.0,) * len(speeds), strict=True)
    return any(abs(new - old) > NEW_SPEED for new, old in pairs)
