"""`antiphon bench balance`: the case with recorded load, and which cases a command measures."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from antiphon.base.errors import UserError
from antiphon.bench.balance import BalanceOrder, Case, bench_balance, chosen_cases
from antiphon.placement.routing_trace import RoutingTraceWriter, TraceHeader
from tests.serve.engine_harness import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return save_tiny_model(folder, num_hidden_layers=2, decoder_sparse_step=1, max_position_embeddings=256).folder


def record(file: Path, num_experts: int = 5) -> Path:
    """Rows that all choose experts 0 and 1, which are on one of two workers."""
    writer = RoutingTraceWriter(file, TraceHeader(model="any", layers=(0,), num_experts=num_experts, top_k=2))
    writer.append_step(1, 0, np.tile(np.array([0, 1], dtype="<u2"), 100).tobytes())
    writer.close()
    return file


def order(model: Path, case: Case, routing: Path | None) -> BalanceOrder:
    return BalanceOrder(
        model=model,
        attention=1,
        experts=2,
        micro_batches=2,
        expert_slots=4,
        case=case,
        batch=4,
        prompt_tokens=8,
        output_tokens=12,
        rounds=1,
        routing=routing,
    )


def test_recorded_load_is_what_workers_get(model: Path, tmp_path: Path) -> None:
    (row,) = bench_balance(order(model, "recorded", record(tmp_path / "routing.trace")), ["off"], tmp_path)
    assert row.balancedness == 0.5, "one of two workers has all rows"
    assert row.processor_s > 0
    (row,) = bench_balance(order(model, "plain", None), ["off"], tmp_path)
    assert row.balancedness > 0.5


def test_lina_s_measures(model: Path, tmp_path: Path) -> None:
    """Rows that choose all experts alike, forecasts by paths, and either phase alone."""
    writer = RoutingTraceWriter(
        tmp_path / "routing.trace", TraceHeader(model="any", layers=(0, 1), num_experts=5, top_k=2)
    )
    ids = np.tile(np.array([0, 1], dtype="<u2"), 200)
    writer.append_step(1, 0, ids.tobytes(), ids[:200].tobytes())
    writer.close()
    chosen = replace(order(model, "recorded", tmp_path / "routing.trace"), path_length=1)
    names = ["off", "paths", "no-estimation", "no-fine-tuning", "ideal"]
    rows = {row.policy: row for row in bench_balance(chosen, names, tmp_path)}
    assert list(rows) == names
    assert rows["ideal"].balancedness > rows["off"].balancedness
    for row in rows.values():
        assert 0 < row.exchange_s_median <= row.layer_s_median
        assert row.layer_s_median <= row.layer_s_p95
    with pytest.raises(UserError, match="case plain has no record to profile"):
        bench_balance(order(model, "plain", None), ["paths"], tmp_path)
    with pytest.raises(UserError, match="--policies has 'best'"):
        replace(order(model, "plain", None), policies="off,best").check()


def test_a_record_that_does_not_fit_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the recorded rows choose 2 of 6 experts, this model's 2 of 5"):
        order(model, "recorded", record(tmp_path / "routing.trace", num_experts=6))
    with pytest.raises(UserError, match="the case recorded needs a record"):
        order(model, "recorded", None)
    with pytest.raises(UserError, match="has no forecasts, which the policy predict needs"):
        bench_balance(order(model, "recorded", record(tmp_path / "routing.trace")), ["predict"], tmp_path)


def test_which_cases_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "routing.trace"
    assert chosen_cases(None, None) == ["plain", "hot", "slow"]
    assert chosen_cases(None, file) == ["plain", "hot", "slow", "recorded"]
    assert chosen_cases("hot, recorded", file) == ["hot", "recorded"]
    with pytest.raises(UserError, match="--cases has 'warm'"):
        chosen_cases("warm", None)
    with pytest.raises(UserError, match="which --cases hot leaves out"):
        chosen_cases("hot", file)
