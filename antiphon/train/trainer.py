"""Runs the steps: data, losses, gradients, optimizer, what is shown and what is saved.

One step: its micro-batches are taken from the data and passed (`passes`), their gradients are summed over ranks, the
norm is limited, the optimizer moves.
"""

import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.comm.collectives import barrier
from antiphon.comm.mesh import regrouped
from antiphon.cost.training.counts import training_flops_per_token
from antiphon.models.config import load_model_spec, read_config
from antiphon.specs.training_plan import TrainingPlan
from antiphon.train import checkpoint, not_finite
from antiphon.train.activation_bytes import activation_facts
from antiphon.train.boxes import boxes_of
from antiphon.train.checkpoint import RunState
from antiphon.train.config import TrainConfig
from antiphon.train.dispatch_choice import DispatchChoice, choose_dispatch, with_choice
from antiphon.train.evaluation import held_out_loss
from antiphon.train.hugging_face import import_weights
from antiphon.train.memory_check import check_memory, setup_of
from antiphon.train.metrics import Metrics
from antiphon.train.moving import move
from antiphon.train.optimizer import Optimizer, rate_at, shards_of
from antiphon.train.packing import Packing, with_expert
from antiphon.train.passes import Passes
from antiphon.train.ranks import join, local_ranks, sizes_of, world_size
from antiphon.train.run_facts import write_run_facts
from antiphon.train.samples import Samples, numbers_of_rank
from antiphon.train.schedule_choice import choose_schedules
from antiphon.train.setup import build_model, cache_of, prepare_data_together
from antiphon.train.spans import Spans, share_spans
from antiphon.train.timeline import join_parts
from antiphon.train.tokens import TokenFile, open_tokens
from antiphon.train.watch import Watch
from antiphon.train.weights import Weights

_log = get_logger("train")
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """`loss` in nats a target; `norm` of the gradient before it is limited; `counts_LE`: choices by MoE layer
    and expert; `dropped_L`: those of a layer that no expert had room for."""

    step: int
    loss: float
    norm: float
    rate: float
    balance: float
    counts_LE: Tensor
    dropped_L: Tensor
    duration_s: float

    @property
    def fullest(self) -> list[float]:
        """By MoE layer: rows of the fullest expert over the mean."""
        counts = self.counts_LE.double()
        return [float(value) for value in (counts.amax(1) / counts.mean(1)).tolist()]


class Trainer:
    """One run. `on_step` is called after every step. `timeline`: a file for a trace of some of the first steps.
    `plan`: the one that `config` obeys, for the page that closes the run."""

    def __init__(
        self,
        config: TrainConfig,
        on_step: Callable[[StepResult], None] = lambda result: None,
        timeline: Path | None = None,
        plan: TrainingPlan | None = None,
    ) -> None:
        self.config = config
        self.plan = plan
        self.on_step = on_step
        self.timeline = timeline
        self.spans = Spans()
        self.held_out_loss: float | None = None
        self.dispatch: DispatchChoice | None = None
        self.spec = load_model_spec(Path(config.model.path))
        if config.sequence_length > self.spec.max_position:
            raise UserError(
                f"sequence_length is {config.sequence_length}, the model's positions end at {self.spec.max_position}: "
                "shorten the sequences"
            )
        self.model_config = read_config(Path(config.model.path))
        self.packing: Packing | None = None
        self.state = RunState(step=0, num_samples=0, num_tokens=0)

    def run(self) -> dict[str, Any]:
        """Train from the newest checkpoint, or from the beginning, to the last step. Returns the closing facts."""
        config = self.config
        if config.communication.packing:
            self.packing = Packing(config, self.spec)
            config = with_expert(config, self.packing.expert_at(checkpoint.newest_step(config)))
        sizes = sizes_of(config, self.spec, world_size())
        need = check_memory(self.spec, config, setup_of(config, sizes), ranks_here=local_ranks())
        self.mesh = join(sizes, config.communication)
        prepare_data_together(config, self.spec, self.mesh)
        held_out = open_tokens(cache_of(config), "held_out")
        self.samples = Samples.of(config, open_tokens(cache_of(config), "train"), shuffled=True)
        self.dispatch = choose_dispatch(self.spec, config, self.mesh)
        config = self.config = with_choice(config, self.dispatch)
        if self.is_first:
            chosen = None if self.dispatch is None else asdict(self.dispatch)
            write_run_facts(config, self.spec, need, num_ranks=sizes.world_size, plan=self.plan, dispatch=chosen)
        self._build(begin=config.model.begin == "checkpoint")
        self._resume()
        self.saver = checkpoint.Saver(config, self.model_config, self.mesh.world)
        metrics = Metrics(Path(config.output.folder), self.state.step) if self.is_first else None
        if self.state.step >= config.steps:
            self.held_out_loss = held_out_loss(config, self.mesh, held_out, self.passes, self.shards)
        started_s, first_step, loss = time.monotonic(), self.state.step, float("nan")
        watch = Watch(self.spec, self.spans, metrics, self.mesh, first_step=first_step, timeline=self.timeline)
        try:
            while self.state.step < config.steps:
                measured = self.packing is not None and self.packing.is_measured(self.state.step)
                watch.before_step(self.state.step, logged=self._is_logged(self.state.step), measured=measured)
                result = self._step()
                loss = result.loss
                watch.after_step(result.step, result.counts_LE.tolist())
                self.on_step(result)
                if metrics is not None and self._is_logged(result.step):
                    self._record(metrics, result, watch)
                self._after_step(metrics, held_out)
                if self.packing is not None:
                    self._pack(self.packing, watch, measured=measured)
        finally:
            self._close(metrics, watch)
        self.saver.finish()
        barrier(self.mesh.world)
        self.mesh.close()
        if self.timeline is not None and self.is_first:
            join_parts(self.timeline, sizes.world_size)
        return {
            "steps": self.state.step,
            "tokens": self.state.num_tokens,
            "loss": loss,
            "held_out_loss": self.held_out_loss,
            "tokens_per_s": (self.state.step - first_step) * config.tokens_per_step / (time.monotonic() - started_s),
            "checkpoint": str(checkpoint.find_checkpoints(checkpoint.folder_of(config))[-1]),
        }

    def _close(self, metrics: Metrics | None, watch: Watch) -> None:
        """What was opened, however the run ended."""
        self.saver.close()
        if metrics is not None:
            metrics.close()
        watch.close()
        self.model.close()

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.mesh.rank == 0

    def _build(self, *, begin: bool = False) -> None:
        """What is trained, as `config` and `mesh` say; `begin`: with the weights of the model's folder."""
        config = self.config
        self.model = build_model(self.spec, config, config.sequence_length, self.mesh)
        if begin:
            import_weights(self.model, Path(config.model.path))
        share_spans(self.model, self.spans)
        self.shards = shards_of(self.model, config.parallel.zero, config.optimizer, config.communication)
        self.optimizer = Optimizer(self.model, self.shards, config.optimizer)
        self.passes = Passes(self.model, config.loss, self.spans, pairs=config.overlap.pairs)

    def _pack(self, packing: Packing, watch: Watch, *, measured: bool) -> None:
        """Divide the experts among other ranks, where that was decided."""
        if measured:
            packing.observe(watch.operator_s, watch.travelled_s)
        step = self.state.step
        config = with_expert(self.config, packing.decide(step, self.mesh))
        if config == self.config:
            return
        before = boxes_of(self.model, self.shards, self.optimizer, step)
        self.config, self.mesh = config, regrouped(self.mesh, sizes_of(config, self.spec, world_size()))
        self._build()
        move(before, boxes_of(self.model, self.shards, self.optimizer, step), self.mesh.world)
        self.shards.end_step()

    def _resume(self) -> None:
        if self.config.overlap.search:
            batches = [self.samples.batch(numbers, _CPU) for numbers in numbers_of_rank(self.config, self.mesh, 0)]
            choose_schedules(self.model, Path(self.config.output.folder), self.passes, self.shards, batches)
        found = checkpoint.find_checkpoints(checkpoint.folder_of(self.config))
        if not found:
            return
        facts = checkpoint.read_facts(found[-1])
        if facts["model_config"] != self.model_config:
            raise UserError(f"{found[-1]} is of another model: change output.folder, or remove it")
        self.state = checkpoint.load(found[-1], self.model, self.shards, self.optimizer)
        _log.info("resumed from %s", found[-1])

    def _step(self) -> StepResult:
        config, step = self.config, self.state.step
        started_s = time.perf_counter()
        rate = rate_at(step, config.steps, config.optimizer)
        with self.spans.of("data"):
            numbers = numbers_of_rank(config, self.mesh, self.state.num_samples)
            batches = [self.samples.batch(each, _CPU) for each in numbers]
        self.shards.begin_step()
        passed = self.passes.run(batches, self.shards)
        with self.spans.of("gradient sum"):
            self.shards.reduce()
        with self.spans.of("gradient norm"):
            norm = self.shards.norm()
        if not torch.isfinite(norm) or not torch.isfinite(passed.loss):
            why = self.passes.cause_of_nan(batches, self.shards)
            newest = checkpoint.find_checkpoints(checkpoint.folder_of(config))[-1:]
            raise not_finite.complaint(step, float(passed.loss), float(norm), why, newest[0] if newest else None, rate)
        with self.spans.of("optimizer"):
            self.shards.clip(norm, config.optimizer.clip)
            self.optimizer.step(rate)
            self.shards.end_step()
        self._move_score_biases(passed.counts_LE)
        self.state = RunState(
            step=step + 1,
            num_samples=self.state.num_samples + config.batch,
            num_tokens=self.state.num_tokens + config.tokens_per_step,
        )
        return StepResult(
            step=step,
            loss=float(passed.loss),
            norm=float(norm),
            rate=rate,
            balance=float(passed.balance),
            counts_LE=passed.counts_LE,
            dropped_L=passed.dropped_L,
            duration_s=time.perf_counter() - started_s,
        )

    def _move_score_biases(self, counts_LE: Tensor) -> None:
        """One step of each score bias towards even use, from this step's counts."""
        if not self.spec.router.has_score_bias or not self.config.loss.bias_rate:
            return
        routed = (layer for layer, routes in enumerate(self.spec.moe_layers) if routes)
        for layer, counts_E in zip(routed, counts_LE, strict=True):
            if layer not in self.model.layers:  # another stage's
                continue
            bias = Weights(self.model.layers[layer], torch.float32).stored("score_bias")
            wanting = (counts_E.double().mean() - counts_E).sign().view_as(bias)
            bias.add_(self.config.loss.bias_rate * wanting.to(bias.dtype))

    def _is_logged(self, step: int) -> bool:
        return (step + 1) % self.config.output.log_every == 0 or step + 1 == self.config.steps

    def _record(self, metrics: Metrics, result: StepResult, watch: Watch) -> None:
        rate = self.config.tokens_per_step / result.duration_s
        metrics.write(
            result.step,
            {
                "loss": result.loss,
                "gradient_norm": result.norm,
                "learning_rate": result.rate,
                "balance_loss": result.balance,
                "tokens_per_s": rate,
                "flops_per_s": training_flops_per_token(self.spec, self.config.sequence_length) * rate,
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "fullest_expert_ratio": result.fullest,
                "expert_rows": result.counts_LE.tolist(),
                "step_s": result.duration_s,
                "operator_s": dict(watch.operator_s),
            }
            | self._of_some_runs(result, watch),
        )

    def _of_some_runs(self, result: StepResult, watch: Watch) -> dict[str, Any]:
        """What layers keep; of runs that drop rows, choose their dispatch, or have several ranks, more."""
        values: dict[str, Any] = activation_facts(self.model, self.config)
        if self.config.loss.drops:
            values["dropped_rows"] = result.dropped_L.tolist()
        if self.dispatch is not None:
            values["dispatch"] = self.dispatch.way
        return values if watch.traffic is None else values | watch.traffic.metrics()

    def _after_step(self, metrics: Metrics | None, held_out: TokenFile) -> None:
        output, step = self.config.output, self.state.step
        if step == self.config.steps or (output.evaluate_every and step % output.evaluate_every == 0):
            self.held_out_loss = held_out_loss(self.config, self.mesh, held_out, self.passes, self.shards)
            if self.held_out_loss is not None and metrics is not None:
                metrics.write(step - 1, {"held_out_loss": self.held_out_loss})
        if step == self.config.steps or (output.checkpoint_every and step % output.checkpoint_every == 0):
            not_finite.check_parameters(self.shards, step)
            self.saver.save(self.state, boxes_of(self.model, self.shards, self.optimizer, step))
