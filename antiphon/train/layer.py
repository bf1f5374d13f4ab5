"""One layer in training, in the order of MegaScale-MoE's Figure 4:

    attention -> gate -> dispatch -> experts -> combine

The shared expert (or the dense layer's feed-forward) runs between dispatch and the experts' results. How positions and
heads are shared between ranks is `SequenceParallel`'s business, how rows reach their experts the dispatcher's, how many
are worked on at once the `RowBudget`'s. This file has no `if` for the first two.

Letters: B sequences, S positions of this rank, T = B * S rows, H hidden, K experts a row, E experts, R rows in order of
expert.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from antiphon.comm.dispatch.api import Dispatcher
from antiphon.kernels.ops.feed_forward import activate
from antiphon.kernels.ops.norm import layer_norm, rms_norm
from antiphon.kernels.ops.route import choose_experts
from antiphon.specs.model import ModelSpec
from antiphon.train.attention import Sequences, attend
from antiphon.train.experts import Experts
from antiphon.train.partition import Share, part_of
from antiphon.train.routing import Routing
from antiphon.train.row_budget import RowBudget, pass_over_budget
from antiphon.train.spans import Spans
from antiphon.train.weights import FirstValues, Weights, layer_parameters, register


class MoeLayer(nn.Module):
    """Layer `layer` of the model, this rank's `share` of it. A dense layer has no use for `dispatcher` and `budget`."""

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        share: Share,
        dispatcher: Dispatcher,
        budget: RowBudget,
        first: FirstValues,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.share = share
        self.dispatcher = dispatcher
        self.budget = budget
        self.spans = Spans()
        register(self, layer_parameters(spec, layer), f"layers.{layer}", first, partial(part_of, spec, share))

    def forward(self, x_BSH: Tensor, sequences: Sequences, routing: Routing) -> Tensor:
        """The residual stream behind the layer; `routing` learns what the gate did."""
        weights, spec, layer, span = Weights(self, x_BSH.dtype), self.spec, self.layer, self.spans.of
        with span("norm", layer):
            y_BSH = norm(spec, weights, "input_norm", x_BSH)
        with span("attention", layer):
            x_BSH = x_BSH + _scaled(attend(spec, layer, weights, y_BSH, sequences), spec.residual_multiplier)
        with span("norm", layer):
            y_TH = norm(spec, weights, "post_norm", x_BSH).flatten(0, 1)
        if not spec.moe_layers[layer]:
            with span("dense feed-forward", layer):
                dense_TH = _scaled(_gated(spec, weights, "dense", y_TH), spec.residual_multiplier)
                return x_BSH + dense_TH.view_as(x_BSH)
        with span("gate", layer):
            logits_TE, ids_TK, weights_TK = self._gate(weights, y_TH)
            y_TH = routing.attach(y_TH, logits_TE, ids_TK)
            ids_TK = routing.limit(ids_TK, weights_TK)
        with span("dispatch", layer):
            pieces = self.budget.pieces(ids_TK)
            dispatched = self.dispatcher.start_dispatch(y_TH, pieces.choices(0), weights_TK)
        with span("shared expert", layer):
            shared_TH = _shared(spec, weights, y_TH)
        with span("dispatch", layer):
            rows_RH, counts = dispatched.wait()
        with span("experts", layer):
            experts = Experts.of(spec.feed_forward, weights, adds_bias=self.share.adds_bias)
            rows_RH = experts(rows_RH, counts, dispatched.weights_R)
        with span("combine", layer):
            out_TH = dispatched.start_combine(rows_RH).wait()
        if pieces.num_more:
            with span("experts over budget", layer):
                out_TH = out_TH + pass_over_budget(self.dispatcher, experts, y_TH, pieces, weights_TK)
        with span("combine", layer):
            if shared_TH is not None:
                out_TH = out_TH + _scaled(shared_TH, spec.residual_multiplier)
            return x_BSH + out_TH.view_as(x_BSH)

    def _gate(self, weights: Weights, y_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of all experts, and each row's choices and their weights, in float32 at least."""
        router, wide = self.spec.router, torch.promote_types(y_TH.dtype, torch.float32)
        bias_E = weights.stored("router_bias").to(wide) if router.has_logit_bias else None
        logits_TE = F.linear(y_TH.to(wide), weights.stored("router").to(wide), bias_E)
        score_bias_E = weights.stored("score_bias").to(wide) if router.has_score_bias else None
        return logits_TE, *choose_experts(logits_TE, score_bias_E, router)


def norm(spec: ModelSpec, weights: Weights, purpose: str, x: Tensor) -> Tensor:
    """The model's kind of norm with the weights of `purpose`."""
    if spec.norm == "rms":
        return rms_norm(x, weights[purpose], spec.norm_eps)
    return layer_norm(x, weights[purpose], weights.optional(purpose + "_bias"), spec.norm_eps)


def _gated(spec: ModelSpec, weights: Weights, kind: str, y_TH: Tensor) -> Tensor:
    """The feed-forward that all rows pass: "dense" or "shared"."""
    hidden = activate(F.linear(y_TH, weights[f"{kind}.gate_up"]), spec.feed_forward)
    return F.linear(hidden, weights[f"{kind}.down"])


def _shared(spec: ModelSpec, weights: Weights, y_TH: Tensor) -> Tensor | None:
    if not spec.feed_forward.shared_intermediate:
        return None
    out_TH = _gated(spec, weights, "shared", y_TH)
    if not spec.feed_forward.shared_gate:
        return out_TH
    return out_TH * F.linear(y_TH, weights["shared_gate"]).sigmoid()


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
