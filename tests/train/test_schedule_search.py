"""The search for an order of operators, and a run that uses it."""

import itertools
import json
from pathlib import Path

import pytest

from antiphon.base.errors import UserError
from antiphon.train.layer_schedule import GRADIENT, START_GRADIENT, WAIT_GRADIENT, WEIGHTS, Action
from antiphon.train.schedule_search import ActionTimes, Needs, search, seconds_of
from antiphon.train.setup import prepare
from antiphon.train.trainer import Trainer
from tests.train.harness import config_of

OUT, START, WAIT, IN = (
    Action(GRADIENT, "fc2"),
    Action(START_GRADIENT, "dispatch"),
    Action(WAIT_GRADIENT, "dispatch"),
    Action(GRADIENT, "ln2"),
)
FIRST, SECOND = Action(WEIGHTS, "fc1"), Action(WEIGHTS, "fc2")
ORDER = (FIRST, OUT, START, WAIT, IN, SECOND)
NEEDS: Needs = {FIRST: {}, OUT: {}, START: {OUT: ""}, WAIT: {START: ""}, IN: {WAIT: ""}, SECOND: {OUT: ""}}
TIMES = ActionTimes({OUT: 2.0, IN: 1.0, FIRST: 3.0, SECOND: 4.0}, {START: 5.0})


def allowed(order: tuple[Action, ...]) -> bool:
    return all(order.index(other) < order.index(action) for action in order for other in NEEDS[action])


def test_the_search_is_exact_for_a_small_layer() -> None:
    every = [seconds_of(order, TIMES) for order in itertools.permutations(ORDER) if allowed(order)]
    order, seconds, is_exact = search(ORDER, NEEDS, TIMES)
    assert is_exact
    assert allowed(order)
    assert seconds == seconds_of(order, TIMES) == min(every) == 10.0
    assert seconds_of(ORDER, TIMES) == 15.0


def test_a_search_cut_short_is_never_worse() -> None:
    order, seconds, is_exact = search(ORDER, NEEDS, TIMES, most_states=1)
    assert not is_exact
    assert allowed(order)
    assert seconds <= seconds_of(ORDER, TIMES)


def test_a_run_searches_once_and_learns_the_same(tmp_path: Path) -> None:
    losses = []
    for name in ("false", "true", "true"):
        config = config_of(tmp_path / name, f"overlap.search={name}", "steps=3", "memory.remake=selective")
        (tmp_path / name / "out/metrics.jsonl").unlink(missing_ok=True)
        Trainer(prepare(config)).run()
        lines = (tmp_path / name / "out/metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line).get("loss") for line in lines])
        for each in (tmp_path / name / "out").glob("checkpoints/*"):
            each.rename(tmp_path / f"{each.name}-{len(losses)}")
    assert losses[0] == losses[1] == losses[2], "an order changes no number"
    written = (tmp_path / "true/out/schedule-MoE-stage-0.txt").read_text()
    assert written.startswith("forward:\nln1\n")
    other = config_of(tmp_path / "other", f"overlap.schedule={tmp_path}/true/out/schedule-MoE-stage-0.txt", "steps=3")
    Trainer(prepare(other)).run()


def test_a_schedule_and_a_search_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"schedule is .*a.txt and search is true: give one of them"):
        config_of(tmp_path, "overlap.schedule=a.txt", "overlap.search=true")
