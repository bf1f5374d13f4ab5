"""Variants of a training step that take turns in one process: one rank of a box.

Each trainer runs in a thread of its own and hands the turn back after every step, so it is `Trainer.run` that is timed,
not a copy of its inside. What is reported is what the trainer's metrics say. Rejected: one run after the other, for the
machine drifts within a minute; and a process for each variant, which would start for longer than it runs.
"""

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from antiphon.bench.ladder.ladders import LadderCase, Variant
from antiphon.bench.plain_loop import PlainLoop
from antiphon.bench.step_case import samples_of
from antiphon.bench.train_turns import EnoughError, kept_for_backward
from antiphon.models.config import load_model_spec
from antiphon.train.config import TrainConfig, config_of
from antiphon.train.layer_schedule import DEFAULT, one_by_one, parse
from antiphon.train.model import Batch
from antiphon.train.setup import prepare
from antiphon.train.trainer import TrainedStep, Trainer

ONE_BY_ONE = "one-by-one.txt"
WARM = 3  # steps whose losses are compared and whose times are not


@dataclass
class Record:
    """One variant's measurements, by step. `exposed_s`: waiting for others, of the rank that waits longest.
    `expert_rows`: of the last step, by layer and expert."""

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    sent_bytes: float = 0.0
    activation_bytes: float = 0.0
    operator_s: list[dict[str, float]] = field(default_factory=list)
    expert_rows: list[list[int]] = field(default_factory=list)


class Contestant(Protocol):
    def step(self) -> None:
        """Take the next step, together with the other ranks."""

    def end(self) -> Record:
        """Stop; what was recorded."""


class TrainerTurns:
    """The trainer of `config`; a step begins when `step` is called."""

    def __init__(self, config: TrainConfig) -> None:
        self.trainer: Trainer  # made by the first step
        self._config = config
        self._folder = Path(config.output.folder)
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._ending = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"trainer {self._folder.name}", daemon=True)

    def step(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()
        self._turn.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def end(self) -> Record:
        self._ending = True
        self._turn.release()
        self._thread.join()
        return read_record(self._folder) if self.trainer.is_first else Record()

    def _run(self) -> None:
        self._turn.acquire()
        try:
            self.trainer = Trainer(prepare(self._config), self._on_step)
            self.trainer.run()
        except EnoughError:
            return
        except BaseException as error:  # raised where the step was asked for
            self._error = error
        self._back.release()

    def _on_step(self, result: TrainedStep) -> None:
        self._back.release()  # metrics of this step are written when the next turn begins
        self._turn.acquire()
        if self._ending:
            raise EnoughError


class LoopTurns:
    """`DistributedDataParallel` or FSDP2, over the same sequences. The trainers' process group has to be there."""

    def __init__(self, case: LadderCase, config: TrainConfig, rank: int, *, sharded: bool) -> None:
        self._case = case
        self._config = config
        self._rank = rank
        self._sharded = sharded
        self._record = Record()
        self._loop: PlainLoop | None = None

    def step(self) -> None:
        loop, batch = self._loop or self._begin(), self._batch()
        number = len(self._record.losses)
        if 0 < number < WARM:  # it takes two more passes
            self._record.exposed_s.append(loop.exposed_s(batch))
        started_s = time.perf_counter()
        if number:
            loss = loop.step(batch, self._config.optimizer.learning_rate)
        else:
            with kept_for_backward() as kept:
                loss = loop.step(batch, self._config.optimizer.learning_rate)
            self._record.activation_bytes = kept.num_bytes
        self._record.step_s.append(time.perf_counter() - started_s)
        self._record.losses.append(loss)

    def end(self) -> Record:
        assert self._loop is not None
        self._record.sent_bytes = self._loop.sent_bytes
        return self._record

    def _begin(self) -> PlainLoop:
        loop = self._loop = self._case.loop(self._config, sharded=self._sharded)
        self._samples = samples_of(self._config)
        loop.choose_experts(load_model_spec(self._case.folder), self._batch(), lambda text: None)
        return loop

    def _batch(self) -> Batch:
        return self._case.batch_of(self._samples, len(self._record.losses), self._rank)


def read_record(folder: Path) -> Record:
    """What a trainer wrote of itself."""
    record = Record()
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "step_s" in row:
            record.losses.append(row["loss"])
            record.step_s.append(row["step_s"])
            record.exposed_s.append(row["exposed_comm_s"])
            record.operator_s.append(row["operator_s"])
            record.expert_rows = row["expert_rows"]
            record.sent_bytes = sum(row["collective_bytes"].values())
            record.activation_bytes = max(record.activation_bytes, row["activation_bytes"])
    return record


def configuration(case: LadderCase, variant: Variant, number: int, workplace: Path) -> TrainConfig:
    """A run of the trainer that logs every step; all variants share the tokens of one text."""
    tables = case.tables(workplace, {"folder": str(workplace / f"variant-{number}"), "log_every": 1})
    tables["data"]["cache"] = str(workplace / "tokens")
    tables |= {name: dict(table) if isinstance(table, Mapping) else table for name, table in variant.tables.items()}
    if "communication" in tables:
        tables["communication"].setdefault("node_size", case.ranks_per_node)
    if not variant.overlaps:
        tables.setdefault("overlap", {})["schedule"] = str(workplace / ONE_BY_ONE)
    return config_of(tables, f"variant {variant.name}")


def write_schedule(workplace: Path) -> None:
    """The default one, with nothing beside an exchange."""
    text = str(one_by_one(parse(DEFAULT, "the default schedule")))
    (workplace / ONE_BY_ONE).write_text(text, encoding="utf-8")
