"""Who decides where experts should be: nobody, once, or again and again, from the rows that the gates counted lately.

    off       placement stays as it is (a client may still change it, `POST /placement`)
    static    once, from the first `WINDOW_STEPS` steps
    window    every `PERIOD_S`, from the last `WINDOW_STEPS` steps, the newest counting most

A plan is made on a thread of its own: steps go on meanwhile. It is taken only if its moves pay (`placement.place`).
"""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import numpy as np

from antiphon.placement.place import matrix_of, owners_of, place, recent_loads
from antiphon.placement.split import FloatArray
from antiphon.serve.placement_control import PlacementControl
from antiphon.specs.placement import ExpertPlacement

Policy = Literal["off", "static", "window"]
POLICIES: tuple[Policy, ...] = ("off", "static", "window")
WINDOW_STEPS = 40
PERIOD_S = 5.0
MOVE_COST = 0.02  # of an even load: what the busiest worker must gain for each expert that moves


class Balancer:
    """Used by the engine's thread. `shape`: MoE layers and experts, as counts come."""

    def __init__(self, policy: Policy, layers: tuple[int, ...], num_experts: int) -> None:
        self._policy = policy
        self._layers = layers
        self._shape = (len(layers), num_experts)
        self._window: deque[FloatArray] = deque(maxlen=WINDOW_STEPS)
        self._num_steps = 0
        self._planned_s = 0.0
        self._plan: Future[ExpertPlacement | None] | None = None
        self._thread = ThreadPoolExecutor(1, "balancer")

    def count(self, expert_rows: bytes) -> None:
        """The rows of a step, as a worker counted them."""
        if expert_rows:
            self._window.append(np.frombuffer(expert_rows, dtype=np.int32).reshape(self._shape).astype(np.float64))
            self._num_steps += 1

    def advance(self, placing: PlacementControl) -> None:
        """Begin a plan if it is time for one; hand over one that is ready. Never waits."""
        if self._plan is not None and self._plan.done():
            target, self._plan = self._plan.result(), None
            if target is not None:
                placing.aim(target)
        elif self._is_due() and not placing.moving and self._plan is None:
            self._planned_s, self._num_steps = time.monotonic(), 0
            self._plan = self._thread.submit(self._make_plan, np.stack(self._window), placing.current, placing.slots)

    def _is_due(self) -> bool:
        if self._policy == "off" or self._num_steps < WINDOW_STEPS:
            return False
        if self._policy == "static":
            return self._planned_s == 0.0
        return time.monotonic() - self._planned_s > PERIOD_S

    def _make_plan(self, window: FloatArray, now: ExpertPlacement, slots: int) -> ExpertPlacement | None:
        loads = recent_loads(window)
        held = np.stack([matrix_of(now.owners[layer], now.num_workers) for layer in self._layers])
        even = float(loads.sum(axis=1).mean()) / now.num_workers
        wanted = place(loads, now.num_workers, slots, present=held, move_cost=MOVE_COST * even)
        if (wanted == held).all():
            return None
        owners = {layer: owners_of(wanted[number]) for number, layer in enumerate(self._layers)}
        return ExpertPlacement(now.num_workers, owners, speeds=now.speeds, knee=now.knee)
