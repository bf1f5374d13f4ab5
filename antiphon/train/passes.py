"""Forward and backward of the micro-batches of one step, in the order that a pipeline's schedule gives; and forward
alone, for losses of which nothing is learned.

The targets of a step are counted first, on all ranks, so that the loss is the mean over them however the step is cut;
each pass adds its gradients to those of the passes before. A model that is not cut is a pipeline of one stage: the same
code, and nothing travels.

Between stages travel rows, and gradients of rows. With `loss.balance_over = "model"` the experts' use travels too: a
forward brings the sum over the layers so far, a backward the sum over all layers.

The loss on documents that are never trained on is told with its error, over all of them and by source (`HeldOutLoss`).
Windows are spread evenly over the whole held-out text of each source: the first ones of a corpus are its first files,
which say little about the rest. Losses are weighted by their targets. The error is that of a mean over blocks of
windows (their ratio estimate), so it counts how much texts differ. Rejected: a loss a window and their plain mean; a
window of short documents has fewer targets than another.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from antiphon.base.logging import get_logger
from antiphon.comm.collectives import AllReduce, run
from antiphon.comm.mesh import Mesh
from antiphon.kernels.ops.cross_entropy import IGNORED
from antiphon.train import not_finite
from antiphon.train.config import TrainConfig
from antiphon.train.config_tables import LossConfig
from antiphon.train.device import HOST
from antiphon.train.model import Batch, MoeModel
from antiphon.train.pipeline import Pipeline, StagePass, Tensors
from antiphon.train.ranks import gathered
from antiphon.train.routing import Routing, balance_of
from antiphon.train.samples import Samples
from antiphon.train.shards import Shards
from antiphon.train.spans import StepSpans
from antiphon.train.token_file import SourceTokens, TokenFile


@dataclass(frozen=True)
class PassResult:
    """The result over all ranks: `loss` in nats a target, the `balance` loss, `counts_LE`: choices by MoE layer and
    expert, and `dropped_L`: how many of a layer's no expert had room for. The losses of passes add up to those of their
    step. `further_loss`: of a layer that predicts a token further."""

    loss: Tensor
    balance: Tensor
    counts_LE: Tensor
    dropped_L: Tensor
    further_loss: Tensor | None = None


class Passes:
    """The passes of a run's steps over `model`."""

    def __init__(self, model: MoeModel, losses: LossConfig, spans: StepSpans, *, pairs: bool = False) -> None:
        """`pairs`: two micro-batches at a time, in turns (`train.layer_run`); without a pipeline."""
        self.model = model
        self._pairs = pairs
        self.losses = losses
        self.spans = spans
        self._group = model.mesh.group("pipeline")
        self._pipeline = Pipeline(self._group, model.schedule, spans)

    def run(self, batches: Sequence[Batch], shards: Shards | None = None) -> PassResult:
        """Add the gradients of these micro-batches, which are this rank's part of a step. With `shards`, sums of
        gradients may begin before the passes end."""
        work = self._work(batches, self._targets_of_all(batches))
        if shards is not None:
            last = len(batches) - 1  # of each stage, whose backwards come in order of micro-batch
            work.before = lambda action: shards.before_pass(is_last=action.backward and action.micro_batch == last)
        if self._pairs:
            for first in range(0, len(batches), 2):
                pair = range(first, min(first + 2, len(batches)))
                self.model.turns.together([partial(work.whole, micro_batch) for micro_batch in pair])
        else:
            self._pipeline.run(self._orders(self.model.schedule.step, batches), work.buffers, work.do)
        zero = torch.zeros((), dtype=torch.promote_types(self.model.dtype, torch.float32), device=self.model.device)
        loss = torch.stack(work.all_losses()).sum() if work.losses else zero
        num_layers, num_experts = self.model.spec.num_moe_layers, self.model.spec.router.num_experts
        use = run(AllReduce(self._group, "balance"), work.use())
        counts, dropped_L, balance = torch.split(use, [num_layers * num_experts, num_layers, 1])
        return PassResult(
            run(AllReduce(self.model.mesh.world, "loss"), loss.view(1)).squeeze(0),
            balance.squeeze(0),
            counts.view(num_layers, num_experts).long(),
            dropped_L.long(),
            self._further_loss(),
        )

    def _further_loss(self) -> Tensor | None:
        taken, self.model.further_losses = self.model.further_losses, []
        if not self.losses.mtp:
            return None
        return run(AllReduce(self.model.mesh.world, "loss"), torch.stack(taken).sum().view(1)).squeeze(0)

    def cause_of_nan(self, batches: Sequence[Batch], shards: Shards) -> str:
        """Says where the first number of these passes that is not finite came from: the words of the rank that met
        it first. Runs the passes again."""
        num_targets, schedule, mesh = self._targets_of_all(batches), self.model.schedule, self.model.mesh

        def again(begin: Callable[[int, int], None]) -> None:
            work = self._work(batches, num_targets)
            work.before = lambda action: begin(action.micro_batch, schedule.turn_of(action))
            self._pipeline.run(self._orders(schedule.one_after_another, batches), work.buffers, work.do)

        number, words = not_finite.explain(self.model, shards, again, self.spans)
        numbers = gathered(mesh.world, "norm", number)
        first = numbers.index(min(numbers))
        return words if first == mesh.rank else f"rank {first} found where it began"

    @torch.no_grad()
    def losses_of(self, batches: Sequence[Batch], places: Sequence[int], num_places: int) -> Tensor:
        """[num_places, 2]: the sum of nats and the number of targets of each of all ranks' batches; `places`: of this
        rank's, of which all ranks have equally many. Nothing is learned and, as when the model is served, nothing
        dropped."""
        losses = replace(self.losses, capacity=0.0, device_capacity=0.0)
        work = _Stages(self.model, losses, self.spans, batches, torch.tensor(1, device=HOST))
        self._pipeline.run(self._orders(self.model.schedule.forwards, batches), work.buffers, work.do)
        sums = torch.zeros(num_places, 2, dtype=torch.float64, device=HOST)
        for number, (place, batch) in enumerate(zip(places, batches, strict=True)):
            if self.model.is_last and place < num_places:
                sums[place, 0] += work.losses[number].double()
                sums[place, 1] += self._own_targets(batch)
        return run(AllReduce(self.model.mesh.world, "loss"), sums.flatten()).view(num_places, 2)

    def _work(self, batches: Sequence[Batch], num_targets: Tensor) -> "_Stages":
        return _Stages(self.model, self.losses, self.spans, batches, num_targets)

    def _orders(self, order: Callable[[int, int], list[StagePass]], batches: Sequence[Batch]) -> list[list[StagePass]]:
        return [order(place, len(batches)) for place in range(self.model.schedule.pipeline)]

    def _targets_of_all(self, batches: Sequence[Batch]) -> Tensor:
        targets = torch.stack([self._own_targets(batch) for batch in batches]).sum()
        return run(AllReduce(self.model.mesh.stage, "loss"), targets.view(1)).squeeze(0)

    def _own_targets(self, batch: Batch) -> Tensor:
        """Targets that this rank counts: those at its positions."""
        return (self.model.own_targets(batch) != IGNORED).sum()


class _Stages:
    """What this rank's stages do with the micro-batches of a step, which are equal shares of it."""

    def __init__(
        self, model: MoeModel, losses: LossConfig, spans: StepSpans, batches: Sequence[Batch], num_targets: Tensor
    ) -> None:
        self.losses: dict[int, Tensor] = {}  # of the last stage, by micro-batch
        self.before: Callable[[StagePass], None] = lambda action: None
        self._model = model
        self._config = losses
        self._spans = spans
        self._batches = batches
        self._num_targets = num_targets
        self._flights: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # rows given, and what came of them
        self._routings: dict[tuple[int, int], Routing] = {}

    def buffers(self, action: StagePass) -> Tensors:
        """Room for what `action` is given by another stage."""
        rows = self._model.rows_buffer(self._batches[action.micro_batch])
        if self._config.balance_over != "model":
            return (rows,)
        return rows, torch.empty(self._model.spec.router.num_experts, dtype=torch.float64, device=rows.device)

    def do(self, action: StagePass, given: Tensors) -> Tensors:
        """Do it with what was given, nothing where it begins here; what the next stage needs, nothing if none does."""
        self.before(action)
        made = self._backward(action, given) if action.backward else self._forward(action, given)
        return tuple(each for each in made if each is not None)

    def whole(self, micro_batch: int) -> None:
        """Forward and backward of one micro-batch, where one stage has all layers."""
        for backward in (False, True):
            self.do(StagePass(backward, 0, micro_batch), ())

    def all_losses(self) -> list[Tensor]:
        """The losses in order of micro-batch, so that their sum has the same bits in any order of passes."""
        return [self.losses[number] for number in sorted(self.losses)]

    def use(self) -> Tensor:
        """The use of this rank's layers, with zeros for others: choices by MoE layer and expert, flat, then those
        dropped by layer, then the balance loss."""
        spec = self._model.spec
        shape = spec.num_moe_layers, spec.router.num_experts
        counts_LE = torch.zeros(shape, dtype=torch.float64, device=self._model.device)
        dropped_L, balance = counts_LE.new_zeros(spec.num_moe_layers), counts_LE.new_zeros(1)
        for (stage, _), routing in self._routings.items():
            layers = self._model.moe_layers(stage)
            for layer, facts, dropped in zip(layers, routing.all_facts(), routing.dropped, strict=True):
                counts_LE[layer] += facts.counts_E
                dropped_L[layer] += dropped
                balance += balance_of(facts) / spec.num_moe_layers / len(self._batches)
        return torch.cat((counts_LE.flatten(), dropped_L, balance))

    def _forward(self, action: StagePass, given: Tensors) -> tuple[Tensor | None, ...]:
        spec, key = self._model.spec, (action.stage, action.micro_batch)
        share = 1 / len(self._batches)
        routing = Routing(
            spec.router, self._config, self._model.mesh.stage, num_layers=spec.num_moe_layers, share=share
        )
        self._routings[key] = routing
        rows, routing.use_before_E = (*given, None, None)[:2]
        if routing.use_before_E is None:
            shape, device = (spec.router.num_experts,), self._model.device
            routing.use_before_E = torch.zeros(shape, dtype=torch.float64, device=device)
        if rows is not None and torch.is_grad_enabled():
            rows.requires_grad_()
        batch = self._batches[action.micro_batch]
        result = self._model.stage(action.stage, rows, batch, self._num_targets, routing)
        if torch.is_grad_enabled():
            self._flights[key] = rows, result
        if action.stage == self._model.schedule.num_stages - 1:
            self.losses[action.micro_batch] = result.detach()
            return ()
        return result.detach(), routing.use_so_far() if self._config.balance_over == "model" else None

    def _backward(self, action: StagePass, given: Tensors) -> tuple[Tensor | None, ...]:
        key = (action.stage, action.micro_batch)
        (rows, result), routing = self._flights.pop(key), self._routings[key]
        gradient, use_E = (*given, None, None)[:2]
        if self._config.balance_over == "model":
            routing.use_of_all_E = routing.use_so_far() if use_E is None else use_E
        one_thread = torch.autograd.set_multithreading_enabled(False)  # else another one for each kind of device
        with self._spans.backward(result), one_thread:
            torch.autograd.backward(result, gradient)
        return None if rows is None else rows.grad, routing.use_of_all_E


_LEAST_BLOCKS = 16  # of a source, for an error that means something
_log = get_logger("train")


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """Nats a target, the standard error of that (None: a single block has none), targets looked at, and the parts by
    source where there are several. `by_set`: of evaluation sets, which do not count in it."""

    loss: float
    error: float | None
    num_targets: int
    by_source: dict[str, "HeldOutLoss"] = field(default_factory=dict)
    by_set: dict[str, "HeldOutLoss"] = field(default_factory=dict)

    def metrics(self) -> dict[str, Any]:
        """The values under their names in a run's metrics."""
        values: dict[str, Any] = {"held_out_loss": self.loss, "held_out_targets": self.num_targets}
        if self.error is not None:
            values["held_out_error"] = self.error
        if self.by_source:
            values["held_out_loss_by_source"] = {name: each.loss for name, each in self.by_source.items()}
        if self.by_set:
            values["evaluation_loss"] = {name: each.loss for name, each in self.by_set.items()}
        return values

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.4f}"
        return f"{self.loss:.4f}{error} nats a token, over {self.num_targets:,} tokens"


def held_out_loss(
    config: TrainConfig, mesh: Mesh, tokens: TokenFile, passes: Passes, shards: Shards
) -> HeldOutLoss | None:
    """The loss on `tokens`; None if there are none. All ranks call it together."""
    if tokens.ids.shape[0] < 2:
        return None
    samples, sources = Samples.of(config, tokens, shuffled=False), tokens.all_sources()
    sizes = np.bincount(samples.sources, minlength=len(sources)).tolist()
    data, place = mesh.sizes.data, mesh.sizes.place(mesh.rank, "data")
    largest = max(1, config.batch // data)
    blocks = [
        (source, block)
        for source, windows in enumerate(_chosen(sizes, sources, config.output.evaluate_sequences))
        for block in _blocks(windows, largest, data)
    ]
    own = [place + data * turn for turn in range(-(-len(blocks) // data))]  # as many on every rank
    device = passes.model.device
    batches = [_batch(samples, blocks[number][1] if number < len(blocks) else [], device) for number in own]
    shards.begin_step()
    sums = passes.losses_of(batches, own, len(blocks))
    shards.end_step()
    of_blocks = torch.tensor([source for source, _ in blocks], device=HOST)
    parts = {each.name: _mean(sums[of_blocks == source]) for source, each in enumerate(sources)}
    is_set = torch.tensor([sources[source].is_evaluation for source, _ in blocks], device=HOST)
    whole = _mean(sums[~is_set]) or _mean(sums)  # with sets alone, over all of them
    if whole is None:
        _log.warning("the held-out text has no target: raise data.held_out, or give more text")
        return None
    found = [(each, part) for each in sources if (part := parts[each.name]) is not None]
    by_source = {each.name: part for each, part in found if not each.is_evaluation}
    return replace(
        whole,
        by_source=by_source if len(by_source) > 1 else {},
        by_set={each.name: part for each, part in found if each.is_evaluation},
    )


def _chosen(sizes: Sequence[int], sources: Sequence[SourceTokens], wanted: int) -> list[list[int]]:
    """Windows of each source by number, evenly spread; `wanted` of all together, 0: all. Each source is looked at in
    proportion to its size, and has one window at least. Of an evaluation set, `wanted` of its own."""
    both, first, found = list(zip(sizes, sources, strict=True)), 0, list[list[int]]()
    of_sources = sum(size for size, each in both if not each.is_evaluation)
    for size, each in both:
        total = size if each.is_evaluation else of_sources
        num = size if not wanted or wanted >= total else min(size, max(1, round(wanted * size / total)))
        found.append([first + (2 * place + 1) * size // (2 * num) for place in range(num)])
        first += size
    return found


def _blocks(windows: Sequence[int], largest: int, ranks: int) -> list[Sequence[int]]:
    """`windows` in blocks, each a pass of one rank: enough of them for an error."""
    size = max(1, min(largest, len(windows) // max(_LEAST_BLOCKS, ranks)))
    return [windows[first : first + size] for first in range(0, len(windows), size)]


def _mean(sums: Tensor) -> HeldOutLoss | None:
    """The loss of [blocks, 2], sums of nats and targets; None without a target."""
    nats, targets = sums[sums[:, 1] > 0].T
    blocks, num_targets = targets.numel(), float(targets.sum())
    if not blocks:
        return None
    loss = float(nats.sum()) / num_targets
    spread = float((nats - loss * targets).square().sum())
    error = math.sqrt(spread * blocks / (blocks - 1)) / num_targets if blocks > 1 else None
    return HeldOutLoss(loss=loss, error=error, num_targets=int(num_targets))


def _batch(samples: Samples, numbers: Sequence[int], device: torch.device) -> Batch:
    """These samples; without any, one that counts nothing."""
    batch = samples.batch(numbers or [0], device)
    if not numbers:
        batch.targets_BS.fill_(IGNORED)
    return batch
