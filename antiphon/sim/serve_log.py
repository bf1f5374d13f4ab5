"""What a serving simulation writes down on the way: requests, gaps between tokens, queues over time, steps, failures.

1. Of each request and of the gaps enough for every percentile, no more. Gaps are kept as (seconds, how many), because
   all sequences of a step share theirs; a few numbers a step stand for thousands of tokens exactly.
2. Samples of queues are taken at most every so often; the interval doubles, and every second sample goes, whenever
   there are too many. Steps are kept only for a trace file, up to `MOST_STEPS`.
3. The trace for Perfetto is Chrome's JSON, as `sim.gantt` writes it, with counter events ("C") beside the bars: a
   process per instance, a track per attention worker. A step is a bar on the track of every attention worker that took
   part, with its rows, and one on the experts' track, with the share of the step in which they were busy; failures and
   pauses are bars on the tracks they stopped.

Rejected: a histogram of gaps, which would round what tests compare; a fixed interval of samples, because a run lasts a
second or a day; bars of every layer, for `--pipeline` shows one step from inside.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.base.trace import process_named, thread_named, write_events
from antiphon.cost.roofline import FloatArray
from antiphon.serve.engine_api import HandoverCounts
from antiphon.sim.expert_load import Move
from antiphon.sim.instances import Instance, LivePool, Step
from antiphon.sim.pools import Kill, Pool

MOST_SAMPLES = 2000
MOST_STEPS = 200_000
_EXPERTS_TRACK = 1_000_000


@dataclass(slots=True, kw_only=True)
class Record:
    """One request. Times are None until they happen. `refused`: why the engine's admission turned it down."""

    index: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    num_output: int = 0
    num_losses: int = 0  # how often a worker died under it
    refused: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for a single one."""
        if self.num_output < 2 or self.first_token_s is None or self.last_token_s is None:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output - 1)

    @property
    def e2e_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.arrival_s


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


class ServeLog:
    """`num_output`: tokens delivered so far. `gaps_s`, `gap_counts`: times between consecutive tokens of a request, and
    how many such gaps; they end at `gap_ends_s`. Times of `samples` ascend. `steps`: (pool, instance, step). Rows of
    the result: `failures`: which worker was away, from when to when, and how many requests left it; `replacements`:
    which instance moved its experts, when, and the `Move`."""

    def __init__(self, record_steps: bool) -> None:
        self.samples: list[Sample] = []
        self.steps: list[tuple[str, int, Step]] = []
        self.gaps_s: list[float] = []
        self.gap_counts: list[int] = []
        self.gap_ends_s: list[float] = []
        self.num_steps_left_out = 0
        self.failures: list[dict[str, Any]] = []
        self.replacements: list[dict[str, Any]] = []
        self.num_output = 0
        self._record_steps = record_steps
        self._interval_s = 0.0
        self._next_s = 0.0

    def delivered(self, now_s: float, num_tokens: int, gaps: dict[float, int]) -> None:
        """Tokens of one step; `gaps`: seconds -> how many."""
        self.num_output += num_tokens
        self.gaps_s.extend(gaps)
        self.gap_counts.extend(gaps.values())
        self.gap_ends_s.extend([now_s] * len(gaps))

    def gaps_between(self, after_s: float = -1.0, until_s: float = math.inf) -> tuple[FloatArray, NDArray[np.int64]]:
        """Seconds of the gaps that end after the first time and at the latest at the second, and how many of each."""
        ends_s = np.asarray(self.gap_ends_s)
        counted = (after_s < ends_s) & (ends_s <= until_s)
        return np.asarray(self.gaps_s)[counted], np.asarray(self.gap_counts)[counted]

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
            self.steps.append((instance.pool.name, instance.index, step))
        else:
            self.num_steps_left_out += 1

    def failure(self, kill: Kill, pool: Pool, time_s: float, until_s: float, num_moved: int) -> None:
        name = pool.name_of(kill.role, kill.worker)
        self.failures.append({"worker": name, "time_s": time_s, "until_s": until_s, "num_moved": num_moved})

    def move(self, pool: Pool, instance: int, time_s: float, move: Move) -> None:
        self.replacements.append({"pool": pool.name, "instance": instance, "time_s": time_s, "move": asdict(move)})


@dataclass(frozen=True, kw_only=True)
class ServingRun:
    """What happened: `records` by request, `pools` with their final state. `handovers`: of two pools."""

    records: list[Record]
    pools: list[LivePool]
    log: ServeLog
    end_s: float
    handovers: HandoverCounts | None


def write_serving_trace(path: Path, run: ServingRun) -> None:
    """Write `run`, which must have been recorded with its steps, to `path`, replacing it."""
    write_events(path, _events(run))


def _events(run: ServingRun) -> Iterator[dict[str, Any]]:
    pids: dict[tuple[str, int], int] = {
        (live.pool.name, index): number
        for number, (live, index) in enumerate(
            ((live, index) for live in run.pools for index in range(len(live.instances))), start=1
        )
    }
    for live in run.pools:
        for index in range(len(live.instances)):
            yield from _names(live, index, pids[live.pool.name, index])
    for pool, instance, step in run.log.steps:
        yield from _step(step, pids[pool, instance])
    pools = {live.pool.prefix: live.pool for live in run.pools}
    for failure in run.log.failures:
        yield _down(failure["worker"], failure["time_s"], failure["until_s"], pools, pids)
    for each in run.log.replacements:
        place = {"pid": pids[each["pool"], each["instance"]], "tid": _EXPERTS_TRACK}
        arguments = {"experts": each["move"]["num_moved"], "pause_s": each["move"]["pause_s"]}
        yield {"ph": "i", "s": "p", "name": "experts move", "ts": each["time_s"] * 1e6, **place, "args": arguments}
    for sample in run.log.samples:
        for live, one in zip(run.pools, sample.pools, strict=True):
            name = live.pool.name
            time = {"ph": "C", "pid": 0, "ts": sample.time_s * 1e6}
            yield {**time, "name": f"{name}: requests", "args": {"running": one.running, "waiting": one.waiting}}
            yield {**time, "name": f"{name}: KV usage", "args": {"used": one.kv_usage}}


def _names(live: LivePool, index: int, pid: int) -> Iterator[dict[str, Any]]:
    yield process_named(f"{live.pool.name}[{index}]", pid)
    for worker in live.instances[index].schedulers:
        yield thread_named(f"attention[{worker}]", pid, worker + 1)
    yield thread_named("experts", pid, _EXPERTS_TRACK)


def _step(step: Step, pid: int) -> Iterator[dict[str, Any]]:
    times = {"ph": "X", "ts": step.start_s * 1e6, "dur": (step.end_s - step.start_s) * 1e6, "pid": pid}
    if step.price is None:
        yield {**times, "name": "experts move", "cat": "pause", "tid": _EXPERTS_TRACK}
        return
    for worker, rows in step.rows.items():
        yield {**times, "name": f"{rows} rows", "cat": "step", "tid": worker + 1, "args": {"rows": rows}}
    arguments = {"busy_ratio": step.price.experts_busy_s / step.price.duration_s, "decode_rows": step.num_decode}
    yield {**times, "name": "step", "cat": "experts", "tid": _EXPERTS_TRACK, "args": arguments}


def _down(
    worker: str, time_s: float, until_s: float, pools: dict[str, Pool], pids: dict[tuple[str, int], int]
) -> dict[str, Any]:
    prefix, _, rest = worker.rpartition(".")
    role, _, number = rest.rstrip("]").partition("[")
    pool = pools[prefix]
    each = pool.attention_per_instance if role == "attention" else pool.phase.parallel.expert_workers
    place = {"pid": pids[pool.name, int(number) // each]}
    tid = int(number) + 1 if role == "attention" else _EXPERTS_TRACK
    times = {"ts": time_s * 1e6, "dur": (until_s - time_s) * 1e6}
    return {"ph": "X", "name": f"{worker} is down", "cat": "failure", **times, **place, "tid": tid}
