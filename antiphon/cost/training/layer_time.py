"""Time of one layer's forward and backward pass, communication overlapped or not (MegaScale-MoE, section 4, eq. 5-9).

1. R = time of the experts' products / time of one layer's token exchange. Above 1 the exchange fits behind them.
2. Without overlap every operator waits for the one before it: the sum of all.
3. Inter-operator: a communication runs beside operators that do not depend on it: in forward the shared expert beside
   dispatch and combine, in backward gradients of weights and what is made again. Memory-bound kernels that make
   activations again depend on no gradient, so they run beside products, which leave the memory idle.
4. Intra-operator: what is left of a communication is cut into tiles and fused with the product that it feeds or
   follows; of the two the longer counts.
5. Of what could be hidden, the fraction `overlap` (the cluster's calibration) really is.

Rejected: an exact schedule by events. `sim` has that; a search over thousands of layouts needs a closed form, and the
paper's own statement is about which operators can overlap, not about when they start. Rejected: a hidden share per
strategy. It would be the answer put in by hand.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from antiphon.cost.parts import FloatArray, Number, Parts
from antiphon.cost.training.operators import Communication, LayerOperators
from antiphon.cost.training.setup import OverlapLevel


def computation_to_communication(expert_width: Number, bytes_per_s: Number, flops_per_s: Number) -> Number:
    """R of MegaScale-MoE eq. 9, which is eq. 8 for large n: 3/2 * h_ffn * bandwidth / peak; of n ranks n / (n - 1)
    times as much.

    2 FLOPs per multiply-add and 2 bytes per BF16 element cancel, so bandwidth is in bytes and peak in FLOPs. One way of
    the link; by all-to-all with k copies. Independent of top-k, hidden size, number of experts and tokens."""
    return 1.5 * expert_width * bytes_per_s / flops_per_s


def hidden_behind(communication: Parts, independent_s: Number, overlap: float) -> Parts:
    """What is left of `communication` when it runs beside `independent_s` seconds of other work."""
    total = np.asarray(communication.total_s, dtype=np.float64)
    hidden = overlap * np.minimum(total, independent_s)
    left: FloatArray = np.where(total > 0, 1 - hidden / np.where(total > 0, total, 1.0), 0.0)
    return left * communication


def beside_products(again: Parts, compute_s: Number, overlap: float) -> Parts:
    """What is left of kernels that make activations again: of their memory traffic what does not hide behind
    `compute_s` seconds of arithmetic, and all else that they take."""
    memory = Parts(memory_s=again.memory_s)
    return replace(again, memory_s=hidden_behind(memory, compute_s, overlap).memory_s)


def fused_speedup(communication_s: Number, product_s: Number, overlap: float) -> Number:
    """(T_c + T_g) / T of one fused pair: from 1 (one of them is nothing) to 2 (equal, all hidden)."""
    both = communication_s + product_s
    speedup: Number = both / (both - overlap * np.minimum(communication_s, product_s))
    return speedup


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """What backward makes again in one layer: computation, and communication."""

    computation: Parts = field(default_factory=Parts)
    communication: Parts = field(default_factory=Parts)


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """One pass through one layer: computation, all communication, and the part of it that is not hidden."""

    computation: Parts
    communication: Parts
    exposed: Parts

    @property
    def total(self) -> Parts:
        return self.computation + self.exposed


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Both passes of one layer and one micro-batch."""

    forward: PassTime
    backward: PassTime

    @property
    def total(self) -> Parts:
        return self.forward.total + self.backward.total


def layer_time(
    operators: LayerOperators, level: OverlapLevel, overlap: float, recomputed: Recomputed | None = None
) -> LayerTime:
    """Both passes. `overlap`: fraction of what can be hidden that really is (`EfficiencySpec.overlap`)."""
    return LayerTime(
        forward=_forward(operators, level, overlap),
        backward=_backward(operators, level, overlap, Recomputed() if recomputed is None else recomputed),
    )


def _forward(operators: LayerOperators, level: OverlapLevel, overlap: float) -> PassTime:
    products = {name: product.forward for name, product in operators.products.items()}
    computation = sum([*products.values(), *(kernel.forward for kernel in operators.kernels.values())], Parts())
    beside_s = sum((products[name] for name in operators.beside), Parts()).total_s
    experts = {name: item for name, item in operators.communications.items() if name in ("dispatch", "combine")}
    others = {name: item for name, item in operators.communications.items() if name not in experts}
    left = {name: item.time for name, item in operators.communications.items()}
    if level != "none":
        left = left | _left_together(experts, beside_s, overlap)
    fused = {item.fuses_with: products[item.fuses_with] for item in (experts | others).values()}
    return _pass(operators, computation, left, fused, level, overlap)


def _backward(operators: LayerOperators, level: OverlapLevel, overlap: float, recomputed: Recomputed) -> PassTime:
    products = operators.products.values()
    weights = sum((product.weight_gradient for product in products), Parts())
    inputs = {name: product.input_gradient for name, product in operators.products.items()}
    rest = sum((kernel.backward for kernel in operators.kernels.values()), Parts())
    needed = weights + sum(inputs.values(), Parts())
    again = recomputed.computation
    if level != "none":
        again = beside_products(again, needed.compute_s, overlap)
    computation = needed + rest + again
    items = operators.communications | {"again": Communication(time=recomputed.communication, fuses_with="")}
    left = {name: item.time for name, item in items.items()}
    if level != "none":
        left = _left_together(items, weights.total_s + again.total_s, overlap)
    return _pass(operators, computation, left, inputs, level, overlap, recomputed.communication)


def _left_together(items: dict[str, Communication], independent_s: Number, overlap: float) -> dict[str, Parts]:
    """Each communication's part that stays when all of them run beside `independent_s` seconds of other work."""
    total = sum((item.time for item in items.values()), Parts())
    before = np.asarray(total.total_s, dtype=np.float64)
    after = np.asarray(hidden_behind(total, independent_s, overlap).total_s, dtype=np.float64)
    share = np.where(before > 0, after / np.where(before > 0, before, 1.0), 0.0)
    return {name: share * item.time for name, item in items.items()}


def _pass(
    operators: LayerOperators,
    computation: Parts,
    left: dict[str, Parts],
    products: dict[str, Parts],
    level: OverlapLevel,
    overlap: float,
    again: Parts | None = None,
) -> PassTime:
    """The pass, each communication that is left fused with its product where `level` says so."""
    exposed = Parts()
    for name, time in left.items():
        item = operators.communications.get(name)
        if level == "intra" and item is not None:
            time = hidden_behind(time, products[item.fuses_with].total_s, overlap)
        exposed = exposed + time
    communication = sum((item.time for item in operators.communications.values()), Parts())
    return PassTime(
        computation=computation,
        communication=communication if again is None else communication + again,
        exposed=exposed,
    )
