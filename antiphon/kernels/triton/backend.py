"""The back-end for GPUs: Triton's kernels where they serve, PyTorch's operators for the rest.

Weights, cache and signatures are the reference back-end's, whose operations these replace.

Letters as in `antiphon.kernels.api`.
"""

import torch
from torch import Tensor

from antiphon.kernels.api import PackedLinear
from antiphon.kernels.ops.route import choose_experts
from antiphon.kernels.reference import ReferenceBackend
from antiphon.kernels.triton.gate import gate
from antiphon.kernels.triton.norm import norm
from antiphon.specs.model import RouterSpec


class TritonBackend(ReferenceBackend):
    """`KernelBackend` in Triton. `dtype` is that of weights, activations and cache."""

    name = "triton"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm(x, weight, eps)[1]

    def add_rms_norm(self, x_TH: Tensor, delta_TH: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return norm(x_TH, weight, eps, delta_TH)[:2]

    def gate(
        self, x_TH: Tensor, weight: PackedLinear, bias_E: Tensor | None, router: RouterSpec
    ) -> tuple[Tensor, Tensor]:
        logits_TE = self.linear(x_TH, weight, out_dtype=torch.float32)
        if router.scoring == "sparsemixer":
            return choose_experts(logits_TE, bias_E, router)
        return gate(logits_TE, bias_E, router)[:2]
