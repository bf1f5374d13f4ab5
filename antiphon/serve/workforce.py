"""The workers of an engine, in their groups: whose message is whose, who loads, who died, who is started again.

A worker may die `_MAX_RESTARTS` times in a row; then the engine gives up. A finished step begins the count anew, and so
does a death in a step: the requests of that step answer for it, and they have a budget of their own
(`policy/suspects`). So a poisonous request cannot use up the workers' budget, and a worker that dies without any
request's doing (while it loads, or idle) is not restarted for ever.
"""

from collections.abc import Callable, Iterable

from antiphon.base.errors import StartFailed, UserError
from antiphon.base.logging import get_logger
from antiphon.serve.fleet import Event, Fleet, WorkerName, WorkerProcess
from antiphon.serve.group import StepGroup
from antiphon.serve.policy.request import Request
from antiphon.serve.policy.scheduler import Scheduler
from antiphon.serve.running_step import Commit, StepFailure
from antiphon.serve.statistics import EngineStatistics
from antiphon.serve.worker.messages import Failure, FromWorker, Progress, Ready

_log = get_logger("engine")
_MAX_RESTARTS = 5  # of one worker, see above
LOAD_TIMEOUT_S = 120.0  # without a word on how far it has loaded; then a loading worker hangs


class Workforce:
    """Driven by the engine's thread. The properties may be read by any."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        groups: list[StepGroup],
        statistics: EngineStatistics,
        relaunch: Callable[[WorkerName], None],
        load_timeout_s: float = LOAD_TIMEOUT_S,
    ) -> None:
        self.groups = groups
        self.schedulers: dict[WorkerName, Scheduler] = {}
        self.load_timeout_s = load_timeout_s
        self._fleet = fleet
        self._statistics = statistics
        self._relaunch = relaunch
        self._group_of: dict[WorkerName, StepGroup] = {}
        self._loading: dict[WorkerName, Progress] = {}
        self._ready: dict[WorkerName, Ready] = {}
        self._num_deaths: dict[WorkerName, int] = {}

    def adopt_groups(self) -> None:
        """Take note of the groups' workers; the groups may be made after this object."""
        self._group_of = {name: group for group in self.groups for name in _members(group)}
        self.schedulers = {name: scheduler for group in self.groups for name, scheduler in group.schedulers.items()}

    # --- read by any thread ----------------------------------------------------------------------------------------

    @property
    def names(self) -> Iterable[WorkerName]:
        return self._group_of.keys()

    @property
    def ready(self) -> bool:
        """Some group can step."""
        return any(group.ready for group in self.groups)

    @property
    def complete(self) -> bool:
        """All workers can step."""
        return all(group.complete for group in self.groups)

    @property
    def kernels(self) -> set[str]:
        """The kernel back-ends the workers chose."""
        return {ready.kernels for ready in list(self._ready.values())}

    def loading_progress(self) -> tuple[int, int]:
        """(bytes loaded, bytes to load) over all workers; the second is 0 until each has said its part."""
        reports = list(self._loading.values())
        total = sum(report.total for report in reports) if len(reports) == len(self._group_of) else 0
        return sum(report.done for report in reports), total

    # --- the engine's thread ---------------------------------------------------------------------------------------

    def group_of(self, name: WorkerName) -> StepGroup:
        return self._group_of[name]

    def start_steps(self) -> None:
        """A step in every group that stands still and has work."""
        for group in self.groups:
            group.start_step()

    def on_message(self, worker: WorkerProcess, message: FromWorker) -> Commit | StepFailure | None:
        """Note what a worker says. `StartFailed` if it cannot start and never could."""
        if isinstance(message, Progress):
            self._loading[worker.name] = message
            return None
        if isinstance(message, Failure):
            if worker.name not in self._ready:
                raise StartFailed(message.message, message.exit_code)
            _log.error("%s cannot start: %s", worker.name, message.message)
            return None  # it worked before: its death, which follows, starts it again
        if isinstance(message, Ready):
            self._ready[worker.name] = message
        group = self._group_of[worker.name]
        outcome = group.on_message(worker, message)
        if isinstance(outcome, Commit):
            self._begin_count((worker.name, *group.experts))
        elif outcome is not None:
            self._begin_count(_members(group))
        return outcome

    def on_death(self, event: Event) -> tuple[StepFailure | None, list[Request]]:
        """Note that a worker is gone. Returns the failure of the step it was in, and its requests."""
        group = self._group_of[event.worker.name]
        failure, homeless = group.on_death(event.worker, event.reason)
        if failure is not None:
            self._begin_count(_members(group))
        return failure, homeless

    def replace(self, event: Event) -> None:
        """Start a worker that died again; `UserError` if it has died too often."""
        name = event.worker.name
        self._num_deaths[name] = self._num_deaths.get(name, 0) + 1
        if self._num_deaths[name] > _MAX_RESTARTS:
            raise UserError(f"{name} died {self._num_deaths[name]} times in a row, the last time {event.reason}")
        self._statistics.num_worker_restarts += 1
        self._relaunch(name)

    def on_tick(self) -> None:
        """Kill who hangs: in a step (see `StepGroup.on_tick`), or while it loads."""
        for group in self.groups:
            group.on_tick()
        for worker in self._fleet.workers.values():
            if not worker.ready and worker.channel is not None and worker.silent_s > self.load_timeout_s:
                worker.kill(f"it has not said for {self.load_timeout_s:.1f} s how far it has loaded")

    def _begin_count(self, names: Iterable[WorkerName]) -> None:
        for name in names:
            self._num_deaths.pop(name, None)


def _members(group: StepGroup) -> tuple[WorkerName, ...]:
    return (*group.attention, *group.experts)
