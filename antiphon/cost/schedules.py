"""Schedules of one layer where attention and experts share devices: what of the exchange is hidden behind arithmetic.

1. Serial: attention, rows to their experts, experts, rows back.
2. The shared expert runs beside the first half of the exchange; it needs no rows from elsewhere.
3. Two batches: the micro-batch is cut in two halves, one computes while the other's rows are on the way. Weights are
   read twice and kernels get narrower, for a half is priced as what it is. A layer of both halves takes as long as the
   arithmetic, the exchange, or one half's round, whichever is longest (the ping-pong formula with one resource for both
   kinds of arithmetic).
4. Of what could be hidden, the fraction `overlap` is (`EfficiencySpec`).

Rejected: overlap for disaggregated layouts alone. The comparison of layouts would be one of schedules.
"""

import numpy as np

from antiphon.cost.parts import Number


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
