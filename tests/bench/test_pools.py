"""One pool against two: what cannot be compared is refused, who wins is said, and a small contest runs."""

from pathlib import Path
from typing import Any

import pytest

from antiphon.base.errors import UserError
from antiphon.bench.pools import COLUMNS, PoolsCase, bench_pools, verdicts
from tests.serve.engine_harness import save_tiny_model


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
    with pytest.raises(UserError, match="more than the model's context of 256"):
        bench_pools(folder, [500], PoolsCase(), print)


@pytest.mark.slow
def test_a_small_contest(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny", max_position_embeddings=256).folder
    case = PoolsCase(answers=3, output_tokens=40, repetitions=1, threads=1)
    rows = bench_pools(folder, [100], case, print)
    assert [each["engine"] for each in rows] == ["2 together", "1 > 1"]
    assert all(each["ttft_s_median"] > 0 and each["itl_s_p99"] > 0 for each in rows)
    assert len(COLUMNS.cells(rows)) == len(rows)
    assert len(verdicts(rows)) == 1
