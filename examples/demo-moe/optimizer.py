"""Muon for weight matrices and AdamW for the rest, both driven by one learning-rate schedule.

Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon) keeps a momentum of the gradient and steps along
its nearest orthogonal matrix, found by five Newton-Schulz iterations. Per token it learns faster than AdamW,
which counts when all there is is a CPU for an hour. Experts' matrices and attention heads are orthogonalised
one by one: that is what they are, and small products are cheap.
"""

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(update: Tensor) -> Tensor:
    """Nearest orthogonal matrices, roughly, of a batch [..., rows, cols]; bfloat16 is precise enough."""
    a, b, c = _NEWTON_SCHULZ
    tall = update.shape[-2] > update.shape[-1]
    x = (update.mT if tall else update).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(update.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; each parameter group names the `matrix_shape` to orthogonalise in."""

    def __init__(self, groups: list[dict], *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters in place from their gradients; no closure is ever passed."""
        for group in self.param_groups:
            rows, cols = group["matrix_shape"]
            scale = group["lr"] * max(1.0, rows / cols) ** 0.5
            updates = []
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                updates.append(parameter.grad.lerp(state["momentum"], group["momentum"]).view(-1, rows, cols))
            directions = orthogonalise(torch.cat(updates)).split([len(update) for update in updates])
            for parameter, direction in zip(group["params"], directions, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction.reshape(parameter.shape), alpha=-scale)


def build_optimizers(model: nn.Module, *, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon over attention and expert matrices, AdamW over embedding, router and norms."""
    by_shape: dict[tuple[int, int], list[nn.Parameter]] = {}
    plain = []
    for name, parameter in model.named_parameters():
        rows, cols = parameter.shape[-2:] if parameter.dim() > 1 else (0, 0)
        if name.endswith("experts.gate_up_proj"):
            by_shape.setdefault((rows // 2, cols), []).append(parameter)
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            by_shape.setdefault((64, cols), []).append(parameter)
        elif name.endswith(("o_proj.weight", "experts.down_proj")):
            by_shape.setdefault((rows, cols), []).append(parameter)
        else:
            plain.append(parameter)
    groups = [{"params": params, "matrix_shape": shape} for shape, params in by_shape.items()]
    return [
        Muon(groups, lr=muon_lr, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(plain, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
