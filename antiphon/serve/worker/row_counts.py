"""How many rows the gate gave each expert of each layer: counted where it speaks, once a step.

Placement, `/metrics` and `--record-routing` read it. Counting costs some microseconds a layer and micro-batch.
"""

import numpy as np
from torch import Tensor

from antiphon.specs.model import ModelSpec


class RowCounts:
    """Counts of one attention worker."""

    def __init__(self, spec: ModelSpec) -> None:
        self._num_experts = spec.router.num_experts
        moe_layers = list(spec.expert_layers)
        self._place_of = {layer: place for place, layer in enumerate(moe_layers)}
        self._rows = np.zeros((len(moe_layers), self._num_experts), dtype=np.int32)

    def add(self, layer: int, ids_TK: Tensor) -> None:
        """The experts that the gate of `layer` chose for the rows of a micro-batch."""
        counts = np.bincount(ids_TK.reshape(-1).cpu().numpy(), minlength=self._num_experts)
        self._rows[self._place_of[layer]] += counts.astype(np.int32)

    def take(self) -> bytes:
        """The counts since the last call: int32, one MoE layer after the other."""
        taken = self._rows.tobytes()
        self._rows[:] = 0
        return taken
