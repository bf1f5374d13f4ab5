"""One training layer as two streams, computation and network, by events (MegaScale-MoE section 4, Figures 8 and 10).

1. `none`: every operator waits for the one before it.
2. `inter`: what nothing on the critical path waits for runs whenever the compute stream would idle, and is interrupted
   when it need not: the shared expert in forward; in backward gradients of weights, each once the gradient of its
   output is there, and what is computed again.
3. `intra`: besides, each communication and the product it feeds or follows are cut into `num_tiles` tiles; a tile of
   the second starts with the end of the same tile of the first.

Operators and their times are those of `antiphon.cost.training`, whose closed form this checks: `none` is equal to it,
`inter` never faster without a shared expert. Rejected: a schedule by hand for one model; the order follows from what
depends on what.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from antiphon.base.errors import UserError
from antiphon.cost.parts import Parts
from antiphon.cost.training.layer_time import Recomputed
from antiphon.cost.training.operators import LayerOperators
from antiphon.cost.training.setup import OverlapLevel
from antiphon.sim.disciplines import PreemptivePriority
from antiphon.sim.events import EventGraph, Run

COMPUTE, NETWORK = "compute", "network"
What = Literal["product", "kernel", "communication"]

# The forward order of MegaScale-MoE Figure 9. Kernels that stand for several of their kind appear with their share.
CRITICAL: tuple[tuple[What, str, float], ...] = (
    ("kernel", "layer", 1.0),
    ("kernel", "norms", 0.5),
    ("kernel", "rope", 1.0),
    ("product", "qkv", 1.0),
    ("communication", "before_attention", 1.0),
    ("kernel", "scores", 1.0),
    ("communication", "after_attention", 1.0),
    ("product", "out", 1.0),
    ("kernel", "norms", 0.5),
    ("product", "router", 1.0),
    ("kernel", "permute", 0.5),
    ("communication", "dispatch", 1.0),
    ("product", "experts_in", 1.0),
    ("kernel", "activation", 1.0),
    ("product", "experts_out", 1.0),
    ("communication", "combine", 1.0),
    ("kernel", "permute", 0.5),
    ("communication", "before_dense", 1.0),
    ("product", "dense_in", 1.0),
    ("kernel", "dense_activation", 1.0),
    ("product", "dense_out", 1.0),
    ("communication", "after_dense", 1.0),
)
BESIDE: tuple[tuple[What, str, float], ...] = (
    ("product", "shared_in", 1.0),
    ("kernel", "shared_activation", 1.0),
    ("product", "shared_out", 1.0),
)


def simulate_layer(
    operators: LayerOperators,
    level: OverlapLevel,
    *,
    backward: bool,
    num_tiles: int = 8,
    recomputed: Recomputed | None = None,
) -> Run:
    """One pass of one layer and micro-batch. Tracks ``compute`` and ``network``; kinds as in `What`, ``weights`` for
    gradients of weights, ``again`` for what is made again (backward only)."""
    if num_tiles < 1:
        raise UserError(f"{num_tiles} tiles: give at least 1")
    if recomputed is not None and not backward:
        raise UserError("only the backward pass makes anything again: leave out `recomputed`")
    return _Pass(operators, level, backward, num_tiles).run(Recomputed() if recomputed is None else recomputed)


@dataclass(frozen=True)
class _Step:
    what: What
    name: str
    duration_s: float
    partner: str = ""  # of a communication: the product it is fused with


class _Pass:
    def __init__(self, operators: LayerOperators, level: OverlapLevel, backward: bool, num_tiles: int) -> None:
        self._operators, self._backward, self._num_tiles = operators, backward, num_tiles
        self._level = level
        self._graph = EventGraph()
        for track in (COMPUTE, NETWORK):
            self._graph.resource(track, PreemptivePriority())
        self._last: list[int] = []  # what the next step of the critical path waits for
        self._known = self._named()

    def run(self, recomputed: Recomputed) -> Run:
        critical, beside = self._steps(CRITICAL), self._steps(BESIDE)
        if self._backward:
            self._again(recomputed)
            critical, beside = critical[::-1], beside[::-1]
            joins = self._chain(beside)
        for unit in self._units(critical):
            names = [step.name for step in unit]
            if self._backward and "router" in names:  # behind it, the norm's input gradient needs the shared expert's
                self._last += joins
            if len(unit) == 2:
                self._tiles(*unit)
            else:
                self._step(unit[0])
            if not self._backward and "router" in names:
                self._chain(beside)
        return self._graph.run()

    def _units(self, steps: list[_Step]) -> list[list[_Step]]:
        """Single steps, and with `intra` a communication and its product where they follow each other."""
        units: list[list[_Step]] = []
        for step in steps:
            last = units[-1] if units else []
            together = len(last) == 1 and (last[0].partner == step.name or step.partner == last[0].name)
            if self._level == "intra" and together:
                last.append(step)
            else:
                units.append([step])
        return units

    def _named(self) -> dict[str, float]:
        """Seconds of every operator of this pass; gradients of weights as ``weights NAME``."""
        operators, known = self._operators, {}
        for name, product in operators.products.items():
            known[name] = _seconds(product.input_gradient if self._backward else product.forward)
            known[f"weights {name}"] = _seconds(product.weight_gradient) if self._backward else 0.0
        for name, kernel in operators.kernels.items():
            known[name] = _seconds(kernel.backward if self._backward else kernel.forward)
        for name, communication in operators.communications.items():
            known[name] = _seconds(communication.time)
        unknown = known.keys() - {name for _, name, _ in (*CRITICAL, *BESIDE)}
        unknown -= {f"weights {name}" for name in operators.products}
        assert not unknown, f"operators without a place in the order: {sorted(unknown)}"
        return known

    def _steps(self, order: tuple[tuple[What, str, float], ...]) -> list[_Step]:
        partners = {name: item.fuses_with for name, item in self._operators.communications.items()}
        return [
            _Step(what, name, self._known[name] * share, partners.get(name, ""))
            for what, name, share in order
            if name in self._known
        ]

    def _step(self, step: _Step) -> None:
        """One operator of the critical path, and the gradient of its weights."""
        before = list(self._last)
        self._last = [self._add(step, step.duration_s, before, step.name)]
        self._weights(step, before)

    def _tiles(self, first: _Step, second: _Step) -> None:
        """Two operators, tile by tile."""
        before, lead, follow = list(self._last), list(self._last), list[int]()
        for tile in range(1, self._num_tiles + 1):
            lead = [self._add(first, first.duration_s / self._num_tiles, lead, f"{first.name} {tile}")]
            follow = [self._add(second, second.duration_s / self._num_tiles, lead + follow, f"{second.name} {tile}")]
        self._last = follow
        product = first if first.what == "product" else second
        self._weights(product, before if product is first else lead)

    def _weights(self, step: _Step, before: list[int]) -> None:
        """The gradient of a product's weights needs the gradient of its output, as that of its input does."""
        if step.what != "product" or not self._backward:
            return
        duration_s = self._known[f"weights {step.name}"]
        inline = self._level == "none"
        weights = self._graph.add(
            f"weights {step.name}",
            duration_s,
            COMPUTE,
            after=self._last if inline else before,
            kind="weights",
            priority=0 if inline else 1,
        )
        if inline:
            self._last = [weights]

    def _chain(self, steps: list[_Step]) -> list[int]:
        """The shared expert, one operator after the other: on the critical path, or beside it and returned to join."""
        if self._level == "none":
            for step in steps:
                self._step(step)
            return []
        last = list(self._last)
        for step in steps:
            before = list(last)
            last = [self._add(step, step.duration_s, before, step.name, priority=1)]
            self._weights(step, before)
        return last

    def _again(self, recomputed: Recomputed) -> None:
        """What backward makes again needs nothing of this pass; computation first, then its communication. Which
        operator needs it is not modelled: it is over by the end of the pass."""
        inline = self._level == "none"
        priority = 0 if inline else 1
        made = self._graph.add("again", _seconds(recomputed.computation), COMPUTE, kind="again", priority=priority)
        sent = self._graph.add(
            "again", _seconds(recomputed.communication), NETWORK, after=[made], kind="again", priority=priority
        )
        if inline:
            self._last = [sent]

    def _add(self, step: _Step, duration_s: float, after: list[int], label: str, priority: int = 0) -> int:
        track = NETWORK if step.what == "communication" else COMPUTE
        return self._graph.add(label, duration_s, track, after=after, kind=step.what, priority=priority)


def _seconds(parts: Parts) -> float:
    value = np.asarray(parts.total_s, dtype=np.float64)
    if value.size != 1:
        raise UserError(f"operators of {value.size} candidates: simulate one layer, not a table")
    return float(value.reshape(-1)[0])
