"""What is watched around each step: where its time goes, what ranks send each other, and what is worth a warning.

Spans are recorded in steps that are logged, so that their cost (a millisecond or two a step) is divided by `log_every`,
and in the steps of a timeline. Warned of are a router that collapses, an expert that dies, a rank that is slow, a step
that stands out:

**Routers.** From the rows of each expert, step by step. A router has collapsed when its fullest expert has had far more
rows than the mean for `PATIENCE_STEPS` steps in a row; an expert is dead when it has had none for as long, and even use
would have given it `MISSED_ROWS` by then (with a row a step expected, none is chance). One warning when it begins, one
when it ends. Rejected: entropy of the use. It is one number too, but 3.1 of 4.2 says little to a reader.

**Ranks** that work longer than the others and do not wait (MegaScale-MoE, section 7: stragglers). A rank that hangs is
named by its timeout. One that is slow makes all others wait, so the step is long and every rank but one looks idle.
What tells is the time that a rank does not wait: its step less its waiting. It is held against the median of the other
ranks of its stage, in logged steps; a rank that is `SLOW_OVER` times that for `SLOW_STEPS` of them in a row is named,
with the operator that takes it longest beyond the others, and with the rows of its experts: many rows are the router's
doing, few are the machine's. Rejected: the times of collectives. The slow rank waits least, and shows by nothing else.

**Steps.** One is a spike if its gradient norm is `norm_ratio` times the median of the last good steps, its loss
`loss_rise` nats above theirs, or one of them is not finite. Medians, because a mean would follow the spike. The first
`LEAST_STEPS` steps of a run have nothing to be compared with. What was compared with is part of a checkpoint, so that a
run that goes on decides as an undisturbed one. Rejected: standard deviations. Norms of gradients have long tails, and
three of them were seen every few hundred steps.
"""

import logging
import math
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.base.split_evenly import split_evenly
from antiphon.base.units import format_seconds
from antiphon.comm.collectives import barrier
from antiphon.comm.ledger import Ledger
from antiphon.comm.mesh import Mesh
from antiphon.specs.model import ModelSpec
from antiphon.train.config_tables import WatchConfig
from antiphon.train.ranks import gathered
from antiphon.train.run_folder import Metrics
from antiphon.train.spans import Span, StepSpans, seconds_by_operator, write_part

PATIENCE_STEPS = 25
MISSED_ROWS = 50.0
MOST_OVER_MEAN = 8.0


def collapse_limit(num_experts: int, top_k: int) -> float:
    """Rows of the fullest expert over the mean from which on a router counts as collapsed: three quarters of the way
    to the worst that can be (all rows choose the same `top_k`), at most 8."""
    worst = num_experts / top_k
    return min(MOST_OVER_MEAN, 1 + 0.75 * (worst - 1))


Alarm = tuple[str, bool]  # where, what, since when and what to do; whether it is over


@dataclass
class _Trouble:
    """A run of bad steps. `missed`: rows that even use would have given in it to one expert."""

    since_step: int
    num_steps: int = 0
    missed: float = 0.0
    reported: bool = False


class RouterAlarm:
    """`layers`: the model's numbers of the MoE layers, in the order of the counts."""

    def __init__(self, layers: Sequence[int], num_experts: int, top_k: int) -> None:
        self._layers = layers
        self._limit = collapse_limit(num_experts, top_k)
        self._troubles: dict[tuple[int, ...], _Trouble] = {}  # by layer, of routers; by layer and expert, of experts

    def observe(self, step: int, counts_LE: Sequence[Sequence[int]]) -> list[Alarm]:
        """What began or ended with this step. `counts_LE`: rows by layer and expert, of all ranks."""
        alarms: list[Alarm] = []
        for layer, counts_E in zip(self._layers, counts_LE, strict=True):
            mean = sum(counts_E) / len(counts_E)
            if not mean:
                continue
            alarms += self._collapse(step, layer, counts_E, mean)
            for expert, count in enumerate(counts_E):
                if not count or (layer, expert) in self._troubles:
                    alarms += self._death(step, layer, expert, mean, is_dead=not count)
        return alarms

    def _collapse(self, step: int, layer: int, counts_E: Sequence[int], mean: float) -> list[Alarm]:
        fullest = max(range(len(counts_E)), key=counts_E.__getitem__)
        ratio = counts_E[fullest] / mean
        trouble = self._due((layer,), step, mean, is_bad=ratio >= self._limit)
        if trouble is None:
            return []
        if ratio < self._limit:
            text = f"layer {layer}: the router, collapsed since step {trouble.since_step}, has recovered at step {step}"
        else:
            text = (
                f"layer {layer}: the router has collapsed: expert {fullest} has {ratio:.1f} times the mean, the "
                f"fullest above {self._limit:.1f} since step {trouble.since_step}: raise loss.balance, set loss.z, "
                "lower optimizer.learning_rate, or go back to a checkpoint before it"
            )
        return [(text, ratio < self._limit)]

    def _death(self, step: int, layer: int, expert: int, mean: float, *, is_dead: bool) -> list[Alarm]:
        trouble = self._due((layer, expert), step, mean, is_bad=is_dead)
        if trouble is None:
            return []
        if not is_dead:
            text = f"layer {layer}, expert {expert}, without rows since step {trouble.since_step}, lives at step {step}"
        else:
            text = (
                f"layer {layer}, expert {expert} is dead: no row since step {trouble.since_step} "
                f"({trouble.missed:,.0f} expected by even use): raise loss.balance or loss.bias_rate, lower "
                "optimizer.learning_rate, or go back to a checkpoint before it"
            )
        return [(text, not is_dead)]

    def _due(self, key: tuple[int, ...], step: int, mean: float, *, is_bad: bool) -> _Trouble | None:
        """The trouble of `key` if it is to be reported now: because it lasts, or because it was reported and ends."""
        if not is_bad:
            over = self._troubles.pop(key, None)
            return over if over is not None and over.reported else None
        trouble = self._troubles.setdefault(key, _Trouble(step))
        trouble.num_steps += 1
        trouble.missed += mean
        if trouble.reported or trouble.num_steps < PATIENCE_STEPS or trouble.missed < MISSED_ROWS:
            return None
        trouble.reported = True
        return trouble


SLOW_OVER, SLOW_STEPS, SLOW_LEAST_S = 1.3, 5, 0.01


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """One rank in one step. `busy_s`: without waiting. `operator_s`: of its operators, waiting among them. `stage`:
    whose ranks do alike. `rows_over_mean`: of its experts, over the mean of all ranks."""

    host: str
    stage: int
    busy_s: float
    operator_s: Mapping[str, float]
    rows_over_mean: float = 1.0


SlowSince = dict[int, tuple[int, int]]  # by rank that is slow: the first step, and how many in a row


def slow_ranks(step: int, ranks: Sequence[RankWork], slow: SlowSince) -> list[str]:
    """What is to be said after logged step `step` of ranks that begin, and end, to be slow; brings `slow` up to date.
    `ranks`: in order."""
    said = []
    for rank, own in enumerate(ranks):
        others = [each for place, each in enumerate(ranks) if place != rank and each.stage == own.stage]
        if not others:
            continue
        usual_s = statistics.median(each.busy_s for each in others)
        since, count = slow.get(rank, (step, 0))
        if own.busy_s > SLOW_OVER * usual_s and own.busy_s - usual_s > SLOW_LEAST_S:
            slow[rank] = since, count + 1
            if count + 1 == SLOW_STEPS:
                said.append(_words(rank, own, others, usual_s, since))
        elif slow.pop(rank, None) is not None and count >= SLOW_STEPS:
            said.append(f"rank {rank} ({own.host}), slow since step {since}, keeps up at step {step}")
    return said


def _words(rank: int, own: RankWork, others: Sequence[RankWork], usual_s: float, since: int) -> str:
    working = {name: each for name, each in own.operator_s.items() if "wait" not in name}
    excess = {
        name: seconds - statistics.median(each.operator_s.get(name, 0.0) for each in others)
        for name, seconds in working.items()
    }
    worst = max(excess, key=lambda name: excess[name], default="")
    where = f", {format_seconds(excess[worst])} of it in {worst}" if worst and excess[worst] > 0 else ""
    advice = "look at its machine: its clock, other processes, its memory"
    if own.rows_over_mean > SLOW_OVER:
        advice = "raise loss.balance, or set parallel.row_budget or loss.capacity"
    return (
        f"rank {rank} ({own.host}) is slow: it works for {format_seconds(own.busy_s)} a step where the others work for "
        f"{format_seconds(usual_s)}, since step {since}{where}; its experts have {own.rows_over_mean:.1f} times the "
        f"mean of rows: {advice}"
    )


WINDOW_STEPS, LEAST_STEPS = 50, 20
MOST_IN_A_ROW = 10  # steps left out
MOST_ROLLBACKS = 5  # to one checkpoint
Recent = tuple[tuple[float, float], ...]  # loss and norm of the last good steps


def with_step(recent: Recent, loss: float, norm: float) -> Recent:
    """`recent` and one more good step."""
    return (*recent, (loss, norm))[-WINDOW_STEPS:]


def spike(config: WatchConfig, recent: Sequence[Sequence[float]], loss: float, norm: float) -> str:
    """What stands out of this step, for a message; empty if nothing does."""
    if not math.isfinite(loss) or not math.isfinite(norm):
        return f"loss {loss:g} and gradient norm {norm:g} are not both finite"
    if len(recent) < LEAST_STEPS:
        return ""
    usual_loss, usual_norm = (statistics.median(each) for each in zip(*recent, strict=True))
    found = []
    if config.loss_rise and loss > usual_loss + config.loss_rise:
        found.append(f"loss {loss:.4f} is {loss - usual_loss:.2f} nats above the last steps' {usual_loss:.4f}")
    if config.norm_ratio and norm > usual_norm * config.norm_ratio:
        times = f"{norm / usual_norm:.1f} times" if usual_norm else "above"
        found.append(f"gradient norm {norm:.3g} is {times} the last steps' {usual_norm:.3g}")
    return " and ".join(found)


class SpikeLimit:
    """Counts what was left out, so that a run that only does that ends."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._rollbacks: dict[int, int] = {}

    def good(self) -> None:
        self._in_a_row = 0

    def skipped(self, step: int, words: str) -> None:
        """`UserError` if too many steps in a row were."""
        self._in_a_row += 1
        if self._in_a_row > MOST_IN_A_ROW:
            raise UserError(
                f"step {step}: {words}; {MOST_IN_A_ROW} steps before it were left out for the same reason: lower "
                "optimizer.learning_rate or optimizer.clip, look at the data, or raise watch.norm_ratio and loss_rise"
            )

    def rolled_back(self, to_step: int, words: str) -> None:
        """`UserError` if the run went back to that step too often."""
        self._rollbacks[to_step] = self._rollbacks.get(to_step, 0) + 1
        if self._rollbacks[to_step] > MOST_ROLLBACKS:
            raise UserError(
                f"{words}; the run went back to step {to_step} {MOST_ROLLBACKS} times: lower optimizer.learning_rate, "
                "look at the data, or go on from an older checkpoint"
            )


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
        self._slow: SlowSince | None = {} if finds_slow else None
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
            for text in () if self._slow is None else slow_ranks(step, self.traffic.ranks, self._slow):
                self.warn(step, text)
        if self._in_timeline(step):
            self._for_timeline += taken
        for text, has_ended in self._alarm.observe(step, counts_LE):
            self.warn(step, text, level=logging.INFO if has_ended else logging.WARNING)

    def warn(self, step: int, text: str, *, level: int = logging.WARNING) -> None:
        """Log it, and write it among the metrics of `step`."""
        if self._metrics is not None:
            _log.log(level, "%s", text)
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
