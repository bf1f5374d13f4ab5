"""Prompts computed by prefill workers for requests of decode workers, from the engine's side.

    begin     a decode worker has admitted a request, with blocks for all its tokens: the prefill worker with the least
              work beside its prefix hit computes what is missing there, as a request of its own (`prefill_of`)
    publish   the prompt is computed and the next token sampled: the client gets it at once
    settle    the keys and values have arrived: the decode worker goes on; or they will not: another try

A hand-over is a state of the request (`Request.arrives`): it runs on the decode worker, keeps its blocks whatever
happens, and no step takes it. The protocol, and when blocks are out of quarantine, is `policy/handover`.

What goes wrong costs a hand-over, not the request. The first time another one is made, to another prefill worker where
there is one; the second time, or when no prefill worker lives, the decode worker computes what is missing itself. So
a prompt that kills its workers ends where suspects are tried (`policy/suspects`). Only requests that were in the step
in which a prefill worker failed are charged.

A worker that is drained hands its requests over the same way: each leaves for another worker, and its old one, which
has all but the last tokens in its prefix cache, computes for the new one like a prefill worker. Rejected: to send its
pages as they are. It would save one step of a few rows, and need blocks that outlive their request.

Rejected: one `Request` in two schedulers. It has blocks, a slot and progress on both sides. A deadline while a prompt
waits or is computed: a prefill worker that hangs is found by its own steps; what counts is how long a prompt that is
computed takes to arrive.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from antiphon.base.logging import get_logger
from antiphon.serve.fleet import Fleet
from antiphon.serve.group import StepFailure, StepGroup
from antiphon.serve.outputs import TrackedRequests
from antiphon.serve.policy.handover import (
    MAX_LOST,
    ExpectKV,
    Handover,
    HandoverBook,
    KVNews,
    KVOffer,
    KVSource,
    KVTarget,
    WithdrawKV,
)
from antiphon.serve.policy.request import Request, StepPlan, prefill_of
from antiphon.serve.policy.scheduler import Scheduler, choose_attention_worker
from antiphon.serve.statistics import EngineStatistics
from antiphon.serve.worker.messages import Sampled
from antiphon.serve.worker_handle import WorkerName, WorkerProcess
from antiphon.serve.workforce import Workforce
from antiphon.specs.counts import blocks_of

_log = get_logger("engine")
_MAX_FAILED_PREFILLS = 2  # steps with a prompt that may fail before its hand-over does
_NO_DEADLINE_S = 1e9


@dataclass(frozen=True, kw_only=True)
class KVEnds:
    """Every process that may write keys and values or take them, its number and part, and what a cached token is.
    `timeout_s`: in which a computed prompt arrives."""

    layout: str
    sources: Mapping[WorkerName, KVSource]
    timeout_s: float


@dataclass(eq=False, kw_only=True)
class _Awaited:
    """A request on a decode worker, what a prefill worker computes for it, and the offer between the two. `charged`:
    if the hand-over fails, the request may be why; `leaves`: the request is wanted elsewhere."""

    origin: Request
    prefill: Request
    source: WorkerName
    target: WorkerName
    handover: Handover
    charged: bool = True
    leaves: bool = False
    withdrawn_s: float | None = None


class Handovers:
    """For the engine's thread. Without prefill workers there is none."""

    def __init__(
        self,
        workforce: Workforce,
        fleet: Fleet,
        tracked: TrackedRequests,
        statistics: EngineStatistics,
        ends: KVEnds,
    ) -> None:
        self._workforce = workforce
        self._fleet = fleet
        self._tracked = tracked
        self._statistics = statistics
        self._counts = statistics.handovers
        self._ends = ends
        self._timeout_s = ends.timeout_s
        self._book = HandoverBook()
        self._arrivals: dict[int, _Awaited] = {}  # by the offer's number
        self._computing: dict[str, _Awaited] = {}  # by the name of what the prefill worker computes
        self._num_prefills = 0
        self._to_clear: set[StepGroup] = set()
        for group in workforce.groups:
            group.handovers = self

    def __len__(self) -> int:
        """How many requests have keys and values on their way."""
        return len(self._arrivals)

    # --- from admission to the first token --------------------------------------------------------------------------

    def _live(self) -> dict[WorkerName, Scheduler]:
        """The prefill workers that can step now."""
        schedulers = self._workforce.schedulers
        groups = [group for group in self._workforce.prefill_groups if group not in self._to_clear]
        live = [name for group in groups for name in group.live_attention]
        return {name: schedulers[name] for name in live if name not in self._workforce.drained}

    def wanted_for(self, request: Request) -> bool:
        """Whether a prefill worker is to compute its prompt once a decode worker has admitted it."""
        return request.num_lost_handovers < MAX_LOST and self._find_source(request) is not None

    def _find_source(self, request: Request) -> WorkerName | None:
        """The worker that is drained of it, and has all but its last tokens cached; else a prefill worker."""
        for name in self._workforce.drained if request.had_by else ():
            if str(name) == request.had_by and name in self._workforce.group_of[name].live_attention:
                return name
        num_blocks = blocks_of(len(request.token_ids) + 1, self._block_size)
        able = {name: each for name, each in self._live().items() if num_blocks <= each.config.num_main_blocks}
        index = choose_attention_worker(request, dict(enumerate(able.values())))
        return None if index is None else list(able)[index]

    @property
    def _block_size(self) -> int:
        return next(iter(self._workforce.schedulers.values())).config.block_size

    def begin(self) -> None:
        """Give what decode workers have admitted to prefill workers, or to those that are drained of it."""
        for target, scheduler in self._workforce.request_schedulers.items():
            for origin in scheduler.take_arriving():
                if origin.status == "finished":
                    scheduler.remove(origin, nothing_comes=True)
                elif origin.awaits_mask:  # it has a token already: the next one needs its mask
                    scheduler.ask_again(origin)
                else:
                    self._begin(origin, target)

    def _begin(self, origin: Request, target: WorkerName) -> None:
        """Offer its blocks to a prefill worker; without one the decode worker computes what is missing."""
        source = self._find_source(origin) if origin.num_lost_handovers < MAX_LOST else None
        has_blocks = blocks_of(len(origin.token_ids), self._block_size) <= len(origin.block_table)
        if source is None or not has_blocks:
            self._workforce.schedulers[target].stop_arriving(origin)
            self._counts.num_recomputed += 1
            return
        if any(each.origin is origin for each in self._workforce.schedulers[source].requests.values()):
            self._workforce.schedulers[target].ask_again(origin)  # an earlier try has its place until its step ends
            return
        self._num_prefills += 1
        prefill = prefill_of(origin, f"{origin.request_id}/{self._num_prefills}")
        handover = self._book.offer(
            prefill.request_id,
            source=str(source),
            target=str(target),
            num_target_ranks=len(self._ranks_of(target)),
            first=origin.num_computed,
            end=len(origin.token_ids),
            pages=origin.block_table,
            now_s=self._fleet.clock.now_s,
            timeout_s=_NO_DEADLINE_S,
        )
        origin.had_by = ""  # should it fail, there are prefill workers, or none
        arrival = _Awaited(origin=origin, prefill=prefill, source=source, target=target, handover=handover)
        self._arrivals[handover.number] = self._computing[prefill.request_id] = arrival
        self._expect(arrival)
        self._workforce.schedulers[source].add(prefill)
        self._counts.num_begun += 1

    def _expect(self, arrival: _Awaited) -> None:
        handover = arrival.handover
        for rank, name in enumerate(self._ranks_of(arrival.target)):
            order = ExpectKV(
                number=handover.number,
                first=handover.first,
                end=handover.end,
                layout=self._ends.layout,
                blocks=list(handover.pages),
                rank=rank,
                sources=self._sources(arrival),
                targets=self._targets(arrival),
            )
            self._fleet.send(self._fleet.workers[name], order)

    def _ranks_of(self, leader: WorkerName) -> tuple[WorkerName, ...]:
        return self._workforce.group_of[leader].members.ranks_of[leader]

    def _sources(self, arrival: _Awaited) -> list[KVSource]:
        return [self._ends.sources[name] for name in self._ranks_of(arrival.source)]

    def _targets(self, arrival: _Awaited) -> list[KVTarget]:
        ranks = self._ranks_of(arrival.target)
        return [KVTarget(self._workforce.kv_ticket(name), self._ends.sources[name].part) for name in ranks]

    def offers(self, plan: StepPlan) -> list[KVOffer]:
        """What a prefill worker has to know of the requests that start with this step."""
        arrivals = [self._computing.get(start.request_id) for start in plan.starts]
        return [
            KVOffer(
                number=arrival.handover.number,
                request_id=arrival.prefill.request_id,
                first=arrival.handover.first,
                end=arrival.handover.end,
                layout=self._ends.layout,
                sources=self._sources(arrival),
                targets=self._targets(arrival),
            )
            for arrival in arrivals
            if arrival is not None
        ]

    def publish(self, progress: list[Request], sampled: dict[str, Sampled]) -> None:
        """A prefill worker has computed a step: what it says belongs to the requests that it computes for."""
        said: dict[str, Sampled] = {}
        for request_id, entry in sampled.items():
            if (arrival := self._computing.get(request_id)) is None:
                said[request_id] = entry
            else:
                said[arrival.origin.request_id] = msgspec.structs.replace(entry, request_id=arrival.origin.request_id)
                arrival.origin.num_prompt_logprobs = arrival.prefill.num_prompt_logprobs
        origins = [request for request in progress if request.origin is None]  # of a worker that decodes
        for prefill in progress:
            if (arrival := self._computing.pop(prefill.request_id, None)) is not None:
                self._go_on(arrival)
                origins.append(arrival.origin)
        self._tracked.publish(origins, said)

    def _go_on(self, arrival: _Awaited) -> None:
        origin, prefill, handover = arrival.origin, arrival.prefill, arrival.handover
        scheduler = self._workforce.schedulers[arrival.target]
        self._note_cached(arrival, scheduler)
        token_id = prefill.newest_token_id if prefill.num_output > origin.num_output else None
        if scheduler.take_token(origin, token_id):
            self._book.withdraw(handover.number, "the request has ended")
        else:
            handover.deadline_s = self._fleet.clock.now_s + self._timeout_s
            self._book.done(handover.number, handover.end)

    @staticmethod
    def _note_cached(arrival: _Awaited, scheduler: Scheduler) -> None:
        """The prefill worker may have found more of the prompt than the decode worker had."""
        num_more = arrival.prefill.num_cached_tokens - arrival.origin.num_cached_tokens
        if arrival.origin.num_admissions == 1 and num_more > 0:
            arrival.origin.num_cached_tokens += num_more
            scheduler.book.prefix_hit_tokens += num_more

    # --- how it ends ---------------------------------------------------------------------------------------------

    def hear(self, worker: WorkerProcess, message: KVNews) -> None:
        """What a process at either end says of an offer."""
        if message.what == "landed":
            self._book.landed(message.number, worker.name.rank)
        elif message.what == "drained":
            self._book.drained(message.number, worker.name.rank)
        else:
            self._book.withdraw(message.number, f"{worker.name}: {message.reason}")

    def end(self, request_id: str) -> None:
        """The request is not wanted any more."""
        for arrival in self._arrivals.values():
            if arrival.origin.request_id == request_id:
                self._book.withdraw(arrival.handover.number, "the request has ended")

    def clear(self, group: StepGroup) -> None:
        """Requests that arrive at these decode workers are to leave them, and what these hand over has no end."""
        for arrival in self._arrivals.values():
            if arrival.target in group.schedulers:
                arrival.leaves = True
                self._book.withdraw(arrival.handover.number, "its worker is wanted for others")
            elif arrival.source in group.schedulers:
                self._book.withdraw(arrival.handover.number, "its worker gives up what it computes")

    def on_failure(self, failure: StepFailure) -> None:
        """A step of prefill workers came to nothing. It is tried again as it was, unless that has failed before."""
        for prefill in failure.blamed:
            prefill.num_failures += 1
        suspects = {prefill.request_id for prefill in failure.blamed if prefill.num_failures >= _MAX_FAILED_PREFILLS}
        if not suspects:
            return
        group = self._workforce.group_of[failure.worker]
        self._to_clear.add(group)
        for request_id in suspects & self._computing.keys():
            self._book.withdraw(self._computing[request_id].handover.number, failure.what)
        if failure.reported:
            group.renew(failure.worker)

    def on_death(self, name: WorkerName, failure: StepFailure | None) -> None:
        """A process is gone, and its worker with it. `failure`: of the step it was in; others are not charged."""
        leader = name.leader
        for number, arrival in list(self._arrivals.items()):
            if arrival.target == leader:  # the request has left already, and waits for another decode worker
                self._stop_computing(arrival)
                del self._arrivals[number]
            elif arrival.source == leader:
                arrival.charged = failure is not None and arrival.prefill in failure.blamed
        self._book.target_lost(str(leader))
        self._book.source_lost(str(leader))

    def settle(self) -> list[Request]:
        """Do what news ask for. Returns requests that need another decode worker."""
        self._clear_groups()
        self._book.tick(self._fleet.clock.now_s)
        self._kill_silent()
        homeless: list[Request] = []
        while events := self._book.take_events():
            for kind, handover in events:
                if kind == "withdraw":
                    self._withdraw(handover)
                elif (arrival := self._arrivals.pop(handover.number, None)) is not None:
                    if kind == "ready":
                        self._arrive(arrival)
                    else:
                        homeless += self._give_up(arrival)
        return homeless

    def _arrive(self, arrival: _Awaited) -> None:
        arrival.origin.num_lost_handovers = 0
        self._workforce.schedulers[arrival.target].arrive(arrival.origin, arrival.handover.end)
        self._counts.num_done += 1
        self._counts.num_tokens += arrival.handover.end - arrival.handover.first

    def _give_up(self, arrival: _Awaited) -> list[Request]:
        """Its blocks are out of quarantine: it has ended, goes to another worker, or tries again here."""
        origin, scheduler = arrival.origin, self._workforce.schedulers[arrival.target]
        if origin.status == "finished":
            scheduler.remove(origin, nothing_comes=True)
            return []
        self._counts.num_failed += 1
        _log.warning("request %s: no hand-over from %s: %s", origin.request_id, arrival.source, arrival.handover.reason)
        self._statistics.note_event("failed", f"hand-over: {arrival.handover.reason}", str(arrival.source))
        if arrival.leaves:
            scheduler.remove(origin, nothing_comes=True)
            return [origin]
        origin.num_lost_handovers += arrival.charged
        scheduler.ask_again(origin)
        return []

    def _withdraw(self, handover: Handover) -> None:
        if (arrival := self._arrivals.get(handover.number)) is not None:
            self._stop_computing(arrival)
            arrival.withdrawn_s = arrival.withdrawn_s or self._fleet.clock.now_s
            leaders = {arrival.source, arrival.target}
        else:  # the target is gone
            leaders = {name for name in self._workforce.schedulers if str(name) == handover.source}
        for leader in leaders:
            for name in self._ranks_of(leader):
                worker = self._fleet.workers.get(name)
                if worker is not None and worker.ready:
                    self._fleet.send(worker, WithdrawKV(handover.number))

    def _stop_computing(self, arrival: _Awaited) -> None:
        self._computing.pop(arrival.prefill.request_id, None)
        self._workforce.schedulers[arrival.source].end(arrival.prefill.request_id)

    def _clear_groups(self) -> None:
        """Take back what prefill workers have whose step failed again, so that it can be computed without suspects."""
        for group in self._to_clear:
            group.hold()
        for group in [group for group in self._to_clear if group.quiet]:
            self._to_clear.remove(group)
            for prefill in group.remove_all():
                if (arrival := self._computing.get(prefill.request_id)) is not None:
                    self._workforce.schedulers[arrival.source].add(prefill)

    def _kill_silent(self) -> None:
        """A process that does not say when it has stopped writing hangs: only its end lets the blocks go."""
        now_s = self._fleet.clock.now_s
        for number, arrival in self._arrivals.items():
            if arrival.withdrawn_s is not None and now_s - arrival.withdrawn_s > 2 * self._timeout_s:
                for rank in arrival.handover.draining:
                    worker = self._fleet.workers[self._ranks_of(arrival.target)[rank]]
                    worker.kill(f"it does not say that hand-over {number} has ended")
