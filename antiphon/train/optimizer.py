"""AdamW over float32 parameters, and its rate over the steps.

Decayed are matrices: not norms, biases and sinks. The router is not decayed either: pulled towards zero it loses the
differences that it routes by.
"""

import math

import torch
from torch import nn

from antiphon.train.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Two groups: decayed or not."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (decayed if parameter.ndim > 1 and not name.endswith("router") else others).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    beta1, beta2 = config.betas
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(beta1, beta2), eps=config.eps, fused=True)


def rate_at(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """The learning rate of step `step` (the first is 0) of `num_steps`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    if config.schedule == "cosine":
        share = config.final_rate + (1 - config.final_rate) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    elif config.schedule == "wsd":
        left = max(0.0, 1.0 - step / num_steps)
        falling = min(1.0, left / config.decay_part) if config.decay_part else 1.0
        share = config.final_rate + (1 - config.final_rate) * falling
    else:
        share = 1.0
    return config.learning_rate * share
