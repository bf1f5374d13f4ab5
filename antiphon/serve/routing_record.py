"""`serve --record-routing FILE`: a worker keeps which experts the rows of a step chose, the engine writes them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from antiphon.base.logging import get_logger
from antiphon.placement.routing_trace import IdArray, RoutingTraceWriter, TraceHeader
from antiphon.specs.model import ModelSpec


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


_log = get_logger("engine")


class RoutingRecord:
    """One file for all groups of an engine, written by the engine's thread. `UserError` if the file cannot be made.

    A disk that is full ends the record, not the serving."""

    def __init__(self, path: Path, model: str, spec: ModelSpec, num_groups: int) -> None:
        router = spec.router
        header = TraceHeader(model=model, layers=spec.expert_layers, num_experts=router.num_experts, top_k=router.top_k)
        self._path = path
        self._num_groups = num_groups
        self._writer: RoutingTraceWriter | None = RoutingTraceWriter(path, header)

    def add(self, group: int, step: int, worker: int, ids: bytes) -> None:
        """The rows of one worker in one step of its group. Groups step by themselves, so each has its own numbers."""
        if self._writer is None:
            return
        try:
            self._writer.append_step(step * self._num_groups + group, worker, ids)
        except OSError as error:
            _log.error("%s: nothing more is recorded: %s", self._path, error.strerror or error)
            self._writer = None
