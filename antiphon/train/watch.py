"""What is watched around each step: where its time goes, what ranks send each other, and what `train.alarms` says.

Spans are recorded in steps that are logged, so that their cost (a millisecond or two a step) is divided by `log_every`,
and in the steps of a timeline.
"""

import logging
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from antiphon.base.logging import get_logger
from antiphon.base.ranges import split_evenly
from antiphon.comm.collectives import barrier
from antiphon.comm.ledger import Ledger
from antiphon.comm.mesh import Mesh
from antiphon.specs.model import ModelSpec
from antiphon.train.alarms import RankWork, RouterAlarm, SlowRanks
from antiphon.train.metrics import Metrics
from antiphon.train.ranks import gathered
from antiphon.train.spans import Span, StepSpans, seconds_by_operator, write_part

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
    `finds_slow`: whether ranks wait where the host sees it; else slow ones are not looked for. `timeline`: the file
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
    ledgers = gathered(mesh.world, "ledger", asdict(taken) | {"work": asdict(own_work)})
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
