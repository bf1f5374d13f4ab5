"""The policy under random load: arrivals, aborts, tiny pools, failures. Every request ends with exactly its tokens."""

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.serve.policy.request import PENDING, SchedulerConfig, StepPlan
from antiphon.specs.sampling import SamplingParams
from tests.serve.policy_harness import Simulation, check_scheduler, expected_output

MAX_LEN = 48


@dataclass(frozen=True)
class Load:
    prompt: list[int]
    params: SamplingParams
    arrival_step: int
    abort_step: int | None
    abort_in_flight: bool
    owner: str | None


@st.composite
def loads(draw: st.DrawFn) -> Load:
    """Prompts share beginnings on purpose: they are cut from two fixed texts, with a tail of their own."""
    text = draw(st.sampled_from([[5, 6, 7, 8] * 8, [9, 8, 7] * 10]))
    prompt = text[: draw(st.integers(0, 28))] + draw(st.lists(st.integers(3, 9), max_size=4))
    params = SamplingParams(
        max_tokens=draw(st.integers(0, 16)),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (11,)])),
        prompt_logprobs=draw(st.sampled_from([None, None, 1])),
    )
    abort_step = draw(st.one_of(st.none(), st.none(), st.integers(0, 40)))
    owner = draw(st.sampled_from([None, None, "shared"]))
    return Load(prompt or [4], params, draw(st.integers(0, 20)), abort_step, draw(st.booleans()), owner)


@st.composite
def configs(draw: st.DrawFn, most_express_slots: int = 3) -> SchedulerConfig:
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    max_running = draw(st.integers(1, 6))
    express_slots = draw(st.integers(0, most_express_slots))
    express_blocks = draw(st.integers(1, 48)) if express_slots else 0
    return SchedulerConfig(
        num_blocks=-(-MAX_LEN // block_size) + draw(st.integers(0, 12)) + express_blocks,
        block_size=block_size,
        max_model_len=MAX_LEN,
        max_batch_tokens=max_running + express_slots + draw(st.integers(0, 30)),
        logprob_row_cost=draw(st.sampled_from([1.0, 1.0, 3.5])),
        max_running=max_running,
        express_slots=express_slots,
        express_blocks=express_blocks,
        watermark_blocks=draw(st.sampled_from([None, 0, 3])),
    )


FAILURES = st.dictionaries(
    st.integers(0, 60),
    st.sampled_from(["resend", "withdrawn", "unseen", "lost", "lost in flight"]),
    max_size=6,
)

MASK_DELAYS = st.dictionaries(st.integers(0, 9).map(str), st.sampled_from([1, 2, 7, 20]), max_size=6)


@settings(max_examples=150, deadline=None)
@given(configs(), st.lists(loads(), min_size=1, max_size=10), FAILURES, MASK_DELAYS)
def test_every_request_ends_with_exactly_its_tokens(
    config: SchedulerConfig, load: list[Load], failures: dict[int, str], mask_delays: dict[str, int]
) -> None:
    simulation = Simulation(config, mask_delays=mask_delays)
    aborted: set[str] = set()
    for now in range(2_000):
        for index, item in enumerate(load):
            if item.arrival_step == now:
                simulation.submit(str(index), item.prompt, item.params, owner=item.owner)

        def abort(in_flight: bool, now: int = now) -> None:
            for index, item in enumerate(load):
                if item.abort_step == now and item.abort_in_flight == in_flight:
                    request = simulation.scheduler.end(str(index))
                    if request is not None:
                        assert request.finish_reason == "abort"
                        aborted.add(str(index))

        abort(in_flight=False)
        check_scheduler(simulation.scheduler)
        failure = failures.get(now)
        if failure == "lost":
            simulation.lose_worker()
        plan = simulation.plan()
        abort(in_flight=True)
        if plan is None:
            if now > 60 and not simulation.scheduler.has_work:
                break
            continue
        if failure == "resend":
            simulation.worker.run(plan)  # computed, but the answer was lost
        elif failure in {"withdrawn", "unseen"}:
            if failure == "withdrawn":
                simulation.worker.run(plan)
            simulation.withdraw()
            continue
        elif failure == "lost in flight":
            simulation.lose_worker()
            continue
        simulation.compute(plan)
    assert not simulation.scheduler.has_work
    assert simulation.scheduler.book.pool.num_used == 0
    for index, item in enumerate(load):
        request_id = str(index)
        expected = expected_output(item.prompt, item.params)
        if request_id in aborted:
            assert simulation.outputs[request_id] == expected[: len(simulation.outputs[request_id])]
            continue
        assert simulation.outputs[request_id] == expected
        assert simulation.reasons[request_id] in {"stop", "length"}
        rows = [position for name, position in simulation.reported if name == request_id]
        wanted = range(len(item.prompt) - 1) if item.params.prompt_logprobs is not None else range(0)
        assert rows == list(wanted), "each prompt row reports once, in order"


@dataclass(frozen=True)
class _Running:
    """A step that its worker has computed and not answered."""

    plan: StepPlan
    made: Any
    written: dict[int, bytes]

    @staticmethod
    def of(simulation: Simulation, plan: StepPlan) -> "_Running":
        return _Running(plan, simulation.worker.run(plan), simulation.written(plan))

    @staticmethod
    def ahead(simulation: Simulation, before: "_Running") -> "_Running | None":
        """The step behind, planned while `before` runs; the worker puts in the tokens that it has sampled."""
        plan = simulation.plan_ahead(before.plan)
        if plan is None:
            return None
        newest = dict(zip((each.request_id for each in before.plan.sequences), before.made[0], strict=True))
        assert all(each.token_ids == (PENDING,) for each in plan.sequences)
        known = tuple(each._replace(token_ids=(newest[each.request_id],)) for each in plan.sequences)
        made = simulation.worker.run(replace(plan, sequences=known))
        return _Running(plan, made, simulation.written(plan))


def _check_chunks(steps: list[_Running]) -> None:
    """What steps in flight have of one request follows one upon the other, in the order in which they were planned."""
    ends: dict[str, int] = {}
    for running in sorted(steps, key=lambda each: each.plan.step_id):
        for step in running.plan.sequences:
            assert ends.setdefault(step.request_id, step.start) == step.start
            ends[step.request_id] = step.start + len(step.token_ids)


def _is_behind(step: _Running, lanes: list[list[_Running]]) -> bool:
    """It has a later chunk of what another step in flight computes: the worker ends it after that."""
    names = {each.request_id for each in step.plan.sequences}
    before = [lane[0].plan for lane in lanes if lane[0].plan.step_id < step.plan.step_id]
    return any(not names.isdisjoint(each.request_id for each in plan.sequences) for plan in before)


@settings(max_examples=120, deadline=None)
@given(configs(), st.lists(loads(), min_size=1, max_size=10), FAILURES, MASK_DELAYS, st.integers(1, 4), st.data())
def test_steps_side_by_side_share_no_block_and_requests_by_chunks_alone(
    config: SchedulerConfig,
    load: list[Load],
    failures: dict[int, str],
    mask_delays: dict[str, int],
    num_side_by_side: int,
    data: st.DataObject,
) -> None:
    """They end in any order, but those with chunks of one prompt in theirs, while requests are aborted, the worker is
    lost and plans are void. What a step writes stays as it is until its end. Behind some the next one was planned
    before their tokens were known."""
    simulation = Simulation(config, mask_delays=mask_delays, num_side_by_side=num_side_by_side)
    lanes: list[list[_Running]] = []
    aborted: set[str] = set()
    for now in range(3_000):
        for index, item in enumerate(load):
            if item.arrival_step == now:
                simulation.submit(str(index), item.prompt, item.params, owner=item.owner)
            if item.abort_step == now and simulation.scheduler.end(str(index)) is not None:
                aborted.add(str(index))
        check_scheduler(simulation.scheduler)
        if (failure := failures.get(now)) in {"lost", "withdrawn"}:
            lanes.clear()
            (simulation.lose_worker if failure == "lost" else simulation.withdraw)()
        while len(lanes) < num_side_by_side and (plan := simulation.plan()) is not None:
            assert len(plan.sequences) <= -(-config.max_batch_tokens // num_side_by_side)
            lanes.append([_Running.of(simulation, plan)])
            _check_chunks([each for lane in lanes for each in lane])
        if lanes:
            able = [lane for lane in lanes if not _is_behind(lane[0], lanes)]
            lane = able[data.draw(st.integers(0, len(able) - 1), "which ends")]
            if data.draw(st.booleans(), "ahead") and len(lane) == 1:
                lane += [each for each in [_Running.ahead(simulation, lane[0])] if each is not None]
            if data.draw(st.booleans(), "none ends"):
                continue  # other lanes plan beside the step ahead
            ended = lane.pop(0)
            assert simulation.written(ended.plan) == ended.written
            simulation.compute(ended.plan, ended.made)
            lanes = [each for each in lanes if each]
        elif now > 60 and not simulation.scheduler.has_work:
            break
    assert not simulation.scheduler.has_work
    assert simulation.scheduler.book.pool.num_used == 0
    for index, item in enumerate(load):
        expected = expected_output(item.prompt, item.params)
        outputs = simulation.outputs[str(index)]
        assert outputs == (expected[: len(outputs)] if str(index) in aborted else expected)


def test_a_prompt_is_not_admitted_on_the_block_of_a_token_that_is_still_pending() -> None:
    config = SchedulerConfig(
        num_blocks=6, block_size=2, max_model_len=12, max_batch_tokens=20, max_running=2, watermark_blocks=0
    )
    simulation = Simulation(config, num_side_by_side=2)
    first, second = (SamplingParams(max_tokens=count, ignore_eos=True) for count in (4, 2))
    simulation.submit("first", [3, 4], first)
    plan = simulation.plan()
    assert plan is not None
    running = _Running.of(simulation, plan)
    ahead = _Running.ahead(simulation, running)
    assert ahead is not None, "it has the block of its next token"
    simulation.submit("second", [5] * 9, second)  # five blocks, and four are free
    assert simulation.plan() is None
    simulation.compute(running.plan, running.made)
    simulation.compute(ahead.plan, ahead.made)
    simulation.run()
    assert simulation.outputs["first"] == expected_output([3, 4], first)
    assert simulation.outputs["second"] == expected_output([5] * 9, second)


@settings(max_examples=60, deadline=None)
@given(configs(most_express_slots=0), st.lists(loads(), min_size=2, max_size=10))
def test_first_admission_is_in_order_of_arrival_and_everything_ends_in_bounded_time(
    config: SchedulerConfig, load: list[Load]
) -> None:
    simulation = Simulation(config)
    for index, item in enumerate(load):
        simulation.submit(str(index), item.prompt, item.params)
    seen: list[int] = []
    num_steps = 0
    while simulation.step():
        num_steps += 1
        seen += [int(start.request_id) for start in simulation.plans[-1].starts if int(start.request_id) not in seen]
        running = [request.arrival for request in simulation.scheduler.book.running]
        waiting = [request.arrival for request in simulation.scheduler.book.waiting]
        assert running == sorted(running)
        assert not running or not waiting or max(running) < min(waiting), "somebody was overtaken"
    assert seen == list(range(len(load)))
    # at worst one request after the other, one token a step, each recomputed whenever an older one ends
    assert num_steps <= sum(len(item.prompt) + item.params.max_tokens for item in load) * len(load)


@settings(max_examples=40, deadline=None)
@given(configs(), st.lists(loads(), min_size=1, max_size=8))
def test_the_same_load_gives_the_same_plans(config: SchedulerConfig, load: list[Load]) -> None:
    def plans() -> list[object]:
        simulation = Simulation(config)
        for index, item in enumerate(load):
            simulation.submit(str(index), item.prompt, item.params)
        simulation.run()
        return list(simulation.plans)

    assert plans() == plans()


@settings(max_examples=40, deadline=None)
@given(configs(), st.lists(loads(), min_size=1, max_size=8), st.integers(0, 12))
def test_a_withdrawn_plan_is_planned_again(config: SchedulerConfig, load: list[Load], at_step: int) -> None:
    simulation = Simulation(config)
    for index, item in enumerate(load):
        simulation.submit(str(index), item.prompt, item.params)
    for _ in range(at_step):
        simulation.step()
    if simulation.plan() is None:
        return
    simulation.withdraw()
    second = simulation.plan()
    assert second is not None
    told = {start.request_id for start in second.starts}
    assert told == {step.request_id for step in second.sequences}, "the worker is told everything again"
    simulation.compute(second)
    simulation.run()
    for index, item in enumerate(load):
        assert simulation.outputs[str(index)] == expected_output(item.prompt, item.params)


@settings(max_examples=100, deadline=None)
@given(configs(), st.lists(loads(), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_requests_taken_over_from_a_lost_worker_may_be_older_than_the_running_ones(
    config: SchedulerConfig, load: list[Load], random: Any
) -> None:
    simulation = Simulation(config)
    arrivals = list(range(len(load)))
    random.shuffle(arrivals)
    for index, item in enumerate(load):
        simulation.submit(str(index), item.prompt, item.params, arrival=arrivals[index])
        for _ in range(item.arrival_step % 4):
            simulation.step()
    simulation.run()
    for index, item in enumerate(load):
        assert simulation.outputs[str(index)] == expected_output(item.prompt, item.params)


def test_an_older_prefill_does_not_push_out_what_the_step_computes_already() -> None:
    config = SchedulerConfig(num_blocks=10, block_size=2, max_model_len=20, max_batch_tokens=4, max_running=2)
    for num_steps in range(1, 12):
        for length in range(4, 16):
            simulation = Simulation(config)
            young = SamplingParams(max_tokens=14, ignore_eos=True)
            simulation.submit("young", [3, 4, 5], young, arrival=7)
            for _ in range(num_steps):
                simulation.step()
            old = SamplingParams(max_tokens=20 - length, ignore_eos=True)
            simulation.submit("old", list(range(length)), old, arrival=1)
            simulation.run()
            assert simulation.outputs["young"] == expected_output([3, 4, 5], young)
            assert simulation.outputs["old"] == expected_output(list(range(length)), old)


def test_a_long_prompt_is_in_several_steps_at_once() -> None:
    """One prompt alone keeps all steps side by side busy; its token comes with the last of its chunks."""
    config = SchedulerConfig(num_blocks=64, block_size=2, max_model_len=64, max_batch_tokens=16, max_running=2)
    simulation = Simulation(config, num_side_by_side=2)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    simulation.submit("long", list(range(3, 23)), params)
    running = []
    for _ in range(2):
        plan = simulation.plan()
        assert plan is not None
        running.append(_Running.of(simulation, plan))
    assert [(each.start, len(each.token_ids)) for step in running for each in step.plan.sequences] == [(0, 7), (7, 7)]
    simulation.compute(running[0].plan, running[0].made)
    last = simulation.plan()
    assert last is not None
    assert [(each.start, len(each.token_ids), each.samples) for each in last.sequences] == [(14, 6, True)]
    for step in (running[1], _Running.of(simulation, last)):
        simulation.compute(step.plan, step.made)
    simulation.run()
    assert simulation.outputs["long"] == expected_output(list(range(3, 23)), params)
