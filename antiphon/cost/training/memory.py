"""Memory of one device in training: parameters, gradients, optimizer state, activations, logits.

1. Parameters of one rank by part: sequence-parallel attention and shared experts are whole, everything else is cut; the
   busiest rank holds ceil(E/n) experts; embedding and head are cut by vocabulary over the group.
2. BF16 parameters and FP32 gradient sums on every rank, 12 bytes of optimizer state per parameter sharded over data
   parallelism (ZeRO-1; 2 shards gradients too, 3 parameters too). What is replicated over the group is sharded over
   it as well: that keeps the price of sequence-parallel attention to 6 bytes per extra parameter.
3. A stage of 1F1B holds as many micro-batches as there are stages from it to the end; interleaving with v chunks holds
   (p - 1) / (p v) of that more.
4. One layer's tensors are whole while its backward runs: workspace of one layer beyond what it keeps.

Rejected: the paper's Figure 17 as a ratio. Its configuration is not stated; ours are computed for a stated one.
"""

from dataclasses import dataclass

import numpy as np

from antiphon.base.errors import UserError
from antiphon.base.split_evenly import split_evenly
from antiphon.cost.memory import attention_matrices, elements_of, gated_matrices, share_of
from antiphon.cost.roofline import Number
from antiphon.cost.training.setup import TrainingSetup
from antiphon.specs.counts import ParameterCounts, count_parameters
from antiphon.specs.model import BYTES_OF, ModelSpec


@dataclass(frozen=True, kw_only=True)
class StageLayers:
    """Layers of the fullest pipeline stage."""

    num_moe: Number
    num_dense: Number

    @property
    def total(self) -> Number:
        return self.num_moe + self.num_dense


@dataclass(frozen=True, kw_only=True)
class RankParameters:
    """Parameters of one rank: `sharded` over the model-parallel group, `replicated` on all of it. `experts`: those of
    the sharded ones that fewer ranks have the same of, where copies share experts."""

    sharded: Number
    replicated: Number
    experts: Number = 0.0

    @property
    def total(self) -> Number:
        return self.sharded + self.replicated

    def owned(self, setup: TrainingSetup) -> Number:
        """What one rank owns where data-parallel ranks share out what they have the same of."""
        data = np.asarray(setup.data_parallel, dtype=np.float64)
        alike = self.sharded + (setup.expert_copies - 1) * self.experts
        return alike / data + self.replicated / (data * setup.model_parallel)


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes of the fullest device."""

    parameters: Number
    gradients: Number
    optimizer: Number
    activations: Number
    workspace: Number

    @property
    def total(self) -> Number:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.workspace


def stage_layers(model: ModelSpec, num_chunks: int) -> tuple[tuple[int, int], ...]:
    """(MoE layers, dense layers) of each of `num_chunks` contiguous runs whose lengths differ by at most one."""
    if not 1 <= num_chunks <= model.num_layers:
        raise UserError(
            f"{num_chunks} pipeline chunks for {model.num_layers} layers: use at most {model.num_layers} "
            "(stages times virtual stages)"
        )
    runs = split_evenly(model.num_layers, num_chunks)
    num_moe = [sum(model.moe_layers[first:last]) for first, last in runs]
    return tuple((moe, last - first - moe) for moe, (first, last) in zip(num_moe, runs, strict=True))


def fullest_stage(model: ModelSpec, pipeline: Number, virtual_stages: Number = 1) -> StageLayers:
    """Layers of the stage with most MoE layers (then most layers); stage i has chunks i, i + p, i + 2p..."""
    stages, chunks = np.broadcast_arrays(
        np.asarray(pipeline, dtype=np.int64), np.asarray(virtual_stages, dtype=np.int64)
    )
    fullest: dict[tuple[int, int], tuple[int, int]] = {}
    for pair in set(zip(stages.reshape(-1).tolist(), chunks.reshape(-1).tolist(), strict=True)):
        fullest[pair] = _fullest(model, *pair)
    each = [fullest[pair] for pair in zip(stages.reshape(-1).tolist(), chunks.reshape(-1).tolist(), strict=True)]
    table = np.asarray(each, dtype=np.float64).reshape(*stages.shape, 2)
    return StageLayers(num_moe=table[..., 0], num_dense=table[..., 1])


def _fullest(model: ModelSpec, pipeline: int, virtual_stages: int) -> tuple[int, int]:
    chunks = stage_layers(model, pipeline * virtual_stages)
    sums = [
        (sum(chunk[0] for chunk in chunks[stage::pipeline]), sum(chunk[1] for chunk in chunks[stage::pipeline]))
        for stage in range(pipeline)
    ]
    return max(sums)


def table_parameters(counts: ParameterCounts, pipeline: Number) -> Number:
    """Embedding and head where there is one stage, else the larger of them."""
    held: Number = np.where(
        np.asarray(pipeline) == 1, counts.embedding + counts.head, max(counts.embedding, counts.head)
    )
    return held


def rank_parameters(
    model: ModelSpec, setup: TrainingSetup, layers: StageLayers, *, with_tables: bool = True
) -> RankParameters:
    """Parameters of one rank of the fullest stage, with the larger of embedding and head where `with_tables` (both
    where there is one stage and they are not shared)."""
    counts, degree = count_parameters(model), setup.model_parallel
    sequence = setup.attention == "sequence"

    def gated(intermediate: int) -> Number:
        return elements_of(gated_matrices(model.hidden_size, intermediate, degree))

    if setup.experts == "expert":
        experts: Number = share_of(model.router.num_experts, setup.expert_parallel) * counts.expert
    else:
        experts = model.router.num_experts * gated(model.feed_forward.intermediate)
    attention = 0 if sequence else elements_of(attention_matrices(model, degree))
    shared = 0 if sequence else gated(model.feed_forward.shared_intermediate)
    dense = 0 if sequence else gated(model.feed_forward.dense_intermediate)
    whole_attention = counts.attention if sequence else 0
    sharded = layers.num_moe * (experts + shared) + layers.num_dense * dense + layers.total * attention
    replicated = (
        layers.total * (whole_attention + counts.layer_norms)
        + layers.num_moe * (counts.router + (counts.shared_expert if sequence else 0))
        + layers.num_dense * (counts.dense if sequence else 0)
    )
    if with_tables:
        sharded = sharded + table_parameters(counts, setup.pipeline) / np.asarray(degree, dtype=np.float64)
    return RankParameters(sharded=sharded, replicated=replicated, experts=layers.num_moe * experts)


def state_bytes(parameters: RankParameters, setup: TrainingSetup) -> tuple[Number, Number, Number]:
    """(parameters, gradients, optimizer state) of one rank in bytes."""
    precision, owned = setup.precision, parameters.owned(setup)
    weights = (owned if setup.zero >= 3 else parameters.total) * BYTES_OF[precision.weights]
    gradients = (owned if setup.zero >= 2 else parameters.total) * BYTES_OF[precision.gradients]
    optimizer = (owned if setup.zero >= 1 else parameters.total) * precision.optimizer_bytes
    return weights, gradients, optimizer


def layers_in_flight(layers: Number, pipeline: Number, virtual_stages: Number, num_micro_batches: Number) -> Number:
    """Layers times micro-batches whose activations the first stage holds at its peak: L/p * min(M, p) in 1F1B, with v
    chunks (p - 1) / (p v) more (Korthikanti et al., 2022, section 4.2.3), never above all of them."""
    stages = np.asarray(pipeline, dtype=np.float64)
    more = np.where(np.asarray(virtual_stages) > 1, 1 + (stages - 1) / (stages * virtual_stages), 1.0)
    held: Number = layers * np.minimum(stages * more, num_micro_batches)
    return held


def logits_bytes(model: ModelSpec, setup: TrainingSetup, sequence_length: int) -> Number:
    """Logits of one micro-batch on the last stage, in 16 bits and in FP32 for the loss, cut by vocabulary."""
    tokens = setup.micro_batch * sequence_length
    return tokens * share_of(model.vocab_size, setup.model_parallel) * (setup.precision.row_bytes + 4)
