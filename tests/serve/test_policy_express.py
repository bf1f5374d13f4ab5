"""The express lane: a small request beside whatever large ones hold and want."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from antiphon.base.errors import UserError
from antiphon.serve.config import ServeConfig
from antiphon.serve.engine_api import RequestTooLong
from antiphon.serve.policy.request import SchedulerConfig, new_request
from antiphon.serve.policy.scheduler import choose_attention_worker
from antiphon.serve.prepare import split_for_lane
from antiphon.specs.sampling import SamplingParams
from tests.serve.policy_harness import Simulation, expected_output

TWO = SamplingParams(max_tokens=2, ignore_eos=True)
LONG = SamplingParams(max_tokens=80, ignore_eos=True)
SMALL_PROMPT = [3, 4, 5, 6]


def crowded(
    num_running: int = 8, prompt: int = 40, max_tokens: int = 80, waiting: int = 30, **changes: Any
) -> Simulation:
    """Large requests of one owner hold all slots or blocks of the main way, and more of them wait."""
    config = SchedulerConfig(
        num_blocks=8 * 30 + 32,
        block_size=4,
        max_model_len=400,
        max_batch_tokens=64,
        context_tokens_per_row=1e9,
        max_running=num_running,
        watermark_blocks=0,
        express_slots=4,
        express_blocks=32,
    )
    sim = Simulation(dataclasses.replace(config, **changes))
    params = dataclasses.replace(LONG, max_tokens=max_tokens)
    for index in range(num_running + waiting):
        sim.submit(f"large {index}", [3 + (index + at) % 20 for at in range(prompt)], params, owner="large")
    return sim


def in_last_plan(sim: Simulation, name: str) -> bool:
    return name in {step.request_id for step in sim.plans[-1].sequences}


MIXES: list[dict[str, Any]] = [
    {"prompt": 1, "max_tokens": 110},  # all slots
    {"prompt": 40, "max_tokens": 300},  # all blocks, and more are wanted: large ones push each other out
    {"prompt": 200, "max_tokens": 2},  # rows of prompts
    {"prompt": 1, "max_tokens": 2, "waiting": 500},  # a line of small ones, of one owner
    {"prompt": 200, "max_tokens": 2, "num_running": 56, "max_batch_tokens": 60},  # a row for each, and no more
]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("num_before", [0, 1, 7, 60])
def test_a_two_token_request_is_done_in_two_steps_beside_every_mix(mix: dict[str, Any], num_before: int) -> None:
    sim = crowded(**mix)
    for _ in range(num_before):
        sim.step()
    sim.submit("small", SMALL_PROMPT, TWO)
    for _ in range(2):
        sim.step()
        assert in_last_plan(sim, "small")
    assert sim.reasons["small"] == "length"
    assert sim.outputs["small"] == expected_output(SMALL_PROMPT, TWO)


def test_without_a_lane_it_waits() -> None:
    sim = crowded(express_slots=0, express_blocks=0)
    sim.submit("small", SMALL_PROMPT, TWO)
    for _ in range(40):
        sim.step()
        assert not in_last_plan(sim, "small")


def test_of_one_owner_one_request_overtakes_the_line() -> None:
    sim = crowded()
    sim.step()
    for index in range(20):
        sim.submit(f"answer {index}", SMALL_PROMPT, TWO, owner="one")
    sim.submit("other", SMALL_PROMPT, TWO)
    sim.step()
    assert in_last_plan(sim, "answer 0")
    assert in_last_plan(sim, "other")
    assert not in_last_plan(sim, "answer 1")
    sim.step()
    sim.step()
    assert in_last_plan(sim, "answer 1"), "its turn comes when the first has left"


def test_the_smallest_finds_room_beside_the_largest_of_the_lane() -> None:
    sim = crowded()
    sim.step()
    for index in range(3):
        sim.submit(f"quarter {index}", SMALL_PROMPT, dataclasses.replace(TWO, max_tokens=28))  # 8 of 32 blocks
    sim.submit("small", SMALL_PROMPT, TWO)
    sim.step()
    assert in_last_plan(sim, "quarter 0")
    assert not in_last_plan(sim, "quarter 1"), "8 are more than a quarter of the 24 that are left"
    assert in_last_plan(sim, "small")


def test_long_answers_leave_a_slot_to_short_ones() -> None:
    sim = crowded(express_slots=8, max_running=7)
    sim.step()
    for index in range(12):
        sim.submit(f"long {index}", [3], dataclasses.replace(TWO, max_tokens=27))
    for number in range(6):
        sim.submit(f"small {number}", SMALL_PROMPT, TWO)
        for _ in range(2):
            sim.step()
            assert in_last_plan(sim, f"small {number}")
    assert in_last_plan(sim, "long 0")


def test_no_lane_is_needed_while_there_is_room() -> None:
    sim = crowded(num_running=8, waiting=-7, max_batch_tokens=256)
    sim.step()
    small = sim.submit("small", SMALL_PROMPT, TWO)
    sim.step()
    assert small.status == "running"
    assert small.num_promised_blocks == 0


def test_an_endless_stream_of_small_requests_starves_nobody() -> None:
    """A request as large as the main way, as few rows as a step may have, and a new small owner each step."""
    sim = crowded(num_running=1, waiting=-1, num_blocks=32 + 45, max_batch_tokens=5)
    prompt = [3 + at % 20 for at in range(4 * 45 - 80)]
    for index in range(12):
        sim.submit(f"early {index}", [3], TWO)
    sim.submit("huge", prompt, LONG)
    for number in range(len(prompt) + 80 + 60):
        sim.submit(f"small {number}", [3], TWO)
        sim.step()
        if sim.reasons["huge"] is not None:
            break
    assert sum(reason is not None for reason in sim.reasons.values()) > 100, "the lane was used all the time"
    assert sim.outputs["huge"] == expected_output(prompt, LONG)


def test_members_are_never_pushed_out_and_keep_their_place_without_a_mask() -> None:
    sim = crowded(prompt=40, max_tokens=300)
    sim.step()
    small = sim.submit("small", SMALL_PROMPT, dataclasses.replace(TWO, max_tokens=20))
    sim.step()
    small.awaits_mask = True
    while sim.scheduler.book.num_preemptions < 3:
        sim.step()
        assert small.status == "running"
        assert not in_last_plan(sim, "small")
    small.awaits_mask = False
    sim.step()
    assert in_last_plan(sim, "small")
    assert small.num_admissions == 1


@pytest.mark.parametrize("how", ["abort", "abort in flight", "withdraw", "lose worker"])
def test_places_in_the_lane_are_given_back(how: str) -> None:
    sim = crowded()
    sim.step()
    small = sim.submit("small", SMALL_PROMPT, dataclasses.replace(TWO, max_tokens=20))
    sim.step()
    assert small.num_promised_blocks == 6
    if how == "abort":
        sim.scheduler.end("small")
    elif how == "abort in flight":
        plan = sim.plan()
        assert plan is not None
        sim.scheduler.end("small")
        assert small.num_promised_blocks, "the step in flight still writes there"
        sim.compute(plan)
    else:
        (sim.withdraw if how == "withdraw" else sim.lose_worker)()
        assert small.num_promised_blocks == 0
        sim.step()
        assert small.num_promised_blocks == 6, "it enters anew"
        return
    assert small.num_promised_blocks == len(sim.scheduler.book.lane) == 0


def test_what_a_member_computed_can_be_found_afterwards() -> None:
    sim = crowded(waiting=0)
    sim.step()
    prompt = [9, 8, 7, 6, 5, 4]
    sim.submit("first", prompt, TWO)
    sim.step()
    sim.step()
    again = new_request("again", prompt, TWO, arrival=10**6, seed=0, eos_token_ids=())
    assert len(sim.scheduler.book.find_prefix(again)) == 1


def test_a_worker_with_room_in_its_lane_has_room() -> None:
    full, crowd = crowded(express_slots=0, express_blocks=0), crowded()
    for sim in (full, crowd):
        sim.step()
    small = new_request("small", SMALL_PROMPT, TWO, arrival=10**6, seed=0, eos_token_ids=())
    assert choose_attention_worker(small, {0: full.scheduler, 1: crowd.scheduler}) == 1


def test_what_would_need_the_blocks_of_the_lane_is_refused() -> None:
    sim = crowded(waiting=-8, max_model_len=2000)
    with pytest.raises(RequestTooLong, match="above the 960 that the KV memory"):
        sim.submit("too long", [3] * 960, TWO)
    with pytest.raises(UserError, match="express_slots is 4, express_blocks 272"):
        crowded(express_blocks=272)


@pytest.mark.parametrize(
    ("max_running", "max_batch_tokens", "num_blocks", "expected"),
    [
        (256, 2048, 16384, (256, 8, 256)),
        (256, 260, 16384, (256, 4, 256)),  # rows for four more
        (256, 256, 16384, (248, 8, 256)),  # for no more: out of those that there are
        (3, 3, 16384, (3, 0, 0)),
        (256, 2048, 1024, (256, 8, 32)),
        (256, 2048, 128, (256, 8, 8)),
        (256, 2048, 66, (256, 8, 2)),  # a sequence of full length needs 64
        (256, 2048, 64, (256, 0, 0)),
        (256, 2048, 63, (256, 0, 0)),
    ],
)
def test_what_the_lane_has_of_a_worker(
    max_running: int, max_batch_tokens: int, num_blocks: int, expected: tuple[int, int, int]
) -> None:
    config = ServeConfig(
        model=Path("model"), layout="colocated", max_running=max_running, max_batch_tokens=max_batch_tokens
    )
    assert split_for_lane(config, num_blocks, 1024) == expected
