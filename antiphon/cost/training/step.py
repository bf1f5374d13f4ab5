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
"""

from dataclasses import dataclass

import numpy as np

from antiphon.base.errors import UserError
from antiphon.cost.parts import Number, Parts, select
from antiphon.cost.roofline import kernel
from antiphon.cost.shapes import share_of
from antiphon.cost.training.counts import model_flops_utilization, tokens_per_s
from antiphon.cost.training.dispatch import gather
from antiphon.cost.training.fit_memory import Rematerialize, fit_memory
from antiphon.cost.training.gradient_sync import SyncBytes, SyncTime, sync_time
from antiphon.cost.training.layer_case import LayerCase, layer_case
from antiphon.cost.training.layer_time import LayerTime, hidden_behind, layer_time
from antiphon.cost.training.measured import measured_step
from antiphon.cost.training.memory import (
    RankParameters,
    StageLayers,
    TrainingMemory,
    fullest_stage,
    rank_parameters,
)
from antiphon.cost.training.operators import layer_operators
from antiphon.cost.training.rematerialize import (
    Rematerialized,
)
from antiphon.cost.training.setup import Training, TrainingSetup
from antiphon.cost.training.step_estimate import StepEstimate
from antiphon.specs.precision import BYTES_OF


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """What one rank of the fullest stage does for one micro-batch."""

    layers: StageLayers
    forward: Parts
    backward: Parts
    head: Parts
    communication_s: Number
    exposed_s: Number

    @property
    def total(self) -> Parts:
        return self.forward + self.backward


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
    stage = _stage(case, layers, choice)
    return _iteration(training, case, stage, choice, memory, num_micro_batches)


def _stage(case: LayerCase, layers: StageLayers, choice: Rematerialized) -> _Stage:
    level, overlap = case.setup.overlap, case.network.overlap
    moe = layer_time(layer_operators(case), level, overlap, choice.recomputed)
    found: list[tuple[Number, LayerTime]] = [(layers.num_moe, moe)]
    if case.model.num_moe_layers < case.model.num_layers:
        dense = layer_time(layer_operators(case, moe_layer=False), level, overlap)
        found.append((layers.num_dense, dense))
    forward, backward = Parts(), Parts()
    communication_s: Number = 0.0
    exposed_s: Number = 0.0
    for count, layer in found:
        forward = forward + count * layer.forward.total
        backward = backward + count * layer.backward.total
        for one in (layer.forward, layer.backward):
            communication_s = communication_s + count * one.communication.total_s
            exposed_s = exposed_s + count * one.exposed.total_s
    return _Stage(
        layers=layers,
        forward=forward,
        backward=backward,
        head=_head(case),
        communication_s=communication_s,
        exposed_s=exposed_s,
    )


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
    stage: _Stage,
    choice: Rematerialized,
    memory: TrainingMemory,
    num_micro_batches: Number,
) -> StepEstimate:
    setup = case.setup
    hidden = setup.overlap != "none"
    alone = np.asarray(setup.pipeline) == 1
    slowest = stage.total + stage.head
    bubble_s = (setup.pipeline - 1) / np.asarray(setup.virtual_stages, dtype=np.float64) * stage.total.total_s
    sends, fill = _between_stages(case)
    sends = hidden_behind(sends, slowest.total_s, case.network.overlap) if hidden else sends
    sync = _synchronisation(case, stage.layers)
    exposed = _exposed_sync(sync, stage, case.network.overlap) if hidden else sync.total
    optimizer = _optimizer(case, stage.layers)
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
        forward_s=stage.forward.total_s,
        backward_s=stage.backward.total_s,
        communication_s=num_micro_batches * stage.communication_s,
        exposed_s=num_micro_batches * stage.exposed_s,
        bubble_s=bubble_s,
        pipeline_exposed_s=pipeline.total_s,
        sync_s=sync.total.total_s,
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
            gradients=SyncBytes(sharded=sharded * wire, replicated=replicated * wire),
            parameters=SyncBytes(sharded=sharded * kept, replicated=replicated * kept),
            by_all_to_all=precision.gradient_wire != precision.gradients,
        )

    if np.all(np.asarray(setup.expert_copies) == 1):
        return over(setup.data_parallel, parameters.sharded, parameters.replicated)
    rest = over(setup.data_parallel, parameters.sharded - parameters.experts, parameters.replicated)
    alike = np.asarray(setup.data_parallel, dtype=np.float64) / setup.expert_copies  # ranks with the same experts
    experts = over(alike, parameters.experts, 0.0 * parameters.experts)
    return SyncTime(gradients=rest.gradients + experts.gradients, parameters=rest.parameters + experts.parameters)


def _exposed_sync(sync: SyncTime, stage: _Stage, overlap: float) -> Parts:
    """What does not fit behind the last backward and the first forward, all but one layer of each."""
    most = 1 - 1 / np.maximum(stage.layers.total, 1)
    return hidden_behind(sync.gradients, most * stage.backward.total_s, overlap) + hidden_behind(
        sync.parameters, most * stage.forward.total_s, overlap
    )


def _optimizer(case: LayerCase, layers: StageLayers) -> Parts:
    """Gradients read, state read and written, parameters written, of what one rank owns."""
    setup, precision = case.setup, case.setup.precision
    parameters: RankParameters = rank_parameters(case.model, setup, layers)
    owned = parameters.owned(setup)
    if setup.zero < 1:
        owned = parameters.sharded + parameters.replicated / np.asarray(setup.model_parallel, dtype=np.float64)
    moved = owned * (BYTES_OF[precision.gradients] + 2 * precision.optimizer_bytes + BYTES_OF[precision.weights])
    return kernel(case.roofs.gemm, 0.0, moved)
