"""In which order a rank of a pipeline runs its stages, and the running of it.

The model's layers are cut into `pipeline * virtual_stages` stages. Rank p has stages p, p + pipeline, and so on. A
step's order on each rank:

    1. some forwards, fewer on later ranks: they fill the pipeline
    2. a forward and a backward in turns (1F1B): a micro-batch's activations are freed as soon as they can be
    3. the backwards that are left

With one stage a rank this is 1F1B (PipeDream-Flush; Narayanan et al., 2021, section 2.2.1). With several it is its
interleaved form (section 2.2.2): micro-batches go through a rank's first stage in groups of `pipeline`, then through
its second, so that the pipeline fills with shorter work.

A rank takes what other stages made, does the work, and sends what they need. A receive begins one action before the one
that needs it, so that it runs beside work. A send is never waited for where it begins: ranks that send to each other
would wait for each other. It is over as soon as an answer comes that its receiver made later; then what was sent is
freed, so no more is held than the schedule needs. Every wait ends with an error after the process group's timeout and
names the peer. Any number of tensors may be under way between two ranks; a tag tells which is which, so they may be
waited for in any order. Shapes are known on both sides: nothing but the tensor travels.

Rejected: `torch.distributed.pipelining`. Its stages pass tensors of one static shape and own the backward, which leaves
no place for the counts of experts that travel with the rows, for spans and for the ledger.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from antiphon.base.errors import PeerLost, UserError
from antiphon.comm.mesh import Group
from antiphon.train.spans import StepSpans


@dataclass(frozen=True)
class StagePass:
    """One pass of a micro-batch through one stage."""

    backward: bool
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{'backward' if self.backward else 'forward'} of micro-batch {self.micro_batch} in stage {self.stage}"


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule:
    """`pipeline` ranks with `virtual_stages` stages each."""

    pipeline: int
    virtual_stages: int = 1

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.virtual_stages

    def stages_of(self, place: int) -> range:
        """Those of the rank at `place` of the pipeline."""
        return range(place, self.num_stages, self.pipeline)

    def place_of(self, stage: int) -> int:
        """The place of the rank that has this stage."""
        return stage % self.pipeline

    def check(self, micro_batches: int) -> None:
        """`UserError` unless this many micro-batches a step keep the pipeline busy."""
        if micro_batches < self.pipeline:
            raise UserError(
                f"parallel: pipeline is {self.pipeline}, a step has {micro_batches} micro-batches, so some ranks would "
                f"never work at the same time: set micro_batch to a part of batch, {self.pipeline} times in it or more"
            )
        if self.virtual_stages > 1 and self.pipeline == 1:
            raise UserError(
                f"parallel: virtual_stages is {self.virtual_stages}, but a pipeline of 1 has nothing to interleave: "
                "use 1, or more pipeline ranks"
            )
        if self.virtual_stages > 1 and micro_batches % self.pipeline:
            raise UserError(
                f"parallel: {micro_batches} micro-batches a step with virtual_stages {self.virtual_stages} on "
                f"{self.pipeline} pipeline ranks: make them a multiple of {self.pipeline} (micro_batch, batch), or "
                "set virtual_stages to 1"
            )

    def source(self, action: StagePass) -> StagePass | None:
        """Whose result `action` needs from another rank; None for what begins here."""
        return self._beside(action, 1 if action.backward else -1)

    def target(self, action: StagePass) -> StagePass | None:
        """Who needs the result of `action` on another rank."""
        return self._beside(action, -1 if action.backward else 1)

    def _beside(self, action: StagePass, step: int) -> StagePass | None:
        stage = action.stage + step
        return StagePass(action.backward, stage, action.micro_batch) if 0 <= stage < self.num_stages else None

    def step(self, place: int, micro_batches: int) -> list[StagePass]:
        """Forward and backward of all micro-batches."""
        forwards = self.forwards(place, micro_batches)
        last = self.num_stages - 1
        backwards = [
            StagePass(True, last - action.stage, action.micro_batch)
            for action in self.forwards(self.pipeline - 1 - place, micro_batches)
        ]
        first = min(self._fill(place), len(forwards))
        found = forwards[:first]
        for forward, backward in zip(forwards[first:], backwards, strict=False):
            found += [forward, backward]
        return found + backwards[len(forwards) - first :]

    def forwards(self, place: int, micro_batches: int) -> list[StagePass]:
        """Forward alone of all micro-batches."""
        return [
            StagePass(False, stage, micro_batch)
            for first in range(0, micro_batches, self.pipeline)
            for stage in self.stages_of(place)
            for micro_batch in range(first, min(first + self.pipeline, micro_batches))
        ]

    def one_after_another(self, place: int, micro_batches: int) -> list[StagePass]:
        """One micro-batch through all stages and back, then the next: in the order of `turn_of`."""
        return [
            StagePass(backward, stage, micro_batch)
            for micro_batch in range(micro_batches)
            for backward, stages in ((False, self.stages_of(place)), (True, reversed(self.stages_of(place))))
            for stage in stages
        ]

    def turn_of(self, action: StagePass) -> int:
        """The number of `action` among those of all ranks, when they run one after another."""
        on_the_way = 2 * self.num_stages - 1 - action.stage if action.backward else action.stage
        return action.micro_batch * 2 * self.num_stages + on_the_way

    def _fill(self, place: int) -> int:
        """Forwards before the first backward is wanted."""
        after = self.pipeline - 1 - place
        return after if self.virtual_stages == 1 else 2 * after + (self.virtual_stages - 1) * self.pipeline


@dataclass(frozen=True)
class Parcel:
    """A tensor on its way to or from the rank at place `peer` of `group`. `what`: for errors, what it is."""

    group: Group
    peer: int
    what: str
    name: str
    tensor: Tensor
    work: Any

    def wait(self) -> Tensor:
        """The tensor, filled if it was received; what was sent may be written to again. `PeerLost` names the peer if
        it is gone, or silent for longer than the timeout of the group; with a roll call, `ResourceError` names the
        ranks that hang."""
        begin = time.perf_counter()
        try:
            with self.group.waiting(f"{self.name}, {self.what}"):
                self.work.wait()
        except RuntimeError as error:
            raise PeerLost(f"rank {self.group.ranks[self.peer]}", f"{self.name}, {self.what}: {error}") from error
        self.group.ledger.waited(self.name, time.perf_counter() - begin)
        return self.tensor


def start_send(group: Group, peer: int, tag: int, what: str, x: Tensor) -> Parcel:
    """Begin to send `x`, which stays as it is until the wait."""
    x = x.contiguous()
    group.ledger.sent("pipeline.send", x.numel() * x.element_size())
    work = dist.isend(x, group=group.process_group, group_dst=peer, tag=tag)
    return Parcel(group, peer, what, "pipeline.send", x, work)


def start_receive(group: Group, peer: int, tag: int, what: str, buffer: Tensor) -> Parcel:
    """Begin to fill `buffer`."""
    work = dist.irecv(buffer, group=group.process_group, group_src=peer, tag=tag)
    return Parcel(group, peer, what, "pipeline.receive", buffer, work)


Tensors = tuple[Tensor, ...]
_MOST_TENSORS = 2  # of one action


class Pipeline:
    """The rank at place `group.index` of `group`, whose ranks have the same rows."""

    def __init__(self, group: Group, schedule: PipelineSchedule, spans: StepSpans) -> None:
        self._group = group
        self._schedule = schedule
        self._spans = spans

    def run(
        self,
        orders: Sequence[Sequence[StagePass]],
        buffers: Callable[[StagePass], Tensors],
        do: Callable[[StagePass, Tensors], Tensors],
    ) -> None:
        """Do this rank's part of `orders`, one list of actions for each rank. All ranks call it with the same.
        `buffers`: room for what an action is given by another stage; `do`: does it, and gives what the next needs."""
        numbers = {action: number for order in orders for number, action in enumerate(order)}
        own, expected = orders[self._group.index], dict[StagePass, list[Parcel]]()
        sent: list[tuple[StagePass, list[Parcel]]] = []
        for number, action in enumerate(own):
            for coming in own[number : number + 2]:
                if coming not in expected and self._schedule.source(coming) is not None:
                    expected[coming] = self._receive(coming, buffers(coming))
            given = self._given(action, expected.pop(action, []))
            source = self._schedule.source(action)
            if source is not None:
                sent = self._not_yet_used(sent, source, numbers)
            made = do(action, given)
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
