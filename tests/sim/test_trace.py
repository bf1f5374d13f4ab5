"""Trace files and bars."""

import json
from pathlib import Path

import pytest

from antiphon.base.errors import UserError
from antiphon.sim.gantt import Bar, covered_s, span_s, tracks, write_trace

BARS = [
    Bar(track="attention[0]", label="0.0", start_s=1.0, end_s=1.5, kind="attention", layer=0, micro_batch=0),
    Bar(track="attention[0] out", label="0.0", start_s=1.5, end_s=1.75, kind="dispatch"),
    Bar(track="experts[2]", label="0.0", start_s=1.75, end_s=2.0, kind="experts", layer=0, micro_batch=0),
]


def test_trace_has_a_process_per_worker_and_a_thread_per_track(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, BARS)
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    named = [(e["name"], e["pid"], e.get("tid"), e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert named == [
        ("process_name", 1, None, "attention[0]"),
        ("thread_name", 1, 1, "work"),
        ("thread_name", 1, 2, "out"),
        ("process_name", 2, None, "experts[2]"),
        ("thread_name", 2, 3, "work"),
    ]
    complete = [event for event in events if event["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["ts"], e["dur"]) for e in complete] == [
        (1, 1, 0, 500_000),
        (1, 2, 500_000, 250_000),
        (2, 3, 750_000, 250_000),
    ]
    assert [e["args"] for e in complete] == [{"layer": 0, "micro_batch": 0}, {}, {"layer": 0, "micro_batch": 0}]


def test_empty_trace_is_valid(tmp_path: Path) -> None:
    write_trace(tmp_path / "empty.json", [])
    assert json.loads((tmp_path / "empty.json").read_text())["traceEvents"] == []


def test_bars() -> None:
    assert tracks(BARS) == ["attention[0]", "attention[0] out", "experts[2]"]
    assert span_s(BARS) == (1.0, 2.0)
    assert span_s([]) == (0.0, 0.0)
    twice = [BARS[0], Bar(track="attention[0]", label="x", start_s=1.25, end_s=1.75)]
    assert covered_s(twice) == 0.75
    assert covered_s(BARS, 1.25, 1.6) == pytest.approx(0.35)
    with pytest.raises(UserError, match=r"bar 'x' on 'a' ends at 1 s, before 2 s"):
        Bar(track="a", label="x", start_s=2, end_s=1)
    with pytest.raises(UserError, match=r"before nan s"):
        Bar(track="a", label="x", start_s=float("nan"), end_s=1)
