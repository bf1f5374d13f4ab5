"""Rotary position embedding (RoFormer, arXiv 2104.09864), neighbours or halves paired, differentiable.

Letters: N heads, D head width, R half the rotated width; the leading axes are any.
"""

import torch
from torch import Tensor

from antiphon.kernels.api import RotaryTable


def rotate(x_ND: Tensor, cos_R: Tensor, sin_R: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first 2R dims of each head, in float32 at least; the rest passes unchanged.

    x [..., N, D]; cos and sin [..., R] for the same leading axes."""
    half = cos_R.shape[-1]
    if half == 0:
        return x_ND
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    cos, sin = cos_R.unsqueeze(-2), sin_R.unsqueeze(-2)
    turned = x_ND[..., : 2 * half].to(wide)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    turned = turned.to(x_ND.dtype)
    return turned if 2 * half == x_ND.shape[-1] else torch.cat((turned, x_ND[..., 2 * half :]), dim=-1)


def look_up(rotary: RotaryTable, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R] of these positions."""
    return rotary.cos.index_select(0, positions_T), rotary.sin.index_select(0, positions_T)
