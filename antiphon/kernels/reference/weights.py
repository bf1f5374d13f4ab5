"""How the reference back-end keeps weights: plain tensors in its dtype, gate and up projections stacked.

Letters as in `antiphon.kernels.api`.
"""

import torch
from torch import Tensor


class ReferenceLinear:
    """Weight [out, in] and optional bias [out] on the back-end's device."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight_OI = weight_OI
        self.bias_O = bias_O
        self.out_features, self.in_features = weight_OI.shape
        self.num_bytes = weight_OI.nbytes + (0 if bias_O is None else bias_O.nbytes)


class ReferenceExperts:
    """E gated feed-forwards: `gate_up` holds the gate's I rows above the up projection's I rows, and so its bias."""

    def __init__(
        self, gate_up_EJH: Tensor, down_EHI: Tensor, activation: str, alpha: float, limit: float, has_bias: bool
    ) -> None:
        self.gate_up_EJH = gate_up_EJH
        self.down_EHI = down_EHI
        self.activation = activation
        self.alpha = alpha
        self.limit = limit
        self.num_experts, self.hidden, self.intermediate = down_EHI.shape
        self.gate_up_bias_EJ = gate_up_EJH.new_zeros(gate_up_EJH.shape[:2]) if has_bias else None
        self.down_bias_EH = down_EHI.new_zeros(down_EHI.shape[:2]) if has_bias else None
        tensors = (gate_up_EJH, down_EHI, self.gate_up_bias_EJ, self.down_bias_EH)
        self.num_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def set_expert(self, index: int, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> None:
        self.gate_up_EJH[index, : self.intermediate].copy_(gate_IH)
        self.gate_up_EJH[index, self.intermediate :].copy_(up_IH)
        self.down_EHI[index].copy_(down_HI)

    def set_bias(self, index: int, gate_I: Tensor, up_I: Tensor, down_H: Tensor) -> None:
        assert self.gate_up_bias_EJ is not None, "experts without room for biases"
        assert self.down_bias_EH is not None
        self.gate_up_bias_EJ[index, : self.intermediate].copy_(gate_I)
        self.gate_up_bias_EJ[index, self.intermediate :].copy_(up_I)
        self.down_bias_EH[index].copy_(down_H)


def own_copy(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A contiguous copy that shares nothing with `tensor`, so that a memory-mapped source can be let go."""
    copy = torch.empty(tensor.shape, dtype=dtype, device=device)
    copy.copy_(tensor)
    return copy
