"""Parts of the serving simulation: arrivals, names, tables, prices, percentiles, the trace file."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.cost.curves import Surface
from antiphon.cost.ping_pong import layer_time
from antiphon.cost.profile import AttentionTable
from antiphon.planner.predict import candidate_of
from antiphon.planner.worker_times import attention_alone, step_rows
from antiphon.serve.policy.micro_batches import split_into_micro_batches
from antiphon.serve.policy.request import SequenceStep
from antiphon.sim.demand import draw_demand
from antiphon.sim.events import EventGraph
from antiphon.sim.expert_load import ExpertLoad, Popularity, fractions_of
from antiphon.sim.pools import Kill, ServingOptions, parse_kill, pools_of
from antiphon.sim.resources import InOrder
from antiphon.sim.serve_log import MOST_SAMPLES, ServeLog, write_serving_trace
from antiphon.sim.serve_results import summary
from antiphon.sim.step_price import StepPricer, round_robin_s, rows_of
from antiphon.sim.step_tables import Line, line, plane, sizes_up_to, step_tables
from antiphon.specs.workload import LengthSpec
from tests.planner.test_profiled import profile as measured_profile
from tests.sim.serving_specimens import apart, plan, serve, setting, together, workload

TIMES = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4)


def step(index: int, start: int, num_rows: int, *, samples: bool = True) -> SequenceStep:
    return SequenceStep(str(index), index, (0,) * num_rows, start, 0, (), samples, 0, 0)


# --- arrivals --------------------------------------------------------------------------------------------------------


def test_arrivals_of_a_trace_are_kept_and_those_at_a_rate_are_poisson() -> None:
    traced = workload(
        input_tokens=LengthSpec(median=2, trace=(1, 2, 3)),
        output_tokens=LengthSpec(median=2, trace=(4, 5, 6)),
        arrivals_s=(0.0, 0.5, 2.0),
    )
    demand = draw_demand(traced)
    assert demand.arrivals_s.tolist() == [0.0, 0.5, 2.0]
    assert demand.input_tokens.tolist() == [1, 2, 3]
    assert demand.output_tokens.tolist() == [4, 5, 6]
    assert draw_demand(traced, all_at_once=True).arrivals_s.tolist() == [0, 0, 0]
    assert draw_demand(traced, num_requests=2).arrivals_s.tolist() == [0.0, 0.5]
    longer = draw_demand(traced, num_requests=5, rate=1.0)
    assert longer.input_tokens.tolist() == [1, 2, 3, 1, 2]
    with pytest.raises(UserError, match=r"5 requests: the trace of small has arrivals for 3: ask for fewer, or give"):
        draw_demand(traced, num_requests=5)
    many = draw_demand(workload(rate=8.0), num_requests=20_000)
    gaps = np.diff(many.arrivals_s)
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.05)
    assert np.median(many.input_tokens) == pytest.approx(60, abs=2)
    assert many.output_tokens.mean() == pytest.approx(20 * np.exp(0.18), rel=0.03)


def test_a_higher_rate_brings_the_same_requests_sooner() -> None:
    slow, fast = (draw_demand(workload(), num_requests=50, rate=rate, seed=3) for rate in (1.0, 4.0))
    assert np.allclose(slow.arrivals_s, 4 * fast.arrivals_s)
    assert np.array_equal(slow.input_tokens, fast.input_tokens)
    assert not np.array_equal(slow.input_tokens, draw_demand(workload(), num_requests=50, seed=4).input_tokens)


@pytest.mark.parametrize("asked", [{"rate": math.nan}, {"rate": 1e-320}, {"burstiness": 0.0}, {"burstiness": math.inf}])
def test_chance_without_a_mean_is_refused(asked: dict[str, float]) -> None:
    (name,) = asked
    with pytest.raises(UserError, match=f"{name} is .*: it must be above .*, at most 1e.30"):
        draw_demand(workload(), num_requests=5, **asked)  # type: ignore[arg-type]


def test_the_longest_request_is_cut() -> None:
    demand = draw_demand(workload(sigma=2.0, max_length=100), num_requests=500)
    assert (demand.input_tokens + demand.output_tokens).max() == 100
    assert demand.output_tokens.min() >= 1
    assert 0 < demand.num_cut < 500
    for wrong in ({"num_requests": 0}, {"rate": 0.0}, {"rate": float("nan")}):
        with pytest.raises(UserError, match=r"at least 1|above 0"):
            draw_demand(workload(), **wrong)  # type: ignore[arg-type]


# --- names -----------------------------------------------------------------------------------------------------------


def test_failures_by_name() -> None:
    of = workload()
    alone = pools_of(plan(of, decode=apart(attention=2, experts=1)), setting(of), draw_demand(of))
    assert parse_kill("attention[1]@12.5", alone) == Kill(pool=0, role="attention", worker=1, time_s=12.5)
    both = plan(of, prefill=together(dp=2), decode=apart(attention=3, experts=4))
    pools = pools_of(both, setting(of), draw_demand(of))
    assert parse_kill(" decode.experts[3] @ 0 ", pools) == Kill(pool=1, role="experts", worker=3, time_s=0.0)
    known = (
        r"the plan has prefill.attention\[0\] to prefill.attention\[1\], decode.attention\[0\] to decode.attention\[2\]"
    )
    for name in ("prefill.experts[0]", "attention[0]", "decode.attention[3]"):
        with pytest.raises(UserError, match=rf"there is no worker {name.replace('[', chr(92) + '[')}: {known}"):
            parse_kill(f"{name}@1", pools)
    for text in ("attention@3", "attention[0]", "worker[0]@1", "attention[-1]@2", ""):
        with pytest.raises(UserError, match=r"is no failure: write a worker and a time in seconds"):
            parse_kill(text, alone)
    for text in ("attention[0]@-1", "attention[0]@soon", "attention[0]@inf", "attention[0]@nan"):
        with pytest.raises(UserError, match=r"is no time: give seconds, at least 0"):
            parse_kill(text, alone)


# --- tables ----------------------------------------------------------------------------------------------------------


def test_tables_are_exact_for_straight_lines_and_products() -> None:
    sizes = sizes_up_to(1000)
    assert sizes[0] == 1
    assert sizes[-1] >= 1000
    assert (np.diff(sizes) >= 1).all()
    straight = line(sizes, lambda size: 3 + 2 * size)
    product = plane(sizes, sizes_up_to(500, 1.6), lambda one, two: one * two)
    for one, two in itertools.product((1, 7, 33, 999, 5000), (1, 20, 499, 900)):
        assert straight(one) == pytest.approx(3 + 2 * one)
        assert product(one, two) == pytest.approx(one * two)
    assert straight(0.0) == 5
    assert Line(np.array([1.0, 2.0]), np.array([4.0, 4.0]))(100) == 4


@pytest.mark.parametrize("phase", [apart(), apart(attention=1, experts=5, m=3), together(), together(pp=2, dp=2)])
def test_tables_hold_the_planners_costs(phase: object) -> None:
    of = workload(sigma=0.0, input_tokens=LengthSpec(median=299), output_tokens=LengthSpec(median=2))
    one_setting = setting(of)
    one = candidate_of(one_setting, phase)  # type: ignore[arg-type]
    tables = step_tables(one_setting, one, most_rows=500, most_context=1000)
    context = one_setting.lengths.context
    for rows in (1, 5, 64, 333):
        at_rows = one.having(batch=np.array([rows]))
        planned = attention_alone(one_setting, at_rows, 0, step_rows(one_setting, at_rows)).moe_layer.at(0).total_s
        assert tables.moe.rows(rows) + tables.moe.decode_s(rows, rows * context) == pytest.approx(planned, rel=0.03)
    assert tables.moe.chunk_s(64, 0) > 0
    assert tables.moe.chunk_s(64, 512) > tables.moe.chunk_s(64, 16)


def test_measured_steps_take_what_was_measured_of_their_parts() -> None:
    """Decodes by their table, prompts by theirs, and both together less than the sum: their rows are read once. What a
    few sequences take says nothing of the rows of a long prompt."""
    decode = Surface((1.0, 10.0), (1.0, 1000.0), ((1e-3, 2e-3), (2e-3, 3e-3)))
    prompts = Surface((10.0, 1000.0), (10.0, 1000.0), ((1.5e-3, 1.5e-3), (20e-3, 20e-3)))
    profile = replace(
        measured_profile(),
        attention=(
            AttentionTable(phase="decode", layer="moe", times=decode),
            AttentionTable(phase="prefill", layer="moe", times=prompts, per_cached_s=1e-8),
        ),
    )
    one_setting = replace(setting(workload()), profile=profile)
    tables = step_tables(one_setting, candidate_of(one_setting, together()), most_rows=1000, most_context=1000).moe
    assert tables.rows(10) + tables.decode_s(10, 10) == pytest.approx(2e-3)
    assert tables.rows(10) + tables.decode_s(10, 10_000) == pytest.approx(3e-3)
    assert tables.rows(1000) + tables.chunk_s(1000, 0) == pytest.approx(20e-3, rel=0.01)
    assert tables.chunk_s(1000, 500) - tables.chunk_s(1000, 0) == pytest.approx(1000 * 500 * 1e-8, rel=0.02)
    both_s = tables.rows(1000) + tables.chunk_s(990, 0) + tables.decode_s(10, 10_000)
    assert 20e-3 < both_s < 23e-3


# --- prices ----------------------------------------------------------------------------------------------------------


def end_of_rounds_s(num_layers: int, times: tuple[list[float], ...]) -> float:
    """Event by event: micro-batches pass the resources in turn, each of which keeps to their order."""
    graph = EventGraph()
    tracks = [graph.resource(f"resource {number}", InOrder()) for number in range(len(times))]
    before: dict[int, tuple[int, ...]] = {}
    for _ in range(num_layers):
        for micro_batch in range(len(times[0])):
            for track, of_track in zip(tracks, times, strict=True):
                after = before.get(micro_batch, ())
                before[micro_batch] = (graph.add("work", of_track[micro_batch], track, after=after),)
    return graph.run().end_s


@given(TIMES, TIMES, TIMES)
@settings(max_examples=50, deadline=None)
def test_a_round_of_unequal_micro_batches_is_what_the_exact_simulation_says(
    attention: list[float], experts: list[float], wire: list[float]
) -> None:
    """Never faster than possible, and the steady state of the recurrence but for the few percent of mixed cycles."""
    m = min(len(attention), len(experts), len(wire))
    t_a, t_e, t_c = attention[:m], experts[:m], wire[:m]
    formula = round_robin_s(t_a, t_c, t_e, t_c)
    layers = [40, 80]
    ends = [end_of_rounds_s(num_layers, (t_a, t_c, t_e, t_c)) for num_layers in layers]
    exact = (ends[1] - ends[0]) / (layers[1] - layers[0])
    assert exact >= formula * (1 - 1e-9)
    assert exact <= formula * 1.5
    equal = round_robin_s([t_a[0]] * m, [t_c[0]] * m, [t_e[0]] * m, [t_c[0]] * m)
    assert equal == pytest.approx(float(layer_time(m, t_a[0], t_e[0], t_c[0])))


@given(st.lists(st.integers(0, 3000), min_size=64, max_size=200), st.integers(2, 4))
@settings(max_examples=50, deadline=None)
def test_an_even_cut_is_what_the_engine_would_cut(starts: list[int], m: int) -> None:
    """Where the shortcut is taken, rows and visible tokens of each micro-batch are near the engine's."""
    sequences = [step(index, start, 1) for index, start in enumerate(starts)]
    taken = rows_of(sequences, len(sequences), m, 1024.0)
    assert sum(batch.num for batch in taken) == len(starts)
    assert sum(batch.num_decode for batch in taken) == len(starts)
    assert sum(batch.visible for batch in taken) == pytest.approx(sum(starts) + len(starts), abs=m)
    cut = split_into_micro_batches(sequences, m, 1024.0)
    cost = [sum(1 + (one.start + 1) / 1024 for one in batch) for batch in cut]
    even = sum(cost) / m
    assert max(cost) <= even * 1.15
    assert len(taken) == len(cut) == m


def test_chunks_and_decodes_are_told_apart() -> None:
    sequences = [step(0, 99, 1), step(1, 0, 40), step(2, 64, 8, samples=False)]
    (batch,) = rows_of(sequences, 49, 1, 1024.0)
    assert (batch.num, batch.num_decode, batch.visible, batch.sampled) == (49, 1, 100, 2)
    assert batch.chunks == [(40, 0), (8, 64)]
    cut = rows_of(sequences, 49, 2, 1024.0)
    assert sum(part.num for part in cut) == 49
    assert sum(part.sampled for part in cut) == 2
    assert all(part.num > 0 for part in cut)


def test_prices_grow_with_everything() -> None:
    of = workload()
    one_setting = setting(of)
    one = candidate_of(one_setting, apart())
    load = ExpertLoad(one_setting, one, fractions_of(apart(), 2), Popularity(one_setting.shares, 0), 0)
    pricer = StepPricer(one_setting, one, step_tables(one_setting, one, most_rows=500, most_context=4000))

    def price(num: int, start: int, extra: int = 0) -> float:
        sequences = [step(index, start, 1) for index in range(num)]
        if extra:
            sequences.append(step(num, 0, extra))
        return pricer.price({0: rows_of(sequences, num + extra, 2, 1024.0)}, load).duration_s

    assert price(2, 10) < price(100, 10) < price(400, 10)
    assert price(100, 10) < price(100, 3000)
    assert price(100, 10) < price(100, 10, 64) < price(100, 10, 400)
    assert 0 < load.mean_pairs < load.fullest_pairs


def test_popularity_shifts_and_counts_follow_it() -> None:
    of = workload(skew=1.0)
    one_setting = setting(of)
    one = candidate_of(one_setting, apart())
    popularity = Popularity(one_setting.shares, 5)
    load = ExpertLoad(one_setting, one, fractions_of(apart(), 2), popularity, 0)
    before = popularity.shares
    load.record(10_000, load.fullest(10_000))
    popularity.shift()
    assert sorted(popularity.shares) == pytest.approx(sorted(before))
    load.record(0, load.fullest(10_000))
    assert load.counts.sum() == 10_000
    assert load.counts / 10_000 == pytest.approx(before, abs=0.03)
    assert load.fullest(10_000) >= 10_000 * max(popularity.shares @ load.fractions) * 0.999
    assert load.replace() is None or load.fractions.sum() == pytest.approx(5)


# --- results ---------------------------------------------------------------------------------------------------------


def test_percentiles_of_gaps_are_those_of_the_tokens() -> None:
    log = ServeLog(record_steps=False)
    log.delivered(1.0, 8, {0.3: 1, 0.1: 7})
    log.delivered(2.0, 2, {0.2: 2})
    each = np.array([0.1] * 7 + [0.2] * 2 + [0.3])
    assert summary(*log.gaps_between()) == summary(each)
    assert summary(*log.gaps_between()) == {
        "mean": pytest.approx(0.14),
        "p50": 0.1,
        "p90": 0.2,
        "p99": 0.3,
        "max": 0.3,
    }
    assert summary(*log.gaps_between(after_s=1.0)) == summary(np.array([0.2, 0.2]))
    assert summary(*log.gaps_between(until_s=1.0)) == summary(np.array([0.1] * 7 + [0.3]))
    assert summary(*log.gaps_between(after_s=2.0)) == summary(*ServeLog(record_steps=False).gaps_between()) == {}


def test_samples_stay_few_and_in_order() -> None:
    log = ServeLog(record_steps=False)
    for moment in range(10 * MOST_SAMPLES):
        log.sample(moment * 0.01, [])
    log.end(1e6, [])
    times = [sample.time_s for sample in log.samples]
    assert MOST_SAMPLES / 4 <= len(times) <= MOST_SAMPLES + 1
    assert times == sorted(times)
    assert times[-1] == 1e6


def test_the_trace_file_shows_steps_failures_and_counters(tmp_path: Path) -> None:
    of = workload(rate=300.0, skew=1.5)
    made = plan(of, prefill=together(dp=2, batch=512), decode=apart(instances=2))
    options = ServingOptions(
        kills=(
            Kill(pool=1, role="attention", worker=4, time_s=0.05),
            Kill(pool=1, role="experts", worker=2, time_s=0.06),
        ),
        restart_s=0.1,
        rebalance_every_s=0.05,
        shift_every_s=0.03,
    )
    run = serve(made, of, options=options, record_steps=True)
    path = tmp_path / "trace.json"
    write_serving_trace(path, run)
    events = json.loads(path.read_text())["traceEvents"]
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert processes == {"prefill[0]": 1, "decode[0]": 2, "decode[1]": 3}
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 3}
    assert tracks == {"attention[3]", "attention[4]", "attention[5]", "experts"}
    steps = [event for event in events if event.get("cat") == "step"]
    assert sum(event["args"]["rows"] for event in steps) == sum(live.totals.num_rows for live in run.pools)
    down = [event for event in events if event.get("cat") == "failure"]
    assert [(event["name"], event["pid"]) for event in down] == [
        ("decode.attention[4] is down", 3),
        ("decode.experts[2] is down", 3),
    ]
    assert all(event["dur"] == pytest.approx(0.1e6) for event in down)
    moves = [event for event in events if event["name"] == "experts move" and event["ph"] == "i"]
    assert len(moves) == len(run.log.replacements) > 0
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {f"{pool}: {what}" for pool in ("prefill", "decode") for what in ("requests", "KV usage")}


def test_a_trace_of_many_steps_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.sim.serve_log.MOST_STEPS", 5)
    of = workload()
    run = serve(plan(of, decode=replace(apart(), batch=6)), of, record_steps=True)
    assert len(run.log.steps) == 5
    assert run.log.num_steps_left_out == run.pools[0].totals.num_steps - 5
