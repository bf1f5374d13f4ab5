"""Single decisions of the scheduler, one at a time, and the errors that users see."""

import dataclasses
from typing import Any

import pytest

from antiphon.base.errors import UserError
from antiphon.serve.engine_api import RequestTooLong
from antiphon.serve.policy.request import PENDING, SchedulerConfig, SequenceStep, chunk_cost, prefill_of
from antiphon.serve.worker.attention import with_sampled
from antiphon.serve.worker.messages import Sampled
from antiphon.specs.sampling import SamplingParams
from tests.serve.policy_harness import EOS, Simulation, check_scheduler, expected_output

FREE = SamplingParams(max_tokens=8, ignore_eos=True)


def simulation(**changes: Any) -> Simulation:
    config = SchedulerConfig(
        num_blocks=16,
        block_size=4,
        max_model_len=64,
        max_batch_tokens=32,
        context_tokens_per_row=1e9,
        max_running=4,
        watermark_blocks=0,
    )
    return Simulation(dataclasses.replace(config, **changes))


def chunks(sim: Simulation) -> list[tuple[str, int, int]]:
    """(request, start, number of tokens) of the last plan."""
    return [(step.request_id, step.start, len(step.token_ids)) for step in sim.plans[-1].sequences]


def test_decodes_come_first_then_running_prefills_then_waiting() -> None:
    sim = simulation(max_batch_tokens=10)
    sim.submit("a", [3] * 4, FREE)
    sim.submit("b", list(range(3, 19)), FREE)
    sim.step()
    assert chunks(sim) == [("a", 0, 4), ("b", 0, 6)]
    sim.submit("c", [7] * 2, FREE)
    sim.step()
    assert chunks(sim) == [("a", 4, 1), ("b", 6, 7), ("c", 0, 2)]
    sim.step()
    assert chunks(sim) == [("a", 5, 1), ("c", 2, 1), ("b", 13, 3)]
    sim.run()


def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    """Four long prompts came first: the short one is in the step after its arrival, and few rows are left unused."""
    sim = simulation(num_blocks=1024, max_model_len=1024, max_batch_tokens=256, max_running=8)
    for name in "abcd":
        sim.submit(name, list(range(3, 903)), FREE)
    sim.step()
    assert [name for name, _, _ in chunks(sim)] == ["a", "b", "c", "d"]
    sim.submit("short", [7] * 5, FREE)
    sim.step()
    assert ("short", 0, 5) in chunks(sim)
    assert sum(rows for _, _, rows in chunks(sim)) > 240
    while sim.reasons["a"] is None:
        assert sim.step()
    assert sim.reasons["b"] is None, "the oldest has the largest share"
    sim.run()


def test_rows_that_see_a_long_context_are_fewer() -> None:
    """Chunks of a long prompt cost at most as much as `max_batch_tokens` rows without a context."""
    ratio = 50.0
    sim = simulation(
        num_blocks=256, max_model_len=1000, max_batch_tokens=256, max_running=8, context_tokens_per_row=ratio
    )
    sim.submit("long", [3] * 900, SamplingParams(max_tokens=1))
    costs, rows = [], []
    while sim.step():
        ((_, start, num_rows),) = chunks(sim)
        costs.append(chunk_cost(start, num_rows, ratio))
        rows.append(num_rows)
    assert max(costs) <= 256
    assert min(costs[:-1]) > 0.7 * 256
    assert rows[0] > 100
    assert rows[-2] < 20


@pytest.mark.parametrize("cost", [1.0, 4.0])
def test_rows_that_report_log_probabilities_are_fewer(cost: float) -> None:
    """A step of theirs lasts no longer than one of other rows; short prompts beside them are not held up."""
    sim = simulation(num_blocks=512, max_model_len=1000, max_batch_tokens=256, max_running=8, logprob_row_cost=cost)
    reports = SamplingParams(max_tokens=1, prompt_logprobs=20)
    for index in range(3):
        sim.submit(f"long {index}", [3 + index] * 600, reports)
    while sim.step():
        assert sum(rows for name, _, rows in chunks(sim) if name.startswith("long")) <= 256 / cost + 1
        if len(sim.plans) == 3:
            sim.submit("short", [7] * 5, FREE)
    assert ("short", 0, 5) in [(step.request_id, step.start, len(step.token_ids)) for step in sim.plans[3].sequences]
    assert len(sim.reported) == 3 * 599


def test_a_plan_names_only_new_blocks_after_the_first() -> None:
    sim = simulation(block_size=2)
    sim.submit("a", [3, 4, 5], FREE)
    sim.step()
    (step,) = sim.plans[-1].sequences
    assert (step.first_new_block, len(step.new_blocks), len(sim.plans[-1].starts)) == (0, 2, 1)
    sim.step()
    (step,) = sim.plans[-1].sequences
    assert (step.first_new_block, step.new_blocks, sim.plans[-1].starts) == (2, (), ())
    sim.step()
    (step,) = sim.plans[-1].sequences
    assert (step.first_new_block, len(step.new_blocks)) == (2, 1)


def test_the_latest_arrival_gives_way_and_comes_back_first() -> None:
    sim = simulation(num_blocks=6, block_size=2, max_model_len=12)
    a = sim.submit("a", [3, 4, 5, 6], FREE)
    b = sim.submit("b", [7, 8, 9, 10], FREE)
    c = sim.submit("c", [3, 3], FREE)
    while not sim.scheduler.book.num_preemptions:
        assert sim.step()
    assert (a.status, b.status, c.status) == ("running", "running", "waiting")
    while sim.scheduler.book.num_preemptions < 2:
        assert sim.step()
    assert [request.request_id for request in sim.scheduler.book.waiting] == ["b", "c"]
    sim.run()
    assert sim.outputs["b"] == expected_output([7, 8, 9, 10], FREE)


def test_a_large_prompt_at_the_head_is_not_overtaken() -> None:
    sim = simulation(num_blocks=8)
    sim.submit("running", [3] * 8, FREE)
    sim.step()
    sim.submit("large", [4] * 24, FREE)
    sim.submit("small", [5], FREE)
    while "large" not in {start.request_id for start in sim.plans[-1].starts}:
        assert "small" not in {step.request_id for step in sim.plans[-1].sequences}
        assert sim.step()
    sim.run()


def test_a_prompt_is_admitted_only_if_all_of_it_fits() -> None:
    sim = simulation(max_batch_tokens=8, watermark_blocks=1)
    sim.submit("a", list(range(3, 34)), FREE)  # 8 of 16 blocks
    sim.submit("b", list(range(35, 3, -1)), FREE)  # 8 blocks: its first chunk would fit beside a, all of it would not
    while sim.reasons["a"] is None:
        assert sim.step()
        assert {name for name, _, _ in chunks(sim)} == {"a"}
    sim.run()
    assert sim.scheduler.book.num_preemptions == 0


def test_a_second_request_starts_from_the_cached_prefix_but_computes_its_last_token() -> None:
    sim = simulation()
    prompt = list(range(3, 15))  # exactly three blocks
    sim.submit("a", prompt, FREE)
    sim.step()
    b = sim.submit("b", prompt, FREE)
    sim.step()
    assert ("b", 8, 4) in chunks(sim)
    assert b.num_cached_tokens == 8
    assert sim.scheduler.book.prefix_query_tokens == 24
    assert sim.scheduler.book.prefix_hit_tokens == 8
    sim.run()
    assert sim.outputs["a"] == sim.outputs["b"]


def test_blocks_are_not_offered_before_they_are_computed() -> None:
    sim = simulation(max_batch_tokens=64)
    prompt = list(range(3, 15))
    sim.submit("a", prompt, FREE)
    sim.submit("b", prompt, FREE)
    sim.step()
    assert chunks(sim) == [("a", 0, 12), ("b", 0, 12)]


def test_prompt_logprobs_compute_every_row_whatever_is_cached() -> None:
    sim = simulation()
    prompt = list(range(3, 15))
    sim.submit("a", prompt, FREE)
    sim.step()
    b = sim.submit("b", prompt, dataclasses.replace(FREE, prompt_logprobs=0))
    sim.run()
    assert b.num_cached_tokens == 0
    assert [position for name, position in sim.reported if name == "b"] == list(range(11))


def test_stop_reasons() -> None:
    sim = simulation(num_blocks=64)
    prompt = [3, 4, 5]
    free = expected_output(prompt, dataclasses.replace(FREE, max_tokens=30))
    stop = next(token for token in free if token != EOS)
    sim.submit("length", prompt, FREE)
    sim.submit("stop", prompt, dataclasses.replace(FREE, stop_token_ids=(stop,)))
    sim.submit("both", prompt, SamplingParams(max_tokens=free.index(stop) + 1, ignore_eos=True, stop_token_ids=(stop,)))
    sim.submit("nothing", prompt, SamplingParams(max_tokens=0))
    sim.run()
    assert sim.reasons == {"length": "length", "stop": "stop", "both": "stop", "nothing": "length"}
    assert sim.outputs["stop"][-1] == stop
    assert sim.outputs["nothing"] == []


def test_eos_ends_unless_ignored() -> None:
    prompt = next([3, tail] for tail in range(200) if EOS in expected_output([3, tail], FREE))
    sim = simulation()
    sim.submit("ends", prompt, SamplingParams(max_tokens=8))
    sim.submit("goes on", prompt, FREE)
    sim.run()
    assert sim.outputs["ends"][-1] == EOS
    assert sim.reasons["ends"] == "stop"
    assert len(sim.outputs["goes on"]) == 8


def test_abort_in_flight_frees_with_the_commit_and_drops_the_token() -> None:
    sim = simulation()
    sim.submit("a", [3] * 8, FREE)
    plan = sim.plan()
    assert plan is not None
    request = sim.scheduler.end("a")
    assert request is not None
    assert request.finish_reason == "abort"
    assert sim.scheduler.end("a") is None
    assert sim.scheduler.book.pool.num_used == 2, "the step in flight still writes there"
    assert sim.compute(plan) == []
    assert sim.scheduler.book.pool.num_used == 0
    assert not sim.scheduler.has_work
    assert sim.scheduler.end("unknown") is None


def test_the_worker_is_told_what_it_may_forget() -> None:
    sim = simulation()
    sim.submit("a", [3], SamplingParams(max_tokens=1))
    sim.submit("b", [4], FREE)
    sim.step()
    sim.step()
    assert sim.plans[-1].released == ("a",)
    sim.step()
    assert sim.plans[-1].released == ()


def test_evacuated_requests_finish_elsewhere_with_the_same_text() -> None:
    old, new = simulation(), simulation()
    prompts = {"a": [3, 4, 5], "b": [6] * 9, "c": [7]}
    for name, prompt in prompts.items():
        old.submit(name, prompt, FREE)
    for _ in range(3):
        old.step()
    new.outputs, new.reasons = old.outputs, old.reasons
    for request in old.scheduler.remove_all(cache_lost=True):
        new.scheduler.add(request)
    assert not old.scheduler.has_work
    check_scheduler(old.scheduler)
    new.run()
    assert new.outputs == {name: expected_output(prompt, FREE) for name, prompt in prompts.items()}


@pytest.mark.parametrize("seen", [False, True])
def test_withdrawn_requests_come_back_to_a_worker_that_kept_its_cache(seen: bool) -> None:
    """The plan in flight is void, whether or not the worker has seen it; what can be found in the cache still is."""
    sim = simulation()
    prompts = {"a": [3, 4, 5], "b": [6] * 9, "c": [7]}
    for name, prompt in prompts.items():
        sim.submit(name, prompt, FREE)
    sim.step()
    plan = sim.plan()
    assert plan is not None
    if seen:
        sim.worker.run(plan)
    sim.scheduler.end("c")
    num_published = len(sim.scheduler.book.pool._block_of)
    requests = sim.scheduler.remove_all()
    assert [request.request_id for request in requests] == ["a", "b"]
    assert not sim.scheduler.has_work
    check_scheduler(sim.scheduler)
    assert len(sim.scheduler.book.pool._block_of) == num_published > 0
    for request in reversed(requests):
        sim.scheduler.add(request)
    sim.run()
    assert [sim.outputs[name] for name in ("a", "b")] == [expected_output(prompts[name], FREE) for name in ("a", "b")]


def test_what_cannot_fit_is_refused_with_value_limit_and_mend() -> None:
    sim = simulation(num_blocks=4, max_model_len=100)
    with pytest.raises(
        RequestTooLong, match=r"prompt \(10\) plus max_tokens \(8\) is 18 tokens, above the 16 that .* KV"
    ):
        sim.submit("a", [3] * 10, FREE)
    sim = simulation(max_model_len=17)
    with pytest.raises(RequestTooLong, match=r"is 18 tokens, above the context length of 17: shorten the prompt"):
        sim.submit("a", [3] * 10, FREE)
    sim.submit("b", [3] * 9, FREE)
    with pytest.raises(UserError, match="the prompt is empty"):
        sim.submit("c", [], FREE)


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    sim = simulation(vocab_size=24)
    with pytest.raises(UserError, match="the prompt names token 24: it must be between 0 and 23"):
        sim.submit("a", [3, 24], FREE)
    with pytest.raises(UserError, match="stop_token_ids names token -1"):
        sim.submit("a", [3], SamplingParams(stop_token_ids=(-1,)))
    with pytest.raises(UserError, match="logit_bias names token 99"):
        sim.submit("a", [3], SamplingParams(logit_bias={99: 1.0}))


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UserError, match=r"max_batch_tokens is 3, max_running is 4: .* raise max_batch_tokens"):
        simulation(max_batch_tokens=3)
    with pytest.raises(UserError, match="block_size is 0"):
        simulation(block_size=0)


def test_a_smaller_priority_goes_first_and_gives_way_last() -> None:
    sim = simulation(max_running=1, max_batch_tokens=32)
    urgent, patient = (dataclasses.replace(FREE, priority=priority) for priority in (-1, 5))
    sim.submit("a", [3] * 4, FREE)
    sim.step()
    for name, params in (("patient", patient), ("b", FREE), ("urgent", urgent), ("urgent too", urgent)):
        sim.submit(name, [7] * 4, params)
    sim.run()
    first_steps = [step.request_id for plan in sim.plans for step in plan.sequences if step.start == 0]
    assert first_steps == ["a", "urgent", "urgent too", "b", "patient"]


def test_memory_is_taken_from_the_largest_priority() -> None:
    sim = simulation(num_blocks=5, block_size=4, max_running=2, max_model_len=16)
    sim.submit("patient", [3] * 8, dataclasses.replace(FREE, priority=5))
    sim.step()
    sim.submit("urgent", [7] * 7, FREE)
    sim.run()
    assert sim.scheduler.book.num_preemptions > 0
    assert sim.scheduler.requests == {}
    last = {step.request_id: number for number, plan in enumerate(sim.plans) for step in plan.sequences}
    assert last["urgent"] < last["patient"]


def test_a_plan_that_is_sent_again_forgets_no_request_that_another_has_started() -> None:
    sim = simulation()
    sim.num_side_by_side = 2
    sim.submit("x", [3, 4], FREE)
    sim.step()
    sim.scheduler.end("x")
    sim.submit("y", [5], FREE)
    failed = sim.plan()
    assert failed is not None
    assert failed.released == ("x",)
    sim.worker.run(failed)  # and the answer is lost
    sim.submit("x", [6, 7], FREE)
    assert sim.step(), "beside it, with a start of its own"
    again = sim.scheduler.released_by(failed, is_again=True)
    assert (again, sim.scheduler.released_by(failed, is_again=False)) == ([], ["x"])
    made = sim.worker.run(dataclasses.replace(failed, released=tuple(again)))
    sim.compute(failed, made)
    sim.run()
    assert sim.outputs["x"] == expected_output([6, 7], FREE)


@pytest.mark.parametrize("aborted", ["a", "b"])
@pytest.mark.parametrize("is_alone", [False, True])
def test_a_step_planned_ahead_is_sent_again_without_a_request_that_was_aborted(aborted: str, is_alone: bool) -> None:
    sim = simulation()
    for name in aborted if is_alone else "ab":
        sim.submit(name, [3] * 4, FREE)
    sim.step()
    first = sim.plan()
    assert first is not None
    second = sim.plan_ahead(first)
    assert second is not None
    planned = [list(second.sequences)]
    assert sim.scheduler.with_known_tokens(planned) == planned, "nothing is known yet"
    sim.scheduler.end(aborted)
    sim.compute(first)
    (known,) = sim.scheduler.with_known_tokens(planned)
    assert [each.request_id for each in known] == [each.request_id for each in second.sequences]
    assert all(each.token_ids != (PENDING,) for each in known), "the worker has forgotten what it sampled"
    assert with_sampled(known, []) == known


def test_tokens_of_the_step_before_take_the_place_of_those_that_are_not_known() -> None:
    rows = [SequenceStep(name, 0, (token,), 4, 1, (), True, 0, 0) for name, token in (("a", PENDING), ("b", 0))]
    sampled = [Sampled(request_id="a", token_id=7)]
    found = with_sampled(rows, sampled)
    assert found is not None
    assert [each.token_ids for each in found] == [(7,), (0,)]
    assert with_sampled(rows, []) is None


def test_a_request_comes_to_a_worker_that_still_computes_what_was_handed_over_of_it() -> None:
    """A drained worker computes for another one, which dies, and serves again before that step has ended."""
    sim = simulation()
    sim.num_side_by_side = 2
    prompt = list(range(3, 12))
    origin = sim.submit("a", prompt, FREE)
    sim.scheduler.remove(origin)
    sim.scheduler.add(prefill_of(origin, "a/1"))
    in_flight = sim.plan()
    assert in_flight is not None
    assert chunks(sim) == [("a/1", 0, 9)]
    sim.scheduler.end("a/1")
    sim.scheduler.add(origin)
    plan = sim.plan()
    assert plan is not None
    assert chunks(sim) == [("a", 0, 9)]
    sim.compute(in_flight)
    sim.compute(plan)
    sim.run()
    assert sim.outputs["a"] == expected_output(prompt, FREE)
