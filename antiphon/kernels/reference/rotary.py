"""Rotary position embedding in plain PyTorch (RoFormer, arXiv 2104.09864), neighbours or halves paired.

Letters as in `antiphon.kernels.api`; R half the rotated width.
"""

import torch
from torch import Tensor

from antiphon.kernels.api import RotaryTable


def rotate(x_TND: Tensor, cos_TR: Tensor, sin_TR: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of the first 2R dims in float32; the rest passes unchanged."""
    half = cos_TR.shape[1]
    if half == 0:
        return x_TND
    cos, sin = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    turned = x_TND[..., : 2 * half].float()
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    turned = turned.to(x_TND.dtype)
    return turned if 2 * half == x_TND.shape[-1] else torch.cat((turned, x_TND[..., 2 * half :]), dim=-1)


def look_up(rotary: RotaryTable, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    return rotary.cos.index_select(0, positions_T), rotary.sin.index_select(0, positions_T)
