"""Feed-forwards that stay with attention: the dense layers' and the shared expert all tokens pass.

Either is a grouped feed-forward with one expert: every row goes to expert 0 with the model's residual multiplier (1 but
for Granite) as its weight, times the sigmoid of a learned gate (Qwen2-MoE). One kernel therefore serves them and the
routed experts.
"""

import torch
from torch import Tensor

from antiphon.kernels.api import KernelBackend, PackedExperts, PackedLinear


class LocalFeedForward:
    def __init__(
        self,
        backend: KernelBackend,
        expert: PackedExperts,
        shared_gate: PackedLinear | None,
        residual_multiplier: float = 1.0,
    ) -> None:
        self.backend = backend
        self.expert = expert
        self.shared_gate = shared_gate
        self.residual_multiplier = residual_multiplier

    def __call__(self, y_TH: Tensor) -> Tensor:
        ids_T1 = torch.zeros((y_TH.shape[0], 1), dtype=torch.int32, device=y_TH.device)
        if self.shared_gate is None:
            weights_T1 = torch.full_like(ids_T1, self.residual_multiplier, dtype=torch.float32)
        else:
            weights_T1 = self.backend.linear(y_TH, self.shared_gate, out_dtype=torch.float32).sigmoid()
            weights_T1.mul_(self.residual_multiplier)
        return self.backend.grouped_ffn(y_TH, ids_T1, weights_T1, self.expert)
