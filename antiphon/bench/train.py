"""The training benchmark: the trainer's step beside a plain loop over transformers, on one process.

1. a text of random words is tokenized; both begin with the checkpoint's weights and see the same batches
2. the first steps' losses must agree; what both keep for backward is counted meanwhile
3. then they take turns, step by step, until each has three steps that other processes did not disturb

The loop takes its step inside the trainer's `on_step`, so both live in one process with the same threads. Balance and
z-loss and weight decay are off on both sides. Rejected: one after the other. Machines drift within a minute.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.bench.limits import measure_gemm_flops_per_s
from antiphon.bench.plain_loop import PlainLoop
from antiphon.bench.quiet import CpuWatch, Repetition, Repetitions, wait_for_quiet
from antiphon.cost.training.flops import training_flops_per_token
from antiphon.models.config import load_model_spec
from antiphon.specs.model import ModelSpec
from antiphon.train.config import Dtype, TrainConfig, config_of
from antiphon.train.samples import Samples
from antiphon.train.setup import cache_of
from antiphon.train.tokens import open_tokens
from antiphon.train.trainer import StepResult, Trainer

NUM_COMPARED = 3  # steps whose losses must agree
TOLERANCES: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 2e-2}  # of the loss, relative
QUIET_PATIENCE_S = 5.0
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """`batch` sequences a step; `max_rounds`: steps of each contestant, at most."""

    folder: Path
    batch: int
    sequence_length: int
    dtype: Dtype
    max_rounds: int

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.sequence_length


class _EnoughError(Exception):
    """Ends the trainer's run from within `on_step`: a benchmark needs no checkpoint."""


@dataclass
class Timed:
    """One contestant's steps. `kept_bytes`: what its forward keeps for backward, parameters not counted."""

    kept_bytes: int = 0
    steps: list[Repetition[float]] = field(default_factory=list)

    @property
    def counted(self) -> Repetitions[float]:
        return Repetitions(tuple(self.steps))


class Comparison:
    """Both contestants' turns; `run` ends with both `Timed`."""

    def __init__(self, case: TrainingCase, say: Say, report: Callable[[float, float | None], None]) -> None:
        self._case = case
        self._say = say
        self._report = report
        self.ours, self.theirs = Timed(), Timed()
        self.implementation = ""
        self._watch = CpuWatch()

    def run(self, workplace: Path) -> None:
        """`AssertionError` if losses differ: a time of something else says nothing."""
        case = self._case
        self._spec = load_model_spec(case.folder)
        self._config = configuration(case, workplace)
        write_text(workplace / "text.txt", case.tokens_per_step * (NUM_COMPARED + case.max_rounds + 1))
        trainer = Trainer(self._config, self._on_step)
        with ExitStack() as self._counting, suppress(_EnoughError):
            self._kept = self._counting.enter_context(kept_for_backward())
            trainer.run()

    def _on_step(self, result: StepResult) -> None:
        if result.step == 0:
            self._start_loop()
        elif result.step >= NUM_COMPARED:
            self.ours.steps.append(Repetition(result.duration_s, self._watch.foreign_share()))
        batch = self._samples.batch(
            range(result.step * self._case.batch, (result.step + 1) * self._case.batch), torch.device("cpu")
        )
        if result.step < NUM_COMPARED:
            loss = self._compared_step(result, batch)
            check_losses(self._case.dtype, result.step, result.loss, loss)
        else:
            wait_for_quiet(timeout_s=QUIET_PATIENCE_S)
            watch, started_s = CpuWatch(), time.perf_counter()
            self._loop.step(batch, result.rate)
            self.theirs.steps.append(Repetition(time.perf_counter() - started_s, watch.foreign_share()))
        done = result.step + 1 - NUM_COMPARED
        self._report(max(0, done), self._case.max_rounds)
        if done >= self._case.max_rounds or (self.ours.counted.is_quiet and self.theirs.counted.is_quiet):
            raise _EnoughError
        wait_for_quiet(timeout_s=QUIET_PATIENCE_S)
        self._watch = CpuWatch()

    def _start_loop(self) -> None:
        """Once the trainer has tokenized and taken its first step."""
        self._counting.close()  # later steps are timed, without the hooks
        self.ours.kept_bytes = self._kept.num_bytes
        optimizer = self._config.optimizer
        dtype = getattr(torch, self._case.dtype)
        self._loop = PlainLoop(self._case.folder, dtype, optimizer.betas, optimizer.eps, optimizer.clip)
        tokens = open_tokens(cache_of(self._config), "train")
        self._samples = Samples(tokens, self._case.sequence_length, seed=self._config.seed, document_masks=False)
        first = self._samples.batch(range(self._case.batch), torch.device("cpu"))
        self.implementation = self._loop.choose_experts(self._spec, first, self._say)

    def _compared_step(self, result: StepResult, batch: Any) -> float:
        if result.step:
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
    """A run over the text in `workplace` that never saves, evaluates or balances."""
    return config_of(
        {
            "model": {"path": str(case.folder), "begin": "checkpoint"},
            "data": {"files": [str(workplace / "text.txt")], "held_out": 0.0, "document_masks": False},
            "output": {"folder": str(workplace / "out"), "checkpoint_every": 0, "log_every": 1 << 30},
            "steps": 1 << 30,
            "sequence_length": case.sequence_length,
            "batch": case.batch,
            "dtype": case.dtype,
            "optimizer": {"learning_rate": 1e-4, "warmup_steps": 0, "schedule": "constant", "weight_decay": 0.0},
            "loss": {"balance": 0.0, "z": 0.0},
        },
        "the benchmark's configuration",
    )


def write_text(file: Path, num_tokens: int) -> None:
    """Random words, at least `num_tokens` tokens of any tokenizer (a token of ours is at most a word)."""
    generator = random.Random(0)
    syllables = [first + second for first in "bdfgklmnprst" for second in "aeiou"]
    words = ("".join(generator.choices(syllables, k=generator.randint(1, 3))) for _ in range(num_tokens))
    file.write_text(" ".join(words) + "\n")


def bench_train(
    cases: Sequence[TrainingCase], say: Say, report: Callable[[float, float | None], None]
) -> list[dict[str, Any]]:
    """Rows of both contestants for each case."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        check_case(case)
        dtype = getattr(torch, case.dtype)
        peak = measure_gemm_flops_per_s(dtype)
        comparison = Comparison(case, say, report)
        with TemporaryDirectory(prefix="antiphon-bench-train-") as name:
            comparison.run(Path(name))
        peak = max(peak, measure_gemm_flops_per_s(dtype))
        rows += rows_of(case, comparison, peak)
    return rows


def check_case(case: TrainingCase) -> ModelSpec:
    """`UserError` for sequences that the model has no positions for."""
    spec = load_model_spec(case.folder)
    if case.sequence_length > spec.max_position:
        raise UserError(
            f"--sequence-length is {case.sequence_length}, the model's positions end at {spec.max_position}: "
            "shorten the sequences"
        )
    return spec


def rows_of(case: TrainingCase, comparison: Comparison, peak_flops_per_s: float) -> list[dict[str, Any]]:
    """SI units. One process exchanges nothing, so its communication is 0."""
    flops = training_flops_per_token(load_model_spec(case.folder), case.sequence_length) * case.tokens_per_step
    names = ("antiphon", f"transformers {comparison.implementation}")
    loop_s = comparison.theirs.counted.median(float)
    rows = []
    for name, timed in zip(names, (comparison.ours, comparison.theirs), strict=True):
        step_s = timed.counted.median(float)
        rows.append(
            {
                "variant": name,
                "world_size": 1,
                "dtype": case.dtype,
                "batch": case.batch,
                "sequence_length": case.sequence_length,
                "tokens_per_s": case.tokens_per_step / step_s,
                "step_s_median": step_s,
                "exposed_comm_s": 0.0,
                "comm_bytes": 0,
                "activation_bytes": timed.kept_bytes,
                "ratio_to_loop": loop_s / step_s,
                "gemm_peak_flops_per_s": peak_flops_per_s,
                "fraction_of_gemm_peak": flops / step_s / peak_flops_per_s,
                "threads": torch.get_num_threads(),
                "steps": len(timed.counted.counted),
                "foreign_cpu_share": timed.counted.foreign_share,
            }
        )
    return rows
