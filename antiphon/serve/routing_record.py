"""`serve --record-routing FILE`: a worker keeps which experts the rows of a step chose, the engine writes them.
`bench balance --routing FILE`: rows choose as such a record did."""

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.placement.routing_trace import IdArray, RoutingTrace, RoutingTraceWriter, TraceHeader
from antiphon.placement.split import IntArray
from antiphon.serve.policy.step import SequenceStep
from antiphon.specs.model import ModelSpec

_log = get_logger("engine")


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


class RoutingReplay:
    """The choices of recorded rows in place of the gates', so that any model of as many experts has their load.

    A row at position p of a request takes a recorded row between p x `width` and (p + 1) x `width`. So requests that
    generate together are at one time of the record, and the choice does not depend on how rows are batched. With more
    MoE layers than were recorded, the recorded ones take turns. `UserError` if the record does not fit the model."""

    def __init__(self, trace: RoutingTrace, spec: ModelSpec, width: int) -> None:
        recorded, router = trace.header, spec.router
        if (recorded.num_experts, recorded.top_k) != (router.num_experts, router.top_k):
            raise UserError(
                f"the recorded rows choose {recorded.top_k} of {recorded.num_experts} experts, this model's "
                f"{router.top_k} of {router.num_experts}: record one that chooses as this one does"
            )
        if trace.num_rows == 0:
            raise UserError("the record has no rows: record while requests are served")
        self._ids_LTK = trace.ids_LTK().astype(np.int32)
        self._layers = {layer: number % recorded.num_layers for number, layer in enumerate(spec.expert_layers)}
        self._width = width

    def rows_of(self, sequences: Sequence[SequenceStep]) -> IntArray:
        """The recorded rows [T] whose choices a micro-batch takes."""
        rows = [
            np.arange(each.start, each.start + len(each.token_ids)) * self._width + _number(each) % self._width
            for each in sequences
        ]
        recorded_T: IntArray = np.concatenate(rows) % self._ids_LTK.shape[1]
        return recorded_T

    def choose(self, layer: int, rows_T: IntArray) -> Tensor:
        """Their ids [T, K] in one layer, in host memory."""
        return torch.from_numpy(self._ids_LTK[self._layers[layer], rows_T])


def _number(sequence: SequenceStep) -> int:
    """Requests with numbers for names take different rows of the record."""
    name = sequence.request_id
    return int(name) if name.isdecimal() else zlib.crc32(name.encode())
