"""Which communication can hide behind which computation (MegaScale-MoE, section 4 and eq. 5-9).

1. R = time of the experts' products / time of one layer's token exchange. Above 1 the exchange fits behind them.
2. Inter-operator: a communication runs beside operators that do not depend on it: in backward, gradients of weights and
   what is made again; in forward, the shared expert beside dispatch and combine. Memory-bound kernels that make
   activations again run beside products: one waits for memory, the other for arithmetic.
3. Intra-operator: a communication is cut into tiles and fused with the product next to it; of the two the longer
   counts.
4. Of what could be hidden, the fraction `overlap` (the cluster's calibration) really is.

Rejected: a hidden share per strategy. It would be the answer put in by hand.
"""

from dataclasses import replace

import numpy as np

from antiphon.cost.parts import FloatArray, Number, Parts


def computation_to_communication(
    expert_width: Number, bytes_per_s: Number, flops_per_s: Number, degree: Number | None = None
) -> Number:
    """R of MegaScale-MoE eq. 8, or eq. 9 (large n) where `degree` is None: 3/2 * h_ffn * bandwidth / peak * n / (n -
    1).

    2 FLOPs per multiply-add and 2 bytes per BF16 element cancel, so bandwidth is in bytes and peak in FLOPs. One way of
    the link; by all-to-all with k copies. Independent of top-k, hidden size, number of experts and tokens."""
    ratio = 1.5 * expert_width * bytes_per_s / flops_per_s
    if degree is None:
        return ratio
    exact: Number = ratio * np.asarray(degree, dtype=np.float64) / (np.asarray(degree, dtype=np.float64) - 1)
    return exact


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
