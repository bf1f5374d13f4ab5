"""One layer in training, in the order of MegaScale-MoE's Figure 4:

    attention -> gate -> dispatch -> experts -> combine

The layer is a list of operators between named tensors (Figure 9 has the names), below in the order in which a reader
would run them. In which order they really run, what is kept for backward and what is made again is a `LayerPlan`'s
business, how positions and heads are shared `SequenceParallel`'s, how rows reach their experts the dispatcher's, how
many are worked on at once the `RowBudget`'s.

Letters: B sequences, S positions of this rank, T = B * S rows, H hidden, K experts a row, E experts, R rows in order of
expert.
"""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from antiphon.comm.dispatch import Dispatcher
from antiphon.comm.tile_flight import TileLinks
from antiphon.kernels.ops.norm import layer_norm, rms_norm
from antiphon.kernels.ops.route import choose_experts
from antiphon.specs.model import ModelSpec
from antiphon.train.attention import attention_operators
from antiphon.train.feed_forward import dense_operators, expert_operators, scaled
from antiphon.train.layer_plan import LayerPlan, PlanOptions
from antiphon.train.layer_run import run_layer
from antiphon.train.operator_graph import Held
from antiphon.train.operators import Compute, Graph, Here, Operator
from antiphon.train.partition import Share, part_of
from antiphon.train.routing import Routing
from antiphon.train.row_budget import RowBudget
from antiphon.train.sequences import Sequences
from antiphon.train.spans import Spans
from antiphon.train.turns import Turns
from antiphon.train.weights import FirstValues, Recorder, Weights, layer_parameters, register


class MoeLayer(nn.Module):
    """Layer `layer` of the model, this rank's `share` of it. A dense layer has no use for `dispatcher` and `budget`.
    `links`: who carries tiles between the ranks that share its positions."""

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        share: Share,
        dispatcher: Dispatcher,
        budget: RowBudget,
        first: FirstValues,
        options: PlanOptions = PlanOptions(),
        links: TileLinks | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.share = share
        self.dispatcher = dispatcher
        self.budget = budget
        self.spans = Spans()
        self.held = Held()
        self.turns = Turns()
        graph = layer_graph(spec, layer, share, dispatcher, budget, options, links)
        self.plan = LayerPlan.of(graph, options)
        register(self, layer_parameters(spec, layer), f"layers.{layer}", first, partial(part_of, spec, share))

    def forward(self, x_BSH: Tensor, sequences: Sequences, routing: Routing) -> Tensor:
        """The residual stream behind the layer; `routing` learns what the gate did."""
        here = Here(
            spec=self.spec,
            layer=self.layer,
            adds_bias=self.share.adds_bias,
            weights=Recorder(self, x_BSH.dtype),
            sequences=sequences,
            routing=routing,
            dispatcher=self.dispatcher,
            budget=self.budget,
            gate=self._gate,
            spans=self.spans,
        )
        return run_layer(self.plan, here, self.spans, self.held, self.turns, x_BSH)

    def _gate(self, weights: Weights, y_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of all experts, and each row's choices and their weights, in float32 at least."""
        router = self.spec.router
        bias_E = weights.stored("router_bias").to(y_TH.dtype) if router.has_logit_bias else None
        logits_TE = F.linear(y_TH, weights.stored("router").to(y_TH.dtype), bias_E)
        score_bias_E = weights.stored("score_bias").to(y_TH.dtype) if router.has_score_bias else None
        return logits_TE, *choose_experts(logits_TE, score_bias_E, router)


def layer_graph(
    spec: ModelSpec,
    layer: int,
    share: Share,
    dispatcher: Dispatcher,
    budget: RowBudget,
    options: PlanOptions,
    links: TileLinks | None,
) -> Graph:
    """All operators of one layer. `links`: see `attention_operators`."""
    operators: list[Operator] = [
        Compute(name="ln1", reads=("hidden",), makes=("ln1_out",), saves=("hidden",), function=_input_norm),
        *attention_operators(spec, sequence_ranks=budget.mesh.sizes.sequence, links=links),
        Compute(name="add_attention", reads=("hidden", "attn_out_rs"), makes=("ln2_in",), function=_add_attention),
        Compute(name="ln2", reads=("ln2_in",), makes=("ln2_out",), saves=("ln2_in",), function=_post_norm),
        *(
            expert_operators(
                spec,
                dispatcher,
                budget,
                adds_bias=share.adds_bias,
                weighs_early=options.weighs_early,
                parts=options.parts,
            )
            if spec.moe_layers[layer]
            else dense_operators()
        ),
    ]
    return Graph(operators, "hidden", "hidden_next")


def norm(spec: ModelSpec, weights: Weights, purpose: str, x: Tensor) -> Tensor:
    """The model's kind of norm with the weights of `purpose`."""
    if spec.norm == "rms":
        return rms_norm(x, weights[purpose], spec.norm_eps)
    return layer_norm(x, weights[purpose], weights.optional(purpose + "_bias"), spec.norm_eps)


def _input_norm(here: Here, x_BSH: Tensor) -> Tensor:
    return norm(here.spec, here.weights, "input_norm", x_BSH)


def _post_norm(here: Here, x_BSH: Tensor) -> Tensor:
    return norm(here.spec, here.weights, "post_norm", x_BSH).flatten(0, 1)


def _add_attention(here: Here, x_BSH: Tensor, out_BSH: Tensor) -> Tensor:
    bias = here.weights.optional("out_bias")
    return x_BSH + scaled(out_BSH if bias is None else out_BSH + bias, here.spec.residual_multiplier)
