"""`antiphon bench balance`: the case with recorded load, and which cases a command measures."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from antiphon.base.errors import UserError
from antiphon.bench.balance import BalanceOrder, Case, bench_balance, chosen_cases
from antiphon.bench.made_load import SkewedLoad, write_even_routing
from antiphon.models.config import load_model_spec
from antiphon.placement.routing_trace import RoutingTraceWriter, TraceHeader, count_rows, read_routing_trace
from antiphon.placement.sample_paths import PathProfile
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
    assert row["balancedness"] == 0.5, "one of two workers has all rows"
    assert row["processor_s"] > 0
    (row,) = bench_balance(order(model, "plain", None), ["off"], tmp_path)
    assert row["balancedness"] > 0.5


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
    rows = {row["policy"]: row for row in bench_balance(chosen, names, tmp_path)}
    assert list(rows) == names
    assert rows["ideal"]["balancedness"] > rows["off"]["balancedness"]
    for row in rows.values():
        assert 0 < row["exchange_s_median"] <= row["layer_s_median"]
        assert row["layer_s_median"] <= row["layer_s_p95"]
    with pytest.raises(UserError, match="case plain has no record to profile"):
        bench_balance(order(model, "plain", None), ["paths"], tmp_path)
    with pytest.raises(UserError, match="--policies has 'best'"):
        replace(order(model, "plain", None), policies="off,best").check()


def test_a_drawn_load_is_as_skewed_as_asked(model: Path, tmp_path: Path) -> None:
    """And a path says what comes next."""
    drawn = SkewedLoad(load_model_spec(model), 4.0)
    traces = []
    for seed in (0, 1):
        drawn.write(tmp_path / "drawn.trace", 20_000, seed)
        traces.append(read_routing_trace(tmp_path / "drawn.trace"))
    ids_LTK, profiled_LTK = (trace.ids_LTK() for trace in traces)
    assert (ids_LTK[..., 0] != ids_LTK[..., 1]).all()
    assert (ids_LTK != profiled_LTK).any(), "another seed, other rows"
    counts_LE = count_rows(ids_LTK, 5)
    assert counts_LE.max(axis=1) / counts_LE.min(axis=1) == pytest.approx(4.0, rel=0.2)
    forecasts_LTK = traces[0].forecasts_LTK()
    assert forecasts_LTK is not None
    assert 0.9 <= (forecasts_LTK == ids_LTK[1:]).mean() < 1
    expected_TK, _ = PathProfile.of_rows(profiled_LTK, 5, 1).expected(ids_LTK[:1, :, 0], 1)
    assert (expected_TK[:, 0] == ids_LTK[1, :, 0]).mean() > 0.5


def test_an_even_load_is_even_for_prompts_and_answers(model: Path, tmp_path: Path) -> None:
    spec, batch = load_model_spec(model), 10
    write_even_routing(tmp_path / "even.trace", spec, batch)
    ids_PRK = read_routing_trace(tmp_path / "even.trace").ids_LTK()[0].reshape(5, batch, 2)
    for position in range(5):
        assert set(count_rows(ids_PRK[position][None], 5)[0].tolist()) == {4}
    for request in range(batch):
        assert set(count_rows(ids_PRK[:, request][None], 5)[0].tolist()) == {2}


def test_skewed_load_is_what_workers_get(model: Path, tmp_path: Path) -> None:
    chosen = replace(order(model, "skewed", None), path_length=1, skew=50.0)
    (row,) = bench_balance(chosen, ["paths"], tmp_path)
    assert (row["case"], row["policy"]) == ("skewed", "paths")
    assert 0.5 <= row["balancedness"] < 1
    with pytest.raises(UserError, match=r"--skew is 0\.5: it must be 1"):
        replace(chosen, skew=0.5).check()


def test_a_record_that_does_not_fit_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the recorded rows choose 2 of 6 experts, this model's 2 of 5"):
        order(model, "recorded", record(tmp_path / "routing.trace", num_experts=6))
    with pytest.raises(UserError, match="the case recorded needs a record"):
        order(model, "recorded", None)
    with pytest.raises(UserError, match="has no forecasts, which the policy predict needs"):
        bench_balance(order(model, "recorded", record(tmp_path / "routing.trace")), ["predict"], tmp_path)


def test_which_cases_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "routing.trace"
    assert chosen_cases(None, None) == ["plain", "hot", "slow", "skewed"]
    assert chosen_cases(None, file) == ["plain", "hot", "slow", "skewed", "recorded"]
    assert chosen_cases("hot, recorded", file) == ["hot", "recorded"]
    with pytest.raises(UserError, match="--cases has 'warm'"):
        chosen_cases("warm", None)
    with pytest.raises(UserError, match="which --cases hot leaves out"):
        chosen_cases("hot", file)
