"""Runs the steps: data, losses, gradients, optimizer, what is shown and what is saved.

One step: its micro-batches are taken from the data and passed (`passes`), their gradients are summed over ranks, the
norm is limited, the optimizer moves.
"""

import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.comm.collectives import barrier
from antiphon.comm.mesh import regrouped
from antiphon.cost.training.counts import training_flops_per_token
from antiphon.train import checkpoint, not_finite
from antiphon.train.checkpoint import RunState
from antiphon.train.checkpoint_parts import boxes_of, move
from antiphon.train.device import HOST, peak_bytes, product_flops_per_s
from antiphon.train.hugging_face import import_weights
from antiphon.train.measured_choices import Packing, with_expert
from antiphon.train.memory import bytes_by_formula
from antiphon.train.offload import map_experts
from antiphon.train.optimizer import Optimizer, is_frozen, rate_at, shards_of
from antiphon.train.passes import HeldOutLoss, Passes, held_out_loss
from antiphon.train.ranks import StopRequest, sizes_of, sums, world_size
from antiphon.train.run_folder import Metrics, json_values
from antiphon.train.samples import StreamedSamples, numbers_of_rank
from antiphon.train.saver import Saver
from antiphon.train.schedule_search import choose_schedules
from antiphon.train.setup import DTYPES, TrainingRun, build_model
from antiphon.train.shards import clip_factor
from antiphon.train.spans import StepSpans, join_parts, share_spans
from antiphon.train.watch import SpikeLimit, Watch, spike, with_step
from antiphon.train.weights import NOT_TRAINED, Weights

_TEXT_S = 1.0  # between two looks for a signal
_log = get_logger("train")


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """`loss` in nats a target; `norm` of the gradient before it is limited; `counts_LE`: choices by MoE layer
    and expert; `dropped_L`: those of a layer that no expert had room for. `spike`: what stood out, empty if nothing
    did. `mfu`: of the fastest matrix products that the ranks can make, which share this step's were.
    `further_loss`: of the layer that predicts a token further, where one is trained."""

    step: int
    loss: float
    norm: float
    rate: float
    balance: float
    counts_LE: Tensor
    dropped_L: Tensor
    duration_s: float
    mfu: float
    spike: str = ""
    further_loss: float | None = None

    @property
    def fullest(self) -> list[float]:
        """For each MoE layer, rows of the fullest expert over the mean."""
        counts = self.counts_LE.double()
        return [float(value) for value in (counts.amax(1) / counts.mean(1)).tolist()]


class Trainer:
    """Trains `run`. `on_step` is called after every step. `timeline`: a file for a trace of some of the first steps.
    `max_hours`: the run saves and ends behind the step in which they are over.

    `config` and `mesh` are the run's, until packing divides the experts among other ranks."""

    def __init__(
        self,
        run: TrainingRun,
        on_step: Callable[[TrainedStep], None] = lambda result: None,
        timeline: Path | None = None,
        max_hours: float | None = None,
    ) -> None:
        self._run = run
        self._on_step = on_step
        self._timeline = timeline
        self._max_hours = max_hours
        self.spec = run.spec
        self.config = run.config
        self.mesh = run.mesh
        self.state = RunState(step=0, num_samples=0, num_tokens=0)
        self._spans = StepSpans(run.device)
        self._held_out: HeldOutLoss | None = None
        self._saved_step = -1
        self._spikes = SpikeLimit()

    def run(self) -> dict[str, Any]:
        """Train from the newest checkpoint, or from the beginning, to the last step, or until a signal or the end of
        the time (`train.ranks`). Returns the closing facts."""
        try:
            with StopRequest(self.mesh.world, self._max_hours) as stop:
                return self._train(stop)
        finally:
            for held in (self._run.writer, self._run.lock):
                if held is not None:
                    held.close()

    def _train(self, stop: StopRequest) -> dict[str, Any]:
        config, packing, timeline = self.config, self._run.packing, self._timeline
        former = self._run.former
        self._build(begin=config.model.begin == "checkpoint" and not former.step)
        self._resume()
        self._saver = Saver(config, self._run.model_config, self._run.text, self.mesh.world, self._run.device)
        output = config.output
        try:
            metrics = Metrics(Path(output.folder), self.state.step, output.wandb) if self.is_first else None
        except BaseException:  # of a service that cannot be used
            self.model.close()
            raise
        if self.state.step >= config.steps:
            self._evaluate()
        started_s, first_step, stopped = time.monotonic(), self.state.step, ""
        loss: float | None = None
        self._peak_flops_per_s = self._measured_peak()
        finds_slow = self._run.device == HOST  # on a GPU a wait ends at once, and the next product waits
        watch = Watch(
            *(self.spec, self._spans, metrics, self.mesh),
            first_step=first_step,
            finds_slow=finds_slow,
            timeline=timeline,
        )
        try:
            while self.state.step < config.steps and not (stopped := stop.reason()):
                if not self._text_is_there():
                    continue
                measured = packing is not None and packing.is_measured(self.state.step)
                watch.before_step(self.state.step, logged=self._is_logged(self.state.step), measured=measured)
                result = self._step()
                loss = result.loss
                watch.after_step(result.step, result.counts_LE.tolist())
                self._on_step(result)
                if not result.spike:
                    self._spikes.good()
                elif self._met_spike(result, metrics, watch):
                    continue
                if metrics is not None and self._is_logged(result.step):
                    self._record(metrics, result, watch)
                self._after_step(metrics)
                if packing is not None:
                    self._pack(packing, watch, measured=measured)
            if stopped and self._saved_step != self.state.step:
                self._save()
        finally:
            self._close(metrics, watch)
        self._saver.finish()
        barrier(self.mesh.world)
        self.mesh.close()
        if timeline is not None and self.is_first:
            join_parts(timeline, self.mesh.sizes.world_size)
        facts = {
            "steps": self.state.step,
            "tokens": self.state.num_tokens,
            "loss": loss,
            **({"held_out_loss": None} if self._held_out is None else self._held_out.metrics()),
            "tokens_per_s": (self.state.step - first_step) * config.tokens_per_step / (time.monotonic() - started_s),
            "checkpoint": str(checkpoint.find_checkpoints(checkpoint.folder_of(config))[-1]),
            "stopped_by": stopped or None,
        }
        return {name: json_values(value) for name, value in facts.items()}

    def _close(self, metrics: Metrics | None, watch: Watch) -> None:
        """What was opened, however the run ended."""
        self._saver.close()
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
        self.model = build_model(self.spec, config, config.sequence_length, self.mesh, self._run.device)
        if begin:
            import_weights(self.model, Path(config.model.path))
        share_spans(self.model, self._spans)
        memory, folder = config.memory, config.offload_folder
        experts = map_experts(self.model, folder) if memory.offload == "experts" else None
        self._shards = shards_of(self.model, config.parallel.zero, config.optimizer, config.communication)
        moments = None if memory.offload == "none" else folder
        self._optimizer = Optimizer(self.model, self._shards, config.optimizer, moments, experts)
        self._passes = Passes(self.model, config.loss, self._spans, pairs=config.overlap.pairs)
        self._bytes_by_formula = bytes_by_formula(self.model, config)
        self._flops_per_token = training_flops_per_token(self.spec, config.sequence_length)

    def _pack(self, packing: Packing, watch: Watch, *, measured: bool) -> None:
        """Divide the experts among other ranks, where that was decided."""
        if measured:
            packing.observe(watch.operator_s, watch.travelled_s)
        step = self.state.step
        config = with_expert(self.config, packing.decide(step, self.mesh))
        if config == self.config:
            return
        before = boxes_of(self.model, self._shards, self._optimizer, step)
        self.config, self.mesh = config, regrouped(self.mesh, sizes_of(config, self.spec, world_size()))
        watch.mesh = self.mesh
        self._build()
        move(before, boxes_of(self.model, self._shards, self._optimizer, step), self.mesh.world)
        self._shards.end_step()

    def _resume(self) -> None:
        if self.config.overlap.search:
            batches = [
                self._run.samples.batch(numbers, self._run.device)
                for numbers in numbers_of_rank(self.config, self.mesh, 0)
            ]
            choose_schedules(self.model, Path(self.config.output.folder), self._passes, self._shards, batches)
        self._run.former.check_model(self._run.model_config)
        if (state := self._load_newest()) is not None:
            self.state, self._saved_step = state, state.step

    def _load_newest(self) -> RunState | None:
        """Fill model and optimizer from the newest checkpoint, if there is one."""
        state = checkpoint.load_newest(
            checkpoint.folder_of(self.config),
            self.model,
            self._shards,
            self._optimizer,
            new_moments=self._run.former.may_change_optimizer,
        )
        for parts in self._optimizer.mapped if state is not None else ():
            parts.give_up_all()
        return state

    def _text_is_there(self) -> bool:
        """Whether every rank has the samples of the next step, after a wait in which no signal is looked for. Where one
        of them will never have them, all save and end."""
        samples, first, found, failure = self._run.samples, self.state.num_samples, False, None
        if not isinstance(samples, StreamedSamples):
            return True
        try:
            found = samples.are_there(range(first, first + self.config.batch), _TEXT_S)
        except UserError as error:
            failure = error
        num_waiting, num_failed = sums(self.mesh.world, "barrier", not found, failure is not None)
        if num_failed:
            if self.state.step and self._saved_step != self.state.step:
                self._save()
                self._saver.finish()
            raise failure or UserError("another rank has no more text to train on: see what it says")
        return not num_waiting

    def _step(self) -> TrainedStep:
        config, step = self.config, self.state.step
        started_s = time.perf_counter()
        rate = rate_at(step, config.optimizer.schedule_steps or config.steps, config.optimizer)
        with self._spans.of("data"):
            numbers = numbers_of_rank(config, self.mesh, self.state.num_samples)
            batches = [self._run.samples.batch(each, self._run.device) for each in numbers]
        self._shards.begin_step()
        passed = self._passes.run(batches, self._shards)
        with self._spans.of("gradient sum"):
            self._shards.reduce()
        self._optimizer.forget_frozen()
        with self._spans.of("gradient norm"):
            norm = self._shards.norm()
        loss_now, norm_now, recent = float(passed.loss), float(norm), self.state.recent
        if not (math.isfinite(loss_now) and math.isfinite(norm_now)) and config.watch.on_spike == "warn":
            why = self._passes.cause_of_nan(batches, self._shards)
            newest = checkpoint.find_checkpoints(checkpoint.folder_of(config))[-1:]
            raise not_finite.complaint(step, loss_now, norm_now, why, newest[0] if newest else None, rate)
        found = spike(config.watch, recent, loss_now, norm_now)
        is_left_out = bool(found) and config.watch.on_spike != "warn"
        with self._spans.of("optimizer"):
            if is_left_out:
                self._shards.zero_grad()
                self._optimizer.count_step()
            else:
                self._optimizer.step(rate, clip_factor(norm, config.optimizer.clip))
            self._shards.end_step()
        if not is_left_out:
            self._move_score_biases(passed.counts_LE)
        self.state = RunState(
            step=step + 1,
            num_samples=self.state.num_samples + config.batch,
            num_tokens=self.state.num_tokens + config.tokens_per_step,
            recent=recent if is_left_out else with_step(recent, loss_now, norm_now),
        )
        duration_s = time.perf_counter() - started_s
        flops_per_s = self._flops_per_token * config.tokens_per_step / duration_s
        return TrainedStep(
            step=step,
            loss=loss_now,
            norm=norm_now,
            rate=rate,
            balance=float(passed.balance),
            counts_LE=passed.counts_LE,
            dropped_L=passed.dropped_L,
            duration_s=duration_s,
            mfu=flops_per_s / self._peak_flops_per_s,
            spike=found,
            further_loss=None if passed.further_loss is None else float(passed.further_loss),
        )

    def _met_spike(self, result: TrainedStep, metrics: Metrics | None, watch: Watch) -> bool:
        """Says what stood out of this step, and goes back to the newest checkpoint where that is wanted; returns
        whether it did. Samples up to here are not seen again."""
        reaction, words = self.config.watch.on_spike, f"step {result.step}: {result.spike}"
        if reaction == "warn":
            watch.warn(result.step, f"{words}: set watch.on_spike to skip or rollback, or lower the rate")
            return False
        self._spikes.skipped(result.step, words)
        if reaction == "skip":
            watch.warn(result.step, f"{words}: its update is left out")
            return False
        self._saver.close()
        barrier(self.mesh.world)  # every rank sees the checkpoint that the first one completed
        if (state := self._load_newest()) is None:
            watch.warn(result.step, f"{words}: its update is left out; there is no checkpoint to go back to yet")
            return False
        self._spikes.rolled_back(state.step, words)
        if metrics is not None:
            metrics.go_back(state.step)
        num_samples = self.state.num_samples
        watch.warn(
            state.step, f"{words}: back to step {state.step}, without samples {state.num_samples} to {num_samples - 1}"
        )
        self.state = replace(state, num_samples=num_samples)
        self._saved_step = -1  # the checkpoint knows nothing of the samples that are left out
        return True

    def _measured_peak(self) -> float:
        """FLOPs a second of all ranks' matrix products, all at once, as they share this machine's cores."""
        barrier(self.mesh.world)
        own = product_flops_per_s(self._run.device, DTYPES[self.config.dtype])
        return sums(self.mesh.world, "barrier", own, dtype=torch.float64)[0]

    def _move_score_biases(self, counts_LE: Tensor) -> None:
        """One step of each score bias towards even use, from this step's counts. Its mean is taken out: it changes no
        choice, and would grow until a bias has no digits left for differences."""
        if not self.spec.router.has_score_bias or not self.config.loss.bias_rate:
            return
        routed = (layer for layer, routes in enumerate(self.spec.moe_layers) if routes)
        for layer, counts_E in zip(routed, counts_LE, strict=True):
            where = f"layers.{layer}."
            if layer not in self.model.layers:  # another stage's
                continue
            if any(is_frozen(where + name, self.config.optimizer) for name in ("router", NOT_TRAINED)):
                continue  # it steers the choices of a router that is to stay as it is
            bias = Weights(self.model.layers[layer], torch.float32).stored("score_bias")
            wanting = (counts_E.double().mean() - counts_E).sign().view_as(bias)
            moved = bias.double() + self.config.loss.bias_rate * wanting
            bias.copy_(moved - moved.mean())

    def _is_logged(self, step: int) -> bool:
        return (step + 1) % self.config.output.log_every == 0 or step + 1 == self.config.steps

    def _record(self, metrics: Metrics, result: TrainedStep, watch: Watch) -> None:
        rate = self.config.tokens_per_step / result.duration_s
        metrics.write(
            result.step,
            {
                "loss": result.loss,
                "gradient_norm": result.norm,
                "learning_rate": result.rate,
                "balance_loss": result.balance,
                "tokens_per_s": rate,
                "flops_per_s": self._flops_per_token * rate,
                "mfu": result.mfu,
                **({} if (peak := peak_bytes(self._run.device)) is None else {"peak_device_bytes": peak}),
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "fullest_expert_ratio": result.fullest,
                "expert_rows": result.counts_LE.tolist(),
                "step_s": result.duration_s,
                "num_ranks": self.mesh.sizes.world_size,
                "operator_s": dict(watch.operator_s),
            }
            | self._of_some_runs(result, watch),
        )

    def _of_some_runs(self, result: TrainedStep, watch: Watch) -> dict[str, Any]:
        """What layers keep; of runs that drop rows, choose their dispatch, or have several ranks, more."""
        values: dict[str, Any] = {
            "activation_bytes": self.model.held.take_peak(),
            "activation_bytes_by_formula": self._bytes_by_formula,
        }
        if result.further_loss is not None:
            values["mtp_loss"] = result.further_loss
        if self.config.loss.drops:
            values["dropped_rows"] = result.dropped_L.tolist()
        if self._run.dispatch is not None:
            values["dispatch"] = self._run.dispatch.way
        if mapped := self._optimizer.mapped:
            values["offloaded_bytes"] = sum(each.num_bytes for each in mapped)
            values["offloaded_resident_bytes"] = sum(each.resident_bytes for each in mapped)
        if (buffers := self.model.layers[0].products.buffers) is not None:
            values["row_buffers_bytes"], values["row_buffers_made"] = buffers.num_bytes, buffers.num_made
        return values if watch.traffic is None else values | watch.traffic.metrics()

    def _evaluate(self) -> None:
        self._held_out = held_out_loss(self.config, self.mesh, self._run.held_out, self._passes, self._shards)

    def _after_step(self, metrics: Metrics | None) -> None:
        output, step, loss = self.config.output, self.state.step, None
        if step == self.config.steps or (output.evaluate_every and step % output.evaluate_every == 0):
            self._evaluate()
            loss = None if self._held_out is None else self._held_out.loss
            if self._held_out is not None and metrics is not None:
                metrics.write(step - 1, self._held_out.metrics())
        is_due = step == self.config.steps or (output.checkpoint_every and step % output.checkpoint_every == 0)
        if is_due or (output.keep_best and loss is not None):
            self._save(loss)

    def _save(self, held_out_loss: float | None = None) -> None:
        step = self.state.step
        not_finite.check_parameters(self._shards, step)
        boxes = boxes_of(self.model, self._shards, self._optimizer, step)
        self._saver.save(self.state, boxes, held_out_loss)
        for parts in self._optimizer.mapped:
            parts.give_up_all()
        self._saved_step = step
