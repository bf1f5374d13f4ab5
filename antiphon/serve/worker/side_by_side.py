"""Several steps of one attention worker at once, each a micro-batch of its own (`--stepping free`).

A step that has its tokens is answered while the others go on, and the engine's next one takes its place. That one may
be here already, planned before its first tokens were known (`PENDING`): it begins at once, with the tokens of the step
before it. So neither the head and the choice of tokens nor the way to the engine and back holds up the experts' work
for the other steps.

The worker takes, again and again, what can be done without waiting:

1. a layer of the step whose rows came back from the experts, the oldest dispatch first. Of two steps with chunks of one
   prompt the later one computes a layer after the earlier one, whose keys and values it reads, and ends after it;
2. else a piece of the head of a step that is through its layers: the experts compute for the others meanwhile, so the
   head is cut into pieces of `ROWS_A_PIECE` rows, and rows that come back are gone on with in between;
3. else it waits for the oldest dispatch.

A row's result depends on no row beside it, so neither the cut nor the order changes a token.

Rejected: a thread for the head. It would take the kernels' threads from the layers of the other steps.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import torch

from antiphon.comm.m2n.native import NativeAttentionExchange
from antiphon.serve.policy.request import SequenceStep
from antiphon.serve.worker.attention import AttentionRunner, MicroBatch, with_sampled
from antiphon.serve.worker.exchange import StepExchange
from antiphon.serve.worker.messages import RunStep, Sampled, StepResult
from antiphon.serve.worker.row_sampler import logit_rows, needs_logits
from antiphon.serve.worker.spans import SAMPLE

ROWS_A_PIECE = 64  # enough that reading the head's weights takes less time than their product with the rows


class SharedExchange(StepExchange):
    """The exchange of steps that run side by side: times and bytes are counted from one result to the next."""

    exchange: NativeAttentionExchange

    def begin_step(self, step: RunStep) -> None:
        """Announce one more step."""
        self.exchange.begin_step(step.step, step.participants, step.first_micro_batch)

    def count_from_here(self) -> None:
        """A result has been made of what was counted."""
        self._before = self._counted()

    def is_back(self, layer: int, micro_batch: int) -> bool:
        """`combine` would not wait."""
        return self.exchange.is_back(layer, micro_batch)


@dataclass(eq=False)
class _Step:
    """A step under way. `layers`: those left, `num_begun`: how many are not; `pieces`: of the head, those left, when
    its layers are done. `after`: steps with earlier chunks of its prompts."""

    order: RunStep
    micro_batch: MicroBatch
    layers: Iterator[int]
    after: list["_Step"]
    num_begun: int = 0
    pieces: deque[MicroBatch] | None = None
    sampled: list[Sampled] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """The names of the requests that it computes."""
        return {sequence.request_id for sequence in self.micro_batch.sequences}

    def may_go_on(self, num_layers: int) -> bool:
        """What its next rows attend to is written; it ends after the steps before it."""
        return all(step.has_ended or num_layers > self.num_begun < step.num_begun for step in self.after)

    @property
    def has_ended(self) -> bool:
        """All its rows are computed and all its tokens sampled."""
        return self.pieces is not None and not self.pieces


@dataclass(eq=False)
class SideBySide(AttentionRunner):
    """The steps of one attention worker. `begin` some, at most two of a micro-batch; then `advance`."""

    exchange: SharedExchange
    _steps: list[_Step] = field(default_factory=list, init=False)  # by their last piece of work, the oldest first
    # By micro-batch: what begins when the step before it has its tokens, and what its last step sampled.
    _behind: dict[int, RunStep] = field(default_factory=dict, init=False)
    _sampled: dict[int, list[Sampled]] = field(default_factory=dict, init=False)
    _counted_until_ns: int = field(default=0, init=False)
    _is_void: bool = field(default=False, init=False)  # until all begins anew

    @property
    def num_running(self) -> int:
        """Steps under way, or waiting behind one."""
        return len(self._steps) + len(self._behind)

    def begin(self, order: RunStep) -> None:
        """One more step, of one micro-batch. Behind one of the same micro-batch it waits until that has ended. Nothing
        begins between `fail` and `forget`: the engine sent it before it knew, and sends it again."""
        if self._is_void:
            return
        self._start_waiting()
        if any(step.order.first_micro_batch == order.first_micro_batch for step in self._steps):
            self._behind[order.first_micro_batch] = order
        else:
            self.recorder.step = order.step
            self._start(order)

    @torch.inference_mode()
    def _start(self, order: RunStep) -> None:
        if not self._steps:
            self._counted_until_ns = time.monotonic_ns()
            self.exchange.count_from_here()
        self.stage.begin_step(order)
        self.exchange.begin_step(order)
        self._open(order)
        sequences = with_sampled(order.micro_batches[0], self._sampled.get(order.first_micro_batch, []))
        assert sequences is not None, "the step before it has ended, or nothing begins"
        micro_batch = self._begin(sequences)
        assert micro_batch is not None, "a step has rows"
        names = {each.request_id for each in sequences}
        after = [step for step in self._steps if not names.isdisjoint(step.names)]
        self._steps.append(_Step(order, micro_batch, iter(self.half.layers), after))

    def _start_waiting(self) -> None:
        """Those whose micro-batch is free: the step before them has ended."""
        for micro_batch in self._behind.keys() - {step.order.first_micro_batch for step in self._steps}:
            order = self._behind.pop(micro_batch)
            self.recorder.step = order.step
            self._start(order)

    def fail(self) -> None:
        """Something went wrong: all that is under way is void, and what comes before `forget`. Nothing reads its pages
        afterwards."""
        self._is_void = True
        self._steps.clear()
        self._behind.clear()
        self._sampled.clear()
        self._flush()

    def forget(self) -> None:
        """All that is under way is void, and what comes is not."""
        self.fail()
        self._is_void = False

    @torch.inference_mode()
    def advance(self) -> StepResult | None:
        """Do one piece of work, waiting only if there is none. The result of a step that has ended with it. Raises as
        `run` does; `recorder.step` is then the one that failed."""
        self._start_waiting()
        step = self._next()
        self.recorder.step = step.order.step
        if step.pieces is None:
            self._go_on(step)
        else:
            self._sample(step, step.pieces.popleft())
        self._steps.remove(step)
        if step.pieces is None or step.pieces:
            self._steps.append(step)
            return None
        return self._end(step)

    def _next(self) -> _Step:
        able = [step for step in self._steps if not step.after or step.may_go_on(len(self.half.layers))]
        for step in able:
            layer = step.micro_batch.in_flight
            through = step.pieces is not None
            if not through and (layer is None or self.exchange.is_back(layer, step.order.first_micro_batch)):
                return step
        return next((step for step in able if step.pieces is not None), able[0])

    def _go_on(self, step: _Step) -> None:
        """One layer; behind the last one the head is cut."""
        index = step.order.first_micro_batch
        self._collect(index, step.micro_batch)
        layer = next(step.layers, None)
        if layer is None:
            step.pieces = deque(pieces_of(step.micro_batch))
        else:
            self._attend(layer, index, step.micro_batch)
            step.num_begun += 1

    def _sample(self, step: _Step, piece: MicroBatch) -> None:
        start_ns = time.monotonic_ns()
        step.sampled += self.stage.sample([piece], step.order.bitmasks)
        self.recorder.add(SAMPLE, start_ns, micro_batch=step.order.first_micro_batch, rows=len(piece.sequences))

    def _end(self, step: _Step) -> StepResult:
        flushed_s = self._flush()
        self._sampled[step.order.first_micro_batch] = step.sampled
        started_ns, self._counted_until_ns = self._counted_until_ns, time.monotonic_ns()
        result = self._result(step.sampled, started_ns, step.micro_batch.batch.num_tokens)
        self.exchange.count_from_here()
        self.routing.begin_step()  # what it counted has been said
        return msgspec.structs.replace(result, hand_over_s=flushed_s)


def pieces_of(micro_batch: MicroBatch) -> Iterator[MicroBatch]:
    """The rows of whole sequences that need logits, cut so that each piece has about `ROWS_A_PIECE` of those."""
    assert micro_batch.delta_TH is not None, "every layer has a feed-forward"
    first = row = num_wanted = 0
    taken: list[SequenceStep] = []
    for number, sequence in enumerate(micro_batch.sequences, 1):
        taken.append(sequence)
        row += len(sequence.token_ids)
        num_wanted += len(logit_rows(sequence)) if needs_logits(sequence) else 0
        if num_wanted >= ROWS_A_PIECE or (num_wanted and number == len(micro_batch.sequences)):
            part = slice(first, row)
            yield MicroBatch(taken, micro_batch.batch, micro_batch.x_TH[part], micro_batch.delta_TH[part])
            first, taken, num_wanted = row, [], 0
