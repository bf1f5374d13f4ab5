"""The choice among implementations, with candidates made up here: which is taken, why others are out, and the file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.kernels.choices import (
    Candidate,
    choice_of,
    choices_path,
    choose,
    process_choices,
    read_choices,
    write_choices,
)

CASES = ("1 row", "4 rows")
ROWS = (torch.randn(1, 3), torch.randn(4, 3))


def candidate(name: str, change: Any = lambda x, others: x, why_not: str = "") -> Candidate:
    """Doubles rows, then `change(result, whether there are other rows)`."""

    def run(case: int) -> Tensor:
        return change(2 * ROWS[case], True)

    def alone(case: int) -> Tensor:
        return change(2 * ROWS[case][-1:], False)

    return Candidate(name=name, run=run, alone=alone, why_not=why_not)


def failing(x: Tensor, others: bool) -> Tensor:
    raise RuntimeError("no kernel image is available\nfor this card")


OWN = candidate("triton")
BAD = {
    "absent": candidate("absent", why_not="absent is not installed"),
    "wrong": candidate("wrong", lambda x, others: x * 1.1),
    "shaky": candidate("shaky", lambda x, others: x + 1e-6 * others),
    "broken": candidate("broken", failing),
}


def measured(seconds: dict[str, tuple[float, float]], candidates: list[Candidate]) -> Any:
    """A stopwatch that shows these times, in the order in which the usable ones are tried."""
    left = iter([time for each in candidates if each.name in seconds for time in seconds[each.name]])
    return lambda way: (way(), next(left))[1]


def test_the_quickest_over_all_sizes_is_taken() -> None:
    good = [OWN, candidate("second"), candidate("third")]
    times = {"triton": (1.0, 8.0), "second": (2.0, 2.0), "third": (1.5, 3.0)}
    chosen = choose(good, CASES, measured(times, good))
    assert chosen.name == "second"
    assert chosen.why == "1.41 times as quick as triton, 1.06 times as quick as third (over 2 sizes)"
    assert [each.times_s for each in chosen.tried] == [[1.0, 8.0], [2.0, 2.0], [1.5, 3.0]]


def test_why_others_are_out() -> None:
    candidates = [OWN, *BAD.values()]
    chosen = choose(candidates, CASES, measured({"triton": (5.0, 5.0)}, candidates))
    assert chosen.name == "triton"
    assert {each.name: each.why_not for each in chosen.tried[1:]} == {
        "absent": "absent is not installed",
        "wrong": "gives other numbers (1 row)",
        "shaky": "gives a row other bits among others than alone (1 row)",
        "broken": "fails (1 row): no kernel image is available",
    }
    assert chosen.why.startswith("absent: absent is not installed, wrong: gives other numbers (1 row), shaky: ")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("ANTIPHON_TILES", str(tmp_path / "h100.json"))
    process_choices.cache_clear()
    yield choices_path()
    process_choices.cache_clear()


def test_workers_do_as_the_file_says(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert file.name == "h100.choices.json"
    key, other = ("experts", "H100", 2, 768), ("experts", "H100", 2, 1024)
    assert choice_of(key, lambda name: "") == "triton"
    write_choices(file, {key: ("deep_gemm", "1.30 times as quick as triton (over 5 sizes)")})
    assert read_choices(file) == {key: ("deep_gemm", "1.30 times as quick as triton (over 5 sizes)")}
    process_choices.cache_clear()
    with caplog.at_level("INFO", "antiphon"):
        assert choice_of(key, lambda name: "") == "deep_gemm"
        assert choice_of(key, lambda name: f"{name} is not installed") == "triton"
        assert choice_of(other, lambda name: "") == "triton"
    assert caplog.messages == [
        "kernels: experts, H100, 2, 768: deep_gemm: 1.30 times as quick as triton (over 5 sizes)",
        f"kernels: experts, H100, 2, 768: triton, not deep_gemm as {file} says: deep_gemm is not installed",
        f"kernels: experts, H100, 2, 1024: triton ({file} has no such entry)",
    ]


@pytest.mark.parametrize("text", ["", "[]", '{"choices": [{"key": 1}]}', '{"choices": [{"key": [1]}]}'])
def test_files_without_choices_are_refused(text: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(UserError, match=r"h100.choices.json has no choices of kernels .*: write it with antiphon tune"):
        read_choices(file)
