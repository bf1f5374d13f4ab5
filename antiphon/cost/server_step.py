"""One step of a server whose devices have attention and experts: rows that decode and tokens of prompts in one batch.
The planner's search prices its candidates by it, `cost.engine_step` the servers that others measured.

1. Attention's side of a layer, by the rows of one data-parallel rank: products take all of them together, so weights
   are read once; scores over the cache are apart, for decoding rows have long contexts and a prompt's tokens see what
   is before them. What attention does is the same in layers with experts and in dense ones, so it is priced once.
2. Experts, by the rows of the fullest rank; the caller knows how unequal they are.
3. The exchange between them, which the caller chooses: rows sent to the ranks of their experts, or sums over all ranks
   (`cost.exchange`).
4. Everything stays apart by layer and kind, because schedules overlap some of it, and an engine's constants multiply
   it.

Rejected: steps that only decode plus a share for prefill by its own times. It charges the reading of weights twice.
"""

from dataclasses import dataclass

from antiphon.cost.exchange import Degrees
from antiphon.cost.layers import (
    StepRows,
    attended,
    beside_experts,
    expert_feed_forward,
    output_head,
)
from antiphon.cost.network import Network
from antiphon.cost.parts import Number, Parts
from antiphon.cost.roofline import Roofs, row_bytes_of
from antiphon.specs.model import ModelSpec
from antiphon.specs.precision import PrecisionSpec


@dataclass(frozen=True, kw_only=True)
class AttentionTimes:
    """Attention's side: of a layer with experts, of a dense layer (nothing if the model has none), and the head once
    per step."""

    moe_layer: Parts
    dense_layer: Parts
    head: Parts


@dataclass(frozen=True, kw_only=True)
class ServerStep:
    """On the busiest device, one micro-batch: attention's side, routed experts and exchange of a layer. `sums`: what a
    dense layer adds up over its ranks."""

    attention: AttentionTimes
    experts: Parts
    exchange: Parts
    sums: Parts


def attention_side(
    model: ModelSpec, roofs: Roofs, rows: StepRows, tp: Number, precision: PrecisionSpec, *, whole: bool = True
) -> AttentionTimes:
    """One rank's part, without synchronisation. `whole` False: of a layer with experts only."""
    core = attended(model, roofs, rows, tp, precision)
    moe_layer = core + beside_experts(model, roofs, rows.total, tp, precision, moe_layer=True)
    if not whole:
        return AttentionTimes(moe_layer=moe_layer, dense_layer=Parts(), head=Parts())
    dense = Parts()
    if model.num_moe_layers < model.num_layers:
        dense = core + beside_experts(model, roofs, rows.total, tp, precision, moe_layer=False)
    return AttentionTimes(
        moe_layer=moe_layer, dense_layer=dense, head=output_head(model, roofs, rows.sampled, tp, precision)
    )


def server_step(
    model: ModelSpec,
    roofs: Roofs,
    net: Network,
    degrees: Degrees,
    precision: PrecisionSpec,
    rows: StepRows,
    *,
    pairs: Number,
    held: Number,
    exchange: Parts,
    whole: bool = True,
) -> ServerStep:
    """A step of `rows` on each data-parallel rank. `pairs`: (token, expert) rows of the fullest EP rank, which holds
    `held` experts. `exchange`: both ways of a layer. `whole` False: of a layer with experts only."""
    size_bytes = rows.total * model.hidden_size * row_bytes_of(precision)
    has_dense = whole and model.num_moe_layers < model.num_layers
    return ServerStep(
        attention=attention_side(model, roofs, rows, degrees.attention_tp, precision, whole=whole),
        experts=expert_feed_forward(model, roofs.gemm, pairs, held, degrees.expert_tp, precision),
        exchange=exchange,
        sums=2 * net.all_reduce(size_bytes, degrees.attention_tp) if has_dense else Parts(),
    )
