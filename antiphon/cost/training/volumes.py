"""How many elements each rank sends in one layer's forward pass, by counting (MegaScale-MoE, section 3).

Everything is in units of tokens * hidden size of one micro-batch of the whole model-parallel group (the paper's b*s*h);
the backward pass sends the same again. A group of one sends nothing.

1. Tensor parallelism: all-gather before, reduce-scatter after, for attention and feed-forward alike.
2. Sequence parallelism (Ulysses): two all-to-alls, of queries, keys and values, and of the attention's output.
3. Expert parallelism: by all-to-all each token travels to its k experts and back; by all-gather to everybody.
4. A token goes to a rank once, however many of its experts live there: the expected number of distinct ranks.

Rejected: k copies of each token as the only count for all-to-all. It is the paper's eq. 3 and kept, but an exchange
that sends duplicates is a choice, not a law.
"""

import numpy as np

from antiphon.cost.parts import Number


def _others(degree: Number) -> Number:
    """(n - 1) / n: the share of a tensor that is, or goes, elsewhere."""
    share: Number = (np.asarray(degree, dtype=np.float64) - 1) / degree
    return share


def expert_parallel_volume(degree: Number, copies: Number) -> Number:
    """MegaScale-MoE eq. 3: 2 k / n * (n - 1) / n by all-to-all; `copies` is k, or `expected_distinct` where tokens
    travel once per rank."""
    return 2 * np.asarray(copies, dtype=np.float64) / degree * _others(degree)


def sequence_to_tensor_ratio(degree: Number, heads_per_kv_head: Number) -> Number:
    """Eq. 2 over eq. 1, (2 + 2/m) / n: Table 2's models give 0.275 to 0.5 at n = 8."""
    ratio: Number = (2 + 2 / np.asarray(heads_per_kv_head, dtype=np.float64)) / degree
    return ratio


def expert_to_tensor_ratio(degree: Number, copies: Number) -> Number:
    """Eq. 3 over eq. 4: k / n."""
    ratio: Number = np.asarray(copies, dtype=np.float64) / degree
    return ratio


def layer_ratio(degree: Number, heads_per_kv_head: Number, copies: Number) -> Number:
    """(SP + EP) / (TP + TP) of a whole layer: the mean of the two ratios, for both TP volumes are equal."""
    return (sequence_to_tensor_ratio(degree, heads_per_kv_head) + expert_to_tensor_ratio(degree, copies)) / 2
