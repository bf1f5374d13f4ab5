"""The ping-pong pipeline between attention and expert workers: MegaScale-Infer section 4.1, eq. 1 to 5.

1. m micro-batches go round: attention (T_a), dispatch (T_c), experts (T_e), combine (T_c), next layer.
2. A layer of all micro-batches takes as long as its busiest resource, m * max(T_a, T_e, T_c), or as one round,
   T_a + T_e + T_c + T_c, whichever is longer. The two ways of the network are two resources (links are full duplex).
3. An iteration is L layers of that, the last micro-batch trailing by m - 1 turns of the busiest resource.

Rejected: eq. 5 outside its conditions. With m below 2 (1 + T_c/T_f) it is too fast, by the bubbles of every layer.

Where attention and experts share devices, the schedule says what of the exchange is hidden behind arithmetic:

1. Serial: attention, rows to their experts, experts, rows back.
2. The shared expert runs beside the first half of the exchange; it needs no rows from elsewhere.
3. Two batches: the micro-batch is cut in two halves, one computes while the other's rows are on the way. Weights are
   read twice and kernels get narrower, for a half is priced as what it is. A layer of both halves takes as long as the
   arithmetic, the exchange, or one half's round, whichever is longest (the ping-pong formula with one resource for both
   kinds of arithmetic).
4. Of what could be hidden, the fraction `overlap` is (`EfficiencySpec`).

Rejected: overlap for disaggregated layouts alone. The comparison of layouts would be one of schedules.
"""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from antiphon.cost.roofline import Number

_ROUNDS = 8  # steps of each micro-batch, of which the second half is steady


def busiest_s(t_a: Number, t_e: Number, t_c: Number, t_c_back: Number | None = None) -> Number:
    """One micro-batch and layer of the busiest resource: attention, experts, or one way of the network."""
    result: Number = np.maximum(np.maximum(t_a, t_e), np.maximum(t_c, t_c if t_c_back is None else t_c_back))
    return result


def round_s(t_a: Number, t_e: Number, t_c: Number, t_c_back: Number | None = None) -> Number:
    """One micro-batch once round: T_a + T_e + 2 T_c."""
    return t_a + t_e + t_c + (t_c if t_c_back is None else t_c_back)


def layer_time(
    num_micro_batches: Number, t_a: Number, t_e: Number, t_c: Number, t_c_back: Number | None = None
) -> Number:
    """Steady time of one layer of all micro-batches: max(m T_f, T_a + T_e + 2 T_c), T_c counting in T_f if eq. 2 fails.

    `t_c_back`: the way back if it differs from the way there."""
    result: Number = np.maximum(
        num_micro_batches * busiest_s(t_a, t_e, t_c, t_c_back), round_s(t_a, t_e, t_c, t_c_back)
    )
    return result


def iteration(
    num_micro_batches: Number,
    num_layers: Number,
    t_a: Number,
    t_e: Number,
    t_c: Number,
    t_c_back: Number | None = None,
) -> Number:
    """From the first micro-batch's start to the last one's end: eq. 5 where eq. 1-3 hold, else bubbles included."""
    steady = layer_time(num_micro_batches, t_a, t_e, t_c, t_c_back)
    trailing = (num_micro_batches - 1) * busiest_s(t_a, t_e, t_c, t_c_back)
    return steady * (num_layers - 1) + round_s(t_a, t_e, t_c, t_c_back) + trailing


def free_step(
    num_micro_batches: int, num_layers: int, t_a: float, t_e: float, t_c: float, head_s: Sequence[float]
) -> float:
    """Steady time of a step of a micro-batch where each steps for itself. `head_s`: the pieces of its head, computed
    where attention would wait: while the experts compute for the others.

    Played through, because a head that is long beside the layers makes several meet there; no formula held then."""
    back = [(0.0, micro_batch) for micro_batch in range(num_micro_batches)]  # when its rows are back for the next layer
    layers_left, in_head = [num_layers] * num_micro_batches, deque[tuple[int, float]]()
    now_s = experts_free_s = 0.0
    ends_s: list[float] = []
    while len(ends_s) < _ROUNDS * num_micro_batches:
        since_s, micro_batch = min(back, default=(math.inf, 0))
        if since_s <= now_s or not in_head:
            back.remove((since_s, micro_batch))
            now_s = max(now_s, since_s)
            if layers_left[micro_batch]:
                layers_left[micro_batch] -= 1
                now_s += t_a
                experts_free_s = max(experts_free_s, now_s + t_c) + t_e
                back.append((experts_free_s + t_c, micro_batch))
            else:
                in_head.extend((micro_batch, piece_s) for piece_s in head_s)
        else:
            micro_batch, piece_s = in_head.popleft()
            now_s += piece_s
            if all(other != micro_batch for other, _ in in_head):
                ends_s.append(now_s)
                layers_left[micro_batch] = num_layers
                back.append((now_s, micro_batch))
    steady = num_micro_batches * _ROUNDS // 2
    return (ends_s[-1] - ends_s[-1 - steady]) / steady * num_micro_batches


def micro_batch_bounds(
    num_micro_batches: Number, num_layers: Number, t_a: Number, t_e: Number, t_c: Number
) -> tuple[Number, Number]:
    """Eq. 4: least and most time of one micro-batch through all layers. The most is also the steady time between two
    tokens of a sequence, when iterations follow each other without a gap."""
    steady = layer_time(num_micro_batches, t_a, t_e, t_c)
    return steady * (num_layers - 1) + round_s(t_a, t_e, t_c), steady * num_layers


def min_micro_batches(t_c: Number, t_f: Number) -> Number:
    """Eq. 3 for m, rounded up: 2 (1 + T_c / T_f). 2 without communication, 3 up to T_c = T_f / 2, 4 up to T_c = T_f."""
    result: Number = np.ceil(np.round(2 * (1 + t_c / t_f), 9))
    return result


def conditions(
    num_micro_batches: Number, t_a: Number, t_e: Number, t_c: Number, tolerance: float = 0.2
) -> tuple[bool | NDArray[np.bool_], bool | NDArray[np.bool_], bool | NDArray[np.bool_]]:
    """Whether eq. 1 (T_a and T_e differ by at most `tolerance` of the larger), eq. 2 and eq. 3 hold."""
    t_f = np.maximum(t_a, t_e)
    balanced = np.abs(t_a - np.asarray(t_e)) <= tolerance * t_f
    hidden = np.asarray(t_c < t_f)
    filled = np.asarray(num_micro_batches * t_f >= 2 * (t_f + t_c) * (1 - 1e-12))
    return balanced, hidden, filled


def bottleneck(num_micro_batches: int, t_a: float, t_e: float, t_c: float, t_c_back: float | None = None) -> str:
    """What sets the layer's time: `attention`, `experts`, `network`, or `bubbles` where there are too few micro-batches
    to fill the round."""
    back = t_c if t_c_back is None else t_c_back
    busiest = max(t_a, t_e, t_c, back)
    if num_micro_batches * busiest < round_s(t_a, t_e, t_c, back) and not math.isclose(
        num_micro_batches * busiest, float(round_s(t_a, t_e, t_c, back))
    ):
        return "bubbles"
    if busiest == t_a:
        return "attention"
    return "experts" if busiest == t_e else "network"


def balanced_attention_workers(k1: Number, k3: Number, num_experts: Number, top_k: Number) -> Number:
    """MegaScale-Infer section 4.2: n_a = (k1 E) / (k3 K), T_a = k1 b_a + k2 and T_e = k3 b_e + k4. Not rounded."""
    return k1 * num_experts / (k3 * top_k)


def throughput_per_cost(
    batch: Number,
    total_s: Number,
    num_attention_devices: Number,
    attention_cost: Number,
    num_expert_devices: Number,
    expert_cost: Number,
) -> Number:
    """MegaScale-Infer section 4.2: (B / T_total) / (tp_a n_a Cost_a + tp_e E Cost_e)."""
    return batch / total_s / (num_attention_devices * attention_cost + num_expert_devices * expert_cost)


def beside_dispatch_s(serial_s: Number, shared_s: Number, exchange_s: Number, overlap: float) -> Number:
    """A serial layer of that time with its shared expert beside the rows' way to the experts."""
    best_s: Number = serial_s - overlap * np.minimum(shared_s, np.asarray(exchange_s) / 2)
    return best_s


def two_batches_s(computed_s: Number, exchange_s: Number, overlap: float) -> Number:
    """A layer of two halves, of which each computes and exchanges for so long."""
    round_s = computed_s + exchange_s
    steady_s = np.maximum(2 * np.maximum(computed_s, exchange_s), round_s)
    layer_s: Number = 2 * round_s - overlap * (2 * round_s - steady_s)
    return layer_s
