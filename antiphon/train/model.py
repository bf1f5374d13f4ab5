"""The trainable model: embedding, layers, final norm, and the loss of its head.

It is built from the same `ModelSpec` and tensor names as the one that serves. Parameters stay in float32 (or wider);
the arithmetic runs in `dtype`.

Letters: B sequences, S positions, T = B * S rows, H hidden, E experts, W vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from antiphon.comm.dispatch.api import Dispatcher
from antiphon.kernels.ops.cross_entropy import linear_cross_entropy
from antiphon.models.rotary import rotary_table
from antiphon.specs.model import ModelSpec
from antiphon.train.attention import Sequences
from antiphon.train.layer import MoeLayer, Routing, norm
from antiphon.train.spans import Spans
from antiphon.train.weights import Weights, outer_parameters, register


@dataclass(frozen=True)
class Batch:
    """One micro-batch. `positions_BS` count within documents; `documents_BS` None: one document a sequence.
    `targets_BS`: the next token, or -100 where nothing is to be learned."""

    ids_BS: Tensor
    targets_BS: Tensor
    positions_BS: Tensor
    documents_BS: Tensor | None


@dataclass(frozen=True)
class Losses:
    """`cross_entropy` is summed over targets and divided by the number the caller gave. `routings`: by MoE layer."""

    cross_entropy: Tensor
    routings: list[Routing]


class MoeModel(nn.Module):
    """A decoder of `spec`. `dispatcher_of` gives each MoE layer its way to the experts."""

    cos_PR: Tensor
    sin_PR: Tensor

    def __init__(
        self,
        spec: ModelSpec,
        dispatcher_of: Callable[[int], Dispatcher],
        *,
        max_positions: int,
        dtype: torch.dtype,
        seed: int = 0,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.dtype = dtype
        self.spans = Spans()
        register(self, outer_parameters(spec), "outer", seed, std)
        self.layers = nn.ModuleList(
            MoeLayer(spec, layer, dispatcher_of(layer) if routes else None, seed=seed, std=std)
            for layer, routes in enumerate(spec.moe_layers)
        )
        table = rotary_table(spec.attention.rope, max_positions, torch.device("cpu"))
        self.register_buffer("cos_PR", table.cos, persistent=False)
        self.register_buffer("sin_PR", table.sin, persistent=False)

    def forward(self, batch: Batch, num_targets: Tensor) -> Losses:
        """Losses of a micro-batch; `num_targets` counts those of the whole step, on all ranks."""
        x_BSH, routings = self.hidden(batch)
        x_TH = x_BSH.flatten(0, 1)
        weights = Weights(self, self.dtype)
        head = weights["embedding" if self.spec.tie_embeddings else "head"]
        with self.spans.of("norm"):
            y_TH = norm(self.spec, weights, "final_norm", x_TH)
        with self.spans.of("cross-entropy"):
            loss = linear_cross_entropy(
                y_TH,
                head,
                weights.optional("head_bias"),
                batch.targets_BS.flatten(),
                num_targets,
                self.spec.logits_divisor,
            )
        return Losses(loss, routings)

    def hidden(self, batch: Batch) -> tuple[Tensor, list[Routing]]:
        """The residual stream behind the last layer [B, S, H], before the final norm."""
        sequences = Sequences.of(self.spec, self.cos_PR, self.sin_PR, batch.positions_BS, batch.documents_BS)
        with self.spans.of("embedding"):
            x_BSH = Weights(self, self.dtype)["embedding"][batch.ids_BS]
            if self.spec.embedding_multiplier != 1.0:
                x_BSH = x_BSH * self.spec.embedding_multiplier
        routings = []
        for layer in self.layers:
            x_BSH, routing = layer(x_BSH, sequences)
            if routing is not None:
                routings.append(routing)
        return x_BSH, routings

    def logits(self, batch: Batch) -> Tensor:
        """[B, S, W] in float32 or wider: for comparisons, not for training."""
        x_BSH, _ = self.hidden(batch)
        weights = Weights(self, self.dtype)
        y_BSH = norm(self.spec, weights, "final_norm", x_BSH)
        logits = y_BSH @ weights["embedding" if self.spec.tie_embeddings else "head"].mT
        bias = weights.optional("head_bias")
        logits = (logits if bias is None else logits + bias) / self.spec.logits_divisor
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
