"""How the workers of a group begin anew after one of them died or stopped answering: phases, epochs, deadlines.

  STEPPING  the members step
  LEAVING   a new exchange epoch begins, and everyone leaves the running step
  LOADING   expert workers that died are started again and load; they held no state of any request
  JOINING   all workers agree on the epoch
  STEPPING  plans that were not answered are sent again, unchanged: the cache is written at the same places with the
            same bits

How long a dead worker waits until it is started again, `policy/restarts` says.

Which worker hangs? A worker that waits in vain names its peers, and one of them may wait for a third. So no worker is
killed on a report: the unresponsive are asked to leave the step and to join the new epoch as everyone is, and only have
less time for it.

A worker may consist of several ranks (`worker/build`). Its leader has the worker's name and its steps; all ranks belong
to the epoch, and the worker takes part once all of them have joined it. The loss of one is the loss of the worker.

Rejected: a rendezvous among the workers. The engine hears of every process that comes up, and is the one that decides
when to begin anew.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from antiphon.base.errors import ResourceError
from antiphon.base.logging import get_logger
from antiphon.serve.fleet import Fleet
from antiphon.serve.placement_control import PlacementControl
from antiphon.serve.statistics import EngineStatistics
from antiphon.serve.worker.messages import Abort, Reset, StepFailed, WorkerReady
from antiphon.serve.worker_handle import WorkerName, WorkerProcess

_log = get_logger("engine")
_MAX_ASKS = 3  # how often a worker that cannot join an epoch is asked
_UNRESPONSIVE_S = 2.0  # what a worker has to answer in, once others waited for it in vain


RecoveryPhase = Literal["stepping", "leaving", "loading", "joining"]  # see the module's docstring


@dataclass(eq=False)
class Members:
    """The workers of one group, the processes they consist of, and which of those are up.

    `ranks_of`: the processes of every worker, its leader first, by the leader's name. `share_experts`: attention
    workers hold experts for each other (layout hybrid), so that none can step without the others."""

    attention: Sequence[WorkerName]
    experts: Sequence[WorkerName]
    ranks_of: Mapping[WorkerName, tuple[WorkerName, ...]]
    fleet: Fleet
    share_experts: bool = field(default=False, kw_only=True)

    @cached_property
    def processes(self) -> tuple[WorkerName, ...]:
        """All of them, worker by worker."""
        return tuple(name for ranks in self.ranks_of.values() for name in ranks)

    def peers_of(self, name: WorkerName) -> Sequence[WorkerName]:
        """The processes that reach each other as ranks: those of one worker, or of all that share experts."""
        return self.processes if self.share_experts else self.ranks_of[name.leader]

    def ranks(self, leaders: Collection[WorkerName]) -> list[WorkerName]:
        """The processes of these workers."""
        return [name for leader in leaders for name in self.ranks_of[leader]]

    def is_ready(self, name: WorkerName) -> bool:
        """This process has loaded its part and takes orders."""
        worker = self.fleet.workers.get(name)
        return worker is not None and worker.ready

    def is_loaded(self, leader: WorkerName) -> bool:
        """All ranks of a worker are up."""
        return all(map(self.is_ready, self.ranks_of[leader]))

    def loaded(self, absent: Collection[int]) -> list[WorkerProcess]:
        """The processes of the workers whose ranks are all up, without the expert workers `absent`."""
        left_out = {name for name in self.experts if name.index in absent}
        leaders = [leader for leader in self.ranks_of if leader not in left_out and self.is_loaded(leader)]
        return [self.fleet.workers[name] for name in self.ranks(leaders)]

    def loaded_attention(self) -> list[WorkerName]:
        """Attention workers whose ranks are all up."""
        return [name for name in self.attention if self.is_loaded(name)]

    @property
    def expert_holders(self) -> Sequence[WorkerName]:
        """The processes that hold experts for others: those of expert workers, or of all that share experts."""
        return self.processes if self.share_experts else self.ranks(self.experts)

    def missing_experts(self) -> frozenset[int]:
        """Expert workers of which not all ranks are up."""
        return frozenset(name.index for name in self.experts if not self.is_loaded(name))

    def others_missing(self) -> bool:
        """Where attention workers share experts: one of them is not up."""
        return self.share_experts and len(self.loaded_attention()) < len(self.attention)


class Recovery:
    """The phase of one group, the epoch of its exchange, and which processes have joined it; for the engine's thread.

    `is_quiet`: no step of the group runs. `placing`: where experts are, if attention workers do not have them all. A
    group of one process has no exchange, so it has no epochs: it steps when it has loaded."""

    def __init__(
        self,
        members: Members,
        statistics: EngineStatistics,
        timeout_s: float,
        placing: PlacementControl | None,
        is_quiet: Callable[[], bool],
    ) -> None:
        self.phase: RecoveryPhase = "loading"
        self._members = members
        self._fleet = members.fleet
        self._statistics = statistics
        self._timeout_s = timeout_s
        self._placing = placing
        self._is_quiet = is_quiet
        self._has_exchange = len(members.processes) > 1
        self._has_served = False  # an attention worker could step; experts alone, or nobody, begin epochs too
        self._epoch = 0
        self._tickets: dict[WorkerName, WorkerReady] = {}  # how each process can be reached
        self._joined: set[WorkerName] = set()
        self._num_asked: Counter[WorkerName] = Counter()
        self._unresponsive: set[str] = set()
        self._waiting_since_s = self._fleet.clock.now_s  # for a phase to end
        self._stepping_since_s: dict[WorkerName, float] = {}

    @property
    def live_attention(self) -> list[WorkerName]:
        """The attention workers that can step now: none while an expert worker is missing or a recovery goes on."""
        if self.phase != "stepping":
            return []
        return [name for name in self._members.attention if self._joined.issuperset(self._members.ranks_of[name])]

    @property
    def complete(self) -> bool:
        """All workers can step."""
        return len(self.live_attention) == len(self._members.attention) and not self._absent

    @property
    def _absent(self) -> Collection[int]:
        """Expert workers without which this epoch began."""
        return frozenset() if self._placing is None else self._placing.absent

    # --- what happens to the members -----------------------------------------------------------------------------

    def note_step(self, names: Iterable[WorkerName]) -> None:
        """A step of these workers has begun: their answers are waited for from now on."""
        self._stepping_since_s |= dict.fromkeys(names, self._fleet.clock.now_s)

    def on_ready(self, worker: WorkerProcess, ready: WorkerReady) -> None:
        """A process is ready and can be reached at its tickets; a restarted one has new ones."""
        leader = worker.name.leader
        self._tickets[worker.name] = ready
        # What peers said before was about the process that had this place before.
        self._unresponsive.difference_update(worker.name.among_peers[worker.name.rank > 0 :])
        if not self._has_exchange:
            self._joined.add(worker.name)
            self.phase = "stepping"
        elif leader in self._members.attention and self.phase in ("stepping", "joining"):
            self._call_in(self._members.ranks_of[leader] if self._members.is_loaded(leader) else ())
        self.advance()

    def on_joined(self, worker: WorkerProcess, epoch: int) -> None:
        """A process has joined this epoch."""
        if epoch == self._epoch and worker.ready:
            self._joined.add(worker.name)
        self.advance()
        self._has_served = self._has_served or bool(self.live_attention)

    def on_step_failed(self, worker: WorkerProcess, failed: StepFailed) -> None:
        """A worker has left a step, or could not join the epoch. `ResourceError` if none ever could and it waits for no
        peer: no client is served yet, and the person who started the server should hear of it."""
        if failed.reason != "aborted":
            self._unresponsive.update(peer.partition(" ")[0] for peer in failed.peers)  # "replica[0][1] nodes"
            if self.phase == "stepping":
                self.begin()
            elif failed.reason == "timeout" and self.phase == "joining":
                # It could not reach a peer. That may pass; `overdue` names it if it does not.
                self._num_asked[worker.name] += 1
                if self._num_asked[worker.name] <= _MAX_ASKS:
                    self._call_in([worker.name])
                elif not (self._has_served or failed.peers):
                    raise ResourceError(f"{worker.name} cannot join the others: {failed.message}")
        self.advance()

    def on_death(self, name: WorkerName) -> None:
        """A process is gone, and its worker with it."""
        self._joined.difference_update(self._members.ranks_of[name.leader])
        if not self._has_exchange:
            self.phase = "loading"
        self.begin()

    def expel(self, name: WorkerName) -> None:
        """This process takes part in nothing more; its death follows."""
        self._joined.discard(name)
        self.advance()

    def overdue(self, stepping: Iterable[WorkerName]) -> list[tuple[WorkerName, float]]:
        """The workers that owe an answer for longer than twice their own timeout, in which they would have said why,
        and for how long. The unresponsive have less time, once the step they hold up has been given up. `stepping`: the
        workers that owe a result."""
        now_s = self._fleet.clock.now_s
        owing = set(stepping)
        if self.phase == "joining":
            owing |= {worker.name for worker in self._members.loaded(self._absent)} - self._joined
        found = []
        for name in owing:
            waited_s = now_s - max(self._waiting_since_s, self._stepping_since_s.get(name, 0.0))
            blamed = not self._unresponsive.isdisjoint(name.among_peers[name.rank > 0 :])
            unresponsive = blamed and self.phase != "stepping"
            if waited_s > (min(_UNRESPONSIVE_S, self._timeout_s) if unresponsive else 2 * self._timeout_s):
                found.append((name, waited_s))
        return found

    # --- from phase to phase -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a new epoch: call all workers out of the running step."""
        if not self._has_exchange:
            return
        if self.phase == "stepping":
            self._statistics.note_event("standstill", "the step is given up, the workers begin anew")
        self._epoch += 1
        for name in filter(self._members.is_ready, self._members.processes):
            self._fleet.send(self._fleet.workers[name], Abort(self._epoch))
        self._joined.clear()
        self._enter("leaving")
        self.advance()

    def advance(self) -> None:
        """Go as far as answers allow."""
        if not self._has_exchange:
            return
        if self.phase == "leaving" and self._is_quiet():
            self._enter("loading")
        if self.phase == "loading" and self._experts_loaded():
            self._enter("joining")
            if self._placing is not None:
                self._placing.leave_out(self._members.missing_experts(), self._members.loaded_attention())
            self._call_in([worker.name for worker in self._members.loaded(self._absent)])
        if self.phase == "joining" and self._everyone_joined() and self._experts_loaded():
            self._unresponsive.clear()
            self._enter("stepping")
            self._statistics.note_event("going on", "the workers that are there step together")

    def _enter(self, phase: RecoveryPhase) -> None:
        self.phase = phase
        self._num_asked.clear()
        self._waiting_since_s = self._fleet.clock.now_s

    def _call_in(self, names: Iterable[WorkerName]) -> None:
        """Ask these processes to join the epoch, and tell them how to reach the others. The ranks of each must be up;
        expert workers that the epoch leaves out get no rows, also if they are back by now."""
        experts = [
            b"" if expert.index in self._absent else self._tickets[expert].ticket for expert in self._members.experts
        ]
        for name in names:
            ranks = [self._tickets[rank].rank_ticket for rank in self._members.peers_of(name)]
            self._fleet.send(self._fleet.workers[name], Reset(self._epoch, tickets=experts, rank_tickets=ranks))

    def _everyone_joined(self) -> bool:
        return all(worker.name in self._joined for worker in self._members.loaded(self._absent))

    def _experts_loaded(self) -> bool:
        """All expert workers are up; or others have copies of the experts of those that once were and are missing."""
        if self._members.others_missing():
            return False
        missing = self._members.missing_experts()
        return not missing or (self._has_served and self._placing is not None and self._placing.spares(missing))
