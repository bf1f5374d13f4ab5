"""How much a device must make again to fit, and what it then holds.

1. Without rematerialization the fullest device holds all that backward reads, for each micro-batch in flight; the
   last stage holds one micro-batch and the logits, the first one as many as there are stages.
2. What is missing, spread over the layers and micro-batches in flight, is what each layer must save; one layer's
   worth stays, for its tensors are whole while its backward runs.
3. `rematerialize.choose` then takes the cheapest options that save it.

Rejected: a fixed list for all. With memory to spare, making things again costs time for nothing.
"""

from typing import Literal

import numpy as np

from antiphon.cost.parts import FloatArray, Number
from antiphon.cost.training.activations import total_width
from antiphon.cost.training.layer_case import LayerCase
from antiphon.cost.training.memory import (
    StageLayers,
    TrainingMemory,
    layers_in_flight,
    logits_bytes,
    rank_parameters,
    state_bytes,
)
from antiphon.cost.training.operators import layer_operators
from antiphon.cost.training.rematerialize import (
    CHEAP,
    Rematerialized,
    activations_of,
    choose,
    dense_bytes,
    needed_bytes,
    options,
)
from antiphon.cost.training.setup import Training

Rematerialize = Literal["none", "cheap", "fit"]


def fit_memory(
    training: Training, case: LayerCase, layers: StageLayers, num_micro_batches: Number, rematerialize: Rematerialize
) -> tuple[Rematerialized, TrainingMemory]:
    setup = case.setup
    weights, gradients, optimizer = state_bytes(rank_parameters(training.model, setup, layers), setup)
    held = layers_in_flight(1.0, setup.pipeline, setup.virtual_stages, num_micro_batches)
    moe, dense = needed_bytes(case), dense_bytes(case)
    unit = case.rows * case.model.hidden_size * setup.precision.row_bytes
    made = total_width(activations_of(case)) * unit
    logits = logits_bytes(training.model, setup, training.sequence_length)
    budget = training.usable_bytes - weights - gradients - optimizer - (made - moe)
    target: Number = 0.0
    if rematerialize == "fit":
        in_layers = held * layers.num_moe
        first = (in_layers * moe + held * layers.num_dense * dense - budget) / np.maximum(in_layers - 1, 1)
        last = (layers.num_moe * moe + layers.num_dense * dense + logits - budget) / np.maximum(layers.num_moe - 1, 1)
        only = (in_layers * moe + held * layers.num_dense * dense + logits - budget) / np.maximum(in_layers - 1, 1)
        target = np.where(np.asarray(setup.pipeline) == 1, only, np.maximum(first, last))
    efficiency = training.cluster.efficiency
    choice = choose(
        options(case, layer_operators(case)),
        target,
        overlaps=setup.overlap != "none",
        overlap=efficiency.overlap,
        at_least=CHEAP if rematerialize == "cheap" else (),
    )
    kept = moe - choice.saved_bytes
    one = layers.num_moe * kept + layers.num_dense * dense
    alone = np.asarray(setup.pipeline) == 1
    activations: FloatArray = np.where(alone, held * one + logits, np.maximum(held * one, one + logits))
    memory = TrainingMemory(
        parameters=weights, gradients=gradients, optimizer=optimizer, activations=activations, workspace=made - kept
    )
    return choice, memory
