"""Both halves in one process: the colocated layout, and what the disaggregated one must agree with.

Letters as in `antiphon.kernels.api`.
"""

from torch import Tensor

from antiphon.kernels.api import AttentionBatch, KVCache
from antiphon.models.attention_half import AttentionHalf
from antiphon.models.expert_half import ExpertHalf


class Decoder:
    def __init__(self, attention_half: AttentionHalf, expert_half: ExpertHalf) -> None:
        self.attention_half = attention_half
        self.expert_half = expert_half

    def forward(self, token_ids_T: Tensor, cache: KVCache, batch: AttentionBatch) -> Tensor:
        """The residual stream after all layers, as `AttentionHalf.head` takes it once the caller has selected rows."""
        half = self.attention_half
        x_TH = half.embed(token_ids_T)
        delta_TH: Tensor | None = None
        for layer in range(half.spec.num_layers):
            x_TH, y_TH = half.attend(layer, x_TH, delta_TH, cache, batch)
            delta_TH = self.feed_forward(layer, y_TH)
        assert delta_TH is not None
        return x_TH + delta_TH

    def feed_forward(self, layer: int, y_TH: Tensor) -> Tensor:
        """What the layer's experts, shared expert and dense feed-forward add to the residual stream."""
        half, experts = self.attention_half, self.expert_half
        if not half.routes(layer):
            return half.dense_feed_forward(layer, y_TH)
        local_TH = half.local_feed_forward(layer, y_TH)
        ids_TK, weights_TK = half.gate(layer, y_TH)
        routed_TH = experts.forward(layer, y_TH, experts.to_local(layer, ids_TK), weights_TK)
        return half.sum_over_ranks(routed_TH if local_TH is None else routed_TH.add_(local_TH))
