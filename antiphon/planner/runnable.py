"""Which candidates `antiphon serve` can run: the rules of the engine as a filter over columns.

    all                  every stage has a layer, every rank a head, some vocabulary and some columns to work on
    disaggregated        as many attention workers as a batch's header can name
    the colocated three  one TP degree divides the other, and rows can be cut into as many equal pieces as the smaller;
                         replicas that share experts are on CPUs

Rejected: `serve/served_plan`, which judges one finished plan and names what is wrong with it. A search has a million
candidates, and runs without torch.
"""

import numpy as np

from antiphon.planner.candidates import DISAGGREGATED, BoolArray, Candidates
from antiphon.specs.model import ModelSpec
from antiphon.specs.plan import MAX_ATTENTION_WORKERS, MAX_MICRO_BATCHES, groups_nest


def can_be_served(model: ModelSpec, candidates: Candidates, on_cpu: BoolArray) -> BoolArray:
    """Whether each candidate is one that this engine runs. `on_cpu`: of each, whether its devices are CPUs."""
    widths = model.feed_forward
    local = [widths.shared_intermediate] if widths.shared_intermediate else []
    local += [widths.dense_intermediate] if not all(model.moe_layers) else []
    most_attention = min(model.attention.num_heads, model.vocab_size, *local)
    has_parts = (candidates.attention_tp <= most_attention) & (candidates.expert_tp <= widths.intermediate)
    apart = candidates.attention_dp <= MAX_ATTENTION_WORKERS
    num_ranks = candidates.attention_dp * candidates.attention_tp
    together = apart & groups_nest(num_ranks, candidates.attention_tp, candidates.expert_tp)
    is_one = (candidates.attention_dp == 1) & (candidates.expert_ep == 1)
    together &= is_one | (on_cpu & (model.hidden_size % np.minimum(candidates.attention_tp, candidates.expert_tp) == 0))
    together &= candidates.pp <= min(model.num_layers, MAX_MICRO_BATCHES)
    shape = np.where(candidates.layout == DISAGGREGATED, apart, together)
    return np.asarray(has_parts & shape)
