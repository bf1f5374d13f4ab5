"""One pool against two: what cannot be compared is refused, who wins is said, and a small contest runs."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from antiphon.base.errors import UserError
from antiphon.base.system import python_module
from antiphon.bench.box import box_unavailable
from antiphon.bench.harness.core_waits import measure_core_waits, together
from antiphon.bench.pools import PoolsCase, bench_pools, columns, verdicts
from antiphon.bench.pools_prediction import MeasuredMachine, predict_mix
from antiphon.cost.curves import Surface
from antiphon.cost.profile import AttentionTable
from antiphon.serve.config import ServeConfig
from antiphon.sim.host import CoreWaits
from tests.planner.test_profiled import profile as flat_profile
from tests.serve.engine_harness import save_tiny_model
from tests.sim.serving_specimens import cluster


def row(**changes: Any) -> dict[str, Any]:
    even = {"itl_s_p99": 0.1, "ttft_s_median": 1.0, "output_tokens_per_s": 50.0, "prompt_tokens_per_s": 900.0}
    return {"prompt_tokens": 2048, **even, **changes}


def test_who_wins_at_what() -> None:
    (said,) = verdicts([row(), row(itl_s_p99=0.025, ttft_s_median=1.5, output_tokens_per_s=51.0)])
    assert said == (
        "prompts of 2,048: p99 between tokens: two pools, 4.00 times; time to first token: one pool, 1.50 times; "
        "answers' tokens/s: even; prompts' tokens/s: even (one pool: p99 100.00 ms)"
    )
    (said,) = verdicts([row(itl_s_p99=None), row()])
    assert "p99 between tokens: not measured" in said


def test_a_contest_of_unequal_sizes_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny", max_position_embeddings=256).folder
    with pytest.raises(UserError, match=r"--together 2 has 2 processes, --prefill 1 and --decode 1\+1 have 3"):
        bench_pools(folder, [64], PoolsCase(decode="1+1"), print)
    with pytest.raises(UserError, match=r"--mbit is 0: it must be 0.1 to 40000"):
        bench_pools(folder, [64], PoolsCase(mbit=0.0), print)
    with pytest.raises(UserError, match=r"there is no this-machine.json beside it"):
        bench_pools(folder, [64], PoolsCase(profile=str(tmp_path / "profile.json")), print)


def test_waits_for_cores_are_measured_while_all_compute() -> None:
    """Whatever the machine does: a wake for each turn, and stalls that took no longer than there was time."""
    # What a program says is more than a pipe holds.
    found = replace(measure_core_waits(1.5, period_s=2e-4, turn_s=1.5e-4), network_share=0.1)
    assert found.wakes_s
    assert all(0 <= wake_s < 30 for wake_s in found.wakes_s)
    assert all(1e-4 < stall_s < 30 for stall_s in found.stalls_s)
    assert together([]) is None
    twice = together([found, found])
    assert twice is not None
    assert (twice.stalls_per_s, len(twice.wakes_s)) == (found.stalls_per_s, 2 * len(found.wakes_s))
    assert twice.network_share == pytest.approx(0.1)


def test_a_prediction_is_shown_with_its_range() -> None:
    times = {"itl_s_median": 0.1, "itl_s_p99": 0.2, "ttft_s_median": None, "foreign_cpu_share": 0.0, "quiet": True}
    shown = row(engine="2 together", **times) | {"predicted_itl_s_p99": 0.2, "predicted_itl_s_p99_between": [0.1, 0.3]}
    case = PoolsCase(profile="here")
    (cells,) = columns(case).cells([shown])
    headings = columns(case).headings
    assert cells[headings.index("p99") + 1] == "200.00 ms (100.00 ms to 300.00 ms)"
    assert cells[headings.index("first token, median") + 1] is None
    (cells,) = columns(case).cells([shown | {"predicted_itl_s_p99_between": [0.2, 0.2]}])
    assert cells[headings.index("p99") + 1] == "200.00 ms"


@pytest.mark.slow
def test_a_small_contest(tmp_path: Path) -> None:
    """The machine is measured before and after each run, and both predict it."""
    folder = save_tiny_model(tmp_path / "tiny", max_position_embeddings=256).folder
    case = PoolsCase(answers=3, output_tokens=40, repetitions=1, threads=1, profile="here")
    rows = bench_pools(folder, [100], case, print)
    for each in rows:
        first, last = each["predicted_itl_s_p99_between"]
        assert 0 < first <= each["predicted_itl_s_p99"] <= last
        assert each["predicted_ttft_s_median"] > 0
    assert [each["engine"] for each in rows] == ["2 together", "1 > 1"]
    assert all(each["ttft_s_median"] > 0 and each["itl_s_p99"] > 0 for each in rows)
    assert len(columns(case).cells(rows)) == len(rows)
    assert len(verdicts(rows)) == 1


def test_in_a_box_the_two_ways_to_hand_over_are_compared() -> None:
    at_end = row(hand_over="end", predicted_ttft_s_median=1.1)
    by_layers = row(hand_over="layers", ttft_s_median=0.8, predicted_ttft_s_median=0.8)
    (said,) = verdicts([at_end, by_layers])
    assert "time to first token: layer by layer, 1.25 times (predicted / measured: 1.10, 1.00)" in said


@pytest.mark.parametrize("decode", ["1", "1+1"])
def test_the_simulator_predicts_the_same_mix(decode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pools keep answers steady beside prompts; on a slow wire layers that leave early save time."""
    monkeypatch.setattr("antiphon.sim.pools.SLOTS", 0)  # else all that so small a model has is in them at once
    folder = save_tiny_model(tmp_path / "tiny", max_position_embeddings=256).folder
    by_tokens = Surface((1.0, 10_000.0), (1.0, 10_000.0), ((1e-3, 1e-3), (1.0, 1.0)))
    prefill = AttentionTable(phase="prefill", layer="moe", times=by_tokens)
    profile = flat_profile()
    machine = MeasuredMachine(profile=replace(profile, attention=(*profile.attention, prefill)), cluster=cluster())
    common = {"model": folder, "max_model_len": 8200, "max_running": 5, "max_batch_tokens": 256}
    apart = {"layout": "colocated"} if decode == "1" else {"layout": "disaggregated"}

    def predicted(config: ServeConfig) -> dict[str, float]:
        return predict_mix(config, machine, (4, 32, 100), (3, 2000))

    two = replace(
        ServeConfig(**common, **apart, pool="decode"),  # type: ignore[arg-type]
        prefill=ServeConfig(**common, layout="colocated", pool="prefill"),  # type: ignore[arg-type]
    )
    found = predicted(two)
    one = predicted(ServeConfig(**common, layout="colocated"))  # type: ignore[arg-type]
    assert found["itl_s_p99"] < one["itl_s_p99"]
    assert two.prefill is not None
    at_end = predicted(replace(two, hand_over="end", prefill=replace(two.prefill, hand_over="end")))
    assert 0 < found["exposed_share"] < at_end["exposed_share"]
    late = CoreWaits(stalls_per_s=0.0, stalls_s=(), wakes_s=(*[0.0] * 9, 0.004))  # a token in ten
    assert predict_mix(two, machine, (4, 32, 100), (3, 2000), late)["itl_s_p99"] >= found["itl_s_p99"] + 0.0039
    with pytest.raises(UserError, match="--profile predicts replicas and attention workers of one rank, not 1t2"):
        predicted(ServeConfig(**common, layout="colocated", attention_tp=2))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.skipif(box_unavailable() is not None, reason=str(box_unavailable()))
def test_a_small_contest_behind_a_slow_link(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny", max_position_embeddings=256).folder
    options = ["--prompts", "200", "--answers", "3", "--output-tokens", "40", "--repetitions", "1", "--mbit", "10"]
    words = ["bench", "pools", str(folder), *options, "--json", str(tmp_path / "rows.json")]
    subprocess.run(python_module("antiphon.cli.main", *words), check=True, timeout=120)  # workers of tests live outside
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert [each["engine"] for each in rows] == ["1 > 1, at the end", "1 > 1, layer by layer"]
    assert all(each["ttft_s_median"] > 0 and each["exposed_share"] > 0 for each in rows)
