"""Plans of both phases beside what was measured: what counts, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from antiphon.base.errors import UserError
from antiphon.bench.load import LoadedRequest, LoadRun
from antiphon.serve.served_plan import ServedPlan
from antiphon.specs.plan import Predicted
from benchmarks.predict import parse_rates, rate_line, rate_row

PROMISED: list[dict[str, Any]] = [  # by the profile before, and after
    {"ttft_s": {"p50": 0.010}, "tpot_s": {"p50": 0.0016}, "output_tokens_per_s": 30.0},
    {"ttft_s": {"p50": 0.012}, "tpot_s": {"p50": 0.0020}, "output_tokens_per_s": 30.0},
]


def plan(layout: Any, **changes: Any) -> ServedPlan:
    sizes: dict[str, int] = {"num_instances": 1, "num_attention": 1, "num_experts": 1, "attention_tp": 1}
    return ServedPlan(
        file=Path("plan.json"), layout=layout, expert_tp=1, num_micro_batches=2, max_running=8, placement=None,
        predicted=Predicted(), devices=("this-core",), notes=(), **(sizes | changes),
    )  # fmt: skip


def run(*, error: str | None = None) -> LoadRun:
    good = LoadedRequest(token_s=(0.010, 0.012, 0.014), late_s=0.0)
    return LoadRun(requests=(good, LoadedRequest(token_s=(), late_s=0.0, error=error) if error else good), took_s=0.2)


def test_a_row_says_what_was_promised_what_was_measured_and_the_error() -> None:
    row = rate_row(8.0, plan("disaggregated", prefill=plan("colocated", num_attention=2)), PROMISED, [run()])
    assert row["layout"] == "prefill 2, decode 1+1/m2"
    assert row["measured"] == pytest.approx({"ttft_s": 0.010, "tpot_s": 0.002, "tokens_per_s": 30.0})
    assert row["error"] == pytest.approx({"ttft_s": 0.1, "tpot_s": -0.1, "tokens_per_s": 0.0})
    assert row["drift"] == pytest.approx({"ttft_s": 0.2, "tpot_s": 0.25, "tokens_per_s": 0.0})
    assert "ttft 11.00 ms, 10.00 ms (+10%, drift 20%)" in rate_line(row | {"foreign_cpu_share": 0.02})


def test_a_failed_request_ends_the_measurement() -> None:
    with pytest.raises(UserError, match=r"8 requests/s: 1 requests failed, the first: no room"):
        rate_row(8.0, plan("colocated"), PROMISED, [run(error="no room")])


@pytest.mark.parametrize("text", ["", "4,", "none", "0", "-1,2", "inf"])
def test_rates_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="write requests a second, for example 4,8,16"):
        parse_rates(text)
