"""Sixty AdamW steps of our model, alone or on two ranks, with weights from a folder and data from a plain integer
generator: nothing is random."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from antiphon.comm.mesh import Mesh, Sizes, connect
from antiphon.kernels.ops.cross_entropy import IGNORED
from antiphon.models.config import load_model_spec
from antiphon.train.config_tables import LossConfig, ParallelConfig
from antiphon.train.hugging_face import import_weights
from antiphon.train.model import Batch, MoeModel
from antiphon.train.passes import Passes
from antiphon.train.shards import Shards, clip_factor
from antiphon.train.spans import StepSpans
from tests.comm.ranks import begin_anew

NUM_STEPS, NUM_SEQUENCES, LENGTH, VOCABULARY = 60, 4, 32, 64
MICRO_BATCHES = 2  # a pipeline of two needs them, so all have them: the balance loss depends on it
Curve = list[tuple[float, float]]  # (loss, gradient norm) of every step
Spoil = Callable[[MoeModel], None]


def generated(count: int, seed: int) -> list[int]:
    """15-bit numbers of a linear congruential generator."""
    numbers = []
    for _ in range(count):
        seed = (1103515245 * seed + 12345) & 0x7FFFFFFF
        numbers.append(seed >> 16)
    return numbers


def batches() -> list[Tensor]:
    """Sequences that mostly follow a rule: token = 3 * last + 7, with noise at one place in eight."""
    numbers = iter(generated(NUM_STEPS * NUM_SEQUENCES * LENGTH * 2, 1))
    found = []
    for _ in range(NUM_STEPS):
        rows = []
        for _ in range(NUM_SEQUENCES):
            row = [next(numbers) % VOCABULARY, next(numbers) % VOCABULARY]
            while len(row) < LENGTH:
                z = next(numbers)
                row.append((3 * row[-1] + 7) % VOCABULARY if z % 8 else z // 8 % VOCABULARY)
            rows.append(row)
        found.append(torch.tensor(rows))
    return found


def adamw(parameters: list[Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def leave(model: MoeModel) -> None:
    """Spoils nothing."""


def double_an_expert(model: MoeModel) -> None:
    if 1 in model.layers:
        model.layers[1].get_parameter("experts_down").grad[3] *= 2  # type: ignore[index]


def drop_an_expert(model: MoeModel) -> None:
    model.layers[1].get_parameter("experts_gate_up").grad[3] = 0  # type: ignore[index]


def drop_the_router(model: MoeModel) -> None:
    model.layers[0].get_parameter("router").grad = None


@dataclass(frozen=True)
class Run:
    """`sizes`: of the mesh. `spoil` may do something to the gradients before they are summed over ranks."""

    folder: Path
    balance: float = 0.0
    num_steps: int = NUM_STEPS
    sizes: Sizes = field(default_factory=Sizes)
    spoil: Spoil = leave

    def curve(self, rank: int = 0) -> Curve:
        return self.on(connect(self.sizes, rank, 120))

    def on(self, mesh: Mesh) -> Curve:
        spec, parallel = load_model_spec(self.folder), ParallelConfig(pipeline=self.sizes.pipeline)
        model = MoeModel(spec, mesh, max_positions=LENGTH, dtype=torch.float64, parallel=parallel)
        import_weights(model, self.folder)
        model.double()
        shards = Shards(model)
        optimizer = adamw([piece.values for piece in shards.pieces])
        passes = Passes(model, LossConfig(balance=self.balance, balance_over="model"), StepSpans())
        found = []
        for ids in batches()[: self.num_steps]:
            loss = passes.run(self._own(ids, mesh)).loss
            self.spoil(model)
            shards.reduce()
            norm = shards.norm()
            if (factor := clip_factor(norm, 1.0)) is not None:
                shards.scale(factor)
            optimizer.step()
            shards.zero_grad()
            found.append((float(loss), float(norm)))
        return found

    def _own(self, ids: Tensor, mesh: Mesh) -> list[Batch]:
        """This rank's part of each micro-batch."""
        targets = torch.full_like(ids, IGNORED)
        targets[:, :-1] = ids[:, 1:]
        place, positions = mesh.sizes.place(mesh.rank, "data"), torch.arange(LENGTH)
        own = [
            (part.chunk(mesh.sizes.data)[place], wanted.chunk(mesh.sizes.data)[place])
            for part, wanted in zip(ids.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True)
        ]
        return [Batch(part, wanted, positions.expand_as(part), None) for part, wanted in own]


def curves_of(runs: dict[str, Run], rank: int) -> dict[str, Curve]:
    found = {}
    for name, run in runs.items():
        found[name] = run.curve(rank)
        begin_anew()
    return found
