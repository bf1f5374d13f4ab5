"""What is said of one training iteration, whether it was priced by rooflines or by a measured machine."""

from dataclasses import dataclass

import numpy as np

from antiphon.cost.parts import Number, Parts
from antiphon.cost.training.memory import TrainingMemory
from antiphon.cost.training.rematerialize import Rematerialized


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """One iteration, by candidate. `parts`: what the busiest rank does all iteration long, the bubble left out;
    `communication_s` and `exposed_s`: inside layers, over the iteration, all of it and what is not hidden;
    `rematerialized`: what is made again, and how many bytes that saves in a layer."""

    iteration_s: Number
    tokens_per_s: Number
    mfu: Number
    num_micro_batches: Number
    forward_s: Number
    backward_s: Number
    communication_s: Number
    exposed_s: Number
    bubble_s: Number
    pipeline_exposed_s: Number
    sync_s: Number
    sync_exposed_s: Number
    optimizer_s: Number
    parts: Parts
    memory: TrainingMemory
    rematerialized: Rematerialized

    def bound_by(self) -> str:
        """What takes most of one candidate's iteration."""
        largest = max(float(np.max(value)) for value in self.parts._values())
        return "pipeline bubble" if float(np.max(self.bubble_s)) > largest else self.parts.bound_by()
