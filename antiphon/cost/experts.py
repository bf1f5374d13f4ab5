"""Time of one layer's routed experts on one worker: grouped products over the experts that got rows.

1. Rows are (token, expert) pairs. Each touched expert's weights are read once per micro-batch, so what counts beside
   the rows is how many distinct experts they touch.
2. A token misses a given expert with probability 1 - k/E (its k experts are distinct), T tokens with (1 - k/E)^T.
3. With unequal shares each expert has its own probability, its own rows and its own roofline.

Rejected: reading all held experts' weights always. With few rows per step, as in decode with many experts, it is
several times too slow.
"""

import numpy as np

from antiphon.cost.parts import Number, Parts
from antiphon.cost.roofline import Roof, grouped_gemm, kernel, row_bytes_of
from antiphon.cost.shapes import gated_matrices
from antiphon.specs.model import ModelSpec
from antiphon.specs.precision import PrecisionSpec


def expected_touched(num_held: Number, rows: Number, *, num_experts: Number, top_k: Number) -> Number:
    """Expected number of the `num_held` experts that get at least one of `rows` rows arriving for them, all experts
    equally likely. `rows` = tokens * top_k * num_held / num_experts; at most `num_held`, at most `rows`."""
    tokens = rows * num_experts / (top_k * np.asarray(num_held, dtype=np.float64))
    touched = num_held * (1 - (1 - top_k / np.asarray(num_experts)) ** tokens)
    result: Number = np.minimum(np.minimum(touched, num_held), rows)
    return result


def expert_feed_forward(
    model: ModelSpec,
    roof: Roof,
    rows: Number,
    num_held: Number,
    tp: Number,
    precision: PrecisionSpec,
    *,
    touched: Number | None = None,
) -> Parts:
    """One layer of one worker of `tp` devices that holds `num_held` experts and gets `rows` (token, expert) pairs.

    `touched`: how many experts they fall on; None: expected, all experts equally likely. Every device sees all rows and
    a 1/tp of the width; synchronisation is not in here. Bringing rows into expert order and back: one kernel each."""
    if touched is None:
        touched = expected_touched(num_held, rows, num_experts=model.router.num_experts, top_k=model.router.top_k)
    row_bytes = row_bytes_of(precision)
    into, out = gated_matrices(model.hidden_size, model.feed_forward.intermediate, tp)
    total = _permutations(model, roof, rows, row_bytes)
    for matrix in (into, out):
        total = total + grouped_gemm(
            roof, rows, touched, matrix.inner, matrix.outputs, precision.expert_bytes, row_bytes
        )
    return total + kernel(roof, 0.0, rows * 1.5 * into.outputs * row_bytes)


def _permutations(model: ModelSpec, roof: Roof, rows: Number, row_bytes: float) -> Parts:
    """Rows into expert order and weighted sums back: each row read and written."""
    return kernel(roof, 0.0, 4 * rows * model.hidden_size * row_bytes, num_kernels=2)
