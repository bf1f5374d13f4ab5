"""`serve --record-routing FILE`: the engine writes which experts the rows of its workers chose."""

import contextlib
from pathlib import Path

from antiphon.base.logging import get_logger
from antiphon.placement.routing_trace import RoutingTraceWriter, TraceHeader
from antiphon.specs.model import ModelSpec

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

    def add(self, group: int, step: int, worker: int, ids: bytes, forecasts: bytes) -> None:
        """The rows of one worker in one step of its group. Groups step by themselves, so each has its own numbers."""
        if self._writer is None:
            return
        try:
            self._writer.append_step(step * self._num_groups + group, worker, ids, forecasts)
        except OSError as error:
            _log.error("%s: nothing more is recorded: %s", self._path, error.strerror or error)
            with contextlib.suppress(OSError):
                self._writer.close()
            self._writer = None
