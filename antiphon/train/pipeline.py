"""Runs a schedule on one rank of a pipeline: takes what other stages made, does the work, sends what they need.

1. A receive begins one action before the one that needs it, so that it runs beside work.
2. A send is never waited for where it begins: ranks that send to each other would wait for each other. It is over as
   soon as an answer comes that its receiver made later; then what was sent is freed, so no more is held than the
   schedule needs.

Every wait ends with an error after the process group's timeout and names the peer (`comm/point_to_point`).
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from antiphon.comm.mesh import Group
from antiphon.comm.point_to_point import Parcel, start_receive, start_send
from antiphon.train.pipeline_schedule import PipelineSchedule, StagePass
from antiphon.train.spans import Spans

Tensors = tuple[Tensor, ...]
_MOST_TENSORS = 2  # of one action


class Work(Protocol):
    """What a rank does for each action."""

    def buffers(self, action: StagePass) -> Tensors:
        """Room for what `action` is given by another stage."""

    def do(self, action: StagePass, given: Tensors) -> Tensors:
        """Do it with what was given, nothing where it begins here; what the next stage needs, nothing if none does."""


class Pipeline:
    """The rank at place `group.index` of `group`, whose ranks have the same rows."""

    def __init__(self, group: Group, schedule: PipelineSchedule, spans: Spans) -> None:
        self._group = group
        self._schedule = schedule
        self._spans = spans

    def run(self, orders: Sequence[Sequence[StagePass]], work: Work) -> None:
        """Do this rank's part of `orders`, one list of actions for each rank. All ranks call it with the same."""
        numbers = {action: number for order in orders for number, action in enumerate(order)}
        own, expected = orders[self._group.index], dict[StagePass, list[Parcel]]()
        sent: list[tuple[StagePass, list[Parcel]]] = []
        for number, action in enumerate(own):
            for coming in own[number : number + 2]:
                if coming not in expected and self._schedule.source(coming) is not None:
                    expected[coming] = self._receive(coming, work.buffers(coming))
            given = self._given(action, expected.pop(action, []))
            source = self._schedule.source(action)
            if source is not None:
                sent = self._not_yet_used(sent, source, numbers)
            made = work.do(action, given)
            target = self._schedule.target(action)
            if target is not None and made:
                sent.append((target, self._send(target, made)))
        for _, parcels in sent:
            for parcel in parcels:
                parcel.wait()

    def _receive(self, action: StagePass, buffers: Tensors) -> list[Parcel]:
        source = self._schedule.source(action)
        assert source is not None
        place, what = self._schedule.place_of(source.stage), f"from the {source}"
        return [
            start_receive(self._group, place, self._tag(action) + index, what, buffer)
            for index, buffer in enumerate(buffers)
        ]

    def _send(self, target: StagePass, made: Tensors) -> list[Parcel]:
        place, what = self._schedule.place_of(target.stage), f"for the {target}"
        return [start_send(self._group, place, self._tag(target) + index, what, x) for index, x in enumerate(made)]

    def _tag(self, action: StagePass) -> int:
        return self._schedule.turn_of(action) * _MOST_TENSORS

    def _given(self, action: StagePass, parcels: list[Parcel]) -> Tensors:
        if not parcels:
            return ()
        with self._spans.of("gradients from the next stage" if action.backward else "rows from the stage before"):
            return tuple(parcel.wait() for parcel in parcels)

    def _not_yet_used(
        self, sent: list[tuple[StagePass, list[Parcel]]], answer: StagePass, numbers: dict[StagePass, int]
    ) -> list[tuple[StagePass, list[Parcel]]]:
        """What is left of `sent` once `answer` has come: its rank did all of its actions up to it."""
        place, left = self._schedule.place_of(answer.stage), []
        for target, parcels in sent:
            if self._schedule.place_of(target.stage) != place or numbers[target] > numbers[answer]:
                left.append((target, parcels))
                continue
            for parcel in parcels:
                parcel.wait()
        return left
