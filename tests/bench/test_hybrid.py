"""`antiphon bench hybrid`: a small run, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from antiphon.base.errors import UserError
from antiphon.bench.box import box_unavailable
from antiphon.bench.hybrid import CONTESTANTS, TwoLevelCase
from antiphon.cli.bench import app
from antiphon.cli.options import check_limits


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "antiphon.cli.main", "bench", "hybrid", "--calls", "2", "--repetitions", "1"]
    sizes = ["--tokens", "8", "--hidden", "64", "--experts", "4", "--top-k", "4"]
    finished = subprocess.run(
        [*command, *sizes, "--json", str(file)], capture_output=True, text=True, check=False, timeout=400
    )
    assert finished.returncode == 0, finished.stderr
    rows = {row["contestant"]: row for row in json.loads(file.read_text())["rows"]}
    assert tuple(rows) == CONTESTANTS
    # A row goes to the other node once a part: hybrid half of it and back, expert parallel whole rows to one rank. Its
    # choices and weights go with it.
    routing = 8 * 4 * (4 + 4)
    assert rows["fused"]["across_bytes"] == rows["synchronous"]["across_bytes"] == 2 * 8 * 64 * 4 // 2 + routing
    assert rows["expert parallel"]["across_bytes"] == 2 * 8 * 64 * 4 + routing


@pytest.mark.slow
@pytest.mark.skipif(box_unavailable() is not None, reason=f"no box: {box_unavailable()}")
def test_what_links_of_a_box_carry(tmp_path: Path) -> None:
    """Frames have headers; acknowledgements go the other way."""
    options = ["--tokens", "64", "--hidden", "256", "--experts", "4", "--top-k", "4"]
    options += ["--mbit", "200", "--calls", "2", "--repetitions", "1", "--only", "fused,synchronous,expert parallel"]
    CliRunner().invoke(app, ["hybrid", *options, "--json", str(tmp_path / "rows.json")], catch_exceptions=False)
    rows = {row["contestant"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    for name in ("fused", "synchronous", "expert parallel"):
        payload = 2 * rows[name]["across_bytes"]
        assert payload <= rows[name]["link_bytes"] <= 1.1 * payload + 20_000, name
        assert rows[name]["link_s"] == pytest.approx(rows[name]["link_bytes"] * 8 / 200e6)


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(UserError, match="--hidden is 6: it must be a multiple of the 4 ranks"):
        TwoLevelCase(hidden=6).check()
    with pytest.raises(UserError, match="--experts is 3: give each of the 4 ranks one at least"):
        TwoLevelCase(num_experts=3, top_k=1).check()
    with pytest.raises(UserError, match=r"--mbit is 0: it must be 0.1 to 40000"):
        TwoLevelCase(mbit=0).check()
    with pytest.raises(UserError, match="--inner-mbit 600 needs --mbit, and --inside tcp"):
        TwoLevelCase(mbit=100, inner_mbit=600).check()
    with pytest.raises(UserError, match="--inner-mbit is 0"):
        TwoLevelCase(mbit=100, inner_mbit=0, inside="tcp").check()
    with pytest.raises(UserError, match="--only has 'fusd': use some of fused, synchronous"):
        TwoLevelCase(only="fusd,synchronous").check()
    assert TwoLevelCase(only="synchronous, fused").contestants == ["fused", "synchronous"]
    with pytest.raises(UserError, match="--across ucx does not exist: use shm, tcp, libfabric"):
        check_limits(TwoLevelCase(across="ucx"))
