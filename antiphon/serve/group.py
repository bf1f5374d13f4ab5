"""Workers that step together: attention workers and the experts they share, or one colocated replica.

A step: every attention worker with work gets its plan, cut into micro-batches; the engine names for each micro-batch
who takes part, so experts wait for exactly those and an idle worker delays nobody.

Recovery, when a worker of a disaggregated group dies or stops answering:
  1. a new exchange epoch begins; everyone leaves the running step (phase LEAVING)
  2. expert workers that died are started again and load (phase LOADING); they held no state of any request
  3. all workers agree on the epoch (phase JOINING)
  4. plans that were not answered are sent again, unchanged: the cache is written at the same places with the same bits
An attention worker's requests move to the other attention workers, or wait for its return, and are computed again.

Who hangs? Whoever waits in vain names its peers, but may name one that itself waits for a third. So nobody is killed on
a report: suspects are asked to leave the step and to join the new epoch as everyone is, and only have less time for it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from antiphon.base.logging import get_logger
from antiphon.comm.m2n.shm import ControlPage
from antiphon.serve.fleet import Fleet, WorkerName, WorkerProcess
from antiphon.serve.policy.pieces import micro_batch_steps
from antiphon.serve.policy.scheduler import Scheduler
from antiphon.serve.policy.step import Progress, SequenceStep, StepPlan
from antiphon.serve.statistics import EngineStatistics
from antiphon.serve.worker.messages import ExpertReport, Ready, Reset, ResetDone, Sampled, Step, StepFailed, StepResult

_log = get_logger("engine")
_MAX_ATTEMPTS = 4  # a plan that fails this often is given up: its requests end with an error
_SUSPECT_S = 2.0  # what a worker has to answer in, once others waited for it in vain


class Phase(Enum):
    STEPPING = "stepping"
    LEAVING = "leaving"
    LOADING = "loading"
    JOINING = "joining"


@dataclass
class _InFlight:
    plan: StepPlan
    micro_batches: list[list[SequenceStep]]
    attempts: int = 1


@dataclass(frozen=True)
class Commit:
    """What a finished part of a step did: per request its progress, and what the worker reported of it."""

    progress: list[Progress]
    sampled: dict[str, Sampled]


class StepGroup:
    """See the module's docstring. Driven by the engine's thread: `start_step`, `on_message`, `on_death`, `on_tick`."""

    def __init__(
        self,
        *,
        attention: list[WorkerName],
        experts: list[WorkerName],
        schedulers: list[Scheduler],
        num_micro_batches: int,
        control: ControlPage | None,
        fleet: Fleet,
        statistics: EngineStatistics,
        bitmask_of: Callable[[str], bytes | None],
        timeout_s: float,
    ) -> None:
        self.attention = attention
        self.experts = experts
        self.schedulers = dict(zip(attention, schedulers, strict=True))
        self._num_micro_batches = num_micro_batches
        self._control = control
        self._fleet = fleet
        self._statistics = statistics
        self._bitmask_of = bitmask_of
        self._timeout_s = timeout_s
        self._phase = Phase.LOADING
        self._epoch = 0
        self._joined: set[WorkerName] = set()
        self._in_flight: dict[WorkerName, _InFlight] = {}
        self._failed: dict[WorkerName, _InFlight] = {}
        self._suspects: set[str] = set()
        self._step_started = 0.0
        self._phase_started = time.monotonic()

    @property
    def live_attention(self) -> list[WorkerName]:
        """The attention workers that can step now: none while an expert worker is missing or a recovery goes on."""
        return [name for name in self.attention if name in self._joined] if self._phase is Phase.STEPPING else []

    @property
    def ready(self) -> bool:
        """All experts and at least one attention worker can step."""
        return bool(self.live_attention)

    @property
    def complete(self) -> bool:
        """All workers can step."""
        return len(self.live_attention) == len(self.attention)

    # --- steps -----------------------------------------------------------------------------------------------------

    def start_step(self) -> None:
        """Plan and send the next step, if none is running and there is work."""
        if self._in_flight:
            return
        for name in self.live_attention:
            if (failed := self._failed.pop(name, None)) is not None:
                failed.attempts += 1
                self._in_flight[name] = failed
            elif (plan := self.schedulers[name].schedule()) is not None:
                self._in_flight[name] = _InFlight(plan, micro_batch_steps(plan.sequences, self._num_micro_batches))
        if not self._in_flight:
            return
        self._step_started = time.monotonic()
        participants = self._participants()
        for name, part in list(self._in_flight.items()):
            self._fleet.send(self._fleet.workers[name], self._step_message(part, participants))

    def _participants(self) -> list[list[int]]:
        num_micro_batches = max(len(part.micro_batches) for part in self._in_flight.values())
        return [
            [name.index for name, part in self._in_flight.items() if len(part.micro_batches) > index]
            for index in range(num_micro_batches)
        ]

    def _step_message(self, part: _InFlight, participants: list[list[int]]) -> Step:
        bitmasks = {}
        for sequence in part.plan.sequences:
            if sequence.samples and (mask := self._bitmask_of(sequence.request_id)) is not None:
                bitmasks[sequence.request_id] = mask
        return Step(
            step=part.plan.step_id,
            released=list(part.plan.released),
            starts=list(part.plan.starts),
            micro_batches=part.micro_batches,
            participants=participants,
            bitmasks=bitmasks,
        )

    # --- what workers say ------------------------------------------------------------------------------------------

    def on_message(self, worker: WorkerProcess, message: object) -> Commit | list[str] | None:
        """Handle one message. A `Commit` carries tokens; a list of request ids must be ended with an error."""
        if isinstance(message, StepResult):
            return self._on_result(worker.name, message)
        if isinstance(message, StepFailed):
            return self._on_failure(worker, message)
        if isinstance(message, ExpertReport):
            self._statistics.record_experts(message)
        elif isinstance(message, Ready):
            worker.ready = True
            self._on_ready(worker)
        elif isinstance(message, ResetDone):
            self._on_reset_done(worker, message.epoch)
        return None

    def _on_result(self, name: WorkerName, result: StepResult) -> Commit:
        part = self._in_flight.pop(name)
        sampled = {entry.request_id: entry for entry in result.requests}
        tokens = []
        for sequence in part.plan.sequences:
            if sequence.samples:
                token_id = sampled[sequence.request_id].token_id
                assert token_id is not None, "a sampling sequence yields a token"
                tokens.append(token_id)
        progress = self.schedulers[name].commit(part.plan, tokens)
        self._statistics.record_step(result)
        if not self._in_flight:
            self._statistics.record_group_step(time.monotonic() - self._step_started)
        self._advance()
        return Commit(progress, sampled)

    def _on_failure(self, worker: WorkerProcess, failure: StepFailed) -> list[str] | None:
        part = self._in_flight.pop(worker.name, None)
        doomed: list[str] | None = None
        if part is not None and (failure.reason == "error" or part.attempts >= _MAX_ATTEMPTS):
            self.schedulers[worker.name].rollback(part.plan)
            doomed = [sequence.request_id for sequence in part.plan.sequences]
            _log.error("%s gives up on step %d: %s", worker.name, failure.step, failure.message)
        elif part is not None:
            self._failed[worker.name] = part
        if failure.reason == "timeout":
            _log.error("%s: %s", worker.name, failure.message)
            self._suspects.update(failure.peers)
        if failure.reason != "aborted" and self._control is not None and self._phase is Phase.STEPPING:
            self._begin_recovery()
        self._advance()
        return doomed

    def _on_ready(self, worker: WorkerProcess) -> None:
        if self._control is None:
            self._joined.add(worker.name)
            self._phase = Phase.STEPPING
        elif worker.name in self.attention and self._phase in (Phase.STEPPING, Phase.JOINING):
            self._fleet.send(worker, Reset(self._epoch))
        self._advance()

    def _on_reset_done(self, worker: WorkerProcess, epoch: int) -> None:
        if epoch == self._epoch:
            self._joined.add(worker.name)
        self._advance()

    # --- failures --------------------------------------------------------------------------------------------------

    def on_death(self, worker: WorkerProcess) -> None:
        """A worker is gone. Its requests wait in its scheduler; the engine may move them (`Scheduler.evacuate`)."""
        name = worker.name
        self._joined.discard(name)
        if name in self.schedulers:
            self._in_flight.pop(name, None)
            self._failed.pop(name, None)
            self.schedulers[name].requeue_all()
        if self._control is None:
            self._phase = Phase.LOADING
        else:
            self._begin_recovery()
        self._advance()

    def on_tick(self) -> None:
        """Kill workers that owe an answer for twice the workers' own timeout: they would have said why. Suspects have
        less time, once the step they hold up has been given up."""
        waited_s = time.monotonic() - max(self._step_started, self._phase_started)
        owing = set(self._in_flight)
        if self._phase is Phase.JOINING:
            owing |= {worker.name for worker in self._loaded()} - self._joined
        for name in owing:
            suspect = str(name) in self._suspects and self._phase is not Phase.STEPPING
            if waited_s > (min(_SUSPECT_S, self._timeout_s) if suspect else 2 * self._timeout_s):
                _log.error("%s has not answered for %.1f s: killing it", name, waited_s)
                self._fleet.workers[name].kill()

    def close(self) -> None:
        """The workers have ended: let go of the exchange's memory."""
        if self._control is not None:
            self._control.close()

    def _begin_recovery(self) -> None:
        assert self._control is not None, "only workers of an exchange recover together"
        self._epoch = self._control.abort_step()
        self._joined.clear()
        self._enter(Phase.LEAVING)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._phase_started = time.monotonic()

    def _loaded(self) -> list[WorkerProcess]:
        names = (*self.attention, *self.experts)
        return [worker for name in names if (worker := self._fleet.workers.get(name)) is not None and worker.ready]

    def _advance(self) -> None:
        """Go as far through recovery as answers allow."""
        if self._control is None:
            return
        if self._phase is Phase.LEAVING and not self._in_flight:
            self._enter(Phase.LOADING)
        if self._phase is Phase.LOADING and self._experts_loaded():
            self._enter(Phase.JOINING)
            for worker in self._loaded():
                self._fleet.send(worker, Reset(self._epoch))
        everyone_joined = all(worker.name in self._joined for worker in self._loaded())
        if self._phase is Phase.JOINING and everyone_joined and self._experts_loaded():
            self._suspects.clear()
            self._enter(Phase.STEPPING)

    def _experts_loaded(self) -> bool:
        workers = self._fleet.workers
        return all(name in workers and workers[name].ready for name in self.experts)
