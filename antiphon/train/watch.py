"""What is watched around each step: where its time goes, what ranks send each other, how routers use their experts.

Spans are recorded in steps that are logged, so that their cost (a millisecond or two a step) is divided by `log_every`,
and in the steps of a timeline.

The alarm tells when a router collapses or an expert dies, from the rows of each expert, step by step. A router has
collapsed when its fullest expert has had far more rows than the mean for `PATIENCE_STEPS` steps in a row; an expert is
dead when it has had none for as long, and even use would have given it `MISSED_ROWS` by then (with a row a step
expected, none is chance). One warning when it begins, one when it ends.
Rejected: entropy of the use. It is one number too, but 3.1 of 4.2 says little to a reader.
"""

import json
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from antiphon.base.logging import get_logger
from antiphon.base.ranges import split_evenly
from antiphon.comm.collectives import AllGather, barrier, gather_sizes, run
from antiphon.comm.ledger import Ledger
from antiphon.comm.mesh import Mesh
from antiphon.specs.model import ModelSpec
from antiphon.train.device import HOST
from antiphon.train.metrics import Metrics
from antiphon.train.slow_ranks import RankWork, SlowRanks
from antiphon.train.spans import Span, StepSpans, seconds_by_operator, write_part

PATIENCE_STEPS = 25
MISSED_ROWS = 50.0
MOST_OVER_MEAN = 8.0


def collapse_limit(num_experts: int, top_k: int) -> float:
    """Rows of the fullest expert over the mean from which on a router counts as collapsed: three quarters of the way
    to the worst that can be (all rows choose the same `top_k`), at most 8."""
    worst = num_experts / top_k
    return min(MOST_OVER_MEAN, 1 + 0.75 * (worst - 1))


@dataclass(frozen=True)
class Alarm:
    """`text`: where, what, since when, and what to do. `ended`: it is over."""

    layer: int
    expert: int
    since_step: int
    ended: bool
    text: str


@dataclass
class _Trouble:
    """A run of bad steps. `missed`: rows that even use would have given in it to one expert."""

    since_step: int
    num_steps: int = 0
    missed: float = 0.0
    expert: int = -1
    reported: bool = False


class _Watched:
    """Runs of bad steps by some key."""

    def __init__(self) -> None:
        self._troubles: dict[tuple[int, ...], _Trouble] = {}

    def __contains__(self, key: tuple[int, ...]) -> bool:
        return key in self._troubles

    def bad(self, key: tuple[int, ...], step: int, mean: float, expert: int) -> _Trouble | None:
        """The trouble, if it is to be reported now."""
        trouble = self._troubles.setdefault(key, _Trouble(step))
        trouble.num_steps += 1
        trouble.missed += mean
        if trouble.reported or trouble.num_steps < PATIENCE_STEPS or trouble.missed < MISSED_ROWS:
            return None
        trouble.reported, trouble.expert = True, expert
        return trouble

    def good(self, key: tuple[int, ...]) -> _Trouble | None:
        """The trouble that ends here, if it was reported."""
        trouble = self._troubles.pop(key, None)
        return trouble if trouble is not None and trouble.reported else None


class RouterAlarm:
    """`layers`: the model's numbers of the MoE layers, in the order of the counts."""

    def __init__(self, layers: Sequence[int], num_experts: int, top_k: int) -> None:
        self._layers = layers
        self._limit = collapse_limit(num_experts, top_k)
        self._full, self._dead = _Watched(), _Watched()

    def observe(self, step: int, counts_LE: Sequence[Sequence[int]]) -> list[Alarm]:
        """What began or ended with this step. `counts_LE`: rows by layer and expert, of all ranks."""
        alarms: list[Alarm] = []
        for layer, counts_E in zip(self._layers, counts_LE, strict=True):
            mean = sum(counts_E) / len(counts_E)
            if not mean:
                continue
            alarms += self._collapse(step, layer, counts_E, mean)
            for expert, count in enumerate(counts_E):
                if not count or (layer, expert) in self._dead:
                    alarms += self._death(step, layer, expert, count, mean)
        return alarms

    def _collapse(self, step: int, layer: int, counts_E: Sequence[int], mean: float) -> list[Alarm]:
        fullest = max(range(len(counts_E)), key=counts_E.__getitem__)
        ratio = counts_E[fullest] / mean
        if ratio < self._limit:
            over = self._full.good((layer,))
            if over is None:
                return []
            text = f"layer {layer}: the router, collapsed since step {over.since_step}, has recovered at step {step}"
            return [Alarm(layer, over.expert, over.since_step, True, text)]
        trouble = self._full.bad((layer,), step, mean, fullest)
        if trouble is None:
            return []
        text = (
            f"layer {layer}: the router has collapsed: expert {fullest} has {ratio:.1f} times the mean, the fullest "
            f"above {self._limit:.1f} since step {trouble.since_step}: raise loss.balance, set loss.z, lower "
            "optimizer.learning_rate, or go back to a checkpoint before it"
        )
        return [Alarm(layer, fullest, trouble.since_step, False, text)]

    def _death(self, step: int, layer: int, expert: int, count: int, mean: float) -> list[Alarm]:
        if count:
            over = self._dead.good((layer, expert))
            if over is None:
                return []
            text = f"layer {layer}, expert {expert}, without rows since step {over.since_step}, lives at step {step}"
            return [Alarm(layer, expert, over.since_step, True, text)]
        trouble = self._dead.bad((layer, expert), step, mean, expert)
        if trouble is None:
            return []
        text = (
            f"layer {layer}, expert {expert} is dead: no row since step {trouble.since_step} ({trouble.missed:,.0f} "
            "expected by even use): raise loss.balance or loss.bias_rate, lower optimizer.learning_rate, or go back to "
            "a checkpoint before it"
        )
        return [Alarm(layer, expert, trouble.since_step, False, text)]


TIMELINE_STEPS = range(1, 4)  # of this run: the first one warms up
_log = get_logger("train")


@dataclass(frozen=True)
class StepTraffic:
    """Traffic of one step: `sent_bytes` by purpose and collective, the mean of all ranks; `waited_s` for others, of the
    rank that waited longest. What a collective did while a rank was computing is not in it. `lost_numbers` of E4M3
    rows, by what was lost, of all ranks. `ranks`: what each did, in order. `shows_busy`: their `busy_s` is
    without waiting."""

    sent_bytes: Mapping[str, float]
    waited_s: float
    lost_numbers: Mapping[str, int]
    ranks: Sequence[RankWork]
    shows_busy: bool

    def metrics(self) -> dict[str, Any]:
        """The values under their names in a run's metrics."""
        values: dict[str, Any] = {"collective_bytes": dict(self.sent_bytes), "exposed_comm_s": self.waited_s}
        if self.shows_busy:
            values["rank_busy_s"] = [each.busy_s for each in self.ranks]
        return values | ({"float8_lost": dict(self.lost_numbers)} if self.lost_numbers else {})


class Watch:
    """The watch of one rank of `mesh`, which may become another one between steps. `first_step`: of this run.
    `finds_slow`: whether ranks wait where the host sees it; else slow ones are not told apart. `timeline`: the file
    that `join_parts` writes in the end, None: none. `metrics` None on ranks that write none."""

    def __init__(
        self,
        spec: ModelSpec,
        spans: StepSpans,
        metrics: Metrics | None,
        mesh: Mesh,
        *,
        first_step: int,
        finds_slow: bool = True,
        timeline: Path | None = None,
    ) -> None:
        layers = list(spec.expert_layers)
        self._slow = SlowRanks() if finds_slow else None
        self._began_s = 0.0
        self._alarm = RouterAlarm(layers, spec.router.num_experts, spec.router.top_k)
        self._spans = spans
        self._metrics = metrics
        self._timeline = timeline
        self._timeline_steps = range(first_step + TIMELINE_STEPS.start, first_step + TIMELINE_STEPS.stop)
        self._for_timeline: list[Span] = []
        self.mesh = mesh
        self._logged = False
        self.operator_s: Mapping[str, float] = {}
        self.travelled_s: Mapping[str, Sequence[float]] = {}
        self.traffic: StepTraffic | None = None

    def before_step(self, step: int, *, logged: bool, measured: bool = False) -> None:
        """`logged`: whether this step's `operator_s` and `traffic` will be wanted; `measured`: `operator_s` and
        `travelled_s`."""
        self._logged = logged
        if logged:
            barrier(self.mesh.world)  # else others wait in this step for what the first rank wrote after the last one
            _taken(self.mesh)
        self._began_s = time.perf_counter()
        self._spans.step = step
        self._spans.on = logged or measured or self._in_timeline(step)
        if self.mesh.launcher is not None:
            self.mesh.launcher.take_all_to_all_s()

    def after_step(self, step: int, counts_LE: Sequence[Sequence[int]]) -> None:
        """`counts_LE`: rows by MoE layer and expert, of all ranks."""
        step_s = time.perf_counter() - self._began_s
        taken = self._spans.take()
        self._spans.on = False
        self.operator_s = seconds_by_operator(taken)
        self.travelled_s = {} if self.mesh.launcher is None else self.mesh.launcher.take_all_to_all_s()
        self.traffic = None
        if self._logged and self.mesh.sizes.world_size > 1:
            rows = _rows_over_mean(self.mesh, counts_LE)
            self.traffic = _traffic(self.mesh, step_s, self.operator_s, rows, shows_busy=self._slow is not None)
            for text in () if self._slow is None else self._slow.observe(step, self.traffic.ranks):
                self.warn(step, text)
        if self._in_timeline(step):
            self._for_timeline += taken
        for alarm in self._alarm.observe(step, counts_LE):
            if self._metrics is None:
                continue
            _log.log(logging.INFO if alarm.ended else logging.WARNING, "%s", alarm.text)
            self._metrics.write(step, {"alarm": alarm.text})

    def warn(self, step: int, text: str) -> None:
        """Log it, and write it among the metrics of `step`."""
        if self._metrics is not None:
            _log.warning("%s", text)
            self._metrics.write(step, {"alarm": text})

    def close(self) -> None:
        """Write this rank's part of the timeline."""
        if self._timeline is None:
            return
        if not self._for_timeline:
            _log.warning("%s holds no step: this run did fewer than %d", self._timeline, TIMELINE_STEPS.start + 1)
        write_part(self._timeline, self.mesh.rank, self._for_timeline)

    def _in_timeline(self, step: int) -> bool:
        return self._timeline is not None and step in self._timeline_steps


def _traffic(
    mesh: Mesh, step_s: float, operator_s: Mapping[str, float], rows_over_mean: float, *, shows_busy: bool
) -> StepTraffic:
    """What the ledgers of all ranks hold; names may differ between ranks. All ranks call it together, with what each
    did in the step."""
    taken = _taken(mesh)
    own_work = RankWork(
        host=socket.gethostname(),
        stage=mesh.sizes.place(mesh.rank, "pipeline"),
        busy_s=step_s - sum(taken.waited_s.values()),
        operator_s=operator_s,
        rows_over_mean=rows_over_mean,
    )
    text = json.dumps(asdict(taken) | {"work": asdict(own_work)}).encode()
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(HOST)
    sizes = gather_sizes(mesh.world, len(text), own.device)
    texts = torch.split(run(AllGather(mesh.world, "ledger", sizes), own), list(sizes))
    ledgers = [json.loads(bytes(each.tolist())) for each in texts]
    sent, lost = _sums(ledgers, "sent_bytes"), _sums(ledgers, "lost_numbers")
    mean = {name: num / len(ledgers) for name, num in sent.items()}
    waited_s = max(sum(ledger["waited_s"].values()) for ledger in ledgers)
    return StepTraffic(mean, waited_s, lost, [RankWork(**ledger["work"]) for ledger in ledgers], shows_busy)


def _rows_over_mean(mesh: Mesh, counts_LE: Sequence[Sequence[int]]) -> float:
    """Rows of this rank's experts, over the mean of the ranks that share them."""
    group, by_expert = mesh.group("expert"), [sum(each) for each in zip(*counts_LE, strict=True)]
    first, last = split_evenly(len(by_expert), group.size)[group.index]
    return float(sum(by_expert[first:last]) * group.size / max(1, sum(by_expert)))


def _taken(mesh: Mesh) -> Ledger:
    """What this rank counted; of sums that a launcher made the bytes, because no rank waited for their collectives."""
    taken = mesh.ledger.take()
    for name, num_bytes in () if mesh.launcher is None else mesh.launcher.ledger.take().sent_bytes.items():
        taken.sent_bytes[name] = taken.sent_bytes.get(name, 0) + num_bytes
    return taken


def _sums(ledgers: Sequence[Mapping[str, Mapping[str, int]]], kind: str) -> dict[str, int]:
    names = sorted({name for ledger in ledgers for name in ledger[kind]})
    return {name: sum(ledger[kind].get(name, 0) for ledger in ledgers) for name in names}
