"""What moves the parameters: AdamW, or Muon for matrices and AdamW for the rest; and the rate over the steps.

Decayed are matrices: not norms, biases and sinks. The router is not decayed either: pulled towards zero it loses the
differences that it routes by.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from antiphon.train.bucket import Piece
from antiphon.train.config import CommunicationConfig, OptimizerConfig
from antiphon.train.model import MoeModel
from antiphon.train.muon import Muon, matrices_of
from antiphon.train.shards import Shards

_MUON_MOMENTUM = 0.95


class Optimizer:
    """Over the pieces of `shards`."""

    def __init__(self, model: MoeModel, shards: Shards, config: OptimizerConfig) -> None:
        self._config = config
        pieces = shards.pieces
        self._shards = shards
        plain = [piece for piece in pieces if piece.matrices is None]
        self._muon = Muon(
            [piece for piece in pieces if piece.matrices is not None],
            model.mesh,
            momentum=_MUON_MOMENTUM,
            weight_decay=config.weight_decay,
        )
        groups = [
            {"params": [piece.values for piece in plain if _is_decayed(piece)], "weight_decay": config.weight_decay},
            {"params": [piece.values for piece in plain if not _is_decayed(piece)], "weight_decay": 0.0},
        ]
        beta1, beta2 = config.betas
        self._adamw = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=(beta1, beta2), eps=config.eps, fused=True
        )

    def step(self, rate: float) -> None:
        """Move every piece along its gradient, AdamW's by `rate`, and forget the gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._muon.step(rate * self._config.muon_scale)
        self._shards.zero_grad()

    def moments(self, step: int) -> Iterator[tuple[str, Piece, Tensor]]:
        """All that is remembered between steps, `step` of which are done: what it is, whose, and the tensor itself,
        flat as the piece is."""
        for piece in self._shards.pieces:
            if piece in self._muon.state:
                state: dict[str, Tensor] = self._muon.state[piece]
            else:
                state = self._adamw.state[piece.values]
                if not state:
                    state |= {key: torch.zeros_like(piece.values) for key in ("exp_avg", "exp_avg_sq")}
                    self._adamw.state[piece.values] = state
                state["step"] = torch.tensor(float(step))
            yield from ((key, piece, value) for key, value in state.items() if key != "step")


def shards_of(
    model: MoeModel,
    zero: int,
    config: OptimizerConfig,
    communication: CommunicationConfig = CommunicationConfig(),
) -> Shards:
    """As the optimizer of `config` wants them. Made by all ranks together."""
    if config.name != "muon":
        return Shards(model, zero, communication=communication)
    return Shards(model, zero, lambda purpose, shape: matrices_of(model.spec, purpose, shape), communication)


def _is_decayed(piece: Piece) -> bool:
    return len(piece.part.shape) > 1 and piece.purpose != "router" and not piece.purpose.endswith("bias")


def rate_at(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """The learning rate of step `step` (the first is 0) of `num_steps`."""
    return config.learning_rate * _share_at(step, num_steps, config)


def _share_at(step: int, num_steps: int, config: OptimizerConfig) -> float:
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    if config.schedule == "cosine":
        return config.final_rate + (1 - config.final_rate) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    if config.schedule == "wsd":
        left = max(0.0, 1.0 - step / num_steps)
        falling = min(1.0, left / config.decay_part) if config.decay_part else 1.0
        return config.final_rate + (1 - config.final_rate) * falling
    return 1.0
