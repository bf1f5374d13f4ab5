"""The two normalisations of the supported families behind one shape: norm(x), and norm(x + delta) with the sum.

RMS norm is a kernel of the back-end; LayerNorm (DBRX, Phi-3.5-MoE) is PyTorch's.
"""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.api import KernelBackend


class Norm(Protocol):
    def __call__(self, x_TH: Tensor) -> Tensor:
        """The normalised rows."""

    def after_adding(self, x_TH: Tensor, delta_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm): the residual step that starts each half-layer."""


class RMSNorm:
    def __init__(self, backend: KernelBackend, weight_H: Tensor, eps: float) -> None:
        self.backend = backend
        self.weight_H = weight_H
        self.eps = eps

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self.backend.rms_norm(x_TH, self.weight_H, self.eps)

    def after_adding(self, x_TH: Tensor, delta_TH: Tensor) -> tuple[Tensor, Tensor]:
        return self.backend.add_rms_norm(x_TH, delta_TH, self.weight_H, self.eps)


class LayerNorm:
    def __init__(self, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> None:
        self.weight_H = weight_H
        self.bias_H = bias_H
        self.eps = eps

    def __call__(self, x_TH: Tensor) -> Tensor:
        return F.layer_norm(x_TH, self.weight_H.shape, self.weight_H, self.bias_H, self.eps)

    def after_adding(self, x_TH: Tensor, delta_TH: Tensor) -> tuple[Tensor, Tensor]:
        x_TH = x_TH + delta_TH
        return x_TH, self(x_TH)
