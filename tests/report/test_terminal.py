"""The report on a terminal: it fits 80 columns, says the numbers, and more of them with `explain`."""

import pytest
from rich.console import Console

from antiphon.report.document import BAR_WIDTH, rendered
from antiphon.report.gather import MemoryUse, Report
from antiphon.report.serving import memory_bar, plan_pieces


def printed(report: Report, width: int, *, explain: bool) -> str:
    console = Console(width=width, highlight=False, record=True, file=None, quiet=False)
    with console.capture() as captured:
        for item in rendered(plan_pieces(report, explain=explain)):
            console.print(item, markup=False)
    return captured.get()


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits(report: Report, width: int) -> None:
    lines = printed(report, width, explain=True).splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)


def test_it_says_the_answer_and_why_the_others_lost(report: Report) -> None:
    text = " ".join(printed(report, 160, explain=False).split())
    assert "Decode: disaggregated, 16 attention workers, 8 expert workers: 90 ms a token, 2,400 tokens/s, 62.5" in text
    assert "Disaggregate here: 1.41 times the best hybrid TP-EP in tokens/s per unit of price" in text
    assert "Do not disaggregate here: attention computes as long as experts do: nothing is gained" in text
    for contents in report.phases:
        for loser in contents.phase.rejected:
            assert loser.reason in text
    assert "attention 210 µs memory bandwidth 71%, compute 14%, scale-up network 10%, fixed cost 5%" in text
    assert "End to end: prefill and decode, each with its own devices, sized for the same requests/s" in text
    assert "note: expert 7 is popular: it has two replicas" in text


def test_explain_adds_conditions_placement_and_search(report: Report) -> None:
    short, long = printed(report, 120, explain=False), printed(report, 120, explain=True)
    for words in (
        "eq. 3",
        "420 µs ≥ 540 µs",
        "8 experts on 8 workers, 1 to 2 each; 1 expert with replicas",
        "1.080 ×",
        "in price-ms",
    ):
        assert words in long
        assert words not in short
    assert "10,000 candidates considered in 1.25 s, 2,400 of them feasible" in long


@pytest.mark.parametrize(
    ("weights", "kv", "reserve", "expected"),
    [
        (0, 0, 0, "·" * 20),
        (50, 25, 25, "█" * 10 + "▓" * 5 + "▒" * 5),
        (50, 0, 10, "█" * 10 + "▒" * 2 + "·" * 8),
        (90, 10, 10, "█" * 18 + "▓" * 2),
        (1, 1, 1, "▒" + "·" * 19),
    ],
)
def test_memory_bars_are_in_proportion(weights: float, kv: float, reserve: float, expected: str) -> None:
    use = MemoryUse(
        role="both", device="H20", capacity_bytes=100, weight_bytes=weights, kv_bytes=kv, reserve_bytes=reserve
    )
    assert memory_bar(use) == expected
    assert len(memory_bar(use)) == BAR_WIDTH
    assert use.free_bytes == max(0, 100 - weights - kv - reserve)
