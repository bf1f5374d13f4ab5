"""Slow ranks: who is named, and when; and a run on two ranks, one of which sleeps in every pass."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from antiphon.train.config import read_config
from antiphon.train.passes import Passes
from antiphon.train.setup import prepare
from antiphon.train.trainer import Trainer
from antiphon.train.watch import SLOW_STEPS, RankWork, SlowSince, StepTraffic, slow_ranks
from tests.comm.ranks import on_ranks
from tests.train.harness import write_run


def work(busy_s: float, stage: int = 0, rows: float = 1.0) -> RankWork:
    operator_s = {"fc1": busy_s / 2, "norm": 0.1, "wait for combine": 9.0}
    return RankWork(host="node1", stage=stage, busy_s=busy_s, operator_s=operator_s, rows_over_mean=rows)


def test_a_slow_rank_is_named_once_and_again_when_it_keeps_up() -> None:
    slow, said = SlowSince(), []
    for step in range(SLOW_STEPS + 3):
        said += slow_ranks(step, [work(1.0), work(1.1), work(2.0)], slow)
    assert len(said) == 1
    assert said[0].startswith("rank 2 (node1) is slow: it works for 2.00 s a step where the others work for 1.05 s")
    assert "since step 0, 475.00 ms of it in fc1; its experts have 1.0 times the mean of rows: look at" in said[0]
    assert slow_ranks(9, [work(1.0), work(1.1), work(1.2)], slow) == [
        "rank 2 (node1), slow since step 0, keeps up at step 9"
    ]


def test_a_rank_with_many_rows_is_told_apart() -> None:
    slow = SlowSince()
    for step in range(SLOW_STEPS):
        said = slow_ranks(step, [work(1.0), work(2.0, rows=1.9)], slow)
    assert "times the mean of rows: raise loss.balance" in said[0]


def test_what_is_no_slow_rank() -> None:
    """Stages do different work; a few steps are chance; and so are milliseconds."""
    slow = SlowSince()
    for step in range(20):
        assert not slow_ranks(step, [work(1.0), work(1.0), work(5.0, stage=1), work(5.0, stage=1)], slow)
        assert not slow_ranks(step, [work(1.0), work(2.0 if step % SLOW_STEPS else 1.0)], slow)
        assert not slow_ranks(step, [work(0.004), work(0.009)], slow)
        assert not slow_ranks(step, [work(1.0)], slow)


def test_where_the_host_sees_no_wait_nothing_is_said_of_it() -> None:
    traffic = StepTraffic({}, 0.0, {}, [work(1.0)], shows_busy=False)
    assert "rank_busy_s" not in traffic.metrics()
    assert replace(traffic, shows_busy=True).metrics()["rank_busy_s"] == [1.0]


def slowed(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    whole: Any = Passes.run

    def slow(self: Passes, *arguments: Any) -> Any:
        time.sleep(0.15 * rank)
        return whole(self, *arguments)

    Passes.run = slow  # type: ignore[method-assign]
    Trainer(prepare(read_config(Path(os.environ["SLOWED"]), ("steps=7", "parallel.expert=2")))).run()


@pytest.mark.slow
def test_a_run_names_the_rank_that_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOWED", str(write_run(tmp_path)))
    on_ranks(2, tmp_path, Slowed(str(tmp_path / "train.toml")))
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    alarms = [line["alarm"] for line in lines if "alarm" in line]
    assert [each for each in alarms if each.startswith("rank 1 (")], alarms
    assert not [each for each in alarms if each.startswith("rank 0 (")]
    busy = [line["rank_busy_s"] for line in lines if "rank_busy_s" in line][-1]
    assert busy[1] > busy[0] + 0.1


class Slowed:
    """`slowed` of this file."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __call__(self, rank: int) -> None:
        os.environ["SLOWED"] = self.file
        slowed(rank)
