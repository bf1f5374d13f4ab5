"""What a serving simulation writes down on the way: queues over time, steps, failures, re-placements.

Samples are taken at most every so often; the interval doubles, and every second sample goes, whenever there are too
many. Steps are kept only for a trace file, up to `MOST_STEPS`.
Rejected: a fixed interval. A run lasts a second or a day.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.sim.expert_load import Move
from antiphon.sim.instances import Instance, LivePool, Step
from antiphon.sim.pools import Pool
from antiphon.sim.serving_options import Kill

MOST_SAMPLES = 2000
MOST_STEPS = 200_000


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSample:
    """One pool at one moment. `kv_usage`: blocks in use over all blocks."""

    running: int
    waiting: int
    kv_usage: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    time_s: float
    num_output: int
    pools: tuple[PoolSample, ...]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A worker was away from `time_s` to `until_s`; `num_moved` requests left it."""

    worker: str
    time_s: float
    until_s: float
    num_moved: int


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """Experts of an instance moved."""

    pool: str
    instance: int
    time_s: float
    move: Move


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBar:
    """For a trace file. `rows`: by attention worker of the pool; empty for a pause."""

    pool: str
    instance: int
    step: Step


class ServeLog:
    """`num_output`: tokens delivered so far. Times of `samples` ascend."""

    def __init__(self, record_steps: bool) -> None:
        self.samples: list[Sample] = []
        self.steps: list[StepBar] = []
        self.num_steps_left_out = 0
        self.failures: list[Failure] = []
        self.replacements: list[Replacement] = []
        self.num_output = 0
        self._record_steps = record_steps
        self._interval_s = 0.0
        self._next_s = 0.0

    def sample(self, now_s: float, pools: Sequence[LivePool]) -> None:
        """Look at the queues, if it is time to."""
        if now_s < self._next_s:
            return
        self.samples.append(self._look(now_s, pools))
        if len(self.samples) >= MOST_SAMPLES:
            del self.samples[1::2]
            self._interval_s = max(2 * self._interval_s, 2 * now_s / MOST_SAMPLES)
        self._next_s = now_s + self._interval_s

    def end(self, now_s: float, pools: Sequence[LivePool]) -> None:
        """The last look, whenever the one before was."""
        self.samples.append(self._look(now_s, pools))

    def _look(self, now_s: float, pools: Sequence[LivePool]) -> Sample:
        seen = []
        for live in pools:
            schedulers = [scheduler for instance in live.instances for scheduler in instance.schedulers.values()]
            used = sum(scheduler.book.pool.num_used for scheduler in schedulers)
            seen.append(
                PoolSample(
                    running=sum(scheduler.num_running for scheduler in schedulers),
                    waiting=sum(scheduler.num_waiting for scheduler in schedulers) + len(live.waiting),
                    kv_usage=used / (len(schedulers) * live.pool.kv_blocks),
                )
            )
        return Sample(time_s=now_s, num_output=self.num_output, pools=tuple(seen))

    def step(self, instance: Instance, step: Step) -> None:
        if not self._record_steps:
            return
        if len(self.steps) < MOST_STEPS:
            self.steps.append(StepBar(pool=instance.pool.name, instance=instance.index, step=step))
        else:
            self.num_steps_left_out += 1

    def failure(self, kill: Kill, pool: Pool, time_s: float, until_s: float, num_moved: int) -> None:
        name = pool.counts.name(kill.role, kill.worker)
        self.failures.append(Failure(worker=name, time_s=time_s, until_s=until_s, num_moved=num_moved))

    def move(self, pool: Pool, instance: int, time_s: float, move: Move) -> None:
        self.replacements.append(Replacement(pool=pool.name, instance=instance, time_s=time_s, move=move))
