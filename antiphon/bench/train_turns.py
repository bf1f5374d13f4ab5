"""Both contestants of the training benchmark, step by step in turns, in this process: one rank of one or several.

The loop takes its step inside the trainer's `on_step`, so both live in one process with the same threads. What the
first rank decides (that the machine is quiet, that it was often enough) the others do too.
"""

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from antiphon.base.progress import Report
from antiphon.bench.quiet import CpuWatch, Repetition, Repetitions, wait_for_quiet
from antiphon.bench.step_case import StepCase, samples_of
from antiphon.comm.collectives import AllGather, AllReduce, barrier, run
from antiphon.models.config import load_model_spec
from antiphon.train.config import Dtype, TrainConfig, config_of
from antiphon.train.model import Batch
from antiphon.train.setup import prepare
from antiphon.train.trainer import TrainedStep, Trainer

NUM_COMPARED = 3  # steps whose losses must agree
TOLERANCES: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 2e-2}  # of the loss, relative
QUIET_PATIENCE_S = 5.0
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TrainingCase(StepCase):
    """`max_rounds`: steps of each contestant, at most; `parallel`: the trainer's table of that name, for `ranks` of
    `threads` each."""

    max_rounds: int
    ranks: int = 1
    threads: int = 1
    parallel: Mapping[str, Any] = field(default_factory=dict)


class EnoughError(Exception):
    """Ends the trainer's run from within `on_step`: a benchmark needs no checkpoint."""


@dataclass
class Timed:
    """One contestant's steps. `kept_bytes`: what its forward keeps for backward, parameters not counted; `sent_bytes`:
    in a step, the mean of all ranks; `waited_s`: for others, of the rank that waited longest, by step."""

    kept_bytes: int = 0
    sent_bytes: float = 0
    waited_s: list[float] = field(default_factory=list)
    steps: list[Repetition[float]] = field(default_factory=list)

    @property
    def counted(self) -> Repetitions[float]:
        return Repetitions(tuple(self.steps))


class Comparison:
    """Both contestants' turns; `run` ends with both `Timed`."""

    def __init__(self, case: TrainingCase, say: Say, report: Report) -> None:
        self._case = case
        self._say = say
        self._report = report
        self.ours, self.theirs = Timed(), Timed()
        self.implementation = ""
        self._roots = (os.getppid(),) if case.ranks > 1 else ()  # torchrun, and so all ranks
        self._watch = CpuWatch(self._roots)

    def run(self, workplace: Path) -> None:
        """With `write_text`'s file in `workplace`. `AssertionError` if losses differ: a time of something else says
        nothing."""
        case = self._case
        torch.set_num_threads(case.threads)
        self._spec = load_model_spec(case.folder)
        self._config = configuration(case, workplace)
        self._trainer = Trainer(prepare(self._config), self._on_step)
        with ExitStack() as self._counting, suppress(EnoughError):
            self._kept = self._counting.enter_context(kept_for_backward())
            self._trainer.run()

    def _on_step(self, result: TrainedStep) -> None:
        mesh = self._trainer.mesh
        if result.step == 0:
            self._start_loop()
        elif result.step >= NUM_COMPARED:
            self.ours.steps.append(Repetition(result.duration_s, self._watch.foreign_share()))
            taken = mesh.ledger.take()
            own = torch.tensor([sum(taken.sent_bytes.values()), sum(taken.waited_s.values())], dtype=torch.float64)
            sent, waited = run(AllGather(mesh.world, "bench", (2,) * self._case.ranks), own).view(-1, 2).unbind(1)
            self.ours.sent_bytes = float(sent.mean())
            self.ours.waited_s.append(float(waited.max()))
        batch = self._batch(result.step)
        if result.step < NUM_COMPARED:
            loss = self._compared_step(result, batch)
            check_losses(self._case.dtype, result.step, result.loss, loss)
        else:
            self._wait_for_quiet()
            watch, started_s = CpuWatch(self._roots), time.perf_counter()
            self._loop.step(batch, result.rate)
            self.theirs.steps.append(Repetition(time.perf_counter() - started_s, watch.foreign_share()))
        done = result.step + 1 - NUM_COMPARED
        self._report(max(0, done), self._case.max_rounds)
        if self._is_enough(done):
            raise EnoughError
        self._wait_for_quiet()
        mesh.ledger.take()
        self._watch = CpuWatch(self._roots)

    def _batch(self, step: int) -> Batch:
        return self._case.batch_of(self._samples, step, self._trainer.mesh.rank)

    def _is_enough(self, done: int) -> bool:
        """As the first rank sees it."""
        quiet = self.ours.counted.is_quiet and self.theirs.counted.is_quiet
        enough = torch.tensor([float(self._trainer.is_first and (done >= self._case.max_rounds or quiet))])
        return bool(run(AllReduce(self._trainer.mesh.world, "bench"), enough).item())

    def _wait_for_quiet(self) -> None:
        if self._trainer.is_first:
            wait_for_quiet(timeout_s=QUIET_PATIENCE_S, extra_root_pids=self._roots)
        barrier(self._trainer.mesh.world)

    def _start_loop(self) -> None:
        """Once the trainer has tokenized and taken its first step."""
        self._counting.close()  # later steps are timed, without the hooks
        of_layers = self._trainer.model.held.take().peak  # they hold it themselves, so autograd saves little
        self.ours.kept_bytes = self._kept.num_bytes + of_layers
        self._loop = self._case.loop(self._config)
        self._samples = samples_of(self._config)
        self.implementation = self._loop.choose_experts(self._spec, self._batch(0), self._say)
        self.theirs.sent_bytes = self._loop.sent_bytes

    def _compared_step(self, result: TrainedStep, batch: Any) -> float:
        if result.step:
            self.theirs.waited_s.append(self._loop.exposed_s(batch))
            return self._loop.step(batch, result.rate)
        with kept_for_backward() as kept:
            loss = self._loop.step(batch, result.rate)
        self.theirs.kept_bytes = kept.num_bytes
        return loss


def check_losses(dtype: Dtype, step: int, ours: float, theirs: float) -> None:
    difference = abs(ours - theirs) / max(1.0, abs(theirs))
    assert difference <= TOLERANCES[dtype], (
        f"step {step}, {dtype}: the trainer's loss is {ours:.6f}, transformers' {theirs:.6f}: nothing is timed"
    )


class _Kept:
    """Tensors that autograd has saved."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        if not (base.is_leaf and base.requires_grad):  # a parameter, or a view of one
            storage = tensor.untyped_storage()
            self._bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def num_bytes(self) -> int:
        """Each storage once."""
        return sum(self._bytes.values())


@contextmanager
def kept_for_backward() -> Iterator[_Kept]:
    """Counts what the forward passes inside keep for their backward."""
    kept = _Kept()
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        yield kept


def configuration(case: TrainingCase, workplace: Path) -> TrainConfig:
    """A run that logs nothing."""
    tables = case.tables(workplace, {"folder": str(workplace / "out"), "log_every": 1 << 30})
    return config_of(tables | {"parallel": dict(case.parallel)}, "the benchmark's configuration")


def write_text(file: Path, num_tokens: int) -> None:
    """Random words, at least `num_tokens` tokens of any tokenizer (a token of ours is at most a word)."""
    generator = random.Random(0)
    syllables = [first + second for first in "bdfgklmnprst" for second in "aeiou"]
    words = ("".join(generator.choices(syllables, k=generator.randint(1, 3))) for _ in range(num_tokens))
    file.write_text(" ".join(words) + "\n", encoding="utf-8")
