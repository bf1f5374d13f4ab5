"""Keeps which experts the rows of one step chose (`antiphon serve --record-routing`), or chooses them as such a record
did (`antiphon bench balance --routing`)."""

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.placement.routing_trace import IdArray, RoutingTrace
from antiphon.placement.split import IntArray
from antiphon.serve.policy.step import SequenceStep
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
