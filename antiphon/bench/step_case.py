"""One training step that is timed: its sizes, the trainer's run that takes it, and the plain loop beside that."""

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from antiphon.base.errors import UserError
from antiphon.bench.plain_loop import PlainLoop
from antiphon.specs.model import ModelSpec
from antiphon.train.config import Dtype, TrainConfig
from antiphon.train.model import Batch
from antiphon.train.samples import Samples
from antiphon.train.setup import cache_of
from antiphon.train.tokens import open_tokens

TEXT = "text.txt"


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

    def write(self, workplace: Path) -> Path:
        """The file in `workplace` that ranks `read`."""
        file = workplace / "case.json"
        file.write_text(json.dumps(asdict(self) | {"folder": str(self.folder.resolve())}), encoding="utf-8")
        return file

    @classmethod
    def read(cls, file: Path) -> Self:
        values = json.loads(file.read_text(encoding="utf-8"))
        return cls(**values | {"folder": Path(values["folder"])})

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
