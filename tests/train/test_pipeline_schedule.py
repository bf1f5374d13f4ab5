"""The order of a pipeline's passes: complete, without deadlock, as short as theory says, and how it is refused."""

import itertools

import pytest

from antiphon.base.errors import UserError
from antiphon.train.pipeline import PipelineSchedule, StagePass

SIZES = [
    (pipeline, virtual, micro_batches)
    for pipeline, virtual, micro_batches in itertools.product(range(1, 5), range(1, 4), range(1, 13))
    if virtual == 1 or micro_batches % pipeline == 0
]


def turns(schedule: PipelineSchedule, orders: list[list[StagePass]]) -> int:
    """How many turns it takes when each rank does its next action as soon as what it needs is there, which is there in
    the turn after it was made. Fails on a deadlock."""
    done, at, num_turns = set[StagePass](), [0] * len(orders), 0
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        ready = []
        for rank, order in enumerate(orders):
            if at[rank] < len(order):
                action = order[at[rank]]
                source = schedule.source(action)
                own = StagePass(False, action.stage, action.micro_batch)
                if (source is None or source in done) and (not action.backward or own in done):
                    ready.append((rank, action))
        assert ready, (
            f"all wait: {[str(order[at[rank]]) for rank, order in enumerate(orders) if at[rank] < len(order)]}"
        )
        for rank, action in ready:
            at[rank] += 1
            done.add(action)
        num_turns += 1
    return num_turns


@pytest.mark.parametrize(("pipeline", "virtual", "micro_batches"), SIZES)
def test_every_pass_is_done_once_and_nobody_waits_for_ever(pipeline: int, virtual: int, micro_batches: int) -> None:
    schedule = PipelineSchedule(pipeline=pipeline, virtual_stages=virtual)
    whole = {
        StagePass(backward, stage, micro_batch)
        for backward in (False, True)
        for stage in range(pipeline * virtual)
        for micro_batch in range(micro_batches)
    }
    orders = [schedule.step(place, micro_batches) for place in range(pipeline)]
    assert set(itertools.chain(*orders)) == whole
    assert sum(map(len, orders)) == len(whole)
    assert all(schedule.place_of(action.stage) == place for place, order in enumerate(orders) for action in order)
    if micro_batches >= pipeline:  # the work of a rank, and a bubble of pipeline - 1 passes each way
        assert turns(schedule, orders) == 2 * virtual * micro_batches + 2 * (pipeline - 1)
    else:
        assert turns(schedule, orders) > 0
    forwards = [schedule.forwards(place, micro_batches) for place in range(pipeline)]
    assert set(itertools.chain(*forwards)) == {action for action in whole if not action.backward}
    assert turns(schedule, forwards) >= virtual * micro_batches
    in_turn = [schedule.one_after_another(place, micro_batches) for place in range(pipeline)]
    assert turns(schedule, in_turn) == len(whole), "one at a time"
    assert sorted(itertools.chain(*in_turn), key=schedule.turn_of) == sorted(whole, key=schedule.turn_of)
    assert [schedule.turn_of(action) for action in sorted(whole, key=schedule.turn_of)] == list(range(len(whole)))


def test_evaluation_takes_any_number_of_micro_batches() -> None:
    for pipeline, virtual, micro_batches in itertools.product(range(1, 5), range(1, 4), range(1, 13)):
        schedule = PipelineSchedule(pipeline=pipeline, virtual_stages=virtual)
        assert turns(schedule, [schedule.forwards(place, micro_batches) for place in range(pipeline)])


def test_a_rank_holds_as_many_micro_batches_as_stages_come_after_it() -> None:
    """Forwards without their backward: what memory is needed for. Four stages, then eight on the same four ranks."""
    assert [most_held(PipelineSchedule(pipeline=4), place, 12) for place in range(4)] == [4, 3, 2, 1]
    interleaved = [most_held(PipelineSchedule(pipeline=4, virtual_stages=2), place, 12) for place in range(4)]
    assert interleaved == [11, 9, 7, 5], "of half the layers each: 4 * (1 + 3 / 8) micro-batches on the first"


def most_held(schedule: PipelineSchedule, place: int, micro_batches: int) -> int:
    steps = [-1 if action.backward else 1 for action in schedule.step(place, micro_batches)]
    return max(itertools.accumulate(steps))


@pytest.mark.parametrize(
    ("pipeline", "virtual", "micro_batches", "message"),
    [
        (4, 1, 3, r"pipeline is 4, a step has 3 micro-batches.*set micro_batch to a part of batch"),
        (2, 2, 3, r"3 micro-batches a step with virtual_stages 2 on 2 pipeline ranks: make them a multiple of 2"),
        (1, 2, 4, r"virtual_stages is 2, but a pipeline of 1 has nothing to interleave: use 1"),
    ],
)
def test_too_few_micro_batches_are_refused(pipeline: int, virtual: int, micro_batches: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        PipelineSchedule(pipeline=pipeline, virtual_stages=virtual).check(micro_batches)
