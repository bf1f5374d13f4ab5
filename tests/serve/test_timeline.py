"""Spans, the trace and the four numbers, on examples small enough to work out by hand."""

import json
from array import array
from pathlib import Path

import pytest

from antiphon.serve.timeline import summarise, write_trace
from antiphon.serve.worker import spans as span_module
from antiphon.serve.worker.spans import ATTENTION, COMBINE, EXPERTS, RECEIVE, SAMPLE, STEP, SpanRecorder, Spans
from antiphon.serve.worker_handle import WorkerName
from tests.serve.span_examples import recorded

ATTENTION_0, ATTENTION_1 = WorkerName("attention", 0), WorkerName("attention", 1)
EXPERTS_0, EXPERTS_1 = WorkerName("experts", 0), WorkerName("experts", 1)


def example() -> dict[WorkerName, Spans]:
    """Two attention workers step from 1000 to 2000 and 1500 to 2500; together 1500 ns.

    Worker 0 waits from 1200 to 1600, in which the experts compute from 1300 to 1500 (one) and 1400 to 1550 (other):
    150 ns of it are exposed. Worker 1 waits from 2000 to 2100 while nobody computes."""
    return {
        ATTENTION_0: recorded((COMBINE, 1200, 1600, 4), (ATTENTION, 1000, 1200, 4), (STEP, 1000, 2000, 4)),
        ATTENTION_1: recorded((STEP, 1500, 2500, 2), (COMBINE, 2000, 2100, 2)),
        EXPERTS_0: recorded((RECEIVE, 1250, 1300, 5), (EXPERTS, 1300, 1500, 5)),
        EXPERTS_1: recorded((EXPERTS, 1400, 1550, 1), (EXPERTS, 2400, 2800, 2)),
    }


def test_the_four_numbers() -> None:
    summary = summarise(example())
    assert summary.step_s == pytest.approx(1500e-9)
    assert summary.attention_idle_ratio == pytest.approx({"attention[0]": 0.4, "attention[1]": 0.1})
    busy = {"experts[0]": 200, "experts[1]": 150 + 100}  # what lies beyond the last step does not count
    assert summary.expert_idle_ratio == pytest.approx({name: 1 - ns / 1500 for name, ns in busy.items()})
    assert summary.exposed_communication_s == pytest.approx((150 + 100) * 1e-9)
    assert summary.rows_per_expert_worker == {"experts[0]": 5, "experts[1]": 3}


def test_replicas_never_wait_and_silent_workers_are_left_out() -> None:
    summary = summarise({WorkerName("replica", 0): recorded((STEP, 0, 50, 1)), WorkerName("replica", 1): recorded()})
    assert summary.attention_idle_ratio == {"replica[0]": 0.0}
    assert summary.expert_idle_ratio == {}
    assert summary.exposed_communication_s == 0.0
    assert summarise({}).step_s == 0.0


def test_the_trace_opens_in_perfetto(tmp_path: Path) -> None:
    """Chrome's trace format: complete events with microseconds, on named threads of named processes."""
    write_trace(tmp_path / "trace.json", example())
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert list(names.values()) == ["attention[0]", "attention[1]", "experts[0]", "experts[1]"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == sum(len(spans.starts_ns) for spans in example().values())
    assert min(event["ts"] for event in complete) == 0
    for event in complete:
        assert {"name", "pid", "tid", "ts", "dur", "args"} <= set(event)
        assert event["dur"] >= 0
        assert event["pid"] in names
        assert event["tid"] == (1 if event["name"] == "step" else 2)
    (received,) = [event for event in complete if event["name"] == "receive"]
    assert (received["ts"], received["dur"]) == (0.25, 0.05)
    assert received["args"] == {"rows": 5, "step": 7, "layer": 3, "micro_batch": 1}
    assert "layer" not in next(event for event in complete if event["name"] == "step")["args"]


def test_an_empty_trace_is_a_trace(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", {ATTENTION_0: recorded()})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["ph"] for event in events] == ["M", "M", "M"]


def test_a_recorder_gives_each_span_once() -> None:
    recorder = SpanRecorder(keeps_all=True)
    recorder.step = 5
    recorder.add(ATTENTION, 100, layer=2, micro_batch=1, rows=9)
    recorder.add(STEP, 50)
    taken = recorder.take()
    assert (taken.name_index, taken.layers, taken.micro_batches) == ([ATTENTION, STEP], [2, -1], [1, -1])
    assert (taken.rows, taken.steps, taken.starts_ns) == ([9, 0], [5, 5], [100, 50])
    assert all(end > 100 for end in taken.ends_ns)
    assert recorder.take().starts_ns == []


def test_parts_of_a_native_call_are_spans_one_after_the_other() -> None:
    recorder = SpanRecorder(keeps_all=False)
    recorder.step = 3
    recorder.add_all([(ATTENTION, 4), (SAMPLE, -1)], array("q", [10, 30, 70]).tobytes(), rows=6)
    recorder.add(STEP, 5)
    assert recorder.take(last_steps=1).starts_ns == [10, 30, 5]
    taken = recorder.take()
    assert (taken.name_index, taken.layers, taken.micro_batches) == (
        [ATTENTION, SAMPLE, STEP],
        [4, -1, -1],
        [0, -1, -1],
    )
    assert (taken.rows, taken.steps, taken.ends_ns[:2]) == ([6, 6, 0], [3, 3, 3], [30, 70])
    assert recorder.take().starts_ns == []


@pytest.mark.parametrize(("keeps_all", "limit"), [(True, "MAX_SPANS"), (False, "RECENT_SPANS")])
def test_a_full_recorder_keeps_the_newest(monkeypatch: pytest.MonkeyPatch, keeps_all: bool, limit: str) -> None:
    monkeypatch.setattr(span_module, limit, 2)
    full = SpanRecorder(keeps_all)
    for start_ns in range(5):
        full.add(STEP, start_ns)
    assert full.take().starts_ns == [3, 4]


def test_the_last_steps_can_be_looked_at_again_and_again() -> None:
    recorder = SpanRecorder(keeps_all=False)
    assert recorder.take(last_steps=2).starts_ns == []
    for step in range(4):
        recorder.step = step
        recorder.add(ATTENTION, 10 * step, layer=0)
        recorder.add(STEP, 10 * step + 1)
    assert recorder.take(last_steps=1).starts_ns == [30, 31]
    assert recorder.take(last_steps=2).steps == [2, 2, 3, 3]
    assert len(recorder.take(last_steps=9).starts_ns) == 8
