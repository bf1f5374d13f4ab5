"""The grouped feed-forward in plain PyTorch: a loop over touched experts, or two grouped matrix products.

The loop asks the host which experts were touched, so on an accelerator it waits for the device; `torch._grouped_mm`
(bfloat16, rows of 16-byte multiples) does not, and is used there when it can be.

Letters as in `antiphon.kernels.api`; R = T * K routed rows in order of local expert.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.ops.feed_forward import activate
from antiphon.kernels.reference.weights import ReferenceExperts


def has_grouped_mm(experts: ReferenceExperts) -> bool:
    """Whether `torch._grouped_mm` takes these weights: bfloat16, both widths multiples of 8 elements (16 bytes)."""
    return (
        hasattr(torch, "_grouped_mm")
        and experts.down_EHI.dtype == torch.bfloat16
        and experts.hidden % 8 == 0
        and experts.intermediate % 8 == 0
    )


def loop_over_experts(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: ReferenceExperts) -> Tensor:
    """Ascending over the touched experts; each adds its weighted rows to a float32 sum."""
    sums_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    gate_up_bias_EJ, down_bias_EH = experts.gate_up_bias_EJ, experts.down_bias_EH
    if experts.num_experts == 1:
        touched = [0]
    else:
        touched = [expert for expert in torch.unique(ids_TK).tolist() if expert >= 0]
    for expert in touched:
        rows, slots = torch.where(ids_TK == expert)
        hidden = activate(F.linear(x_TH[rows], experts.gate_up_EJH[expert], _of(expert, gate_up_bias_EJ)), experts)
        y = F.linear(hidden, experts.down_EHI[expert], _of(expert, down_bias_EH)).float()
        sums_TH.index_add_(0, rows, y * weights_TK[rows, slots].float().unsqueeze(1))
    return sums_TH.to(x_TH.dtype)


def _of(expert: int, bias_EX: Tensor | None) -> Tensor | None:
    return None if bias_EX is None else bias_EX[expert]


def _add_bias(y_RX: Tensor, bias_EX: Tensor | None, experts_R: Tensor) -> Tensor:
    """Each row plus its expert's bias; rows of no expert, which count for nothing, get the last one's."""
    if bias_EX is None:
        return y_RX
    return y_RX + bias_EX.index_select(0, experts_R.clamp(max=bias_EX.shape[0] - 1))


def grouped_products(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: ReferenceExperts) -> Tensor:
    """The same sums without asking the host anything."""
    num_experts, (num_rows, top_k) = experts.num_experts, ids_TK.shape
    # 1. Slots of each row in ascending local index, "not held here" last; then all slots by expert, stable.
    keys_TK, slots_TK = torch.where(ids_TK < 0, num_experts, ids_TK).sort(dim=1)
    weights_TK = weights_TK.gather(1, slots_TK).float()
    keys_R, order_R = keys_TK.flatten().sort(stable=True)
    ends_E = torch.searchsorted(keys_R, torch.arange(num_experts, device=x_TH.device), right=True).int()
    # 2. Both products over the groups. Rows beyond the last group are never written: they are replaced by zeros below.
    x_RH = x_TH.index_select(0, order_R // top_k)
    gate_up_RJ = torch._grouped_mm(x_RH, experts.gate_up_EJH.transpose(1, 2), offs=ends_E)
    hidden_RI = activate(_add_bias(gate_up_RJ, experts.gate_up_bias_EJ, keys_R), experts)
    y_RH = torch._grouped_mm(hidden_RI, experts.down_EHI.transpose(1, 2), offs=ends_E)
    y_RH = _add_bias(y_RH, experts.down_bias_EH, keys_R)
    # 3. Back to rows of tokens, summed in a fixed order.
    y_TKH = torch.empty_like(y_RH).index_copy_(0, order_R, y_RH).view(num_rows, top_k, -1)
    held_TK1 = (keys_TK < num_experts).unsqueeze(-1)
    sums_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    for slot in range(top_k):
        y_TH = torch.where(held_TK1[:, slot], y_TKH[:, slot], 0).float()
        sums_TH.addcmul_(y_TH, weights_TK[:, slot, None])
    return sums_TH.to(x_TH.dtype)
