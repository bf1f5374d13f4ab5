"""A routing trace: what is written is read, as far as it goes; what is none is refused."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from antiphon.base.errors import UserError
from antiphon.placement.routing_trace import (
    IdArray,
    RoutingTraceWriter,
    TraceHeader,
    count_rows,
    read_routing_trace,
)

HEADER = TraceHeader(model="tiny", layers=(1, 3), num_experts=4, top_k=2)
FIRST = np.array([[[0, 1], [0, 2], [0, 3]], [[3, 2], [3, 1], [3, 2]]], dtype="<u2")  # 3 rows
SECOND = np.array([[[1, 0]], [[3, 0]]], dtype="<u2")


def written(path: Path, *parts: tuple[int, int, IdArray]) -> Path:
    writer = RoutingTraceWriter(path, HEADER)
    for step, worker, ids in parts:
        writer.append_step(step, worker, ids.tobytes())
    writer.close()
    return path


def test_rows_come_back_and_are_counted_by_step(tmp_path: Path) -> None:
    trace = read_routing_trace(written(tmp_path / "a", (5, 0, FIRST), (5, 1, SECOND), (7, 0, SECOND)))
    assert trace.header == HEADER
    assert trace.num_rows == 5
    assert (trace.ids_LTK() == np.concatenate([FIRST, SECOND, SECOND], axis=1)).all()
    assert trace.counts_of_steps().tolist() == [[[4, 2, 1, 1], [1, 1, 2, 4]], [[1, 1, 0, 0], [1, 0, 0, 1]]]
    shares = [(5 / 10 + 5 / 10) / 2, (3 / 10 + 2 / 10) / 2, (1 / 10 + 2 / 10) / 2, (1 / 10 + 1 / 10) / 2]
    assert trace.popularity() == pytest.approx(shares)


def test_forecasts_are_of_all_rows_or_of_none(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for known in (True, False):
        writer = RoutingTraceWriter(path, HEADER)
        writer.append_step(1, 0, FIRST.tobytes(), SECOND.repeat(3, axis=1)[:1].tobytes())
        writer.append_step(2, 0, SECOND.tobytes(), FIRST[1:, :1].tobytes() if known else b"")
        writer.close()
        trace = read_routing_trace(path)
        assert trace.has_forecasts == known
        forecasts = trace.forecasts_LTK()
        assert (None if forecasts is None else forecasts.tolist()) == (
            [[[1, 0], [1, 0], [1, 0], [3, 2]]] if known else None
        )
    writer = RoutingTraceWriter(path, HEADER)
    writer.append_step(3, 0, FIRST.tobytes(), FIRST.tobytes())
    with pytest.raises(UserError, match="step 3 has 24 bytes of forecasts"):
        read_routing_trace(path)


def test_rows_of_one_phase_are_kept_alone(tmp_path: Path) -> None:
    path = tmp_path / "a"
    writer = RoutingTraceWriter(path, HEADER)
    writer.append_step(1, 0, FIRST.tobytes(), FIRST[1:].tobytes(), bytes([1, 0, 1]))
    writer.append_step(2, 0, SECOND.tobytes(), SECOND[1:].tobytes(), bytes([0]))
    writer.close()
    trace = read_routing_trace(path)
    prompts, answers = trace.of_phase("prefill"), trace.of_phase("decode")
    assert prompts.ids_LTK().tolist() == FIRST[:, [0, 2]].tolist()
    assert answers.ids_LTK().tolist() == np.concatenate([FIRST[:, 1:2], SECOND], axis=1).tolist()
    forecasts = prompts.forecasts_LTK()
    assert forecasts is not None
    assert forecasts.tolist() == FIRST[1:, [0, 2]].tolist()
    assert prompts.counts_of_steps().sum() + answers.counts_of_steps().sum() == trace.counts_of_steps().sum()
    old = read_routing_trace(written(path, (1, 0, FIRST)))
    with pytest.raises(UserError, match="does not say which rows are of decode: record it anew"):
        old.of_phase("decode")
    writer = RoutingTraceWriter(path, HEADER)
    writer.append_step(3, 0, FIRST.tobytes(), b"", bytes([1]))
    with pytest.raises(UserError, match="step 3 has 1 bytes of phases for 3 rows"):
        read_routing_trace(path)


def test_without_rows(tmp_path: Path) -> None:
    trace = read_routing_trace(written(tmp_path / "a", (1, 0, FIRST[:, :0])))
    assert trace.num_rows == 0
    assert trace.ids_LTK().shape == (2, 0, 2)
    assert trace.counts_of_steps().sum() == 0


def test_a_file_that_was_cut_off_reads_up_to_its_last_whole_frame(tmp_path: Path) -> None:
    path = written(tmp_path / "a", (1, 0, FIRST), (2, 0, SECOND))
    content = path.read_bytes()
    for missing in range(1, 20):
        path.write_bytes(content[:-missing])
        assert read_routing_trace(path).num_rows == 3


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with pytest.raises(UserError, match="cannot be read"):
        read_routing_trace(path)
    for content in (b"", b"{}", b"\x05\x00\x00\x00hello"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="not a routing trace: write one with antiphon serve --record-routing"):
            read_routing_trace(path)
    with pytest.raises(UserError, match="step 1 names an expert beyond 3"):
        read_routing_trace(written(path, (1, 0, FIRST + np.uint16(1))))
    with pytest.raises(UserError, match="cannot be written"):
        RoutingTraceWriter(tmp_path / "none" / "a", HEADER)


def test_ids_and_headers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    ids = np.array([[[0, 4]], [[0, 1]]])  # 4 of 3 experts: it would count in the next layer
    for wrong in (ids, ids - 1):
        with pytest.raises(UserError, match="experts are 0 to 2"):
            count_rows(wrong, 3)
    header = TraceHeader(model="m", layers=(0, 1), num_experts=3, top_k=2)
    path = tmp_path / "trace"
    for changed in ({"num_experts": 10**18}, {"layers": (0, 0)}, {"top_k": 4}):
        RoutingTraceWriter(path, msgspec.structs.replace(header, **changed)).close()
        with pytest.raises(UserError, match="a trace names each layer once"):
            read_routing_trace(path)
    writer = RoutingTraceWriter(path, header)
    with pytest.raises(UserError, match="9 bytes of ids: a row has 8"):
        writer.append_step(0, 0, bytes(9))
    writer.close()
    with pytest.raises(UserError, match="the recording has no rows"):
        read_routing_trace(path).popularity()
