"""Keeps which experts the rows of one step chose, for `antiphon serve --record-routing`."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from antiphon.placement.routing_trace import IdArray


class RoutingRecorder:
    """`layers` are the numbers of the MoE layers. Every layer of a step routes the same rows, micro-batch by
    micro-batch."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = layers
        self._ids: dict[int, list[IdArray]] = {layer: [] for layer in layers}

    def begin_step(self) -> None:
        """Forget what a step that failed has left."""
        for parts in self._ids.values():
            parts.clear()

    def add(self, layer: int, ids_TK: Tensor) -> None:
        """The choices of one micro-batch; micro-batches come in the same order in every layer."""
        self._ids[layer].append(ids_TK.cpu().numpy().astype("<u2"))

    def of_step(self) -> bytes:
        """As `RoutedRows.ids`."""
        return b"".join(np.concatenate(self._ids[layer]).tobytes() for layer in self._layers if self._ids[layer])
