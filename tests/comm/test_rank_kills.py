"""Any rank of a group may be killed or stopped at any point: the others name it and go on with its successor."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("rank_program.py")
SIZE, KILLS = 3, 8


class Rank:
    """One process."""

    def __init__(self, rank: int, transport: str, timeout_s: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(SIZE), transport, str(timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        self.ticket = self.heard()["ticket"]

    def heard(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process has ended: its own words are above"
        words: dict[str, Any] = json.loads(line)
        return words

    def order(self, **words: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Group:
    """All ranks, and the epochs they begin."""

    def __init__(self, transport: str, timeout_s: float = 60.0) -> None:
        self.transport, self.timeout_s, self.epoch = transport, timeout_s, 0
        self.ranks = [self.new(rank) for rank in range(SIZE)]

    def new(self, rank: int) -> Rank:
        return Rank(rank, self.transport, self.timeout_s)

    def begin(self) -> None:
        for rank in self.ranks:
            rank.order(epoch=self.epoch, tickets=[each.ticket for each in self.ranks])
        for rank in self.ranks:
            assert rank.heard() == {"began": self.epoch}

    def give_up(self, ranks: list[Rank]) -> None:
        """These have said what ended their epoch; a new one comes."""
        self.epoch += 1
        for rank in ranks:
            rank.order(abort=self.epoch)

    def close(self) -> None:
        for rank in self.ranks:
            rank.end()


@pytest.fixture(params=["shm", "tcp"])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    made = Group(request.param)
    yield made
    made.close()


@pytest.mark.slow
def test_killed_ranks_are_named_and_replaced(group: Group) -> None:
    chance = random.Random(group.transport)
    for _ in range(KILLS):
        group.begin()
        victim = chance.randrange(SIZE)
        group.ranks[victim].end()
        others = [rank for index, rank in enumerate(group.ranks) if index != victim]
        for rank in others:
            assert rank.heard() == {"lost": f"rank[{victim}]"}
        group.give_up(others)
        group.ranks[victim] = group.new(victim)
    group.begin()


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_comes_back() -> None:
    group = Group("shm", timeout_s=3.0)
    try:
        group.begin()
        group.ranks[1].process.send_signal(signal.SIGSTOP)
        for rank in (group.ranks[0], group.ranks[2]):
            late = rank.heard()["late"]
            assert late == ["rank[1]"]
        group.give_up(group.ranks)
        group.ranks[1].process.send_signal(signal.SIGCONT)
        assert set(group.ranks[1].heard()) & {"aborted", "late"}
        group.begin()
    finally:
        group.close()
