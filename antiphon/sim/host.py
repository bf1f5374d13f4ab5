"""The serving machine around the model's steps: HTTP, the engine's turns and clients, on cores that workers need too.

1. A thread does its work in order. Threads of a process share one core, because they are Python's. An instance's step
   needs a core for each of its devices.
2. If all processes that have something to do need more cores than there are, all are slower by the same factor.
3. A request: the client sends it, the server's event loop reads it, a fixed time of waking up and waiting passes. A
   step: the instance's devices, then the engine's thread, which commits it and plans the next one. Tokens of a step:
   the event loop writes them, the client reads them.

Used where the profile has these times (`cost.profile.HostTimes`) and all of the plan is on one node, the measured one.
Where it is not used, a simulation may be given what waits for cores were measured (`CoreWaits`): other programs and the
system take cores now and then, and a process that is woken while all cores compute waits for the scheduler's next tick.
A mean of these changes little; the slowest tokens of a hundred are theirs.
Rejected: a fixed time for each request and token. What HTTP takes is small while cores are idle; a server on two cores
has none that are.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from antiphon.base.errors import UserError
from antiphon.cost.profile import HostTimes
from antiphon.planner.setting import Setting

Then = Callable[[], None]


@dataclass(slots=True)
class _Thread:
    """What one thread has to do: seconds of a core left of the first, and what happens when each ends."""

    process: str
    num_cores: int
    works: deque[tuple[float, Then]] = field(default_factory=deque)


class SharedCores:
    """Threads of processes on `num_cores` cores. Times only grow from call to call."""

    def __init__(self, num_cores: int) -> None:
        self._num_cores = num_cores
        self._threads: dict[str, _Thread] = {}
        self._now_s = 0.0

    def add(self, now_s: float, process: str, thread: str, work_s: float, then: Then, num_cores: int = 1) -> None:
        """`work_s` more for this thread; `then` is handed out when it is done. A process has all its `num_cores`."""
        self._pass(now_s)
        found = self._threads.setdefault(thread, _Thread(process, num_cores))
        found.works.append((max(work_s, 0.0), then))

    def next_s(self) -> float:
        """When the next work will be done if none is added; infinity if there is none."""
        return self._now_s + min(self._left_s().values(), default=math.inf)

    def done(self, now_s: float) -> list[Then]:
        """What is done by `now_s`, which is at most `next_s()`."""
        left_s = self._left_s()
        first_s = min(left_s.values(), default=math.inf)
        ending = [name for name, seconds in left_s.items() if seconds == first_s and now_s == self._now_s + first_s]
        self._pass(now_s)
        return [self._threads[name].works.popleft()[1] for name in ending]

    def drop(self, now_s: float, thread: str) -> None:
        """The thread has died: nothing of what it had to do is done."""
        self._pass(now_s)
        self._threads.pop(thread, None)

    def _left_s(self) -> dict[str, float]:
        """Until each thread's first work is done, at the present speeds."""
        return {name: self._threads[name].works[0][0] / speed for name, speed in self._speeds().items()}

    def _pass(self, now_s: float) -> None:
        """Time passes at the speeds of those that have work."""
        if (passed := now_s - self._now_s) > 0:
            for name, speed in self._speeds().items():
                works = self._threads[name].works
                left, then = works[0]
                works[0] = (max(left - speed * passed, 0.0), then)
            self._now_s = now_s

    def _speeds(self) -> dict[str, float]:
        """The speed of each thread that has work, in seconds of a core a second."""
        busy = {name: thread for name, thread in self._threads.items() if thread.works}
        threads_of: dict[str, int] = {}
        needed: dict[str, int] = {}
        for thread in busy.values():
            threads_of[thread.process] = threads_of.get(thread.process, 0) + 1
            needed[thread.process] = thread.num_cores
        share = min(1.0, self._num_cores / max(sum(needed.values()), 1))
        return {name: share / threads_of[thread.process] for name, thread in busy.items()}


@dataclass(frozen=True, kw_only=True)
class CoreWaits:
    """Measured on a machine all of whose cores compute: how often in a second of computing another program or the
    system takes the core for longer than a tenth of a millisecond (`stalls_per_s`) and for how long each time
    (`stalls_s`); after how long the engine is done with a step, beyond what the step's time has of it (`wakes_s`).
    `network_share`: of all cores' time, what the system takes for packets in turns that are too short to be a stall."""

    stalls_per_s: float
    stalls_s: tuple[float, ...]
    wakes_s: tuple[float, ...]
    network_share: float = 0.0


class DrawnWaits:
    """What of `CoreWaits` happens to a simulation. Same seed, same chance."""

    def __init__(self, waits: CoreWaits, seed: int) -> None:
        self._waits = waits
        self._chance = np.random.default_rng(seed)

    def stalled_s(self, work_s: float) -> float:
        """What stalls add to so long a computation on one core."""
        waits = self._waits
        added_s = work_s * waits.network_share / (1.0 - waits.network_share)
        if not waits.stalls_s:
            return added_s
        count = self._chance.poisson(waits.stalls_per_s * work_s)
        return added_s + (float(self._chance.choice(waits.stalls_s, count).sum()) if count else 0.0)

    def woken_s(self) -> float:
        """Until the engine is done with a step."""
        return float(self._chance.choice(self._waits.wakes_s)) if self._waits.wakes_s else 0.0


class ServingHost:
    """The path of requests, steps and tokens through that machine. `now_s`: the simulation's clock; `at(time_s, then)`
    calls back then. `has_client`: the clients are a process of the same machine. `hands_over`: another pool computes
    the prompts, which counts as waiting of the request."""

    def __init__(
        self,
        times: HostTimes,
        num_cores: int,
        now_s: Callable[[], float],
        at: Callable[[float, Then], None],
        *,
        has_client: bool,
        hands_over: bool,
    ) -> None:
        self.cores = SharedCores(num_cores)
        self._times = times
        self._now_s = now_s
        self._at = at
        self._has_client = has_client
        self._wait_s = times.wait_s + (times.handover_s if hands_over else 0.0)

    def request(self, then: Then) -> None:
        """A request is due now; `then` when the engine has it."""
        times = self._times

        def received() -> None:
            self._at(self._now_s() + self._wait_s, then)

        def sent() -> None:
            self._add("server", "event loop", times.request_s, received)

        self._add("client", "client", times.client_request_s if self._has_client else 0.0, sent)

    def step(
        self, instance: str, num_devices: int, work_s: float, turn_s: float, then: Then, *, wait_s: float = 0.0
    ) -> None:
        """An instance begins a step now; `then` when the engine has its tokens and may begin the next one. `wait_s`:
        when all is computed, it waits for a wire, which takes no core."""

        def left() -> None:
            self._add("server", "engine", turn_s, then)

        def computed() -> None:
            if wait_s > 0:
                self._at(self._now_s() + wait_s, left)
            else:
                left()

        self.cores.add(self._now_s(), instance, instance, work_s, computed, num_devices)

    def decoding_s(self, seconds: float, rows: int) -> float:
        """What a decode step that takes so long alone takes here."""
        return seconds * self._times.step_ratio.value(rows)

    def tokens(self, count: int, then: Then) -> None:
        """The engine has `count` tokens of one step; `then` when the clients have them."""
        times = self._times
        reading_s = count * times.client_token_s.value(count) if self._has_client else 0.0

        def written() -> None:
            self._add("client", "client", reading_s, then)

        self._add("server", "event loop", count * times.token_s.value(count), written)

    def _add(self, process: str, thread: str, work_s: float, then: Then) -> None:
        self.cores.add(self._now_s(), process, thread, work_s, then)


def serving_host(
    setting: Setting,
    now_s: Callable[[], float],
    at: Callable[[float, Then], None],
    *,
    has_client: bool,
    hands_over: bool,
) -> ServingHost | None:
    """None where the plan is not on the measured machine alone, or the profile lacks these times. `UserError` where a
    client is asked for then."""
    profile = setting.profile
    num_nodes = sum(group.num_nodes for group in setting.cluster.groups)
    if profile is not None and profile.host is not None and num_nodes == 1:
        num_cores = profile.machine.num_cores
        return ServingHost(profile.host, num_cores, now_s, at, has_client=has_client, hands_over=hands_over)
    if has_client:
        why = f"the plan's cluster has {num_nodes} nodes"
        if profile is None or profile.host is None:
            why = "no --profile is given" if profile is None else "the profile does not have what HTTP takes"
        raise UserError(f"--client-here: {why}; it needs a plan for one machine, and a new antiphon profile of it")
    return None
