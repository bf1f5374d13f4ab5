"""Floating-point operations of training, and the share of the peak that they are (MFU).

1. Forward: every matrix product of a token, attention causal: a token sees (s + 1) / 2 tokens on average.
2. Backward: twice the forward (gradient of the input, gradient of the weight). Made again or not, counted once.
3. MFU = FLOPs per token * tokens per second / (devices * peak). With MegaScale-MoE's 352B model, 989 TFLOP/s and the
   iteration times of its Table 3 this gives the MFU it states; with attention over the full square it does not.

Rejected: 6 * active parameters per token. It leaves out attention, and counts the embedding, which multiplies nothing.
"""

from antiphon.cost.parts import Number
from antiphon.specs.counts import flops_per_token
from antiphon.specs.model import ModelSpec


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
