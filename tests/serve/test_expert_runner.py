"""What an expert worker counts, over an exchange that takes a batch's memory back with the reply."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.comm.m2n.api import ExpertBatch
from antiphon.comm.rank_group import RankGroup
from antiphon.serve.worker.expert_prefetch import PrefetchSlots
from antiphon.serve.worker.experts import ExpertCounters, ExpertRanks, ExpertRunner
from antiphon.serve.worker.spans import SpanRecorder

HELD = (1, 3)


class _Half:
    """Computes nothing; holds experts 1 and 3 of four."""

    spec = SimpleNamespace(router=SimpleNamespace(num_experts=4, top_k=2))
    backend = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    expert_ids = {0: HELD, 5: HELD}  # noqa: RUF012

    def to_local(self, layer: int, ids_RK: Tensor) -> Tensor:
        return ids_RK

    def forward(self, layer: int, rows_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
        return torch.zeros_like(rows_RH)


class _Exchange:
    """Hands out batches; the ids of one that has been answered are overwritten, as a new message would."""

    def __init__(self, batches: list[ExpertBatch]) -> None:
        self._batches = batches

    def receive(self, idle_s: float, timeout_s: float) -> ExpertBatch | None:
        return self._batches.pop(0) if self._batches else None

    def reply(self, batch: ExpertBatch, partial_RH: Tensor, computed_ns: tuple[int, int]) -> None:
        batch.ids_RK.fill_(1 << 20)


def batch(layer: int, ids_RK: list[list[int]]) -> ExpertBatch:
    num_rows = len(ids_RK)
    return ExpertBatch(
        step=1,
        layer=layer,
        micro_batch=0,
        sources=(0,),
        rows_per_source=(num_rows,),
        placements=(0, 0),
        rows_RH=torch.zeros(num_rows, 8),
        ids_RK=torch.tensor(ids_RK, dtype=torch.int32).reshape(num_rows, 2),
        weights_RK=torch.zeros(num_rows, 2),
    )


def test_rows_of_each_expert_are_counted_before_the_reply() -> None:
    batches = [batch(0, [[1, 3], [1, -1]]), batch(0, []), batch(5, [[-1, 3]]), batch(0, [[1, -1]])]
    exchange: Any = _Exchange(batches)
    half: Any = _Half()
    moves: Any = SimpleNamespace(check=lambda versions: None, prefetched=PrefetchSlots(half, lambda *_: None, 0))
    recorder = SpanRecorder(keeps_all=False)
    counters = ExpertCounters(2, half)
    runner = ExpertRunner(ExpertRanks(RankGroup(), half, moves, recorder), exchange, counters, recorder)
    assert counters.report() is None
    while runner.serve_one(0.0, 1.0):
        pass
    report = counters.report()
    assert report is not None
    assert (report.index, report.rows_per_layer) == (2, {0: 3, 5: 1})
    assert report.rows_per_expert == {0: {1: 3, 3: 1}, 5: {1: 0, 3: 1}}
    assert counters.report() is None, "each row is reported once"


class _Event:
    """An event of a device that comes there when `arrives` says so."""

    clock_ms = 0.0
    arrived = False

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        assert stream == ("stream of", torch.device("cuda", 1))
        self.at_ms = _Event.clock_ms

    def query(self) -> bool:
        return _Event.arrived

    def elapsed_time(self, end: "_Event") -> float:
        return end.at_ms - self.at_ms


class _DeviceRows(Tensor):
    """Rows whose copy to the host waits for the device."""

    num_waited = 0

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        _DeviceRows.num_waited += 1
        return self


class _DeviceRanks:
    """Launches at once what takes the device 40 ms."""

    half = SimpleNamespace(backend=SimpleNamespace(device=torch.device("cuda", 1)))

    def lead(self, batch: ExpertBatch) -> Tensor:
        _Event.clock_ms += 40.0
        return torch.zeros(2, 8).as_subclass(_DeviceRows)


def test_time_of_a_device_is_that_of_computing_and_not_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    half: Any = _Half()
    ranks: Any = _DeviceRanks()
    exchange: Any = _Exchange([batch(0, [[1, 3], [1, -1]]), batch(0, [[1, 3]]), batch(5, [[1, 3]])])
    counters = ExpertCounters(2, half)
    runner = ExpertRunner(ranks, exchange, counters, SpanRecorder(keeps_all=False), in_stream_order=True)
    assert runner.serve_one(0.0, 1.0)
    report = counters.report()
    assert report is not None
    assert report.busy_s == 0.0, "the device has not come there"
    _Event.arrived = True
    assert runner.serve_one(0.0, 1.0)
    report = counters.report()
    assert report is not None
    assert report.busy_s == pytest.approx(0.08)
    assert _DeviceRows.num_waited == 0
    without_streams = ExpertRunner(ranks, exchange, counters, SpanRecorder(keeps_all=False))
    assert without_streams.serve_one(0.0, 1.0)
    assert _DeviceRows.num_waited == 1, "the clock stops when the device has computed"
