"""Numbers and sizes as people read them."""

from dataclasses import replace

import pytest

from antiphon.base.units import milliseconds, number
from antiphon.report.gather import Report
from antiphon.report.summary import facts, given, placement_summary, reasons, subtitle, verdict
from antiphon.report.words import degrees_text, gigabytes, plural, short_degrees, time_unit
from antiphon.specs.plan import Parallel, Rejected


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (12.34, "12.3 s"), (1.234, "1.23 s"), (0.1236, "124 ms"), (0.00126, "1.26 ms"), (65e-6, "65 µs")],
)
def test_times(seconds: float | None, text: str) -> None:
    assert milliseconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "unknown"),
        (12345.6, "12,346"),
        (99.96, "100"),
        (1.234, "1.23"),
        (0.0, "0"),
        (8.07e-17, "0"),
        (0.0000123, "0.0000123"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(24e9, "24.0 GB"), (150e6, "0.1 GB"), (99e6, "99 MB"), (1.5e6, "1.5 MB"), (0, "-")]
)
def test_memory(num_bytes: float, text: str) -> None:
    assert gigabytes(num_bytes) == text


@pytest.mark.parametrize(("longest_s", "unit"), [(11, "s"), (2, "ms"), (0.01, "ms"), (0.009, "µs"), (0, "µs")])
def test_axes_have_readable_numbers(longest_s: float, unit: str) -> None:
    assert time_unit(longest_s)[1] == unit


def test_degrees() -> None:
    apart = Parallel(attention_dp=1, attention_tp=4, expert_workers=5)
    assert degrees_text("disaggregated", apart) == "1 attention worker of TP 4, 5 expert workers"
    assert short_degrees("disaggregated", apart) == "1×TP4 + 5×TP1"
    together = Parallel(attention_dp=3, attention_tp=2, expert_ep=6, pp=2)
    assert degrees_text("dp_ep", together) == "attention DP 3 × TP 2, experts EP 6 × TP 1, PP 2"
    assert short_degrees("dp_ep", together) == "A 3×TP2, E 6×TP1, PP2"


def test_plural() -> None:
    assert plural(1, "worker") == "1 worker"
    assert plural(1200, "batch", "batches") == "1,200 batches"


def test_sentences(report: Report) -> None:
    prefill, decode = report.phases
    assert subtitle(report) == (
        "mixtral-8x22b on msi-hetero, workload msi-production: 941 tokens in, 219 out on average; "
        "targets at percentile 0.5: TPOT 150 ms"
    )
    assert given(report) == (
        "141 B parameters, 39.2 B active; 8 nodes of 8 H20, 8 nodes of 8 L40S; "
        "weights bfloat16, KV bfloat16, computed in bfloat16, rows sent as bfloat16, back as bfloat16"
    )
    assert verdict(prefill, "per-cost").startswith("Do not disaggregate here: ")
    gain = "1.41 times the best hybrid TP-EP in tokens/s per unit of price"
    assert verdict(decode, "per-cost") == f"Disaggregate here: {gain}"
    assert placement_summary(decode.phase) == "8 experts on 8 workers, 1 to 2 each; 1 expert with replicas"
    one = replace(decode.phase, placement=(((0, 1.0),),) * 8, batch=1)
    assert placement_summary(one) == "8 experts on 1 worker"
    numbers = dict(facts("decode", one))
    assert numbers["batch of one instance"] == "1 request"
    assert numbers["experts wait for"] == "compute"


def test_reasons_that_differ_in_numbers_alone_are_told_once() -> None:
    losers = (
        Rejected(layout="tp_pp", reason="1978 tokens/s, 100.0% of 1979"),
        Rejected(layout="hybrid", reason="its weights do not fit"),
        Rejected(layout="dp_ep", reason="1,649 tokens/s, 83% of 1979"),
    )
    assert reasons(losers) == [
        ("TP + PP; alike: DP + EP", "1978 tokens/s, 100.0% of 1979"),
        ("hybrid TP-EP", "its weights do not fit"),
    ]
