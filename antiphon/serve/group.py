"""Workers that step together: attention and expert workers, or a replica; long because its phases are one machine.

A step: every attention worker with work gets its plan, cut into micro-batches; the engine names for each micro-batch
who takes part, so experts wait for exactly those and an idle worker delays nobody.

Recovery, when a worker of a disaggregated group dies or stops answering:
  1. a new exchange epoch begins; everyone leaves the running step (phase LEAVING)
  2. expert workers that died are started again and load (phase LOADING); they held no state of any request
  3. all workers agree on the epoch (phase JOINING)
  4. plans that were not answered are sent again, unchanged: the cache is written at the same places with the same bits
An attention worker's requests move to the other attention workers, or wait for its return, and are computed again.

Who hangs? A worker that waits in vain names its peers, and one of them may wait for a third. So nobody is killed on
a report: the unresponsive are asked to leave the step and to join the new epoch as everyone is, and only have less time
for it.

A worker may be a group of ranks (`worker/build`). Its leader has the worker's name and its steps; all ranks belong to
the epoch, and the worker takes part once all of them have joined it. The loss of one is the loss of the worker.

A failed step may be a request's doing: the group names whose it can be, and the engine judges (`request_desk`).
What an attention worker trips over is among its own requests; over whose rows an expert worker trips, or who makes
others wait, cannot be told.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection
from enum import Enum

from antiphon.base.logging import get_logger
from antiphon.serve.balancer import Balancer
from antiphon.serve.fleet import Fleet
from antiphon.serve.members import ExchangeControl, Members
from antiphon.serve.outputs import TrackedRequests
from antiphon.serve.placement_control import PlacementControl
from antiphon.serve.policy.request import Request
from antiphon.serve.policy.scheduler import Scheduler
from antiphon.serve.running_step import RunningStep, StepFailure
from antiphon.serve.statistics import EngineStatistics
from antiphon.serve.worker.messages import (
    ExchangeReport,
    ExpertReport,
    Prepared,
    ResetDone,
    StepFailed,
    StepResult,
    WorkerReady,
)
from antiphon.serve.worker_process import WorkerName, WorkerProcess

_log = get_logger("engine")
_MAX_ASKS = 3  # a worker that cannot join an epoch is asked again so often
_UNRESPONSIVE_S = 2.0  # what a worker has to answer in, once others waited for it in vain


class Phase(Enum):
    STEPPING = "stepping"
    LEAVING = "leaving"
    LOADING = "loading"
    JOINING = "joining"


class StepGroup:
    """See the module's docstring. Driven by the engine's thread: `start_step`, `on_message`, `on_death`, `on_tick`."""

    def __init__(
        self,
        *,
        members: Members,
        schedulers: list[Scheduler],
        num_micro_batches: int,
        fleet: Fleet,
        statistics: EngineStatistics,
        tracked: TrackedRequests,
        timeout_s: float,
        placing: PlacementControl | None = None,
        balancer: Balancer | None = None,
        record: Callable[[int, int, bytes, bytes], None] | None = None,
    ) -> None:
        """`placing`: where experts are, if attention workers do not have them all; `balancer`: who decides where they
        should be. `record` takes step, worker and the experts that its rows chose."""
        self.members = members
        self.schedulers = dict(zip(members.attention, schedulers, strict=True))
        self._control = None if len(members.processes) == 1 else ExchangeControl(fleet, members)
        self.placing = placing
        self._balancer = balancer
        self._record = record
        self._was_complete = False
        self._fleet = fleet
        self._statistics = statistics
        self._step = RunningStep(self.schedulers, num_micro_batches, tracked, all_take_part=members.share_experts)
        self._timeout_s = timeout_s
        self._phase = Phase.LOADING
        self._epoch = 0
        self._num_asked: Counter[WorkerName] = Counter()
        self._joined: set[WorkerName] = set()
        self._unresponsive: set[str] = set()
        self._step_started = 0.0
        self._waiting_since_s = fleet.clock.now_s  # for answers to a step, or for a phase to end

    @property
    def live_attention(self) -> list[WorkerName]:
        """The attention workers that can step now: none while an expert worker is missing or a recovery goes on."""
        if self._phase is not Phase.STEPPING:
            return []
        return [name for name in self.members.attention if self._joined.issuperset(self.members.ranks_of[name])]

    @property
    def ready(self) -> bool:
        """All experts and at least one attention worker can step."""
        return bool(self.live_attention)

    @property
    def complete(self) -> bool:
        """All workers can step."""
        return len(self.live_attention) == len(self.members.attention) and not self._absent

    # --- steps -----------------------------------------------------------------------------------------------------

    @property
    def quiet(self) -> bool:
        """No step runs."""
        return not self._step.workers

    def start_step(self) -> None:
        """Plan and send the next step, or one that failed again, if none is running and there is work."""
        if not self.quiet:
            return
        self._between_steps()
        messages = self._step.begin(self.live_attention, 0 if self.placing is None else self.placing.current.version)
        if messages:
            self._step_started = time.monotonic()
            self._waiting_since_s = self._fleet.clock.now_s
        for name, message in messages.items():
            self._fleet.send(self._fleet.workers[name], message)

    def _between_steps(self) -> None:
        """Take back expert workers that were missing; let experts move on."""
        if self.placing is None or self._phase is not Phase.STEPPING:
            return
        members, missing = self.members, self.members.missing_experts()
        if self.placing.absent - missing:
            self._begin_recovery()
            self._advance()
        elif not missing:
            if self._balancer is not None:
                self._balancer.advance(self.placing)
            told_apart = [] if members.share_experts else members.loaded_attention()
            self.placing.advance(told_apart, members.expert_holders)

    def withdraw(self) -> list[Request]:
        """Take all requests back, and the plans that failed with them. Only while no step runs."""
        return self._step.withdraw()

    # --- what workers say ------------------------------------------------------------------------------------------

    def on_message(self, worker: WorkerProcess, message: object) -> StepFailure | None:
        """Handle one message. A `StepFailure` is to be charged to its requests."""
        if isinstance(message, StepFailed):
            return self._on_failure(worker, message)
        if isinstance(message, StepResult):
            self._on_result(worker.name, message)
        elif isinstance(message, ExpertReport):
            assert self.placing is not None, "only experts that others use are counted"
            in_instance = self.placing.current.num_workers
            self._statistics.record_experts(worker.name.instance * in_instance + message.index, message)
            if self._balancer is not None:
                self._balancer.note_busy(message)
        elif isinstance(message, ExchangeReport):
            self._statistics.record_exchange(str(worker.name), message.traffic)
        elif isinstance(message, WorkerReady):
            worker.ready = True
            if self._control is not None:
                self._control.learn(worker.name, message)
            self._on_ready(worker)
        elif isinstance(message, ResetDone):
            self._on_reset_done(worker, message.epoch)
        elif isinstance(message, Prepared) and self.placing is not None:
            self.placing.on_prepared(worker, message)
        return None

    def _on_result(self, name: WorkerName, result: StepResult) -> None:
        if name not in self._step.workers:
            return  # one of its ranks died behind the step: the worker is lost, and its requests have moved
        self._step.commit(name, result)
        self._statistics.record_step(result)
        if self._balancer is not None:
            self._balancer.count(self._step.number, result.expert_rows)
        if self._record is not None and result.routed:
            self._record(self._step.number, name.index, result.routed, result.forecasts)
        if self.quiet:
            took_s = time.monotonic() - self._step_started
            self._statistics.record_group_step(took_s, len(self.members.experts))
        self._advance()

    def _on_failure(self, worker: WorkerProcess, failed: StepFailed) -> StepFailure | None:
        failure: StepFailure | None = None
        is_news = failed.reason != "aborted" and self._phase is Phase.STEPPING  # others may report the same failure
        if is_news:
            reported = failed.reason == "error"
            owners = [worker.name.leader] if reported else self._step.workers
            failure = self._step.failure(worker.name, f"{worker.name}: {failed.message}", owners, reported=reported)
        self._step.fail(worker.name)
        if failed.reason != "aborted":
            _log.error("%s: %s", worker.name, failed.message)
            self._statistics.events.note("failed", failed.message, str(worker.name))
            self._unresponsive.update(peer.partition(" ")[0] for peer in failed.peers)  # "replica[0][1] nodes"
        if is_news and self._control is not None:
            self._begin_recovery()
        elif failed.reason == "timeout" and self._phase is Phase.JOINING:
            self._ask_again(worker)
        self._advance()
        return failure

    def _ask_again(self, worker: WorkerProcess) -> None:
        """A worker could not reach a peer when it joined the epoch. That may pass; `on_tick` ends it if it does not."""
        assert self._control is not None, "only workers of an exchange join an epoch"
        self._num_asked[worker.name] += 1
        if self._num_asked[worker.name] <= _MAX_ASKS:
            self._fleet.send(worker, self._control.reset(self._epoch, worker.name, self._absent))

    def _on_ready(self, worker: WorkerProcess) -> None:
        leader = worker.name.leader
        # What peers said before was about the process that had this place before.
        self._unresponsive.difference_update(worker.name.among_peers[worker.name.rank > 0 :])
        if self.placing is not None:
            self.placing.on_ready(worker, is_loaded=self.members.is_loaded(leader))
        if self._control is None:
            self._joined.add(worker.name)
            self._phase = Phase.STEPPING
        elif leader in self.members.attention and self._phase in (Phase.STEPPING, Phase.JOINING):
            self._call_into_epoch(leader)
        self._advance()

    def _call_into_epoch(self, leader: WorkerName) -> None:
        """If all its ranks are up."""
        assert self._control is not None, "only workers of an exchange join an epoch"
        for name in self.members.ranks_of[leader] if self.members.is_loaded(leader) else ():
            self._fleet.send(self._fleet.workers[name], self._control.reset(self._epoch, name, self._absent))

    def _on_reset_done(self, worker: WorkerProcess, epoch: int) -> None:
        if epoch == self._epoch and worker.ready:
            self._joined.add(worker.name)
        self._advance()

    # --- failures --------------------------------------------------------------------------------------------------

    def on_death(self, worker: WorkerProcess, reason: str) -> tuple[StepFailure | None, list[Request]]:
        """A worker is gone. Returns the failure of the step it was in, and its requests, which need another worker."""
        name = worker.name.leader
        computes = name in self.schedulers
        failure: StepFailure | None = None
        if self._phase is Phase.STEPPING:
            owners = [name] if computes else self._step.workers
            failure = self._step.failure(name, f"{worker.name} died: {reason}", owners)
        self._joined.difference_update(self.members.ranks_of[name])
        homeless = self._step.lose(name) if computes else []
        if self._control is None:
            self._phase = Phase.LOADING
        else:
            self._begin_recovery()
        self._advance()
        return failure, homeless

    def renew(self, name: WorkerName) -> None:
        """Replace a worker that lives but may be broken: it takes part in nothing more, its death is noticed as any."""
        worker = self._fleet.workers[name]
        worker.ready = False
        worker.kill("its errors may be its own")
        self._joined.discard(name)
        self._advance()

    def on_tick(self) -> None:
        """Kill workers that owe an answer for twice the workers' own timeout: they would have said why. The
        unresponsive have less time, once the step they hold up has been given up."""
        waited_s = self._fleet.clock.now_s - self._waiting_since_s
        owing = set(self._step.workers)
        if self._phase is Phase.JOINING:
            owing |= {worker.name for worker in self._called()} - self._joined
        for name in owing:
            blamed = not self._unresponsive.isdisjoint(name.among_peers[name.rank > 0 :])
            unresponsive = blamed and self._phase is not Phase.STEPPING
            if waited_s > (min(_UNRESPONSIVE_S, self._timeout_s) if unresponsive else 2 * self._timeout_s):
                _log.error("%s has not answered for %.1f s: killing it", name, waited_s)
                self._fleet.workers[name].kill(f"it has not answered for {waited_s:.1f} s")

    def _begin_recovery(self) -> None:
        assert self._control is not None, "only workers of an exchange recover together"
        if self._phase is Phase.STEPPING:
            self._statistics.events.note("standstill", "the step is given up, the workers begin anew")
        self._epoch = self._control.abort_step()
        self._joined.clear()
        self._enter(Phase.LEAVING)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._num_asked.clear()
        self._waiting_since_s = self._fleet.clock.now_s

    def _called(self) -> list[WorkerProcess]:
        """The processes that belong to this epoch, as far as they are up."""
        return self.members.loaded(self._absent)

    def _advance(self) -> None:
        """Go as far through recovery as answers allow."""
        if self._control is None:
            return
        if self._phase is Phase.LEAVING and self.quiet:
            self._enter(Phase.LOADING)
        if self._phase is Phase.LOADING and self._experts_loaded():
            self._enter(Phase.JOINING)
            if self.placing is not None:
                self.placing.leave_out(self.members.missing_experts(), self.members.loaded_attention())
            for worker in self._called():
                self._fleet.send(worker, self._control.reset(self._epoch, worker.name, self._absent))
        if self._phase is Phase.JOINING and self._everyone_joined() and self._experts_loaded():
            self._unresponsive.clear()
            self._was_complete = True
            self._enter(Phase.STEPPING)
            self._statistics.events.note("going on", "the workers that are there step together")

    def _everyone_joined(self) -> bool:
        return all(worker.name in self._joined for worker in self._called())

    def _experts_loaded(self) -> bool:
        """All expert workers are up; or those that once were and are missing have only experts of which others have
        copies."""
        if self.members.others_missing():
            return False
        missing = self.members.missing_experts()
        return not missing or (self._was_complete and self.placing is not None and self.placing.spares(missing))

    @property
    def _absent(self) -> Collection[int]:
        """Expert workers without which this epoch began."""
        return frozenset() if self.placing is None else self.placing.absent
