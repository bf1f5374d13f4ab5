"""`--record-routing`: every row of every step, with the experts it chose, in either layout."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from antiphon.base.errors import UserError
from antiphon.models.config import load_model_spec
from antiphon.placement.routing_trace import RoutingTraceWriter, TraceHeader, count_rows, read_routing_trace
from antiphon.serve.launch import build_engine
from antiphon.serve.outputs import ThreadSink
from antiphon.serve.policy.request import SequenceStep
from antiphon.serve.prepare import prepare
from antiphon.serve.worker.exchange import RoutingReplay, RowRouting
from tests.serve.engine_harness import (
    GREEDY,
    NUM_TOKENS,
    Prompts,
    TinyModel,
    Tokens,
    complete,
    config,
    running,
    save_tiny_model,
)


@pytest.mark.parametrize("layout", ["2", "2+2/m2"])
def test_each_row_is_recorded_once(
    layout: str, tiny_model: TinyModel, prompts: Prompts, reference: Tokens, tmp_path: Path
) -> None:
    file = tmp_path / "routing.trace"
    with running(config(tiny_model, layout, record_routing=file)) as engine:
        assert complete(engine, prompts[:8]) == reference[:8]
    trace = read_routing_trace(file)
    assert (trace.header.layers, trace.header.num_experts) == ((0, 1), 5)
    # The last token of an answer is not computed with; equal prompts share what the prefix cache has.
    assert trace.num_rows <= sum(len(prompt) + NUM_TOKENS - 1 for prompt in prompts[:8])
    assert trace.num_rows >= 8 * (NUM_TOKENS - 1)
    ids = trace.ids_LTK()
    assert ids.shape == (2, trace.num_rows, trace.header.top_k)
    assert (np.sort(ids, axis=2)[:, :, 1:] != np.sort(ids, axis=2)[:, :, :-1]).all(), "a row chooses an expert once"
    assert {rows.worker for rows in trace.rows} == {0, 1}
    answers = trace.of_phase("decode").num_rows
    assert 8 * (NUM_TOKENS - 1) <= answers <= 8 * NUM_TOKENS, "a prompt's last row may come alone"
    assert trace.of_phase("prefill").num_rows == trace.num_rows - answers
    counts = trace.counts_of_steps()
    assert counts.sum() == ids.size
    forecasts = trace.forecasts_LTK()
    assert forecasts is not None
    assert forecasts.shape == (1, trace.num_rows, trace.header.top_k)
    assert (forecasts != ids[1:]).any(), "an expectation, not what the layer then chose"
    assert (forecasts[:, :, :, None] == ids[1:, :, None]).any(axis=3).mean() > 0.44, "better than chance, 2 in 5"


def test_rows_go_where_recorded_rows_went(tiny_model: TinyModel, prompts: Prompts, tmp_path: Path) -> None:
    """One layer was recorded, the model has two; both take its choices. Text depends on no layout and no batching. 64
    requests run at once, and 8 small ones beside them."""
    file, again = tmp_path / "routing.trace", tmp_path / "again.trace"
    ids_TK = np.argsort(np.random.default_rng(5).random((72 * 300, 5)), axis=1)[:, :2].astype("<u2")
    writer = RoutingTraceWriter(file, TraceHeader(model="other", layers=(3,), num_experts=5, top_k=2))
    writer.append_step(1, 0, ids_TK.tobytes())
    writer.close()
    texts: list[Tokens] = []
    for layout in ("1", "2+2/m2"):
        settings = config(tiny_model, layout, replay_routing=file, record_routing=again, max_running=64)
        with running(settings) as engine:
            sink, text = ThreadSink(), [list[int](), list[int]()]
            for number, prompt in enumerate(prompts[:2]):
                engine.submit_to(sink, str(number), prompt, GREEDY)
            for output in sink.outputs(2):
                text[int(output.request_id)] += output.token_ids
            texts.append(text)
        trace = read_routing_trace(again)
        assert trace.header.layers == (0, 1)
        assert trace.num_rows == sum(len(prompt) + NUM_TOKENS - 1 for prompt in prompts[:2])
        recorded = trace.ids_LTK()
        assert (recorded[0] == recorded[1]).all()
        taken = np.concatenate([np.arange(len(p) + NUM_TOKENS - 1) * 72 + n for n, p in enumerate(prompts[:2])])
        assert (count_rows(recorded[:1], 5) == count_rows(ids_TK[None, taken], 5)).all()
    assert texts[0] == texts[1]


def test_a_recorded_layer_brings_the_forecast_of_the_next(tmp_path: Path) -> None:
    file, ids_LTK = tmp_path / "routing.trace", np.arange(12, dtype="<u2").reshape(2, 3, 2)
    writer = RoutingTraceWriter(file, TraceHeader(model="other", layers=(3, 4), num_experts=18, top_k=2))
    writer.append_step(1, 0, ids_LTK.tobytes(), (ids_LTK[1:] + 6).tobytes())
    writer.close()
    spec = load_model_spec(
        save_tiny_model(tmp_path / "m", num_hidden_layers=4, decoder_sparse_step=1, num_experts=18).folder
    )
    replay = RoutingReplay(read_routing_trace(file), spec, width=1)
    for layer in (1, 3):
        forecast = replay.forecast(layer, np.array([2, 0]))
        assert forecast is not None
        assert forecast.layer == layer
        assert forecast.ids_TK.tolist() == [[16, 17], [12, 13]]
        assert replay.choose(layer, np.array([2, 0])).tolist() == [[10, 11], [6, 7]]
    assert replay.forecast(2, np.array([2, 0])) is None, "the record's last layer knows nothing of its first"


def test_a_file_that_cannot_be_written_is_refused_before_anything_starts(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        build_engine(prepare(config(tiny_model, "1", record_routing=tmp_path / "none" / "routing.trace")))


def test_two_servers_do_not_write_one_record(tiny_model: TinyModel, tmp_path: Path) -> None:
    file, header = tmp_path / "routing.trace", TraceHeader(model="first", layers=(0,), num_experts=2, top_k=1)
    writer = RoutingTraceWriter(file, header)
    with pytest.raises(UserError, match=r"--record-routing .*routing\.trace: another server writes it: name another"):
        build_engine(prepare(config(tiny_model, "1", record_routing=file)))
    writer.close()
    assert read_routing_trace(file).header == header
    RoutingTraceWriter(file, replace(header, model="next")).close()
    assert read_routing_trace(file).header.model == "next"


def test_a_record_into_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is a pipe, whose reader could hold up all requests: name a file"):
        RoutingTraceWriter(tmp_path / "pipe", TraceHeader(model="m", layers=(0,), num_experts=2, top_k=1))


def test_rows_of_prompts_are_added_up_where_they_are_and_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each reading would make the host wait for the layers before."""
    ids_TK = torch.tensor([[0, 2], [2, 3], [1, 0], [2, 1]], dtype=torch.int32)
    half: Any = SimpleNamespace(
        layers=range(3),
        routes=lambda layer: layer > 0,
        gate=lambda layer, y_TH: ((ids_TK[: len(y_TH)] + layer - 1) % 4, torch.ones(len(y_TH), 2)),
        spec=SimpleNamespace(router=SimpleNamespace(num_experts=4)),
        backend=SimpleNamespace(device=torch.device("cpu")),
    )
    routing = RowRouting(half, counts_prompts=True)

    def sequence(num_rows: int) -> SequenceStep:
        return SequenceStep("a", 0, (5,) * num_rows, 0, 0, (), True, 0, 0)

    micro_batches = [[sequence(1), sequence(3)], [sequence(1)], [sequence(2), sequence(1)]]
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", lambda self: pytest.fail("the host has waited for a layer"))
        for layer in (1, 2):
            for sequences in micro_batches:
                num_rows = sum(len(each.token_ids) for each in sequences)
                routing.choose(layer, torch.zeros(num_rows, 1), None, routing.prompt_rows(sequences))
    counts_LE = np.frombuffer(routing.prompt_counts(), "<u4").reshape(2, 4)
    # rows 1 to 3 of the first, rows 0 and 1 of the third; a layer later each expert is the next one
    assert counts_LE.tolist() == [[2, 2, 4, 2], [2, 2, 2, 4]]
    routing.begin_step()
    routing.choose(1, torch.zeros(1, 1), None, routing.prompt_rows([sequence(1)]))
    assert routing.prompt_counts() == b""
