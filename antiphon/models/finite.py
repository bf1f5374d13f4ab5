"""Whether a weight holds NaN or infinity: one such number in a norm or an embedding makes every answer nonsense.

A sum is finite only if every number is, and takes one pass at the speed of memory. A sum that is not finite may just be
too large for its dtype: then the smallest and the largest number decide (`aminmax` hands NaN on), and only where they
are not finite does a slow pass look for the place.
Rejected: `isfinite().all()`, which writes a mask first and takes seventy times as long on bfloat16.
"""

import torch
from torch import Tensor

from antiphon.base.errors import CheckpointError


def check_finite(tensor: Tensor, name: str, file: str) -> None:
    """`CheckpointError` that names tensor, file and place if a number is NaN or infinite. `tensor` is on the CPU."""
    if tensor.numel() == 0 or torch.isfinite(tensor.sum()):
        return
    low, high = torch.aminmax(tensor)
    if torch.isfinite(low) and torch.isfinite(high):
        return
    place = torch.isfinite(tensor).logical_not().nonzero()[0].tolist()
    value = float(tensor[tuple(place)])
    raise CheckpointError(
        f"{file}: tensor {name} holds {value} at {place}: the weights are damaged, download the file again"
    )
