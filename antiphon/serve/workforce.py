"""The workers of an engine, in their groups: hands on their messages, and starts again those that died.

A worker that died is started again without end, when `policy/restarts` says; requests that need it wait, the others are
served. A worker that says itself why it cannot start, and that this will not pass (the checkpoint is gone, memory is
too small), ends the engine. One from another machine does not: the next to join may do better.

A worker is also killed, and then started again, if it hangs: in a step (see `StepGroup.on_tick`), while it loads, or
because its process was stopped for `_STOPPED_S`. A short stop must do no harm: debuggers and benchmarks do it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from antiphon.base.errors import ResourceError, StartFailed, UserError, with_fix
from antiphon.base.logging import Occasional, get_logger
from antiphon.serve.engine_api import EngineStats, ShownPool
from antiphon.serve.fleet import Event, Fleet
from antiphon.serve.group import StepFailure, StepGroup
from antiphon.serve.placement_control import PlacementControl
from antiphon.serve.policy.request import Request
from antiphon.serve.policy.restarts import Restarts
from antiphon.serve.policy.scheduler import Scheduler
from antiphon.serve.statistics import EngineStatistics
from antiphon.serve.worker.messages import FromWorker, LoadProgress, StepResult, WorkerFailure, WorkerReady
from antiphon.serve.worker_handle import WorkerName, WorkerProcess
from antiphon.specs.placement import ExpertPlacement

_log = get_logger("engine")
_LOAD_TIMEOUT_S = 120.0  # without a word on how far it has loaded; then a loading worker hangs
_STOPPED_S = 2.0  # a process that is stopped for longer is not about to go on
_SAY_S = 5.0  # between two lines on one worker that dies again and again, or cannot be started
_LOOK_S = 0.2  # between two looks for stopped processes


class Workforce:
    """Driven by the engine's thread. The properties may be read by any."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        groups: list[StepGroup],
        statistics: EngineStatistics,
        launch: Callable[[WorkerName], None],
    ) -> None:
        """`launch` starts a worker's process, or asks for one from outside."""
        self.groups = groups
        self.prefill_groups = [group for group in groups if group.pool == "prefill"]
        self.request_groups = [group for group in groups if group.pool != "prefill"]
        self.schedulers: dict[WorkerName, Scheduler] = {}
        for group in groups:
            self.schedulers |= group.schedulers
        # Those that requests are routed to; prefill workers compute for them.
        self.request_schedulers = {
            name: each for group in self.request_groups for name, each in group.schedulers.items()
        }
        self.drained: set[WorkerName] = set()  # they get no requests, and those that they have move to others
        self.load_timeout_s = _LOAD_TIMEOUT_S
        self._fleet = fleet
        self._statistics = statistics
        self._launch = launch
        self.group_of = {name: group for group in groups for name in group.members.processes}
        self._loading: dict[WorkerName, LoadProgress] = {}
        self._ready: dict[WorkerName, WorkerReady] = {}
        self._restarts = {name: Restarts() for name in self.group_of}
        self._saying = {name: Occasional(_SAY_S) for name in self.group_of}  # that it died again
        self._stopped_since_s: dict[WorkerProcess, float] = {}
        self._looked_s = 0.0

    def start(self) -> None:
        """Start all workers, before the engine's thread. `ResourceError` if the system refuses one."""
        for name in self.names:
            try:
                self._launch(name)
            except OSError as error:
                words = with_fix(error.strerror or str(error))
                raise ResourceError(f"the system has no room for {name}: {words}") from error

    # --- read by any thread ----------------------------------------------------------------------------------------

    @property
    def names(self) -> Collection[WorkerName]:
        return self.group_of.keys()

    @property
    def ready(self) -> bool:
        """Some group can step that requests are routed to."""
        return any(group.ready for group in self.request_groups)

    @property
    def complete(self) -> bool:
        """All workers can step."""
        return all(group.complete for group in self.groups)

    @property
    def missing(self) -> dict[WorkerName, str]:
        """The workers that cannot step now and why: they load, wait for their restart, or for a worker to join."""
        now_s = self._fleet.clock.now_s
        found = {}
        for name, restarts in self._restarts.items():
            worker = self._fleet.workers.get(name)
            if worker is None or not worker.ready:
                awaited = self._awaits_joiner(name)
                found[name] = "waiting for a worker to join" if awaited else restarts.describe(now_s)
        return found

    def _awaits_joiner(self, name: WorkerName) -> bool:
        """Its place was offered, and no worker has joined."""
        worker = self._fleet.workers.get(name)
        is_gone = worker is None or (worker.is_remote and worker.channel is None)
        return is_gone and self._restarts[name].due_s is None

    @property
    def stuck(self) -> bool:
        """No group can step, and one waits to start a worker that died again and again."""
        return not self.ready and any(restarts.due_s is not None for restarts in self._restarts.values())

    @property
    def placing(self) -> list[PlacementControl]:
        """Where experts are, of each group that has them apart from attention."""
        return [group.placing for group in self.groups if group.placing is not None]

    def placing_for(self, placement: ExpertPlacement) -> list[PlacementControl]:
        """Where experts are, of each group with as many expert workers: two pools may differ in that. `UserError` if
        there is none."""
        counts = sorted({each.current.num_workers for each in self.placing})
        if not counts:
            raise UserError("experts have no placement in this layout: use --layout disaggregated or hybrid")
        if placement.num_workers not in counts:
            there = " or ".join(map(str, counts))
            raise UserError(
                f"the placement is for {placement.num_workers} expert workers, {there} run: make one for them"
            )
        return [each for each in self.placing if each.current.num_workers == placement.num_workers]

    def kv_ticket(self, name: WorkerName) -> bytes:
        """How the process that has this place now takes keys and values."""
        return self._ready[name].kv_ticket

    @property
    def kernels(self) -> set[str]:
        """The kernel back-ends the workers chose."""
        return {ready.kernels for ready in list(self._ready.values())}

    def loading_progress(self) -> tuple[int, int]:
        """(bytes loaded, bytes to load) over all workers; the second is 0 until each has said its part."""
        reports = list(self._loading.values())
        total = sum(report.total for report in reports) if len(reports) == len(self.group_of) else 0
        return sum(report.done for report in reports), total

    def stats(self, *, num_waiting: int, fatal: str | None, draining: bool) -> EngineStats:
        """One reading of all counters. Never blocks on a step; takes the queue times that have come since the last."""
        statistics, missing, ready = self._statistics, self.missing, self.ready  # once: deaths come meanwhile
        books = [scheduler.book for scheduler in self.schedulers.values()]
        return EngineStats(
            num_running=sum(scheduler.num_running for scheduler in self.request_schedulers.values()),
            num_waiting=num_waiting,
            kv_blocks_used=sum(book.pool.num_used for book in books),
            kv_blocks_total=sum(book.pool.num_blocks for book in books),
            prefix_cache_hit_tokens=sum(book.prefix_hit_tokens for book in books),
            prefix_cache_query_tokens=sum(book.prefix_query_tokens for book in books),
            num_preemptions=sum(book.num_preemptions for book in books),
            prompt_tokens=statistics.prompt_tokens,
            generation_tokens=sum(book.generation_tokens for book in books),
            num_steps=statistics.num_steps,
            num_worker_restarts=statistics.num_worker_restarts,
            attention_idle_ratio=statistics.attention_idle_ratio,
            expert_idle_ratio=statistics.expert_idle_ratio,
            exposed_communication_s=statistics.exposed_communication_s,
            dispatch_bytes=statistics.dispatch_bytes,
            balancedness_per_layer=statistics.balancedness_per_layer(),
            placement_changes=statistics.placement_changes,
            prefetch=msgspec.structs.replace(statistics.prefetch),
            rows_per_expert=statistics.rows_per_expert(),
            prompt_rows_per_expert=statistics.prompt_rows_per_expert(),
            expert_rows_per_s=statistics.rows_per_s(),
            queue_times_s=statistics.take_queue_times(),
            exchange=statistics.exchange(),
            healthy=fatal is None and ready,
            status=fatal or ("draining" if draining else _status(missing, ready)),
            missing=tuple(map(str, missing)),
            workers={str(name): missing.get(name) or self._presence(name, self.drained) for name in self.names},
            events=statistics.newest_events(),
            handovers=msgspec.structs.replace(statistics.handovers),
            pools=self._pools(),
        )

    def _presence(self, name: WorkerName, drained: Collection[WorkerName]) -> str:
        """What a worker that is there is: ready, or how far it is drained."""
        if name.leader not in drained:
            return "ready"
        num_left = len(self.schedulers[name.leader].requests)
        return f"draining, {num_left} requests left" if num_left else "drained"

    @property
    def _missing_leaders(self) -> dict[WorkerName, str]:
        return {name.leader: why for name, why in self.missing.items()}

    def drain_state(self, name: WorkerName, drained: Collection[WorkerName]) -> str:
        """As in `EngineStats.workers`, where `drained` are the workers that are to be drained."""
        return self._missing_leaders.get(name) or self._presence(name, drained)

    def find_drainable(self, worker: str) -> WorkerName:
        """The worker of that name. `UserError` if none has requests under that name."""
        found = next((name for name in self.schedulers if str(name) == worker), None)
        if found is None:
            raise UserError(f"no worker {worker!r} has requests: drain one of {', '.join(map(str, self.schedulers))}")
        return found

    def check_can_drain(self, name: WorkerName, drained: Collection[WorkerName]) -> None:
        """`UserError` if the worker is missing, or if no other could take its requests beside those that are drained:
        an order is for the process that has the place now, not for the next one."""
        missing = self._missing_leaders
        if name in missing:
            raise UserError(
                f"{name} is not there ({missing[name]}): it has no requests; drain what comes once it is ready"
            )
        others = self.request_schedulers.keys() - {name, *drained}
        if name in self.request_schedulers and not others - missing.keys():
            absent = ", ".join(sorted(f"{other} ({missing[other]})" for other in others))
            fix = f"wait for {absent}" if absent else "add another one first"
            raise UserError(f"{name} is the only worker left that takes requests: {fix}")

    def _pools(self) -> tuple[ShownPool, ...]:
        """Both, where prefill and decode are apart."""
        found = []
        for name, groups in (("prefill", self.prefill_groups), ("decode", self.request_groups)):
            schedulers = [each for group in groups for each in group.schedulers.values()]
            pools = [each.book.pool for each in schedulers]
            if self.prefill_groups:
                shown = ShownPool(
                    name=name,
                    num_requests_running=sum(each.num_running - each.num_arriving for each in schedulers),
                    num_requests_waiting=sum(each.num_waiting for each in schedulers),
                    num_requests_arriving=sum(each.num_arriving for each in schedulers),
                    kv_cache_usage_ratio=sum(pool.num_used for pool in pools) / sum(pool.num_blocks for pool in pools),
                )
                found.append(shown)
        return tuple(found)

    # --- the engine's thread ---------------------------------------------------------------------------------------

    def on_message(self, worker: WorkerProcess, message: FromWorker) -> StepFailure | None:
        """Note what a worker says. `StartFailed` if it cannot start and never could."""
        if isinstance(message, LoadProgress):
            self._loading[worker.name] = message
            return None
        if isinstance(message, WorkerFailure):
            self._on_refusal(worker, message)
            return None
        if isinstance(message, WorkerReady):
            self._ready[worker.name] = message
            self._restarts[worker.name].note_ready(self._fleet.clock.now_s)
            self._statistics.note_event("ready", "has loaded and is ready", str(worker.name))
        group = self.group_of[worker.name]
        failure = group.on_message(worker, message)
        if isinstance(message, StepResult):
            self._begin_count(group.members.ranks((worker.name, *group.members.experts)))
        elif failure is not None:
            self._begin_count(group.members.processes)
        return failure

    def _on_refusal(self, worker: WorkerProcess, failure: WorkerFailure) -> None:
        """It cannot start. Its death follows, and starts it again where that may help."""
        if worker.name not in self._ready:
            raise StartFailed(failure.message, failure.exit_code)
        if not failure.passing and not worker.is_remote:
            raise StartFailed(f"{worker.name} died and cannot start again: {failure.message}", failure.exit_code)
        worker.explanation = failure.message
        _log.error("%s cannot start: %s", worker.name, failure.message)

    def on_death(self, event: Event) -> tuple[StepFailure | None, list[Request]]:
        """Note that a worker is gone. Returns the failure of the step it was in, and its requests."""
        group = self.group_of[event.worker.name]
        self.drained.discard(event.worker.name.leader)  # what comes back is another process
        self._statistics.note_event("lost", event.reason, str(event.worker.name))
        failure, homeless = group.on_death(event.worker, event.reason)
        if failure is not None:
            self._begin_count(group.members.processes)
        self._kill_ranks_beside(event.worker.name, blameless=event.worker.was_killed_from_outside)
        return failure, homeless

    def _kill_ranks_beside(self, dead: WorkerName, *, blameless: bool) -> None:
        """What the other ranks of its worker hold is of no use without its part: all of them start again."""
        for name in self.group_of[dead].members.ranks_of[dead.leader]:
            rank = self._fleet.workers.get(name)
            if name != dead and rank is not None and rank.channel is not None:
                rank.ready = False
                rank.fell_blameless = blameless
                rank.kill(f"{dead}, a rank of the same worker, is gone")

    def replace(self, event: Event) -> None:
        """Start a worker that died again, now or later; `ResourceError` if it never came up and died too often."""
        self._note_death(event.worker.name, event.reason, from_outside=event.worker.was_killed_from_outside)
        self._start_due()

    def _note_death(self, name: WorkerName, reason: str, *, from_outside: bool) -> None:
        restarts = self._restarts[name]
        restarts.note_death(self._fleet.clock.now_s, reason, from_outside=from_outside)
        if restarts.hopeless:
            raise ResourceError(f"{name} died {restarts.num_deaths} times in a row, the last time {reason}")
        if restarts.num_deaths > 1 and self._saying[name].count() is not None:
            _log.warning("%s: %s", name, restarts.describe(self._fleet.clock.now_s))

    def _start_due(self) -> None:
        """Start the workers whose time has come, all ranks of one together. What the system cannot start now is tried
        again later."""
        for group in self.groups:
            for ranks in group.members.ranks_of.values():
                down = [name for name in ranks if not self._awaits_joiner(name)]
                due_s = [self._restarts[name].due_s for name in down]
                if due_s and all(each is not None and self._fleet.clock.now_s >= each for each in due_s):
                    self._start(down)

    def _start(self, ranks: Sequence[WorkerName]) -> None:
        for name in ranks:
            self._restarts[name].note_start()
        for name in ranks:
            try:
                self._launch(name)
            except (OSError, MemoryError) as error:
                # Not the worker's doing: it costs little to try again, and streams wait for it.
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                self._note_death(name, f"cannot be started ({reason})", from_outside=True)
                self._kill_ranks_beside(name, blameless=True)
            else:
                self._statistics.num_worker_restarts += 1

    def on_tick(self) -> None:
        """Start the workers that are due; kill those that hang, see the module's docstring."""
        if self._fleet.clock.paused:
            return
        self._start_due()
        for group in self.groups:
            group.on_tick()
        now_s = self._fleet.clock.now_s
        for worker in self._fleet.workers.values():
            if not worker.ready and worker.channel is not None and now_s - worker.heard_s > self.load_timeout_s:
                worker.kill(f"it has not said for {self.load_timeout_s:.1f} s how far it has loaded")
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._kill_stopped(now_s)

    def _kill_stopped(self, now_s: float) -> None:
        stopped = [worker for worker in self._fleet.workers.values() if worker.is_stopped]
        self._stopped_since_s = {worker: self._stopped_since_s.get(worker, now_s) for worker in stopped}
        for worker, since_s in self._stopped_since_s.items():
            if now_s - since_s >= _STOPPED_S:
                worker.kill(f"it was stopped, by SIGSTOP or the like, for {now_s - since_s:.1f} s")

    def _begin_count(self, names: Iterable[WorkerName]) -> None:
        for name in names:
            self._restarts[name].begin_count()


def _status(missing: Mapping[WorkerName, str], ready: bool) -> str:
    """Which workers are missing and why, in words."""
    names = ", ".join(f"{name} ({why})" for name, why in missing.items())
    if ready:
        return f"degraded: waiting for {names}" if names else "ok"
    return f"waiting for {names}" if names else "recovering: the workers begin anew"
