"""What is said of a training iteration: `StepEstimate`, by rooflines or by a measured machine, and what counting alone
says: FLOPs and the share of the peak that they are (MFU), elements that are sent.

1. Forward: every matrix product of a token, attention causal: a token sees (s + 1) / 2 tokens on average.
2. Backward: twice the forward (gradient of the input, gradient of the weight). Made again or not, counted once.
3. MFU = FLOPs per token * tokens per second / (devices * peak). With MegaScale-MoE's 352B model, 989 TFLOP/s and the
   iteration times of its Table 3 this gives the MFU it states; with attention over the full square it does not.

Rejected: 6 * active parameters per token. It leaves out attention, and counts the embedding, which multiplies nothing.

Elements that each rank sends in one layer's forward pass (MegaScale-MoE, section 3).

Everything is in units of tokens * hidden size of one micro-batch of the whole model-parallel group (the paper's b*s*h);
the backward pass sends the same again. A group of one sends nothing.

1. Tensor parallelism: all-gather before, reduce-scatter after, for attention and feed-forward alike.
2. Sequence parallelism (Ulysses): two all-to-alls, of queries, keys and values, and of the attention's output.
3. Expert parallelism: by all-to-all each token travels to its k experts and back; by all-gather to all ranks.
   Context parallelism: every rank's keys and values pass all others; what it costs is balance (`causal_imbalance`).
4. A token goes to a rank once, however many of its experts live there: the expected number of distinct ranks.

Rejected: k copies of each token as the only count for all-to-all. It is the paper's eq. 3 and kept, but an exchange
that sends duplicates is a choice, not a law.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from antiphon.cost.roofline import Number, Parts
from antiphon.cost.training.memory import TrainingMemory
from antiphon.cost.training.rematerialize import Rematerialized
from antiphon.specs.counts import flops_per_token
from antiphon.specs.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """One iteration, by candidate. `parts`: what the busiest rank does all iteration long, the bubble left out;
    `communication_s` and `exposed_s`: inside layers, over the iteration, all of it and what is not hidden;
    `rematerialized`: what is made again, and how many bytes that saves in a layer."""

    iteration_s: Number
    tokens_per_s: Number
    mfu: Number
    num_micro_batches: Number
    forward_s: Number
    backward_s: Number
    communication_s: Number
    exposed_s: Number
    bubble_s: Number
    pipeline_exposed_s: Number
    sync_s: Number
    sync_exposed_s: Number
    optimizer_s: Number
    parts: Parts
    memory: TrainingMemory
    rematerialized: Rematerialized

    def bound_by(self) -> str:
        """What takes most of one candidate's iteration."""
        largest = max(float(np.max(value)) for value in self.parts._values())
        return "pipeline bubble" if float(np.max(self.bubble_s)) > largest else self.parts.bound_by()


def forward_flops_per_token(model: ModelSpec, sequence_length: int) -> float:
    """One token, all layers and the head, causal attention over sequences of that length."""
    visible = (sequence_length + 1) / 2
    window = model.attention.sliding_window
    if window is not None and window < sequence_length:
        windowed = (window * (window + 1) / 2 + (sequence_length - window) * window) / sequence_length
        share = model.attention.windowed_share
        visible = share * windowed + (1 - share) * visible
    return flops_per_token(model, visible, absorbed=False)


def training_flops_per_token(model: ModelSpec, sequence_length: int) -> float:
    """Forward and backward: three times the forward."""
    return 3 * forward_flops_per_token(model, sequence_length)


def tokens_per_s(sequence_length: int, global_batch: int, iteration_s: Number) -> Number:
    """Tokens of one iteration over its time (MegaScale-MoE, Table 3: 720 * 8192 / iteration)."""
    return sequence_length * global_batch / iteration_s


def model_flops_utilization(
    model: ModelSpec, sequence_length: int, rate_tokens_per_s: Number, num_devices: Number, peak_flops_per_s: float
) -> Number:
    """MFU: model FLOPs per second over the peak of all devices."""
    return training_flops_per_token(model, sequence_length) * rate_tokens_per_s / (num_devices * peak_flops_per_s)


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


def context_to_tensor_ratio(heads_per_kv_head: Number) -> Number:
    """Context parallelism over eq. 1, forward: keys and values of all ranks pass each, 2/m (n - 1) / n, so 1 / m."""
    ratio: Number = 1 / np.asarray(heads_per_kv_head, dtype=np.float64)
    return ratio


def causal_imbalance(document_lengths: Sequence[int], degree: int, *, zigzag: bool) -> float:
    """Pairs of tokens that the busiest of `degree` ranks attends to, over the mean, where each rank has a run of a
    sequence's positions (context parallelism, MegaScale-MoE section 3.1); `zigzag`: two runs, one from each end. A
    token sees those before it in its document. One long document gives (2 n - 1) / n in runs, and 1 in zigzag."""
    seen = np.concatenate([np.arange(1, length + 1) for length in document_lengths]).astype(np.float64)
    runs = [part.sum() for part in np.array_split(seen, 2 * degree)]
    pairs = zip(runs, reversed(runs), strict=True) if zigzag else zip(runs[::2], runs[1::2], strict=True)
    work = [first + second for first, second in pairs][:degree]
    return float(max(work) / (sum(work) / degree))


def expert_to_tensor_ratio(degree: Number, copies: Number) -> Number:
    """Eq. 3 over eq. 4: k / n."""
    ratio: Number = np.asarray(copies, dtype=np.float64) / degree
    return ratio


def layer_ratio(degree: Number, heads_per_kv_head: Number, copies: Number) -> Number:
    """(SP + EP) / (TP + TP) of a whole layer: the mean of the two ratios, for both TP volumes are equal."""
    return (sequence_to_tensor_ratio(degree, heads_per_kv_head) + expert_to_tensor_ratio(degree, copies)) / 2
