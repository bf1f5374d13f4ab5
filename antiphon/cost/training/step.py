"""Time and memory of one training iteration: layers, pipeline, synchronisation, optimizer.

1. A stage works t per micro-batch; the last stage also has the head, and the slowest stage sets the pace.
2. 1F1B with M micro-batches and p stages of v virtual stages: M t + (p - 1) / v t_layers (the bubble).
3. Between stages a micro-batch's rows / n travel v times each way. With overlap only what does not fit behind the
   stage's work counts; filling and draining the pipeline wait for every hop.
4. Gradients are reduced behind the last micro-batch's backward, layer by layer (the last layer has nothing to hide
   behind), parameters gathered behind the first forward.
5. The optimizer reads and writes its shard once: memory-bound.

Rejected: communication as a percentage of computation. It would hide that the bubble grows with the number of devices
at a fixed batch, which is why MFU falls in MegaScale-MoE's Table 3.

Gradients summed and parameters gathered over data parallelism, once per iteration (MegaScale-MoE, section 5, A.1):

1. Tensor-parallel weights: each rank's P/n is reduce-scattered and all-gathered over d ranks of other nodes.
2. Weights replicated over n ranks of a node (sequence-parallel attention): reduce-scatter inside the node, then
   across on P/n, all-gather across, then inside. The bytes across are the same as with tensor parallelism.
3. The two levels are different wires, so chunks of one hide the other: the longer counts, and of the shorter what
   overlap leaves. Eq. 10 is their ratio; above 1 the inside is hidden.
4. On the wire gradients are FP32 or BF16. BF16 travels by all-to-all, each rank adding up in FP32 what it gets: the
   same bytes as a reduce-scatter in BF16, but one rounding.

Rejected: an all-reduce over all n * d ranks of replicated weights. It sends n times the bytes across nodes.

One layer's forward and backward pass, communication overlapped or not (MegaScale-MoE, section 4, eq. 5-9).

1. R = time of the experts' products / time of one layer's token exchange. Above 1 the exchange fits behind them.
2. Without overlap every operator waits for the one before it: the sum of all.
3. Inter-operator: a communication runs beside operators that do not depend on it: in forward the shared expert beside
   dispatch and combine, in backward gradients of weights and what is made again. Memory-bound kernels that make
   activations again depend on no gradient, so they run beside products, which leave the memory idle.
4. Intra-operator: what is left of a communication is cut into tiles and fused with the product that it feeds or
   follows; of the two the longer counts.
5. Of what could be hidden, the fraction `overlap` (the cluster's calibration) really is.

Rejected: an exact schedule by events. `sim` has that; a search over thousands of layouts needs a closed form, and the
paper's own statement is about which operators can overlap, not about when they start. Rejected: a hidden share per
strategy. It would be the answer put in by hand.
"""

from dataclasses import dataclass, replace

import numpy as np

from antiphon.base.errors import UserError
from antiphon.cost.memory import share_of
from antiphon.cost.network import Network
from antiphon.cost.roofline import FloatArray, Number, Parts, kernel, longest, select
from antiphon.cost.training.counts import StepEstimate, model_flops_utilization, tokens_per_s
from antiphon.cost.training.measured import measured_step
from antiphon.cost.training.memory import (
    RankParameters,
    StageLayers,
    TrainingMemory,
    fullest_stage,
    rank_parameters,
)
from antiphon.cost.training.operators import FUSES_WITH, LayerOperators, gather, layer_operators
from antiphon.cost.training.rematerialize import (
    Rematerialize,
    Rematerialized,
    fit_memory,
)
from antiphon.cost.training.setup import LayerCase, OverlapLevel, Training, TrainingSetup, layer_case
from antiphon.specs.model import BYTES_OF

# --- one layer


def computation_to_communication(expert_width: Number, bytes_per_s: Number, flops_per_s: Number) -> Number:
    """R of MegaScale-MoE eq. 9, which is eq. 8 for large n: 3/2 * h_ffn * bandwidth / peak; of n ranks n / (n - 1)
    times as much.

    2 FLOPs per multiply-add and 2 bytes per BF16 element cancel, so bandwidth is in bytes and peak in FLOPs. One way of
    the link; by all-to-all with k copies. Independent of top-k, hidden size, number of experts and tokens."""
    return 1.5 * expert_width * bytes_per_s / flops_per_s


def hidden_behind(communication: Parts, independent_s: Number, overlap: float) -> Parts:
    """What is left of `communication` when it runs beside `independent_s` seconds of other work."""
    total = np.asarray(communication.total_s, dtype=np.float64)
    hidden = overlap * np.minimum(total, independent_s)
    left: FloatArray = np.where(total > 0, 1 - hidden / np.where(total > 0, total, 1.0), 0.0)
    return left * communication


def beside_products(again: Parts, compute_s: Number, overlap: float) -> Parts:
    """What is left of kernels that make activations again: of their memory traffic what does not hide behind
    `compute_s` seconds of arithmetic, and all else that they take."""
    memory = Parts(memory_s=again.memory_s)
    return replace(again, memory_s=hidden_behind(memory, compute_s, overlap).memory_s)


def fused_speedup(communication_s: Number, product_s: Number, overlap: float) -> Number:
    """(T_c + T_g) / T of one fused pair: from 1 (one of them is nothing) to 2 (equal, all hidden)."""
    both = communication_s + product_s
    speedup: Number = both / (both - overlap * np.minimum(communication_s, product_s))
    return speedup


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """One pass through one layer: computation, all communication, and the part of it that is not hidden."""

    computation: Parts
    communication: Parts
    exposed: Parts

    @property
    def total(self) -> Parts:
        return self.computation + self.exposed


def layer_time(
    operators: LayerOperators, level: OverlapLevel, overlap: float, again: Parts = Parts(), resent: Parts = Parts()
) -> tuple[PassTime, PassTime]:
    """Forward and backward of one micro-batch. `overlap`: fraction of what can be hidden that really is
    (`EfficiencySpec.overlap`). `again`, `resent`: computation and communication that backward repeats."""
    return _forward(operators, level, overlap), _backward(operators, level, overlap, again, resent)


def _forward(operators: LayerOperators, level: OverlapLevel, overlap: float) -> PassTime:
    products = {name: product.forward for name, product in operators.products.items()}
    computation = sum([*products.values(), *(kernel.forward for kernel in operators.kernels.values())], Parts())
    beside_s = sum((products[name] for name in operators.beside), Parts()).total_s
    left = operators.communications
    if level != "none":
        experts = {name: time for name, time in left.items() if name in ("dispatch", "combine")}
        left = left | _left_together(experts, beside_s, overlap)
    return _pass(operators, computation, left, products, level, overlap)


def _backward(operators: LayerOperators, level: OverlapLevel, overlap: float, again: Parts, resent: Parts) -> PassTime:
    products = operators.products.values()
    weights = sum((product.weight_gradient for product in products), Parts())
    inputs = {name: product.input_gradient for name, product in operators.products.items()}
    rest = sum((kernel.backward for kernel in operators.kernels.values()), Parts())
    needed = weights + sum(inputs.values(), Parts())
    if level != "none":
        again = beside_products(again, needed.compute_s, overlap)
    computation = needed + rest + again
    left = operators.communications | {"again": resent}
    if level != "none":
        left = _left_together(left, weights.total_s + again.total_s, overlap)
    return _pass(operators, computation, left, inputs, level, overlap, resent)


def _left_together(times: dict[str, Parts], independent_s: Number, overlap: float) -> dict[str, Parts]:
    """Each communication's part that stays when all of them run beside `independent_s` seconds of other work."""
    total = sum(times.values(), Parts())
    before = np.asarray(total.total_s, dtype=np.float64)
    after = np.asarray(hidden_behind(total, independent_s, overlap).total_s, dtype=np.float64)
    share = np.where(before > 0, after / np.where(before > 0, before, 1.0), 0.0)
    return {name: share * time for name, time in times.items()}


def _pass(
    operators: LayerOperators,
    computation: Parts,
    left: dict[str, Parts],
    products: dict[str, Parts],
    level: OverlapLevel,
    overlap: float,
    resent: Parts = Parts(),
) -> PassTime:
    """The pass, each communication that is left fused with its product where `level` says so."""
    exposed = Parts()
    for name, time in left.items():
        if level == "intra" and name in FUSES_WITH:
            time = hidden_behind(time, products[FUSES_WITH[name]].total_s, overlap)
        exposed = exposed + time
    communication = sum(operators.communications.values(), resent)
    return PassTime(computation=computation, communication=communication, exposed=exposed)


# --- one iteration

SyncBytes = tuple[Number, Number]
"""Bytes of one rank's parameters before any collective, in one wire format: those that are cut over the model-parallel
group, and those that all of it have."""
SyncTime = tuple[Parts, Parts]
"""Reduce-scatter of gradients, all-gather of parameters."""


def estimate_step(training: Training, setup: TrainingSetup, rematerialize: Rematerialize = "cheap") -> StepEstimate:
    """One iteration under `setup`, whose degrees may be arrays. `rematerialize`: "none" keeps all that backward reads,
    "cheap" makes again what MegaScale-MoE does, "fit" as much as the memory demands, cheapest first. With a profile of
    the machine its tables answer, and nothing is made again.

    `UserError` where the batch cannot be cut into equal micro-batches; memory that does not fit is the caller's to
    see."""
    num_micro_batches = training.batch / np.asarray(setup.data_parallel * setup.micro_batch, dtype=np.float64)
    if np.any(num_micro_batches != np.floor(num_micro_batches)) or np.any(num_micro_batches < 1):
        raise UserError(
            f"training: a batch of {training.batch} sequences cannot be cut evenly by data_parallel * micro_batch = "
            f"{setup.data_parallel * setup.micro_batch}: use a divisor of {training.batch}"
        )
    case = layer_case(training, setup)
    layers = fullest_stage(training.model, setup.pipeline, setup.virtual_stages)
    if training.profile is not None:  # of a trainer that makes nothing again
        choice, memory = fit_memory(training, case, layers, num_micro_batches, "none")
        return measured_step(training, setup, training.profile, layers, num_micro_batches, memory, choice)
    choice, memory = fit_memory(training, case, layers, num_micro_batches, rematerialize)
    return _iteration(training, case, layers, choice, memory, num_micro_batches)


def _layers_of(case: LayerCase, layers: StageLayers, choice: Rematerialized) -> list[tuple[Number, PassTime, PassTime]]:
    """How many layers of each kind a rank of the fullest stage has, and one's passes for one micro-batch."""
    level, overlap = case.setup.overlap, case.network.overlap
    moe = layer_time(layer_operators(case), level, overlap, choice.computation, choice.communication)
    if case.model.num_moe_layers == case.model.num_layers:
        return [(layers.num_moe, *moe)]
    dense = layer_time(layer_operators(case, moe_layer=False), level, overlap)
    return [(layers.num_moe, *moe), (layers.num_dense, *dense)]


def _head(case: LayerCase) -> Parts:
    """Logits and loss of one micro-batch, both passes, cut by vocabulary; rows are gathered, gradients reduced."""
    model, precision, degree = case.model, case.setup.precision, case.setup.model_parallel
    width = share_of(model.vocab_size, degree)
    flops = 3 * 2 * case.tokens * model.hidden_size * width
    moved = 3 * model.hidden_size * width * BYTES_OF[precision.weights] + case.tokens * width * (
        3 * precision.row_bytes + 4 * 4
    )
    rows = gather(case.network, case.tokens * model.hidden_size * precision.row_bytes, degree)
    return kernel(case.roofs.gemm, flops, moved, 4) + 2 * rows


def _iteration(
    training: Training,
    case: LayerCase,
    layers: StageLayers,
    choice: Rematerialized,
    memory: TrainingMemory,
    num_micro_batches: Number,
) -> StepEstimate:
    setup = case.setup
    hidden = setup.overlap != "none"
    alone = np.asarray(setup.pipeline) == 1
    found = _layers_of(case, layers, choice)
    forward = sum((count * one.total for count, one, _ in found), Parts())
    backward = sum((count * one.total for count, _, one in found), Parts())
    passes = [(count, one) for count, *both in found for one in both]
    stage = forward + backward
    slowest = stage + _head(case)
    bubble_s = (setup.pipeline - 1) / np.asarray(setup.virtual_stages, dtype=np.float64) * stage.total_s
    sends, fill = _between_stages(case)
    sends = hidden_behind(sends, slowest.total_s, case.network.overlap) if hidden else sends
    sync = _synchronisation(case, layers)
    most = 1 - 1 / np.maximum(layers.total, 1)  # of the last backward and the first forward, all but one layer
    synced = sync[0] + sync[1]
    exposed = _exposed_sync(sync, most * backward.total_s, most * forward.total_s, case) if hidden else synced
    optimizer = _optimizer(case, layers)
    pipeline = select(~alone, num_micro_batches * sends + fill, Parts())
    work = num_micro_batches * slowest
    parts = work + pipeline + exposed + optimizer
    iteration_s = parts.total_s + bubble_s
    rate = tokens_per_s(training.sequence_length, training.batch, iteration_s)
    peak = training.group.device.peak_flops_per_s(setup.precision.compute)
    return StepEstimate(
        iteration_s=iteration_s,
        tokens_per_s=rate,
        mfu=model_flops_utilization(training.model, training.sequence_length, rate, setup.num_devices, peak),
        num_micro_batches=num_micro_batches,
        forward_s=forward.total_s,
        backward_s=backward.total_s,
        communication_s=num_micro_batches * sum((count * one.communication.total_s for count, one in passes), 0.0),
        exposed_s=num_micro_batches * sum((count * one.exposed.total_s for count, one in passes), 0.0),
        bubble_s=bubble_s,
        pipeline_exposed_s=pipeline.total_s,
        sync_s=synced.total_s,
        sync_exposed_s=exposed.total_s,
        optimizer_s=optimizer.total_s,
        parts=parts,
        memory=memory,
        rematerialized=choice,
    )


def _between_stages(case: LayerCase) -> tuple[Parts, Parts]:
    """(what one stage sends per micro-batch, what filling and draining the pipeline waits for)."""
    setup, net = case.setup, case.network
    size = case.rows * case.model.hidden_size * case.setup.precision.row_bytes
    across = np.asarray(setup.num_devices > net.domain)
    hop = select(across, net.point_to_point(size, across=True), net.point_to_point(size, across=False))
    return 2 * setup.virtual_stages * hop, 2 * (setup.pipeline - 1) * hop


def _synchronisation(case: LayerCase, layers: StageLayers) -> SyncTime:
    setup = case.setup
    precision = setup.precision
    parameters = rank_parameters(case.model, setup, layers)
    wire = BYTES_OF[precision.gradient_wire]
    kept = BYTES_OF[precision.weights] if setup.zero else wire  # without shards sums are gathered, not parameters

    def over(data_parallel: Number, sharded: Number, replicated: Number) -> SyncTime:
        return sync_time(
            case.network,
            degree=setup.model_parallel,
            data_parallel=data_parallel,
            gradients=(sharded * wire, replicated * wire),
            parameters=(sharded * kept, replicated * kept),
            by_all_to_all=precision.gradient_wire != precision.gradients,
        )

    if np.all(np.asarray(setup.expert_copies) == 1):
        return over(setup.data_parallel, parameters.sharded, parameters.replicated)
    rest = over(setup.data_parallel, parameters.sharded - parameters.experts, parameters.replicated)
    alike = np.asarray(setup.data_parallel, dtype=np.float64) / setup.expert_copies  # ranks with the same experts
    experts = over(alike, parameters.experts, 0.0 * parameters.experts)
    return rest[0] + experts[0], rest[1] + experts[1]


def _exposed_sync(sync: SyncTime, backward_s: Number, forward_s: Number, case: LayerCase) -> Parts:
    """What does not fit behind so much of the last backward and of the first forward."""
    gradients, parameters = sync
    overlap = case.network.overlap
    return hidden_behind(gradients, backward_s, overlap) + hidden_behind(parameters, forward_s, overlap)


def _optimizer(case: LayerCase, layers: StageLayers) -> Parts:
    """Gradients read, state read and written, parameters written, of what one rank owns."""
    setup, precision = case.setup, case.setup.precision
    parameters: RankParameters = rank_parameters(case.model, setup, layers)
    owned = parameters.owned(setup)
    if setup.zero < 1:
        owned = parameters.sharded + parameters.replicated / np.asarray(setup.model_parallel, dtype=np.float64)
    moved = owned * (BYTES_OF[precision.gradients] + 2 * precision.optimizer_bytes + BYTES_OF[precision.weights])
    return kernel(case.roofs.gemm, 0.0, moved)


# --- synchronisation


def across_to_inside(
    degree: Number, data_parallel: Number, inside_bytes_per_s: Number, across_bytes_per_s: Number
) -> Number:
    """MegaScale-MoE eq. 10: time across nodes over time inside, 1/n * bandwidths * n (d - 1) / (d (n - 1))."""
    n, d = np.asarray(degree, dtype=np.float64), np.asarray(data_parallel, dtype=np.float64)
    ratio: Number = 1 / n * (inside_bytes_per_s / across_bytes_per_s) * (n * (d - 1)) / (d * (n - 1))
    return ratio


def sync_time(
    network: Network,
    *,
    degree: Number,
    data_parallel: Number,
    gradients: SyncBytes,
    parameters: SyncBytes,
    by_all_to_all: bool = False,
) -> SyncTime:
    """One iteration's synchronisation, nothing of it hidden behind computation. `by_all_to_all`: gradients travel in
    BF16 and are added up in FP32 by the owner of each shard."""
    return (
        _one_way(network, gradients, degree, data_parallel, by_all_to_all),
        _one_way(network, parameters, degree, data_parallel, False),
    )


def _one_way(network: Network, size: SyncBytes, degree: Number, data_parallel: Number, by_all_to_all: bool) -> Parts:
    together = network.ranks_per_domain(data_parallel, degree)
    sharded, replicated = size
    shard = sharded + replicated / np.asarray(degree, dtype=np.float64)
    over = network.all_to_all if by_all_to_all else network.reduce_scatter
    across = over(shard, data_parallel, together)
    inside = select(np.asarray(replicated) > 0, gather(network, replicated, degree), Parts())
    slower = longest(across, inside)
    faster = select(np.asarray(across.total_s >= inside.total_s), inside, across)
    return slower + hidden_behind(faster, slower.total_s, network.overlap)
