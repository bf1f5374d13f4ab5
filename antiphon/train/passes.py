"""Forward and backward of the micro-batches of one step.

Their targets are counted first, on all ranks, so that the loss is the mean over the targets of the step however it is
cut; each pass adds its gradients to those of the passes before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from antiphon.comm.collectives import AllReduce, run
from antiphon.kernels.ops.cross_entropy import IGNORED
from antiphon.train import not_finite
from antiphon.train.config import LossConfig
from antiphon.train.model import Batch, MoeModel
from antiphon.train.routing import Routing, balance_of
from antiphon.train.shards import Shards
from antiphon.train.spans import Spans


@dataclass(frozen=True)
class PassResult:
    """Of all ranks: `loss` in nats a target, the `balance` loss, `counts_LE`: choices by MoE layer and expert, and
    `dropped_L`: how many of a layer's no expert had room for. The losses of passes add up to those of their step."""

    loss: Tensor
    balance: Tensor
    counts_LE: Tensor
    dropped_L: Tensor


class Passes:
    """The passes of a run's steps over `model`."""

    def __init__(self, model: MoeModel, losses: LossConfig, spans: Spans) -> None:
        self.model = model
        self.losses = losses
        self.spans = spans

    def run(self, batches: Sequence[Batch]) -> PassResult:
        """Add the gradients of these micro-batches, which are this rank's part of a step."""
        num_targets = self._targets_of_all(batches)
        results = [self._pass(batch, num_targets, len(batches)) for batch in batches]
        loss = torch.stack([result.loss for result in results]).sum()
        return PassResult(
            run(AllReduce(self.model.mesh.stage, "loss"), loss.view(1)).squeeze(0),
            torch.stack([result.balance for result in results]).sum(),
            torch.stack([result.counts_LE for result in results]).sum(0).long(),
            torch.stack([result.dropped_L for result in results]).sum(0),
        )

    def cause_of_nan(self, batches: Sequence[Batch], shards: Shards) -> str:
        """Where the first number of these passes came from that is not finite, in words: of the rank that met it
        first. Runs the passes again."""
        num_targets, mesh = self._targets_of_all(batches), self.model.mesh
        again = [partial(self._pass, batch, num_targets, len(batches)) for batch in batches]
        found = not_finite.explain(self.model, shards, again, self.spans)
        numbers = torch.zeros(mesh.sizes.world_size, dtype=torch.int64)
        numbers[mesh.rank] = found.number
        first = int(run(AllReduce(mesh.world, "norm"), numbers).argmin())
        return found.words if first == mesh.rank else f"rank {first} found where it began"

    @torch.no_grad()
    def mean_loss(self, batches: Sequence[Batch]) -> float:
        """Nats a target over `batches` of all ranks, which have equally many; nothing is learned and, as when the model
        is served, nothing dropped."""
        losses = replace(self.losses, capacity=0.0, device_capacity=0.0)
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in batches:
            sums[0] += self.model(batch, torch.tensor(1), self._routing(1.0, losses)).double()
            sums[1] += self._own_targets(batch)
        total, targets = run(AllReduce(self.model.mesh.stage, "loss"), sums).tolist()
        return float(total / max(1.0, targets))

    def _targets_of_all(self, batches: Sequence[Batch]) -> Tensor:
        targets = torch.stack([self._own_targets(batch) for batch in batches]).sum()
        return run(AllReduce(self.model.mesh.stage, "loss"), targets.view(1)).squeeze(0)

    def _own_targets(self, batch: Batch) -> Tensor:
        """Targets that this rank counts: those at its positions."""
        return (self.model.own_targets(batch) != IGNORED).sum()

    def _routing(self, share: float, losses: LossConfig) -> Routing:
        spec = self.model.spec
        return Routing(spec.router, losses, self.model.mesh.stage, num_layers=spec.num_moe_layers, share=share)

    def _pass(self, batch: Batch, num_targets: Tensor, num_passes: int) -> PassResult:
        """Forward and backward of one; its `loss` is this rank's part."""
        routing = self._routing(1 / num_passes, self.losses)
        loss = self.model(batch, num_targets, routing)
        with self.spans.backward(loss):
            loss.backward()
        facts = routing.all_facts()
        balance = torch.stack([balance_of(each) for each in facts]).mean() / num_passes
        counts_LE = torch.stack([each.counts_E for each in facts])
        return PassResult(loss.detach(), balance, counts_LE, torch.tensor(routing.dropped))
