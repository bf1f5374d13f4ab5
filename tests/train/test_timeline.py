"""Spans of a step by layer and operator, and the trace made of them."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.base.errors import UserError
from antiphon.train.setup import prepare
from antiphon.train.spans import Label, Span, StepSpans, join_parts, part_of, seconds_by_operator, write_part
from antiphon.train.trainer import Trainer
from tests.train.harness import config_of

IN_A_LAYER = ["ln1", "qkv", "attention", "out", "ln2", "gate", "fc1", "activation", "fc2", "add"]
BACKWARD_IN_A_LAYER = [
    *("add", "fc2", "activation", "fc1", "fc2 weights", "fc1 weights"),
    *("gate", "ln2", "out", "out weights", "attention", "qkv", "qkv weights", "ln1"),
]


def traced(folder: Path, *changes: str) -> list[dict[str, Any]]:
    file = folder / "trace.json"
    Trainer(prepare(config_of(folder, *changes)), timeline=file).run()
    assert not part_of(file, 0).exists()
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def test_a_runs_timeline_has_forward_and_backward_of_every_operator(tmp_path: Path) -> None:
    events = [event for event in traced(tmp_path) if event["ph"] == "X"]
    steps = [event["name"] for event in events if event["tid"] == 1]
    assert steps == ["step 1", "step 2", "step 3"], "the first one warms up"
    for step in (1, 2, 3):
        for layer in (0, 1):
            of_layer = [event for event in events if event["args"] == {"step": step, "layer": layer}]
            forward = [event["name"] for event in of_layer if event["tid"] == 2]
            backward = [event["name"] for event in of_layer if event["tid"] == 3]
            backward = [name.removesuffix(" backward") for name in backward]
            assert [name for name in forward if name in IN_A_LAYER] == IN_A_LAYER
            assert [name for name in backward if name in BACKWARD_IN_A_LAYER] == BACKWARD_IN_A_LAYER
        whole = {event["name"] for event in events if event["args"] == {"step": step}}
        assert whole >= {"data", "embedding", "cross-entropy", "cross-entropy backward", "gradient norm", "optimizer"}


def test_spans_of_one_row_do_not_overlap_and_fill_the_step(tmp_path: Path) -> None:
    events = [event for event in traced(tmp_path, "micro_batch=2") if event["ph"] == "X"]
    step = next(event for event in events if event["name"] == "step 2")
    spans = [event for event in events if event["tid"] != 1 and event["args"]["step"] == 2]
    end = 0.0
    for event in sorted(spans, key=lambda event: event["ts"]):
        assert event["ts"] >= end - 0.01
        end = event["ts"] + event["dur"]
    assert sum(event["dur"] for event in spans) > 0.5 * step["dur"]


def test_the_metrics_hold_the_time_of_each_operator(tmp_path: Path) -> None:
    Trainer(prepare(config_of(tmp_path, "output.log_every=2"))).run()
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    assert [line["step"] for line in lines] == [1, 3, 5]
    for line in lines:
        assert {"attention", "attention backward", "fc1", "fc1 backward", "fc1 weights backward"} < line[
            "operator_s"
        ].keys()
        assert sum(line["operator_s"].values()) < line["step_s"]


def test_a_span_within_another_takes_its_time_from_it() -> None:
    spans = StepSpans()
    with spans.of("off"):
        assert spans.current.operator == "outside"
    spans.on = True
    x = torch.ones(3, requires_grad=True)
    with spans.of("outer", 4):
        y = x * 2
        with spans.of("inner", 4):
            y = y.exp()
        y = (y + 1).sum()
    with spans.backward(y):
        y.backward()
    taken = spans.take()
    assert [str(span.label) for span in taken] == [
        "layer 4, inner, forward",
        "layer 4, outer, forward",
        "layer 4, outer, backward",
        "layer 4, inner, backward",
        "layer 4, outer, backward",
    ]
    inner, outer = taken[:2]
    assert outer.inner_ns == inner.end_ns - inner.start_ns
    total = sum(span.end_ns - span.start_ns for span in taken) - outer.inner_ns
    assert sum(seconds_by_operator(taken).values()) == pytest.approx(total * 1e-9)
    assert spans.take() == []


def test_waiting_inside_an_operator_counts_apart() -> None:
    """Not more of it than the operator took, and nothing while spans are off."""
    spans, waited = StepSpans(), [5.0]

    def wait(seconds: float) -> None:
        with spans.apart("waits", lambda: waited[0]):
            time.sleep(0.01)
            waited[0] += seconds

    wait(1.0)
    spans.on = True
    with spans.of("outer", 4, backward=True):
        wait(0.002)
        wait(1.0)
    first, second, outer = spans.take()
    assert str(first.label) == str(second.label) == "layer 4, waits, backward"
    assert first.end_ns - first.start_ns == 2_000_000
    assert second.start_ns >= outer.start_ns
    assert outer.inner_ns == 2_000_000 + second.end_ns - second.start_ns <= outer.end_ns - outer.start_ns


def some_spans(starts: Sequence[int]) -> list[Span]:
    return [Span(Label("experts", 2), 7, start, start + 1000) for start in starts]


def test_each_rank_is_a_process_of_the_joined_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write_part(file, 0, some_spans([5000, 9000]))
    write_part(file, 1, some_spans([6000]))
    with pytest.raises(UserError, match=r"trace.json.rank2: cannot be read .*: rank 2 did not write it"):
        join_parts(file, 3)
    join_parts(file, 2)
    events = json.loads(file.read_text())["traceEvents"]
    found = sorted((event["pid"], event["dur"]) for event in events if event["name"] == "experts")
    assert found == [(0, 1), (0, 1), (1, 1)]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"rank 0", "rank 1"}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
