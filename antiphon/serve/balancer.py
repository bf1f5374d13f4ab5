"""Decides where experts should be (never, once, or again and again) from the rows that the gates counted lately.

    off       placement stays as it is (a client may still change it, `POST /placement`)
    static    once, from the first `WINDOW_STEPS` steps
    window    every `PERIOD_S`, from the last `WINDOW_STEPS` steps, the newest counting most
    predict   as `window`; besides, attention workers ask for copies in the middle of a step (`worker/prefetch`), which
              the next layer's router foresees
    paths     the same, foreseen by the sample paths of a profile (Lina section 5.2)

A plan is made on a thread of its own: steps go on meanwhile. It is taken only if it gains enough (`placement.place`):

1. Its moves must pay. An expert worker loads in the time of `load_rows` rows, and a placement is expected to stay for
   as long as the present one has stayed. Where load drifts, moves are not worth their loads; where one expert has been
   hot for long, even the last bit of it is. Nothing is known of the first plan's placement: it is expected to stay.
2. It must gain more than chance makes of even counts, and than further copies cost: each reads its weights, too.

While it is made, threads of this process take shorter turns. Otherwise each answer of a worker may wait 5 ms for the
interpreter's lock. Plans of large models take long, so the thread rests in proportion.
Rejected: a process for the plan. It costs memory and a start, and with short turns steps hardly notice the thread.
With any policy but `off` expert workers' speeds are measured, too (`policy/worker_speeds`): a slow one gets fewer rows.
"""

import sys
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import numpy as np

from antiphon.base.logging import get_logger
from antiphon.placement.place import chance_of, matrix_of, owners_of, place, recent_loads
from antiphon.placement.split import FloatArray
from antiphon.serve.placement_control import PlacementControl
from antiphon.serve.policy.worker_speeds import WorkerSpeeds
from antiphon.serve.worker.messages import ExpertReport
from antiphon.specs.placement import ExpertPlacement

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


class Balancer:
    """Used by the engine's thread. `first`: the placement that it starts with. `load_rows`: rows that an expert worker
    computes in the time of one load."""

    def __init__(self, policy: Policy, first: ExpertPlacement, num_micro_batches: int, load_rows: int) -> None:
        self._policy = policy
        self._load_rows = load_rows
        self._floor = float(
            first.knee * num_micro_batches
        )  # rows of a step: each micro-batch reads an expert's weights
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
