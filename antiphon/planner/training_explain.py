"""From estimates to a plan's words: predictions, why each alternative lost, what a person should know about the winner.

1. A loser's reason names the part of its iteration that is longest beyond the winner's: computation, exposed
   communication, bubble, synchronisation; or by how much its memory does not fit.
2. The winner is tried again with one thing changed (no interleaving, FP32 gradients on the wire, no overlap,
   everything kept, more made again): what each choice is worth.

Rejected: a table of all candidates in the plan. Ten thousand rows are not read; the best of each kind answer "why not".
"""

from dataclasses import replace

import numpy as np

from antiphon.base.units import format_bytes
from antiphon.cost.network import network
from antiphon.cost.roofline import Number
from antiphon.cost.training.counts import StepEstimate
from antiphon.cost.training.operators import prefers_all_gather
from antiphon.cost.training.rematerialize import Rematerialize
from antiphon.cost.training.setup import Training, TrainingSetup
from antiphon.cost.training.step import computation_to_communication, estimate_step
from antiphon.specs.training_plan import RejectedTraining, TrainingLayout, TrainingPredicted

DEGREES = ("model_parallel", "expert_copies", "pipeline", "virtual_stages", "data_parallel", "micro_batch")
TIMES = ("iteration_s", "mfu", "bubble_s", "communication_s", "exposed_s", "sync_exposed_s")
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "workspace", "total")
_NAMES = {"sequence": "SP", "tensor": "TP", "expert": "EP"}


def name_of(setup: TrainingSetup) -> str:
    """The strategy in words, such as ``SP+EP by all-to-all``."""
    names = f"{_NAMES[setup.attention]}+{_NAMES[setup.experts]}"
    return f"{names} by {setup.dispatch.replace('_', '-')}" if setup.experts == "expert" else names


def layout_of(setup: TrainingSetup, estimate: StepEstimate) -> TrainingLayout:
    """The layout of one candidate."""
    return TrainingLayout(
        attention=setup.attention,
        experts=setup.experts,
        dispatch=setup.dispatch,
        **{degree: int(one(getattr(setup, degree))) for degree in DEGREES},
        num_micro_batches=int(one(estimate.num_micro_batches)),
        rematerialized=estimate.rematerialized.chosen(0),
        gradient_wire=setup.precision.gradient_wire,
        activation_wire=setup.precision.activation_wire,
        overlap=setup.overlap,
        deduplicate=setup.deduplicate,
        zero=setup.zero,
    )


def predicted_of(training: Training, setup: TrainingSetup, estimate: StepEstimate) -> TrainingPredicted:
    """What one candidate's estimate says, as plain numbers."""
    memory = {part: one(getattr(estimate.memory, part)) for part in MEMORY_PARTS}
    return TrainingPredicted(
        **{name: one(getattr(estimate, name)) for name in TIMES},
        tokens_per_s=one(estimate.tokens_per_s),
        tokens_per_s_per_device=one(estimate.tokens_per_s) / one(setup.num_devices),
        memory_bytes=memory | {"usable": training.usable_bytes},
        bound_by=estimate.bound_by(),
    )


def lost(
    training: Training, name: str, setup: TrainingSetup, estimate: StepEstimate, best: StepEstimate
) -> RejectedTraining:
    """An alternative that can run but lost, or does not fit, with the reason."""
    return RejectedTraining(
        name=name,
        reason=_reason(training, estimate, best),
        layout=layout_of(setup, estimate),
        predicted=predicted_of(training, setup, estimate),
    )


def _reason(training: Training, estimate: StepEstimate, best: StepEstimate) -> str:
    over = one(estimate.memory.total) - training.usable_bytes
    if over > 0:
        return f"does not fit: a device lacks {format_bytes(over)}"
    slower = one(best.tokens_per_s) / one(estimate.tokens_per_s) - 1
    if abs(slower) < 5e-4:
        return "no faster"
    unit = one(best.iteration_s)
    mine, theirs = _shares(best, unit), _shares(estimate, unit)
    worst = max(theirs, key=lambda part: theirs[part] - mine[part])
    return f"{worst} takes {theirs[worst] - mine[worst]:.1%} of the chosen layout's step more"


def _shares(estimate: StepEstimate, unit_s: float) -> dict[str, float]:
    """Where an iteration goes, by cause, in units of `unit_s`."""
    waits = {
        "exposed communication": one(estimate.exposed_s),
        "the pipeline's bubble": one(estimate.bubble_s) + one(estimate.pipeline_exposed_s),
        "exposed synchronisation": one(estimate.sync_exposed_s),
    }
    shares = {name: seconds / unit_s for name, seconds in waits.items()}
    shares["computation"] = one(estimate.iteration_s) / unit_s - sum(shares.values())
    return shares


def one_change(training: Training, setup: TrainingSetup, best: StepEstimate) -> list[RejectedTraining]:
    """The winner with one thing changed at a time."""
    found: list[tuple[str, TrainingSetup, Rematerialize]] = []
    if one(setup.virtual_stages) > 1:
        found.append(("without interleaved stages", replace(setup, virtual_stages=1), "fit"))
    if setup.precision.gradient_wire != "float32":
        wider = replace(setup.precision, gradient_wire="float32")
        found.append(("gradients in FP32 on the wire", replace(setup, precision=wider), "fit"))
    if setup.overlap != "none":
        found.append(("without overlap", replace(setup, overlap="none"), "fit"))
    if setup.overlap == "intra":
        found.append(("without fused pairs", replace(setup, overlap="inter"), "fit"))
    if best.rematerialized.chosen(0):
        found.append(("nothing made again", setup, "none"))
    elif training.profile is None:
        found.append(("norms, activation and exchanges made again", setup, "cheap"))
    return [
        lost(training, name, changed, estimate_step(training, changed, again), best) for name, changed, again in found
    ]


def notes_of(training: Training, setup: TrainingSetup, num_devices: int) -> tuple[str, ...]:
    """What a person should know about the winner."""
    notes = []
    used = int(one(setup.num_devices))
    if used < num_devices:
        notes.append(f"{num_devices - used} of {num_devices} devices stay idle: no way to use them is faster")
    degree = one(setup.expert_parallel)
    if setup.experts == "expert" and training.model.router.num_experts % degree:
        notes.append(
            f"{training.model.router.num_experts} experts on {degree:.0f} devices: some hold one more than others"
        )
    if training.model.num_layers % int(one(setup.pipeline) * one(setup.virtual_stages)):
        notes.append(f"{training.model.num_layers} layers do not divide by the stages: the longest sets the pace")
    if degree > 1 and training.profile is None:
        notes += _exchange_notes(training, setup)
    return tuple(notes)


def _exchange_notes(training: Training, setup: TrainingSetup) -> list[str]:
    net = network(training.cluster, training.group)
    link = net.link(int(one(setup.model_parallel)))
    device = training.group.device
    ratio = one(
        computation_to_communication(
            training.model.feed_forward.intermediate,
            training.group.scale_up_bytes_per_s if link.level == "scale_up" else training.group.scale_out_bytes_per_s,
            device.peak_flops_per_s(setup.precision.compute),
        )
    )
    hides = "can hide" if ratio > 1 else "cannot hide"
    notes = [
        f"experts' products take {ratio:.2f} times as long as their exchange at peak rates: it {hides} behind them"
    ]
    if setup.experts == "expert":
        rows = one(setup.micro_batch) * training.sequence_length
        width = training.model.hidden_size * setup.precision.wire_bytes(training.model.hidden_size)
        gathers = bool(prefers_all_gather(net, rows, width, one(setup.model_parallel), training.model.router.top_k))
        notes.append(f"unoverlapped, {'all-gather' if gathers else 'all-to-all'} is the faster dispatch")
    return notes


def one(value: Number) -> float:
    """The number of a single candidate."""
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])
