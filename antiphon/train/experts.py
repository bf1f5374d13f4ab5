"""The routed experts that a rank holds, as a function of rows in their order.

Letters: R rows in order of expert, E experts held here, H hidden, J = 2 * width of gate and up.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.kernels.ops.feed_forward import activate, grouped_product
from antiphon.specs.model import FeedForwardSpec
from antiphon.train.weights import DOWN, GATE_UP, Weights


@dataclass(frozen=True)
class Experts:
    """`tensors`: their weights by purpose, in the dtype of the arithmetic. `adds_bias`: whether the second bias is
    added here; of ranks that share an expert's width one does it."""

    spec: FeedForwardSpec
    adds_bias: bool
    tensors: Mapping[str, Tensor]

    @staticmethod
    def of(spec: FeedForwardSpec, weights: Weights, *, adds_bias: bool) -> "Experts":
        purposes = (GATE_UP, DOWN, *((GATE_UP + "_bias", DOWN + "_bias") if spec.expert_bias else ()))
        return Experts(spec, adds_bias, {purpose: weights[purpose] for purpose in purposes})

    def __call__(self, rows_RH: Tensor, counts_E: tuple[int, ...], weights_R: Tensor | None = None) -> Tensor:
        """[R, H]: each row through its expert; `counts_E`: rows of each expert. `weights_R`: what results count,
        multiplied before the second product (MegaScale-MoE, section 4.1)."""
        gate_up_RJ = grouped_product(rows_RH, self.tensors[GATE_UP], counts_E)
        experts_R = torch.tensor(counts_E, device=rows_RH.device)
        if self.spec.expert_bias:
            gate_up_RJ = gate_up_RJ + self.tensors[GATE_UP + "_bias"].repeat_interleave(experts_R, dim=0)
        hidden = activate(gate_up_RJ, self.spec)
        factor_R1 = None if weights_R is None else weights_R.to(hidden.dtype).unsqueeze(1)
        down_RH = grouped_product(hidden if factor_R1 is None else hidden * factor_R1, self.tensors[DOWN], counts_E)
        if not self.spec.expert_bias or not self.adds_bias:
            return down_RH
        bias_RH = self.tensors[DOWN + "_bias"].repeat_interleave(experts_R, dim=0)
        return down_RH + (bias_RH if factor_R1 is None else bias_RH * factor_R1)
