"""The training benchmark: the trainer's step beside a plain loop over transformers, on one process or several ranks.

1. a text of random words is tokenized; both begin with the checkpoint's weights and see the same batches
2. the first steps' losses must agree; what both keep for backward is counted meanwhile
3. then they take turns, step by step, until each has three steps that other processes did not disturb

Balance, z-loss and weight decay are off on both sides. On several ranks the loop has a copy of the model on each of
them and a share of the batch. The loop takes its step inside the trainer's `on_step`, so both live in one process with
the same threads. What the first rank decides (that the machine is quiet, that it was often enough) the others do too.

Rejected: one after the other. The machine drifts within a minute.
"""

import os
import random
import socket
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.base.progress import Report, progress
from antiphon.bench.harness.children import Children
from antiphon.bench.harness.columns import ContestColumns, num_bytes, ratio, share
from antiphon.bench.harness.limits import measure_gemm_flops_per_s
from antiphon.bench.harness.quiet import CpuWatch, Repetition, Repetitions, wait_for_quiet
from antiphon.bench.plain_loop import COMPILED_EXPERTS, PlainLoop
from antiphon.comm.collectives import AllGather, AllReduce, barrier, run
from antiphon.cost.training.counts import training_flops_per_token
from antiphon.kernels import native_rows
from antiphon.models.config import load_model_spec
from antiphon.specs.model import ModelSpec
from antiphon.train.config import Dtype, TrainConfig, apply_change, config_of
from antiphon.train.device import HOST, product_flops_per_s
from antiphon.train.model import Batch
from antiphon.train.samples import Samples
from antiphon.train.setup import cache_of, prepare
from antiphon.train.tokens import open_tokens
from antiphon.train.trainer import TrainedStep, Trainer

NUM_COMPARED = 3  # steps whose losses must agree
TOLERANCES: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 2e-2}  # of the loss, relative
QUIET_PATIENCE_S = 5.0
_DAY_S = 86400.0
TEXT = "text.txt"
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class StepCase(ABC):
    """`batch` sequences a step of the model in `folder`, shared by `ranks`."""

    folder: Path
    batch: int
    sequence_length: int
    dtype: Dtype

    @property
    @abstractmethod
    def ranks(self) -> int: ...

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.sequence_length

    def check_sizes(self, spec: ModelSpec) -> None:
        """`UserError` for a batch that ranks cannot share, or sequences that the model has no positions for."""
        if self.batch % self.ranks:
            raise UserError(
                f"--batch is {self.batch}, which {self.ranks} ranks cannot share: make it a multiple of them"
            )
        if self.sequence_length > spec.max_position:
            raise UserError(
                f"--sequence-length is {self.sequence_length}, the model's positions end at {spec.max_position}: "
                "shorten the sequences"
            )

    def tables(self, workplace: Path, output: dict[str, Any]) -> dict[str, Any]:
        """The tables of the trainer's file: a run over the text in `workplace` that never saves, evaluates or
        balances."""
        return {
            "model": {"path": str(self.folder), "begin": "checkpoint"},
            "data": {"files": [str(workplace / TEXT)], "held_out": 0.0, "document_masks": False},
            "output": {"checkpoint_every": 0} | output,
            "steps": 1 << 30,
            "sequence_length": self.sequence_length,
            "batch": self.batch,
            "dtype": self.dtype,
            "optimizer": {"learning_rate": 1e-4, "warmup_steps": 0, "schedule": "constant", "weight_decay": 0.0},
            "loss": {"balance": 0.0, "z": 0.0},
        }

    def loop(self, config: TrainConfig, *, sharded: bool = False) -> PlainLoop:
        """The plain loop with the trainer's optimizer."""
        optimizer, dtype = config.optimizer, getattr(torch, self.dtype)
        return PlainLoop(self.folder, dtype, optimizer.betas, optimizer.eps, optimizer.clip, sharded=sharded)

    def batch_of(self, samples: Samples, step: int, rank: int) -> Batch:
        """A rank's share of the step's sequences."""
        size = self.batch // self.ranks
        first = step * self.batch + rank * size
        return samples.batch(range(first, first + size), torch.device("cpu"))


def samples_of(config: TrainConfig) -> Samples:
    """The sequences that the trainer takes, once it has tokenized its text."""
    tokens = open_tokens(cache_of(config), "train")
    return Samples(tokens, config.sequence_length, seed=config.seed, document_masks=False)


@dataclass(frozen=True, kw_only=True)
class TrainingCase(StepCase):
    """`max_rounds`: steps of each contestant, at most; `parallel`: the trainer's table of that name, for `ranks` of
    `threads` each. `compiled`: a third contestant, the loop through `torch.compile`, on one process."""

    max_rounds: int
    ranks: int = 1
    threads: int = 1
    parallel: Mapping[str, Any] = field(default_factory=dict)
    compiled: bool = False


class EnoughError(Exception):
    """Ends the trainer's run from within `on_step`: a benchmark needs no checkpoint."""


@dataclass
class Timed:
    """One contestant's steps. `loop` None: the trainer. `kept_bytes`: what its forward keeps for backward, parameters
    not counted; None: not measured, as with torch.compile, for which the hooks that count would be another program.
    `sent_bytes`: in a step, the mean of all ranks. `waited_s`: for others, of the rank that waited longest, by step.
    `cpu_s`: processor time of this process's threads, by step, which other processes change less."""

    name: str
    loop: PlainLoop | None = None
    kept_bytes: int | None = None
    sent_bytes: float = 0
    waited_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    steps: list[Repetition[float]] = field(default_factory=list)

    @property
    def counted(self) -> Repetitions[float]:
        return Repetitions(tuple(self.steps))


class StepComparison:
    """The contestants' turns: the trainer's, then those of loops."""

    def __init__(self, case: TrainingCase, say: Say, report: Report) -> None:
        self._case = case
        self._say = say
        self._report = report
        self._ours, self._loops = Timed("antiphon"), list[Timed]()
        self._roots = (os.getppid(),) if case.ranks > 1 else ()  # the fork server, and so all ranks
        self._watch, self._cpu_began_s = CpuWatch(self._roots), time.process_time()

    def run(self, workplace: Path) -> list[dict[str, Any]]:
        """Rows, with `write_text`'s file in `workplace`. `AssertionError` if losses differ: a time of something else
        says nothing."""
        case = self._case
        torch.set_num_threads(case.threads)
        self._spec = load_model_spec(case.folder)
        self._config = configuration(case, workplace)
        self._trainer = Trainer(prepare(self._config), self._on_step)
        with ExitStack() as self._counting, suppress(EnoughError):
            self._kept = self._counting.enter_context(kept_for_backward())
            self._trainer.run()
        return [self._row(timed) for timed in (self._ours, *self._loops)]

    def _on_step(self, result: TrainedStep) -> None:
        mesh = self._trainer.mesh
        if result.step == 0:
            self._start_loops()
        elif result.step >= NUM_COMPARED:
            self._ours.steps.append(Repetition(result.duration_s, self._watch.foreign_share()))
            self._ours.cpu_s.append(time.process_time() - self._cpu_began_s)
            taken = mesh.ledger.take()
            own = torch.tensor([sum(taken.sent_bytes.values()), sum(taken.waited_s.values())], dtype=torch.float64)
            sent, waited = run(AllGather(mesh.world, "bench", (2,) * self._case.ranks), own).view(-1, 2).unbind(1)
            self._ours.sent_bytes = float(sent.mean())
            self._ours.waited_s.append(float(waited.max()))
        batch = self._batch(result.step)
        for timed in self._loops:
            if result.step < NUM_COMPARED:
                loss = self._compared_step(timed, result, batch)
                check_losses(self._case.dtype, result.step, result.loss, loss)
            else:
                self._time_loop(timed, batch, result.rate)
        done = result.step + 1 - NUM_COMPARED
        self._report(max(0, done), self._case.max_rounds)
        if self._is_enough(done):
            raise EnoughError
        self._wait_for_quiet()
        mesh.ledger.take()
        self._watch, self._cpu_began_s = CpuWatch(self._roots), time.process_time()

    def _time_loop(self, timed: Timed, batch: Batch, rate: float) -> None:
        assert timed.loop is not None
        self._wait_for_quiet()
        watch, started_s, cpu_began_s = CpuWatch(self._roots), time.perf_counter(), time.process_time()
        timed.loop.step(batch, rate)
        timed.steps.append(Repetition(time.perf_counter() - started_s, watch.foreign_share()))
        timed.cpu_s.append(time.process_time() - cpu_began_s)

    def _batch(self, step: int) -> Batch:
        return self._case.batch_of(self._samples, step, self._trainer.mesh.rank)

    def _is_enough(self, done: int) -> bool:
        """As the first rank sees it."""
        quiet = all(timed.counted.is_quiet for timed in (self._ours, *self._loops))
        enough = torch.tensor([float(self._trainer.is_first and (done >= self._case.max_rounds or quiet))])
        return bool(run(AllReduce(self._trainer.mesh.world, "bench"), enough).item())

    def _wait_for_quiet(self) -> None:
        if self._trainer.is_first:
            wait_for_quiet(timeout_s=QUIET_PATIENCE_S, extra_root_pids=self._roots)
        barrier(self._trainer.mesh.world)

    def _start_loops(self) -> None:
        """Once the trainer has tokenized and taken its first step."""
        self._counting.close()  # later steps are timed, without the hooks
        of_layers = self._trainer.model.held.take_peak()  # they hold it themselves, so autograd saves little
        self._ours.kept_bytes = sum(self._kept.values()) + of_layers
        loop = self._case.loop(self._config)
        self._samples = samples_of(self._config)
        implementation = loop.choose_experts(self._spec, self._batch(0), self._say)
        self._loops.append(Timed(f"transformers {implementation}", loop, sent_bytes=loop.sent_bytes))
        if self._case.compiled:
            loop = self._case.loop(self._config)
            loop.compile()
            self._loops.append(Timed(f"transformers {COMPILED_EXPERTS} + torch.compile", loop))

    def _compared_step(self, timed: Timed, result: TrainedStep, batch: Batch) -> float:
        assert timed.loop is not None
        if timed is not self._loops[0]:
            self._say("transformers through torch.compile: the first steps compile")
            return timed.loop.step(batch, result.rate)
        if result.step:
            timed.waited_s.append(timed.loop.exposed_s(batch))
            return timed.loop.step(batch, result.rate)
        with kept_for_backward() as kept:
            loss = timed.loop.step(batch, result.rate)
        timed.kept_bytes = sum(kept.values())
        return loss

    def _row(self, timed: Timed) -> dict[str, Any]:
        """SI units. One process exchanges nothing, so its communication is 0."""
        case, plain, step_s = self._case, self._loops[0], timed.counted.median(float)
        return {
            "variant": timed.name,
            "world_size": case.ranks,
            "dtype": case.dtype,
            "batch": case.batch,
            "sequence_length": case.sequence_length,
            "tokens_per_s": case.tokens_per_step / step_s,
            "step_s_median": step_s,
            "cpu_s_least": min(timed.cpu_s),
            "cpu_ratio_to_loop": min(plain.cpu_s) / min(timed.cpu_s),
            "exposed_comm_s": statistics.median(timed.waited_s) if case.ranks > 1 else 0.0,
            "comm_bytes": timed.sent_bytes,
            "activation_bytes": timed.kept_bytes,
            "ratio_to_loop": plain.counted.median(float) / step_s,
            "threads": case.threads,
            "steps": len(timed.counted.counted),
            "foreign_cpu_share": timed.counted.foreign_share,
        }


def check_losses(dtype: Dtype, step: int, ours: float, theirs: float) -> None:
    difference = abs(ours - theirs) / max(1.0, abs(theirs))
    assert difference <= TOLERANCES[dtype], (
        f"step {step}, {dtype}: the trainer's loss is {ours:.6f}, transformers' {theirs:.6f}: nothing is timed"
    )


@contextmanager
def kept_for_backward() -> Iterator[dict[int, int]]:
    """What the forward passes inside keep for their backward, parameters not counted: bytes by storage."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        if not (base.is_leaf and base.requires_grad):  # a parameter, or a view of one
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
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


def parse_parallel(changes: list[str], ranks: int) -> dict[str, Any]:
    """The trainer's table `parallel`: experts over all ranks, and what ``parallel.KEY=VALUE`` says."""
    found: dict[str, Any] = {"expert": ranks}
    for change in changes:
        key = change.partition("=")[0]
        if not key.startswith("parallel."):
            raise UserError(f"--set {change}: only keys of parallel can be set here, for example parallel.zero=1")
        apply_change(found, change.removeprefix("parallel."))
    return found


def parse_dtypes(text: str) -> list[Dtype]:
    """``"float32,bfloat16"`` -> both."""
    found: list[Dtype] = []
    for name in text.split(","):
        if name not in TOLERANCES:
            raise UserError(f"--dtype {text!r}: {name!r} is not measured, use {' or '.join(TOLERANCES)}")
        found.append(name)
    return found


# --- the benchmark


COLUMNS = ContestColumns(
    (
        ("variant", "variant"),
        ("ranks", "world_size"),
        ("dtype", "dtype"),
        ("tok/s", "tokens_per_s"),
        ("step s", "step_s_median"),
        ("CPU s", "cpu_s_least"),
        ("waits s", "exposed_comm_s"),
        ("sends", num_bytes("comm_bytes")),
        ("kept for backward", num_bytes("activation_bytes")),
        ("to loop", ratio("ratio_to_loop")),
        ("CPU to loop", ratio("cpu_ratio_to_loop")),
        ("of GEMM peak", share("fraction_of_gemm_peak")),
        ("steps", "steps"),
        ("foreign", share("foreign_cpu_share")),
    )
)


def bench_train(cases: Sequence[TrainingCase], say: Say, report: Report) -> list[dict[str, Any]]:
    """Rows of both contestants for each case."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        case.check_sizes(load_model_spec(case.folder))
        peak = fastest_product_flops_per_s(case.dtype)
        with TemporaryDirectory(prefix="antiphon-bench-train-") as name:
            workplace = Path(name)
            write_text(workplace / TEXT, case.tokens_per_step * (NUM_COMPARED + case.max_rounds + 1))
            found = (
                rows_on_ranks(case, workplace) if case.ranks > 1 else StepComparison(case, say, report).run(workplace)
            )
        peak = max(peak, fastest_product_flops_per_s(case.dtype))
        for row in found:
            flops_per_s = training_flops_per_token(load_model_spec(case.folder), case.sequence_length)
            flops_per_s *= row["tokens_per_s"]
            rows.append(row | {"gemm_peak_flops_per_s": peak, "fraction_of_gemm_peak": flops_per_s / peak})
    return rows


def fastest_product_flops_per_s(dtype: Dtype) -> float:
    """The faster of PyTorch's products and the trainer's own, on as many threads as PyTorch has."""
    native_rows.share_threads()
    kind = getattr(torch, dtype)
    return max(measure_gemm_flops_per_s(kind), product_flops_per_s(HOST, kind))


def rows_on_ranks(case: TrainingCase, workplace: Path) -> list[dict[str, Any]]:
    """The rows of a case on several ranks, which are processes of this machine, as `torchrun` would start them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(case.ranks)}
    environment |= {"LOCAL_WORLD_SIZE": str(case.ranks), "GROUP_RANK": "0"}
    with Children() as ranks:
        ranks.start_ranks(case.ranks, environment=environment)
        found: list[dict[str, Any]] = ranks.ask(_rows_of_rank, case, workplace, timeout_s=_DAY_S)[0]
    return found


def _rows_of_rank(rank: int, case: TrainingCase, workplace: Path) -> list[dict[str, Any]]:
    """One rank's part in a case. The first one says what it does."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if rank:
        return StepComparison(case, lambda text: None, lambda done, total: None).run(workplace)
    with progress(f"timing training steps on {case.ranks} ranks") as report:
        return StepComparison(case, lambda text: print(text, file=sys.stderr), report).run(workplace)
