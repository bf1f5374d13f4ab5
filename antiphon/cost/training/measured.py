"""A training iteration from the tables of a measured machine, in place of `cost.training.step`'s rooflines.

1. A micro-batch takes a rank its layers (and the last stage the head), as measured with this many ranks at work.
2. A pipeline's critical path is that of 1F1B, M t + (p - 1) / v t_layers, with every rank on a core. Ranks that share
   cores cannot be faster than their work either: the mean of all ranks' work, with all of them at it.
3. Gradients are summed, and parameters gathered, after the last pass, or once a pass (ZeRO 2, 3): nothing runs beside.
4. Each parameter's update takes so long; a step takes so long beside all that.

Rejected: overlap. The trainer waits for its collectives; a rank that waits leaves its core to another one.
"""

import numpy as np

from antiphon.cost.memory import share_of
from antiphon.cost.profile import Profile, SumName, TrainingLayer, TrainingTables
from antiphon.cost.roofline import FloatArray, Number, Parts
from antiphon.cost.training.counts import StepEstimate, model_flops_utilization, tokens_per_s
from antiphon.cost.training.memory import RankParameters, StageLayers, TrainingMemory, rank_parameters, table_parameters
from antiphon.cost.training.rematerialize import Rematerialized
from antiphon.cost.training.setup import Training, TrainingSetup
from antiphon.specs.cluster import ClusterSpec, DeviceSpec, equal_nodes
from antiphon.specs.counts import count_parameters
from antiphon.specs.model import BYTES_OF, ModelSpec

UNMEASURED_S = 1e9  # longer than anybody waits; infinity would make 0 * infinity of an empty bubble
THIS_RANK = "this-rank"


def machine_of_ranks(profile: Profile, sequence_length: int) -> ClusterSpec:
    """The measured machine as a cluster whose devices are ranks: as many as were measured, with even shares of it."""
    tables = profile.training_tables(sequence_length)
    ranks, machine = max(tables.ranks), profile.machine
    rate = machine.memory_bytes_per_s or tables.flops_per_s  # no formula reads it where tables answer
    device = DeviceSpec(
        name=THIS_RANK,
        kind="cpu",
        memory_bytes=machine.memory_bytes // ranks,
        memory_bytes_per_s=rate / ranks,
        flops_per_s={tables.dtype: tables.flops_per_s / ranks},
        scale_up_bytes_per_s=rate,
        scale_up_domain=ranks,
        scale_out_bytes_per_s=rate,
        power_w=1.0,
        sources={"all": f"antiphon profile of {profile.model} on {machine.name}, an even share"},
    )
    return ClusterSpec(name="this-machine", groups=(equal_nodes(device, 1, ranks, ranks),), source=machine.name)


def measured_step(
    training: Training,
    setup: TrainingSetup,
    profile: Profile,
    layers: StageLayers,
    num_micro_batches: Number,
    memory: TrainingMemory,
    choice: Rematerialized,
) -> StepEstimate:
    """One iteration; `UNMEASURED_S` or more where a candidate's way to share a layer was not measured, or it has more
    ranks than were."""
    tables = profile.training_tables(training.sequence_length)
    pipeline, ranks = np.asarray(setup.pipeline, np.float64), np.asarray(setup.num_devices, np.float64)
    on_cores = np.minimum(ranks, profile.machine.num_cores)
    alone_forward_s, alone_backward_s, _, alone_head_s = _pass(training, setup, tables, layers, on_cores)
    forward_s, backward_s, waits_s, head_s = _pass(training, setup, tables, layers, ranks)
    alone_s = alone_forward_s + alone_backward_s
    bubble_s = (pipeline - 1) / np.asarray(setup.virtual_stages, np.float64) * alone_s
    path_s = num_micro_batches * (alone_s + alone_head_s) + bubble_s
    work_s = num_micro_batches * (forward_s + backward_s + head_s / pipeline)
    sends_s = _sends(training, setup, tables, num_micro_batches)
    sync_s = _sync(training, setup, tables, layers, num_micro_batches)
    update_s = _owned(training, setup, layers) * np.asarray(tables.update["adamw"].at(ranks))
    waiting_s = num_micro_batches * waits_s
    busy_s = np.maximum(path_s, work_s)
    parts = Parts(
        compute_s=busy_s - bubble_s - waiting_s,
        memory_s=update_s,
        scale_up_s=waiting_s + sends_s + sync_s,
        fixed_s=np.asarray(tables.step.at(ranks)),
    )
    iteration_s = parts.total_s + bubble_s
    rate = tokens_per_s(training.sequence_length, training.batch, iteration_s)
    return StepEstimate(
        iteration_s=iteration_s,
        tokens_per_s=rate,
        mfu=model_flops_utilization(training.model, training.sequence_length, rate, 1, tables.flops_per_s),
        num_micro_batches=num_micro_batches,
        forward_s=forward_s,
        backward_s=backward_s,
        communication_s=waiting_s,
        exposed_s=waiting_s,
        bubble_s=bubble_s,
        pipeline_exposed_s=sends_s,
        sync_s=sync_s,
        sync_exposed_s=sync_s,
        optimizer_s=update_s,
        parts=parts,
        memory=memory,
        rematerialized=choice,
    )


def _pass(
    training: Training, setup: TrainingSetup, tables: TrainingTables, layers: StageLayers, at_work: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """A micro-batch on the fullest stage: forward, backward, waiting in both; the head, which is the last stage's."""
    tokens = np.asarray(setup.micro_batch * training.sequence_length, np.float64)
    sums = [np.zeros(1)] * 3
    for kind, count in (("moe", np.asarray(layers.num_moe)), ("dense", np.asarray(layers.num_dense))):
        if np.any(count > 0):
            found = _layer_s(tables, setup, kind, tokens, at_work)
            sums = [total + np.where(count > 0, count * each, 0.0) for total, each in zip(sums, found, strict=True)]
    head_s = np.asarray(tables.head.at(at_work, share_of(tokens, setup.model_parallel)))
    forward_s, backward_s, waiting_s = sums
    return forward_s, backward_s, waiting_s, head_s


def _layer_s(
    tables: TrainingTables, setup: TrainingSetup, kind: str, tokens: FloatArray, at_work: FloatArray
) -> list[FloatArray]:
    """(forward, backward, waiting) of one layer; `UNMEASURED_S` where it was not measured."""
    degrees, ranks, tokens, at_work = np.broadcast_arrays(
        np.asarray(setup.model_parallel), np.asarray(setup.num_devices), tokens, at_work
    )
    found = [np.full(degrees.shape, UNMEASURED_S) for _ in range(3)]
    for degree in np.unique(degrees):
        for table in tables.layers:
            if table.layer != kind or table.model_parallel != degree or not _is_of(table, setup):
                continue
            here = (degrees == degree) & (ranks <= max(tables.ranks))
            values = (times.at(at_work, tokens) for times in (table.forward, table.backward, table.waiting))
            found = [np.where(here, each, others) for others, each in zip(found, values, strict=True)]
    return found


def _is_of(table: TrainingLayer, setup: TrainingSetup) -> bool:
    """Whether the layer is shared as in `setup`; alone, all ways to share it are one."""
    ways = (table.attention, table.experts, table.dispatch)
    return table.model_parallel == 1 or ways == (setup.attention, setup.experts, setup.dispatch)


def _sends(training: Training, setup: TrainingSetup, tables: TrainingTables, num_micro_batches: Number) -> FloatArray:
    """Rows between stages: each micro-batch's, and those that filling and draining wait for."""
    pipeline = np.asarray(setup.pipeline, np.float64)
    if tables.message is None:
        return np.where(pipeline > 1, UNMEASURED_S, 0.0)
    rows = share_of(setup.micro_batch * training.sequence_length, setup.model_parallel)
    hop_s = np.asarray(tables.message.at(rows * training.model.hidden_size * setup.precision.row_bytes))
    return np.where(pipeline > 1, 2 * (num_micro_batches * setup.virtual_stages + pipeline - 1) * hop_s, 0.0)


def held_parameters(model: ModelSpec, setup: TrainingSetup, layers: StageLayers) -> RankParameters:
    """What one rank holds. Embedding and head are whole on every rank of the first and the last stage."""
    held = rank_parameters(model, setup, layers, with_tables=False)
    tables = table_parameters(count_parameters(model), setup.pipeline)
    return RankParameters(sharded=held.sharded, replicated=held.replicated + tables)


def _owned(training: Training, setup: TrainingSetup, layers: StageLayers) -> FloatArray:
    """Parameters that one rank updates."""
    held = held_parameters(training.model, setup, layers)
    return np.asarray(held.owned(setup) if setup.zero else held.total)


def _sync(
    training: Training, setup: TrainingSetup, tables: TrainingTables, layers: StageLayers, num_micro_batches: Number
) -> FloatArray:
    """Gradients summed and parameters gathered, a bucket for each layer."""
    held = held_parameters(training.model, setup, layers)
    data, ranks = np.asarray(setup.data_parallel), np.asarray(setup.num_devices)
    passes = np.asarray(num_micro_batches) if setup.zero >= 2 else np.ones(1)
    calls: list[tuple[SumName, FloatArray]] = [("all_reduce", np.ones(1))]
    if setup.zero:
        gathers = 2 * passes if setup.zero == 3 else np.ones(1)
        calls = [("reduce_scatter", passes), ("all_gather", gathers)]
    total = np.zeros(1)
    for size, degree in ((held.sharded, data), (held.replicated, data * setup.model_parallel)):
        for name, times in calls:
            sent = setup.precision.weights if name == "all_gather" else setup.precision.gradients
            in_all = BYTES_OF[sent] * size
            total = total + times * _sum_s(tables, name, in_all, degree, ranks, np.asarray(layers.total))
    return total


def _sum_s(
    tables: TrainingTables, name: SumName, size_bytes: Number, degree: Number, ranks: Number, num_calls: Number
) -> FloatArray:
    """`num_calls` equal collectives over `degree` ranks, of `size_bytes` in all; `UNMEASURED_S` where not measured."""
    size, over, at_work, calls = np.broadcast_arrays(size_bytes, degree, ranks, num_calls)
    found = np.where((over > 1) & (size > 0), UNMEASURED_S, 0.0)
    for table in tables.sums:
        if table.name == name:
            seconds = calls * np.asarray(table.times.at(at_work, size / np.maximum(calls, 1)))
            found = np.where((over == table.degree) & (size > 0), seconds, found)
    return found
