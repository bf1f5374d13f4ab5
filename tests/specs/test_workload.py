"""Workload files and request traces: what is read, what is refused; JSON round trips."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.specs.catalog import names
from antiphon.specs.workload import (
    LengthSpec,
    SloSpec,
    WorkloadSpec,
    load_workload,
    workload_from_json,
    workload_to_json,
)

LENGTHS = "[input_tokens]\nmedian = 100\n[output_tokens]\nmedian = 10\n"


def write(folder: Path, text: str, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def load(folder: Path, text: str) -> WorkloadSpec:
    return load_workload(write(folder, 'name = "mine"\n' + text))


def trace(folder: Path, text: str, name: str = "requests.jsonl") -> WorkloadSpec:
    return load_workload(write(folder, text, name))


def test_lengths_alone_are_enough(tmp_path: Path) -> None:
    workload = load(tmp_path, LENGTHS)
    assert workload.input_tokens == LengthSpec(median=100)
    assert workload.requests_per_s is None
    assert workload.slo == SloSpec()


def test_a_mean_is_turned_into_the_median_of_its_log_normal(tmp_path: Path) -> None:
    workload = load(tmp_path, "[input_tokens]\nmean = 161\nsigma = 1.0\n[output_tokens]\nmedian = 9\n")
    assert workload.input_tokens.median == pytest.approx(161 / math.exp(0.5))
    assert workload.input_tokens.mean == pytest.approx(161)


def test_all_fields(tmp_path: Path) -> None:
    text = (
        "requests_per_s = 4\nmax_batch = 16\nmax_length = 4096\nexpert_skew = 0.5\nexpert_loads = [0.5, 0.25, 0.25]\n"
    )
    workload = load(tmp_path, text + LENGTHS + "[slo]\nttft_s = 1\ntpot_s = 0.1\npercentile = 0.99\n")
    assert (workload.requests_per_s, workload.max_batch, workload.max_length) == (4, 16, 4096)
    assert (workload.expert_skew, workload.expert_loads) == (0.5, (0.5, 0.25, 0.25))
    assert workload.slo == SloSpec(ttft_s=1, tpot_s=0.1, percentile=0.99)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"mine\.toml: input_tokens is missing: add it"),
        ("[input_tokens]\nmedian = 0\n[output_tokens]\nmedian = 1", "input_tokens.median is 0: it must"),
        ("[input_tokens]\n[output_tokens]\nmedian = 1", "input_tokens.median is missing"),
        ("[input_tokens]\nmedian = 1\nmean = 2\n[output_tokens]\nmedian = 1", "median and mean are both given"),
        (
            "[input_tokens]\nmedian = 1\nsigmoid = 2\n[output_tokens]\nmedian = 1",
            "unknown key input_tokens.sigmoid: did you mean sigma",
        ),
        (
            "[input_tokens]\nmedian = 1\nsigma = -1\n[output_tokens]\nmedian = 1",
            "sigma is -1: it must be at least 0",
        ),
        (
            "[input_tokens]\nmedian = 1e29\n[output_tokens]\nmedian = 1",
            r"median is 1e\+29: it must be at most 10000000000",
        ),
        ("[input_tokens]\nmedian = 1\nsigma = 300\n[output_tokens]\nmedian = 1", "sigma is 300: it must be at most 4"),
        (
            "requests_per_s = 1e300\n[input_tokens]\nmedian = 1\n[output_tokens]\nmedian = 1",
            r"requests_per_s is 1e\+300: it must be at most 1",
        ),
        (
            "[input_tokens]\ntrace = [1.5]\n[output_tokens]\nmedian = 1",
            r"trace\[0\] is 1.5: it must be a valid integer",
        ),
        ("[input_tokens]\ntrace = [5, 0]\n[output_tokens]\nmedian = 1", r"trace\[1\] is 0"),
        (
            "[input_tokens]\nmean = 1\nsigma = 1e308\n[output_tokens]\nmedian = 1",
            r"sigma is 1e\+308: it must be at most 4",
        ),
        ("requests_per_s = 1e-320\n" + LENGTHS, "requests_per_s is 1e-320: it must be above 1e-30"),
        ("requests_per_s = 0\n" + LENGTHS, "requests_per_s is 0: it must be above 0"),
        (
            "draft_tokens = 9e15\naccept_rate = 0.5\n" + LENGTHS,
            "draft_tokens is 9000000000000000.0: it must be at most 1",
        ),
        ("max_batch = 0\n" + LENGTHS, "max_batch is 0: it must be at least 1"),
        ("expert_loads = [0.5]\n" + LENGTHS, "expert_loads add up to 0.5"),
        ('expert_loads = ["a"]\n' + LENGTHS, r"expert_loads\[0\] is 'a': it must be a valid number"),
        (LENGTHS + "[slo]\ntpot_s = 0", r"slo.tpot_s is 0: it must be above 0"),
        (LENGTHS + "[slo]\ntpot = 1", r"unknown key slo.tpot: did you mean tpot_s\?"),
        (LENGTHS + "[slo]\npercentile = 99", "percentile is 99: it must be below 1"),
        ("request_per_s = 1\n" + LENGTHS, r"unknown key request_per_s: did you mean requests_per_s\?"),
        ("arrivals_s = [0.0, 1.0]\n" + LENGTHS, "2 arrivals for 0 inputs and 0 outputs"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(tmp_path, text)


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(UserError, match="workload 'ofline' is unknown: did you mean offline"):
        load_workload("ofline")


def test_the_papers_workloads() -> None:
    msi = load_workload("msi")
    assert (msi.input_tokens.median, msi.output_tokens.median, msi.slo.tpot_s) == (571, 159, 0.15)
    for rate in (2, 4, 8):
        mix = load_workload(f"mix-sharegpt-{rate}")
        assert (mix.requests_per_s, mix.max_batch, mix.max_length) == (rate, 16, 4096)


def test_a_trace_is_sorted_by_arrival_and_starts_at_zero(tmp_path: Path) -> None:
    lines = [
        '{"input_tokens": 30, "output_tokens": 3, "arrival_s": 12.0, "user": "x"}',
        "",
        '{"input_tokens": 10, "output_tokens": 1, "arrival_s": 10.0}',
        '{"input_tokens": 20, "output_tokens": 2, "arrival_s": 14.0}',
    ]
    workload = trace(tmp_path, "\n".join(lines))
    assert workload.name == "requests"
    assert workload.input_tokens.trace == (10, 30, 20)
    assert workload.output_tokens.trace == (1, 3, 2)
    assert workload.arrivals_s == (0, 2, 4)
    assert workload.requests_per_s == pytest.approx(0.5)
    assert (workload.input_tokens.median, workload.input_tokens.mean) == (20, 20)


def test_a_trace_without_arrivals_has_no_rate(tmp_path: Path) -> None:
    workload = trace(tmp_path, "input_tokens,output_tokens,model\n7,2,a\n9,4,b\n", "requests.csv")
    assert (workload.input_tokens.trace, workload.output_tokens.trace) == ((7, 9), (2, 4))
    assert workload.requests_per_s is None
    assert workload.arrivals_s == ()


def test_one_request_has_no_rate_either(tmp_path: Path) -> None:
    workload = trace(tmp_path, "input_tokens,output_tokens,arrival_s\n7,2,3\n", "requests.csv")
    assert workload.arrivals_s == (0,)
    assert workload.requests_per_s is None


def test_a_workload_may_name_a_trace_beside_it(tmp_path: Path) -> None:
    write(tmp_path, '{"input_tokens": 5, "output_tokens": 6}\n', "requests.jsonl")
    workload = load(tmp_path, 'trace = "requests.jsonl"\nrequests_per_s = 3\n[slo]\ntpot_s = 0.1\n')
    assert workload.input_tokens.trace == (5,)
    assert (workload.requests_per_s, workload.slo.tpot_s) == (3, 0.1)
    with pytest.raises(UserError, match="input_tokens and trace are both given: leave one of them out"):
        load(tmp_path, 'trace = "requests.jsonl"\n' + LENGTHS)
    with pytest.raises(UserError, match=r"nowhere\.jsonl: cannot be read \(No such file or directory\)"):
        load(tmp_path, 'trace = "nowhere.jsonl"\n')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"requests\.jsonl: holds no requests"),
        ("nonsense", r"requests\.jsonl: line 1: 'nonsense' is not JSON"),
        ("[1]", "line 1: '.1.' is not an object"),
        ('{"input_tokens": 5, "output_tokens": 1}\n{"input_tokens": 5}', "line 2: output_tokens is missing"),
        (
            '{"input_tokens": 0, "output_tokens": 1}',
            "line 1: input_tokens is 0: a whole number from 1 to 9,007,199,254,740,992",
        ),
        ('{"input_tokens": 1.5, "output_tokens": 1}', "line 1: input_tokens is 1.5: a whole number"),
        (
            '{"input_tokens": %s, "output_tokens": 1}' % ("9" * 400),
            r"line 1: input_tokens is 9+… 320 more characters …9+: a whole number",
        ),
        ('{"input_tokens": 1e300, "output_tokens": 1}', r"line 1: input_tokens is 1e\+300: a whole number from 1 to"),
        ('{"input_tokens": 1, "output_tokens": 1, "arrival_s": 1e300}', r"line 1: arrival_s is 1e\+300: a number"),
        ('{"input_tokens": 1, "input_tokens": 2, "output_tokens": 1}', "line 1: .*'input_tokens' stands there twice"),
        ('{"input_tokens": "x", "output_tokens": 1}', "line 1: input_tokens is 'x': a whole number"),
        ('{"input_tokens": true, "output_tokens": 1}', "line 1: input_tokens is true: a whole number"),
        ('{"input_tokens": null, "output_tokens": 1}', "line 1: input_tokens is null: a whole number"),
        ('{"input_tokens": 1, "output_tokens": 1, "arrival_s": "soon"}', "line 1: arrival_s is 'soon': a number"),
        (
            '{"input_tokens": 1, "output_tokens": 1, "arrival_s": 1}\n{"input_tokens": 1, "output_tokens": 1}',
            "line 2: arrival_s is missing: give it in every line or in none",
        ),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        trace(tmp_path, text)


def test_bad_lines_of_a_csv(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"requests\.csv: line 1: no column output_tokens: name the columns"):
        trace(tmp_path, "input_tokens,outputs\n1,1\n", "requests.csv")
    with pytest.raises(UserError, match=r"requests\.csv: line 1: two columns input_tokens: leave one of them out"):
        trace(tmp_path, "input_tokens,output_tokens,input_tokens\n1,1,2\n", "requests.csv")
    with pytest.raises(UserError, match="line 3: input_tokens is '-2': a whole number from 1"):
        trace(tmp_path, "input_tokens,output_tokens\n1,1\n-2,1\n", "requests.csv")
    with pytest.raises(UserError, match="line 2: output_tokens is null: a whole number"):
        trace(tmp_path, "input_tokens,output_tokens\n1\n", "requests.csv")


@pytest.mark.parametrize("name", names("workload"))
def test_shipped_workloads_survive_json(name: str, tmp_path: Path) -> None:
    workload = load_workload(name)
    text = json.dumps(workload_to_json(workload))
    assert load_workload(write(tmp_path, text, "w.json")) == workload


seconds = st.floats(1e-3, 1e3)
log_normal = st.builds(LengthSpec, median=st.floats(1, 1e6), sigma=st.floats(0, 3))


@st.composite
def workloads(draw: st.DrawFn) -> WorkloadSpec:
    num_requests = draw(st.integers(0, 5))
    lengths = st.lists(st.integers(1, 9999), min_size=num_requests, max_size=num_requests).map(tuple)
    traced = [LengthSpec(median=draw(st.floats(1, 99)), trace=draw(lengths)) for _ in range(2)]
    inputs, outputs = traced if num_requests else (draw(log_normal), draw(log_normal))
    arrivals = sorted(draw(st.lists(st.floats(0, 99), min_size=num_requests, max_size=num_requests)))
    return WorkloadSpec(
        name=draw(st.text("xyz", min_size=1)),
        input_tokens=inputs,
        output_tokens=outputs,
        requests_per_s=draw(st.none() | seconds),
        slo=draw(
            st.builds(SloSpec, ttft_s=st.none() | seconds, tpot_s=st.none() | seconds, percentile=st.floats(0.01, 0.99))
        ),
        expert_skew=draw(st.floats(0, 2)),
        expert_loads=draw(st.sampled_from([(), (1.0,), (0.5, 0.5)])),
        arrivals_s=tuple(arrivals),
        max_batch=draw(st.none() | st.integers(1, 999)),
        max_length=draw(st.none() | st.integers(1, 99_999)),
        source=draw(st.text("abc")),
    )


@settings(max_examples=50, deadline=None)
@given(workload=workloads())
def test_json_round_trip(workload: WorkloadSpec) -> None:
    assert workload_from_json(json.loads(json.dumps(workload_to_json(workload))), "workload") == workload
