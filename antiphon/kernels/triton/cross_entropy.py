"""Cross-entropy of rows of logits: each row's loss, and the gradient in the place of the logits.

One program a row, twice through its logits: once for the largest and the sum of exponentials, once for softmax minus
one at the target. No copy of the logits in float32 is made.

Letters: T rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.triton.launch import launch, power_of_two


@triton.jit
def _loss(logits_ptr, bias_ptr, targets_ptr, losses_ptr, vocabulary, inverse, HAS_BIAS: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    logits = logits_ptr + row * vocabulary
    top, total, chosen = -float("inf"), 0.0, 0.0
    for first in range(0, vocabulary, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        x = tl.load(logits + columns, inside, 0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias_ptr + columns, inside, 0.0).to(tl.float32)
        x *= inverse
        chosen += tl.sum(tl.where(columns == target, x, 0.0))
        x = tl.where(inside, x, float("-inf"))
        higher = tl.maximum(top, tl.max(x))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher))
        top = higher
    for first in range(0, vocabulary, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        x = tl.load(logits + columns, inside, 0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias_ptr + columns, inside, 0.0).to(tl.float32)
        grad = tl.exp(x * inverse - top) / total - tl.where(columns == target, 1.0, 0.0)
        tl.store(logits + columns, grad.to(logits_ptr.dtype.element_ty), inside)
    tl.store(losses_ptr + row, tl.log(total) + top - chosen)


def loss_and_gradient(logits_TV: Tensor, bias_V: Tensor | None, targets_T: Tensor, divisor: float) -> Tensor:
    """The loss -log softmax((logits + bias) / divisor)[target] of each row, float32 [T]. `logits_TV`, contiguous,
    becomes its gradient times `divisor`. A target below 0 counts as 0."""
    losses_T = torch.empty(logits_TV.shape[0], dtype=torch.float32, device=logits_TV.device)
    vocabulary, targets_T = logits_TV.shape[1], targets_T.clamp(min=0)
    launch(
        _loss, (logits_TV.shape[0],), logits_TV, bias_V, targets_T, losses_T, vocabulary,
        1.0 / divisor, HAS_BIAS=bias_V is not None, BLOCK=min(4096, power_of_two(vocabulary)), num_warps=8,
    )  # fmt: skip
    return losses_T
