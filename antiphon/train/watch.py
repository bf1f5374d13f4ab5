"""What is watched around each step: where its time goes, what ranks send each other, how routers use their experts.

Spans are recorded in steps that are logged, so that their cost (a millisecond or two a step) is divided by `log_every`,
and in the steps of a timeline.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from antiphon.base.logging import get_logger
from antiphon.comm.collectives import AllGather, barrier, gather_sizes, run
from antiphon.comm.ledger import Ledger
from antiphon.comm.mesh import Mesh
from antiphon.specs.model import ModelSpec
from antiphon.train.alarm import RouterAlarm
from antiphon.train.metrics import Metrics
from antiphon.train.spans import Span, Spans, seconds_by_operator
from antiphon.train.timeline import write_part

TIMELINE_STEPS = range(1, 4)  # of this run: the first one warms up
_log = get_logger("train")


@dataclass(frozen=True)
class StepTraffic:
    """Traffic of one step: `sent_bytes` by purpose and collective, the mean of all ranks; `waited_s` for others, of the
    rank that waited longest. What a collective did while a rank was computing is not in it. `lost_numbers` of E4M3
    rows, by what was lost, of all ranks."""

    sent_bytes: Mapping[str, float]
    waited_s: float
    lost_numbers: Mapping[str, int]

    def metrics(self) -> dict[str, Any]:
        """As a run's metrics name them."""
        values: dict[str, Any] = {"collective_bytes": dict(self.sent_bytes), "exposed_comm_s": self.waited_s}
        return values | ({"float8_lost": dict(self.lost_numbers)} if self.lost_numbers else {})


class Watch:
    """The watch of one rank of `mesh`. `first_step`: of this run. `timeline`: the file that `join_parts` writes in the
    end, None: none. `metrics` None on ranks that write none."""

    def __init__(
        self,
        spec: ModelSpec,
        spans: Spans,
        metrics: Metrics | None,
        mesh: Mesh,
        *,
        first_step: int,
        timeline: Path | None = None,
    ) -> None:
        layers = list(spec.expert_layers)
        self._alarm = RouterAlarm(layers, spec.router.num_experts, spec.router.top_k)
        self._spans = spans
        self._metrics = metrics
        self._timeline = timeline
        self._timeline_steps = range(first_step + TIMELINE_STEPS.start, first_step + TIMELINE_STEPS.stop)
        self._for_timeline: list[Span] = []
        self._mesh = mesh
        self._logged = False
        self.operator_s: Mapping[str, float] = {}
        self.travelled_s: Mapping[str, Sequence[float]] = {}
        self.traffic: StepTraffic | None = None

    def before_step(self, step: int, *, logged: bool, measured: bool = False) -> None:
        """`logged`: whether this step's `operator_s` and `traffic` will be wanted; `measured`: `operator_s` and
        `travelled_s`."""
        self._logged = logged
        if logged:
            barrier(self._mesh.world)  # else others wait in this step for what the first rank wrote after the last one
            _taken(self._mesh)
        self._spans.step = step
        self._spans.on = logged or measured or self._in_timeline(step)
        if self._mesh.launcher is not None:
            self._mesh.launcher.take_all_to_all_s()

    def after_step(self, step: int, counts_LE: Sequence[Sequence[int]]) -> None:
        """`counts_LE`: rows by MoE layer and expert, of all ranks."""
        taken = self._spans.take()
        self._spans.on = False
        self.operator_s = seconds_by_operator(taken)
        self.travelled_s = {} if self._mesh.launcher is None else self._mesh.launcher.take_all_to_all_s()
        self.traffic = _traffic(self._mesh) if self._logged and self._mesh.sizes.world_size > 1 else None
        if self._in_timeline(step):
            self._for_timeline += taken
        for alarm in self._alarm.observe(step, counts_LE):
            if self._metrics is None:
                continue
            _log.log(logging.INFO if alarm.ended else logging.WARNING, "%s", alarm.text)
            self._metrics.write(step, {"alarm": alarm.text})

    def close(self) -> None:
        """Write this rank's part of the timeline."""
        if self._timeline is None:
            return
        if not self._for_timeline:
            _log.warning("%s holds no step: this run did fewer than %d", self._timeline, TIMELINE_STEPS.start + 1)
        write_part(self._timeline, self._mesh.rank, self._for_timeline)

    def _in_timeline(self, step: int) -> bool:
        return self._timeline is not None and step in self._timeline_steps


def _traffic(mesh: Mesh) -> StepTraffic:
    """What the ledgers of all ranks hold; names may differ between ranks. All ranks call it together."""
    text = json.dumps(asdict(_taken(mesh))).encode()
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    sizes = gather_sizes(mesh.world, len(text), own.device)
    texts = torch.split(run(AllGather(mesh.world, "ledger", sizes), own), list(sizes))
    ledgers = [json.loads(bytes(each.tolist())) for each in texts]
    sent, lost = _sums(ledgers, "sent_bytes"), _sums(ledgers, "lost_numbers")
    mean = {name: num / len(ledgers) for name, num in sent.items()}
    return StepTraffic(mean, max(sum(ledger["waited_s"].values()) for ledger in ledgers), lost)


def _taken(mesh: Mesh) -> Ledger:
    """What this rank counted; of sums that a launcher made the bytes, because no rank waited for their collectives."""
    taken = mesh.ledger.take()
    for name, num_bytes in () if mesh.launcher is None else mesh.launcher.ledger.take().sent_bytes.items():
        taken.sent_bytes[name] = taken.sent_bytes.get(name, 0) + num_bytes
    return taken


def _sums(ledgers: Sequence[Mapping[str, Mapping[str, int]]], kind: str) -> dict[str, int]:
    names = sorted({name for ledger in ledgers for name in ledger[kind]})
    return {name: sum(ledger[kind].get(name, 0) for ledger in ledgers) for name in names}
