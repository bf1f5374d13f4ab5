"""What a rank computes itself to send rows to experts and back."""

import pytest

from antiphon.bench.profile.exchange import row_calls
from antiphon.cost.profile import RowCalls
from tests.planner.local_times_harness import MODEL


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_way_to_the_experts_takes_some_time(dtype: str) -> None:
    found = row_calls(MODEL, dtype, (1, 8), 2)
    for curve in (found.across_s, found.gathered_s, found.completed_s):
        assert curve.sizes == (1.0, 8.0)
        assert all(seconds > 0 for seconds in curve.seconds)


def test_layouts_are_told_apart_by_who_has_which_rows() -> None:
    found: RowCalls = row_calls(MODEL, "float32", (1,), 1)
    gathered = found.layer_s(1, attention_tp=1, expert_tp=2, num_ranks=2)
    assert gathered == found.gathered_s.value(1)
    assert found.layer_s(1, attention_tp=2, expert_tp=1, num_ranks=2) == found.completed_s.value(1)
    assert found.layer_s(1, attention_tp=1, expert_tp=1, num_ranks=2) == found.across_s.value(1)
    assert found.layer_s(1, attention_tp=1, expert_tp=2, num_ranks=4) >= gathered
    assert found.layer_s(1, attention_tp=2, expert_tp=2, num_ranks=2) == 0
