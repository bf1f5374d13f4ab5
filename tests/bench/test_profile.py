"""The profiler on a tiny model, and what is made of its tables."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from antiphon.base.errors import PeerLost, UserError
from antiphon.bench.harness import children
from antiphon.bench.harness.children import ChildFailed, Children
from antiphon.bench.profile.exchange import Rounds, Served, exchange_medians
from antiphon.bench.profile.local_times import Wanted, default_threads, measure
from antiphon.bench.profile.measure import NORMAL, QUICK, gaps_between_steps, start_rigs, step_parts
from antiphon.bench.profile.rig import PartSeconds, Rig, RigWork
from antiphon.bench.profile.this_machine import cost_profile, this_cluster
from antiphon.cost.profile import LocalTimes, read_profile
from antiphon.models.config import load_model_spec
from antiphon.planner.local_prediction import LocalChoice, predict_decode
from antiphon.serve.worker.spans import ATTENTION, NAMES, SAMPLE, STEP, Spans
from antiphon.serve.worker_handle import WorkerName
from antiphon.specs.checked import read
from antiphon.specs.cluster import cluster_from_json, cluster_to_json
from tests.serve.fork_server import PROGRAMS

ROWS, CONTEXT = 3, 20


@pytest.fixture(scope="module", autouse=True)
def forked_rigs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(children, "subprocess", PROGRAMS)
        yield


def opening(checkpoint: Path, max_rows: int = 4) -> tuple[str, str, str, int, int, int]:
    return str(checkpoint), "float32", "auto", max_rows, 256, 64


@pytest.fixture(scope="module")
def rig(checkpoint: Path) -> Rig:
    return Rig(*opening(checkpoint))


@pytest.fixture(scope="module")
def measured(checkpoint: Path) -> LocalTimes:
    """The whole profile, briefly; steps of the progress are counted."""
    seen: list[tuple[float, float | None]] = []
    times = measure(Wanted(model=checkpoint, effort=QUICK), lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1], "the progress ends where it said it would"
    return times


@pytest.mark.parametrize("kind", ["colocated", "attention"])
def test_a_step_is_told_apart_into_its_parts(rig: Rig, kind: str) -> None:
    work = RigWork(kind="colocated" if kind == "colocated" else "attention", rows=ROWS, context=CONTEXT)
    for _ in range(2):
        rig.run_once(work)
    times = rig.times_of(work)
    assert [len(part) for part in (times.attention, times.head, times.step)] == [2, 2, 2]
    assert len(times.experts) == (2 if kind == "colocated" else 0)
    assert min(times.attention + times.head) > 0
    assert rig.times_of(work) == PartSeconds()


def test_experts_are_given_what_the_gate_chose_for_those_held(rig: Rig) -> None:
    every = RigWork(kind="experts", rows=ROWS, context=CONTEXT, num_held=rig.spec.router.num_experts)
    rig.run_once(every)
    captured = rig._captured(every)
    assert len({ids_TK.numpy().tobytes() for draw in captured for _, ids_TK, _ in draw.values()}) > len(captured[0])
    sent = captured[0]
    assert set(sent) == {layer for layer, routes in enumerate(rig.spec.moe_layers) if routes}
    assert all(rows_TH.shape[0] == ROWS and int(ids_TK.min()) >= 0 for rows_TH, ids_TK, _ in sent.values())
    one = RigWork(kind="experts", rows=ROWS, context=CONTEXT, num_held=1)
    held = rig._captured(one)[0]
    for layer, (rows_TH, ids_TK, _) in held.items():
        _, sent_ids_TK, _ = sent[layer]
        assert rows_TH.shape[0] == (sent_ids_TK == 0).any(dim=1).sum()
        assert set(ids_TK.unique().tolist()) <= {-1, 0}
    rig.run_once(one)
    assert len(rig.times_of(one).experts) >= 1


def test_many_rows_are_drawn_once(checkpoint: Path) -> None:
    """Every draw of them reads all experts, and what several take would fill the memory."""
    rig = Rig(*opening(checkpoint, max_rows=20))
    draws = [len(rig._captured(RigWork(kind="experts", rows=rows, num_held=1))) for rows in (ROWS, 20)]
    assert draws == [8, 1]


def test_a_prompt_is_one_sequence_from_its_beginning(rig: Rig) -> None:
    work = RigWork(kind="attention", rows=1, prompt_tokens=40)
    rig.run_once(work)
    assert len(rig.times_of(work).attention) == 1
    later = RigWork(kind="attention", rows=1, prompt_tokens=16, cached_tokens=24)
    ((sequence,),) = rig._steps_of(later)[0].micro_batches
    assert (sequence.start, len(sequence.token_ids), len(sequence.new_blocks)) == (24, 16, 3)
    rig.run_once(later)
    assert len(rig.times_of(later).attention) == 1


def test_a_process_says_what_went_wrong_in_one_line(checkpoint: Path, tmp_path: Path) -> None:
    with Children("the profiler's process") as crew:
        (handle,) = start_rigs(crew, ["worker 7"])
        handle.ask("settle", 1, [0])
        with pytest.raises(ChildFailed, match=r"process worker 7: .*none"):
            handle.ask("open", *opening(tmp_path / "none"))
        os.kill(handle.pid, signal.SIGKILL)
        with pytest.raises(PeerLost, match="worker 7: killed by SIGKILL: is there enough memory"):
            handle.ask("open", *opening(checkpoint))


def test_the_profile_answers_for_every_layout(measured: LocalTimes, checkpoint: Path) -> None:
    spec = load_model_spec(checkpoint)
    expected = [(count, True) for count in default_threads(measured.num_cores)]
    if measured.num_cores > 1:  # fewer threads than cores: apart from the other side, too
        expected.insert(1, (expected[1][0], False))
    assert [(each.num_threads, each.both_sides) for each in measured.threads] == expected
    choices = [LocalChoice(layout="colocated"), LocalChoice(layout="colocated", num_attention=measured.num_cores)]
    if measured.num_cores <= 2:
        choices.append(LocalChoice(layout="disaggregated", num_micro_batches=2))
    for choice in choices:
        few = predict_decode(measured, spec, choice, concurrency=4, context=32)
        many = predict_decode(measured, spec, choice, concurrency=64, context=32)
        for count, predicted in ((4, few), (64, many)):
            assert predicted.tpot_s == pytest.approx(sum(predicted.parts_s.values()))
            assert predicted.tokens_per_s == pytest.approx(count / predicted.tpot_s)
    assert measured.exchange.message_bytes.seconds[0] >= spec.hidden_size * 2


def test_the_planner_reads_what_was_measured(measured: LocalTimes, checkpoint: Path, tmp_path: Path) -> None:
    spec = load_model_spec(checkpoint)
    profile = cost_profile(measured, spec, "antiphon profile tiny")
    (tmp_path / "profile.json").write_text(json.dumps(asdict(profile)))
    assert read_profile(tmp_path / "profile.json") == profile
    assert read(type(profile), json.loads(json.dumps(asdict(profile))), "profile") == profile
    fewest = min(measured.threads, key=lambda each: each.num_threads)
    table = profile.attention_table("decode")
    assert table is not None
    assert float(table.times.at(1.0, 1.0)) == pytest.approx(fewest.attention_s.seconds[0])
    prompts = profile.attention_table("prefill")
    assert prompts is not None
    assert prompts.per_cached_s == fewest.per_cached_s is not None
    experts = profile.expert_table()
    assert experts is not None
    num_experts, top_k = spec.router.num_experts, spec.router.top_k
    row = experts.times.first.index(num_experts)
    assert experts.times.seconds[row][experts.times.second.index(top_k)] == fewest.experts_s[num_experts].value(1)
    assert profile.messages


def test_this_machine_is_a_cluster_that_the_planner_reads(measured: LocalTimes, checkpoint: Path) -> None:
    cluster = this_cluster(measured, load_model_spec(checkpoint))
    assert cluster_from_json(json.loads(json.dumps(cluster_to_json(cluster))), "cluster") == cluster
    (group,) = cluster.groups
    assert group.devices_per_node == measured.num_cores
    assert group.device.kind == "cpu"
    assert set(group.device.sources) == {
        "memory_bytes",
        "memory_bytes_per_s",
        "flops_per_s",
        "scale_up_bytes_per_s",
        "scale_out_bytes_per_s",
        "power_w",
    }


def test_sizes_stay_within_the_model_and_what_is_wanted() -> None:
    bounded = NORMAL.bounded(20, 300)
    assert bounded.rows == (1, 2, 4, 8, 16, 20)
    assert bounded.prompts == (32, 128, 300)
    assert bounded.contexts == (64, 300)
    assert bounded.later_piece == (128, 172)
    assert NORMAL.bounded(256, 8192) == NORMAL
    assert NORMAL.bounded(1, 10).contexts == (5, 10)
    with pytest.raises(UserError, match="--max-rows is 0: it must be at least 1"):
        NORMAL.bounded(0, 100)
    with pytest.raises(UserError, match="context is 1: at least 2 tokens"):
        NORMAL.bounded(1, 1)


def spans_of(steps: list[tuple[int, int, int, int]]) -> Spans:
    """(step, rows, begin, end in ns); a layer's attention and a sample within each."""
    records = [(STEP, step, rows, begin, end) for step, rows, begin, end in steps]
    records += [(kind, step, 0, begin, end) for kind in (ATTENTION, SAMPLE) for step, _, begin, end in steps]
    return Spans(
        names=NAMES,
        name_index=[kind for kind, *_ in records],
        layers=[0 if kind == ATTENTION else -1 for kind, *_ in records],
        micro_batches=[-1] * len(records),
        rows=[rows for _, _, rows, _, _ in records],
        steps=[step for _, step, *_ in records],
        starts_ns=[begin for *_, begin, _ in records],
        ends_ns=[end for *_, end in records],
    )


def test_the_engines_turn_is_between_full_steps_of_all_workers() -> None:
    first = spans_of([(1, 4, 0, 100), (2, 4, 150, 260), (3, 4, 300, 400), (4, 2, 450, 500)])
    second = spans_of([(1, 4, 10, 120), (2, 4, 155, 250), (3, 3, 310, 390)])
    assert gaps_between_steps([first], 4) == pytest.approx([50e-9, 40e-9])
    assert gaps_between_steps([first, second], 8) == pytest.approx([30e-9])
    assert gaps_between_steps([first], 7) == []


def test_steps_count_however_two_workers_share_the_requests() -> None:
    """5 and 3 of 8 requests: all steps have 10 ns of sampling at one worker, 20 at the other."""
    steps = [(step, 100 * step, 100 * step + 10) for step in range(1, 6)]
    first = spans_of([(step, 5, begin, end) for step, begin, end in steps])
    second = spans_of([(step, 3, begin, end + 10) for step, begin, end in steps])
    experts = spans_of([(step, 8, begin, end) for step, begin, end in steps])
    names = (WorkerName("attention", 0), WorkerName("attention", 1), WorkerName("experts", 0))
    parts = step_parts(dict(zip(names, (first, second, experts), strict=True)), 8)
    assert (parts["head"], parts["engine"]) == pytest.approx((15e-9, 80e-9))
    assert step_parts(dict(zip(names, (first, second, experts), strict=True)), 9) == {}


def test_calls_and_ways_of_an_exchange_from_both_clocks() -> None:
    """Two rounds of a kind. A dispatch takes 10, a way 5 beyond the calls, a receive 20, a reply 7, a combine 3."""
    us = 1000
    dispatch = [(0, 10 * us)] * 6
    combine = [(0, (100 + 7 + 5 + 3) * us)] * 2 + [(0, 3 * us)] * 2 + [(0, 50 * us)] * 2
    receive = [(0, 0)] + [(0, (10 + 5 + 20) * us)] * 2 + [(0, 0)] * 2 + [(0, 99 * us), (0, 20 * us)]
    reply = [(0, 0)] + [(100 * us, 107 * us)] * 6
    found = exchange_medians(
        Rounds(dispatch_ns=dispatch, combine_ns=combine, message_bytes=64),
        Served(receive_ns=receive, reply_ns=reply),
        first=1,
    )
    assert found["dispatch_s"] == pytest.approx(10e-6)
    assert found["receive_s"] == pytest.approx(20e-6)
    assert found["reply_s"] == pytest.approx(7e-6)
    assert found["combine_s"] == pytest.approx(3e-6)
    assert found["one_way_s"] == pytest.approx(5e-6)
