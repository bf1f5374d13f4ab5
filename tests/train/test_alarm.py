"""Alarms about routers and experts, on made-up histories."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch

from antiphon.train.setup import prepare
from antiphon.train.trainer import TrainedStep, Trainer
from antiphon.train.watch import MISSED_ROWS, PATIENCE_STEPS, RouterAlarm, collapse_limit
from tests.train.harness import config_of

EVEN = [16, 16, 16, 16, 16, 16, 16, 16]
COLLAPSED = [64, 64, 0, 0, 0, 0, 0, 0]


def test_even_use_is_silent() -> None:
    alarm = RouterAlarm([0, 2], 8, 2)
    assert not any(alarm.observe(step, [EVEN, EVEN]) for step in range(200))


def test_a_collapse_is_told_once_within_50_steps_and_again_when_it_ends() -> None:
    alarm = RouterAlarm([0, 2], 8, 2)
    told = []
    for step in range(10, 110):
        told += [(step, each) for each in alarm.observe(step, [EVEN, COLLAPSED if 20 <= step < 90 else EVEN])]
    (begun_step, (begun, had_ended)), (ended_step, ended) = [(step, each) for step, each in told if "router" in each[0]]
    assert begun_step < 20 + 50
    assert not had_ended
    assert "layer 2: the router has collapsed: expert 0 has 4.0 times the mean" in begun
    assert "since step 20: raise loss.balance" in begun
    assert ended_step == 90
    assert ended == ("layer 2: the router, collapsed since step 20, has recovered at step 90", True)
    deaths = [text for _, (text, _) in told if "dead" in text]
    assert [_expert_of(text) for text in deaths] == [2, 3, 4, 5, 6, 7], "six experts have no rows meanwhile"
    assert sum(has_ended for _, (_, has_ended) in told) == 7


def _expert_of(text: str) -> int:
    found = re.match(r"layer \d+, expert (\d+)", text)
    assert found is not None, text
    return int(found[1])


def test_a_collapse_counts_for_the_layer_even_if_the_fullest_expert_changes() -> None:
    alarm = RouterAlarm([0], 8, 2)
    other = [0, 0, 0, 0, 0, 0, 60, 68]
    told = [each for step in range(50) for each in alarm.observe(step, [COLLAPSED if step % 2 else other])]
    assert "layer 0: the router has collapsed" in told[0][0]
    assert [_expert_of(text) for text, _ in told[1:]] == [2, 3, 4, 5]


def test_a_dead_expert_is_named_and_its_return_too() -> None:
    alarm = RouterAlarm([1], 8, 2)
    without_5 = [18, 18, 18, 18, 18, 0, 19, 19]
    told = []
    for step in range(60):
        told += [(step, each) for each in alarm.observe(step, [EVEN if step < 7 or step == 50 else without_5])]
    assert [(step, _expert_of(text), has_ended) for step, (text, has_ended) in told] == [
        (7 + PATIENCE_STEPS - 1, 5, False),
        (50, 5, True),
    ]
    assert "layer 1, expert 5 is dead: no row since step 7" in told[0][1][0]


def test_an_expert_that_chance_leaves_out_is_not_dead() -> None:
    """With half a row a step expected, it takes 100 steps to know."""
    alarm = RouterAlarm([0], 8, 2)
    few = [0, 1, 1, 0, 1, 0, 1, 0]
    first = next(step for step in range(1000) if alarm.observe(step, [few]))
    assert first + 1 == MISSED_ROWS / 0.5


def test_a_layer_without_rows_says_nothing() -> None:
    alarm = RouterAlarm([0], 8, 2)
    assert not any(alarm.observe(step, [[0] * 8]) for step in range(60))


@pytest.mark.parametrize(("experts", "top_k", "limit"), [(8, 2, 3.25), (64, 8, 6.25), (256, 8, 8.0), (5, 2, 2.125)])
def test_the_limit_lies_below_the_worst_that_can_be(experts: int, top_k: int, limit: float) -> None:
    assert collapse_limit(experts, top_k) == limit < experts / top_k


def test_a_router_that_is_spoiled_in_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From then on every row of layer 1 goes to the same two experts."""
    spoiled_at = 5

    def spoil(result: TrainedStep) -> None:
        if result.step >= spoiled_at - 1:
            with torch.no_grad():
                layer = trainer.model.layers[1]
                layer.router.zero_()
                layer.post_norm.fill_(1.0)

    trainer = Trainer(prepare(config_of(tmp_path, "steps=60", "output.log_every=60")), spoil)
    with caplog.at_level(logging.WARNING, "antiphon.train"):
        trainer.run()
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    alarms = [(line["step"], line["alarm"]) for line in lines if "alarm" in line]
    assert spoiled_at <= alarms[0][0] < spoiled_at + 50
    assert "layer 1: the router has collapsed" in alarms[0][1]
    assert re.search("since step [345]:", alarms[0][1]), "two steps before it the use was uneven by itself"
    dead = [text for _, text in alarms if "is dead" in text]
    assert len(dead) == 3, "of five experts two are chosen"
    assert [record.message for record in caplog.records if record.name == "antiphon.train"] == [t for _, t in alarms]
    (last,) = (line for line in lines if "expert_rows" in line)
    assert sorted(last["expert_rows"][1]) == [0, 0, 0, 64, 64]
