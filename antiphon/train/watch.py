"""What is watched around each step: where its time goes, how routers use their experts.

Spans are recorded in steps that are logged, so that their cost (a millisecond or two a step) is divided by `log_every`,
and in the steps of a timeline.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from antiphon.base.logging import get_logger
from antiphon.specs.model import ModelSpec
from antiphon.train.alarm import RouterAlarm
from antiphon.train.metrics import Metrics
from antiphon.train.spans import Span, Spans, seconds_by_operator
from antiphon.train.timeline import write_part

TIMELINE_STEPS = range(1, 4)  # of this run: the first one warms up
_log = get_logger("train")


class Watch:
    """`first_step`: of this run. `timeline`: the file that `join_parts` writes in the end, None: none. `metrics` None
    on ranks that write none."""

    def __init__(
        self,
        spec: ModelSpec,
        spans: Spans,
        metrics: Metrics | None,
        *,
        first_step: int,
        timeline: Path | None = None,
        rank: int = 0,
    ) -> None:
        layers = [layer for layer, routes in enumerate(spec.moe_layers) if routes]
        self._alarm = RouterAlarm(layers, spec.router.num_experts, spec.router.top_k)
        self._spans = spans
        self._metrics = metrics
        self._timeline = timeline
        self._timeline_steps = range(first_step + TIMELINE_STEPS.start, first_step + TIMELINE_STEPS.stop)
        self._for_timeline: list[Span] = []
        self._rank = rank
        self.operator_s: Mapping[str, float] = {}

    def before_step(self, step: int, *, logged: bool) -> None:
        """`logged`: whether this step's `operator_s` will be wanted."""
        self._spans.step = step
        self._spans.on = logged or self._in_timeline(step)

    def after_step(self, step: int, counts_LE: Sequence[Sequence[int]]) -> None:
        """`counts_LE`: rows by MoE layer and expert, of all ranks."""
        taken = self._spans.take()
        self._spans.on = False
        self.operator_s = seconds_by_operator(taken)
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
        write_part(self._timeline, self._rank, self._for_timeline)

    def _in_timeline(self, step: int) -> bool:
        return self._timeline is not None and step in self._timeline_steps
