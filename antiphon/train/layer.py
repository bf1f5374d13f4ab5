"""One layer in training, in the order of MegaScale-MoE's Figure 4:

    attention -> gate -> dispatch -> experts -> combine

The layer is a list of operators between named tensors (Figure 9 has the names), below in the order in which a reader
would run them. In which order they really run, what is kept for backward and what is made again is a `LayerPlan`'s
business, how positions and heads are shared `SequenceParallel`'s, how rows reach their experts the dispatcher's, how
many are worked on at once the `RowBudget`'s.

Letters: B sequences, S positions of this rank, T = B * S rows, H hidden, K experts a row, E experts, R rows in order of
expert.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from antiphon.comm.collectives import run
from antiphon.comm.dispatch import Dispatcher
from antiphon.comm.m2n.tile_links import TileLinks
from antiphon.kernels.ops import differentiable
from antiphon.kernels.ops.attention import layer_norm, rms_norm
from antiphon.kernels.ops.feed_forward import activate
from antiphon.specs.model import ModelSpec
from antiphon.train.attention import attend, attention_operators, projection_bias, projection_weight, rope_heads
from antiphon.train.feed_forward import (
    add_over_budget,
    dense_operators,
    expert_operators,
    gate_rows,
    route_rows,
    scaled,
)
from antiphon.train.layer_plan import LayerPlan, PlanOptions
from antiphon.train.layer_run import Turns, run_layer
from antiphon.train.operators import Graph, HeldBytes, LayerContext, Operator, compute
from antiphon.train.routing import Routing
from antiphon.train.row_budget import Experts, RowBudget
from antiphon.train.sequence_parallel import Sequences
from antiphon.train.spans import StepSpans
from antiphon.train.weights import FirstValues, RankShare, Recorder, Weights, layer_parameters, part_of, register


class MoeLayer(nn.Module):
    """Layer `layer` of the model, this rank's `share` of it. A dense layer has no use for `dispatcher` and `budget`.
    `links`: who carries tiles between the ranks that share its positions, `tensor_links`: its heads."""

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        share: RankShare,
        dispatcher: Dispatcher,
        budget: RowBudget,
        first: FirstValues,
        options: PlanOptions = PlanOptions(),
        links: TileLinks | None = None,
        tensor_links: TileLinks | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.share = share
        self.dispatcher = dispatcher
        self.budget = budget
        self.spans = StepSpans()
        self.held = HeldBytes()
        self.turns = Turns()
        self.products = options.products
        graph = layer_graph(spec, layer, share, dispatcher, budget, options, links, tensor_links)
        self.plan = LayerPlan.of(graph, options)
        register(self, layer_parameters(spec, layer), f"layers.{layer}", first, partial(part_of, spec, share))

    def forward(self, x_BSH: Tensor, sequences: Sequences, routing: Routing) -> Tensor:
        """The residual stream behind the layer; `routing` learns what the gate did. Without gradients, `plan` has
        nothing to say."""
        here = self.context(x_BSH.dtype, sequences, routing)
        if not torch.is_grad_enabled():
            return reference_forward(here, x_BSH)
        return run_layer(self.plan, here, self.held, self.turns, x_BSH)

    def context(self, dtype: torch.dtype, sequences: Sequences, routing: Routing) -> LayerContext:
        """What one pass of a micro-batch knows, computed in `dtype`."""
        return LayerContext(
            spec=self.spec,
            layer=self.layer,
            adds_bias=self.share.adds_bias,
            weights=Recorder(self, dtype, self.products),
            sequences=sequences,
            routing=routing,
            dispatcher=self.dispatcher,
            budget=self.budget,
            spans=self.spans,
        )


def reference_forward(here: LayerContext, x_BSH: Tensor) -> Tensor:
    """The layer from top to bottom: what evaluation runs, and what every schedule of the operators below computes."""
    spec, weights, parallel = here.spec, here.weights, here.sequences.parallel

    # 1. attention, at all positions, of the heads that this rank works on
    y_BSH = norm(spec, weights, "input_norm", x_BSH)
    y_BSH = run(parallel.gather(y_BSH), y_BSH.transpose(0, 1)).transpose(0, 1)
    projection = weights[projection_weight(spec.attention)]
    bias = projection_bias(spec.attention, weights)
    qkv_BSX = weights.products.forward(y_BSH, projection)
    qkv_BSX = qkv_BSX if bias is None else qkv_BSX + bias
    q, k, v = parallel.share_heads(*rope_heads(here, qkv_BSX))
    out_BSW = parallel.share_rows(attend(here, q, k, v))
    out_BSH = weights.products.forward(out_BSW, weights["out"])
    out_BSH = run(parallel.scatter(out_BSH), out_BSH.transpose(0, 1)).transpose(0, 1)
    x_BSH = _add_attention(here, x_BSH, out_BSH)

    # 2. the feed-forward that all rows pass, or the experts that each row chooses
    y_TH = _post_norm(here, x_BSH)
    if not spec.moe_layers[here.layer]:
        return x_BSH + scaled(_gated(here, "dense", y_TH), spec.residual_multiplier).view_as(x_BSH)
    weights_TK, ids_TK = gate_rows(here, y_TH.to(here.wide))
    pieces, first_TK = route_rows(here, ids_TK, weights_TK)
    experts = Experts.of(spec.feed_forward, weights, adds_bias=here.adds_bias)
    out_TH = here.dispatcher.through(experts, y_TH, first_TK, weights_TK)
    out_TH = add_over_budget(here, out_TH, y_TH, weights_TK, pieces)

    # 3. the shared expert
    if spec.feed_forward.shared_intermediate:
        shared_TH = _gated(here, "shared", y_TH)
        if spec.feed_forward.shared_gate:
            shared_TH = shared_TH * F.linear(y_TH, weights["shared_gate"]).sigmoid()
        out_TH = out_TH + scaled(shared_TH, spec.residual_multiplier)
    return x_BSH + out_TH.view_as(x_BSH)


def _gated(here: LayerContext, kind: str, y_TH: Tensor) -> Tensor:
    """The feed-forward "dense" or "shared"."""
    products = here.weights.products
    hidden = activate(products.forward(y_TH, here.weights[f"{kind}.gate_up"]), here.spec.feed_forward)
    return products.forward(hidden, here.weights[f"{kind}.down"])


def around(
    layer: MoeLayer,
    *,
    before: Callable[[], None] | None = None,
    behind: Callable[[], None] | None = None,
    before_backward: Callable[[], None] | None = None,
    behind_backward: Callable[[], None] | None = None,
) -> None:
    """From here on these are called around the layer's forward and around its backward.

    Backward runs in the opposite order of forward, and a parameter's gradient is added as soon as it is known. So a
    node at the layer's end comes before all of the layer's, one at its begin after all of them."""

    def begins(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if before is not None:
            before()
        if behind_backward is None:
            return args
        return (_in_backward(args[0], behind_backward), *args[1:])

    def ends(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        if behind is not None:
            behind()
        if before_backward is not None:
            out = _in_backward(out, before_backward)
        return out

    layer.register_forward_pre_hook(begins)
    layer.register_forward_hook(ends)


def _in_backward_forward(ctx: Any, x: Tensor, do: Callable[[], None]) -> Tensor:
    """`x`; calls `do` when its gradient passes."""
    ctx.do = do
    return x.view_as(x)


def _in_backward_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    ctx.do()
    return grad, None


_in_backward = differentiable(_in_backward_forward, _in_backward_backward)


def layer_graph(
    spec: ModelSpec,
    layer: int,
    share: RankShare,
    dispatcher: Dispatcher,
    budget: RowBudget,
    options: PlanOptions,
    links: TileLinks | None,
    tensor_links: TileLinks | None = None,
) -> Graph:
    """All operators of one layer. `links`, `tensor_links`: see `attention_operators`."""
    operators: list[Operator] = [
        compute("ln1", "hidden -> ln1_out", _input_norm, saves="hidden"),
        *attention_operators(spec, sequence_ranks=budget.mesh.sizes.sequence, links=links, tensor_links=tensor_links),
        compute("add_attention", "hidden attn_out_rs -> ln2_in", _add_attention),
        compute("ln2", "ln2_in -> ln2_out", _post_norm, saves="ln2_in"),
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


def _input_norm(here: LayerContext, x_BSH: Tensor) -> Tensor:
    return norm(here.spec, here.weights, "input_norm", x_BSH)


def _post_norm(here: LayerContext, x_BSH: Tensor) -> Tensor:
    return norm(here.spec, here.weights, "post_norm", x_BSH).flatten(0, 1)


def _add_attention(here: LayerContext, x_BSH: Tensor, out_BSH: Tensor) -> Tensor:
    bias = here.weights.optional("out_bias")
    return x_BSH + scaled(out_BSH if bias is None else out_BSH + bias, here.spec.residual_multiplier)
