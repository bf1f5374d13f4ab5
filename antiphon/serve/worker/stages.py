"""A process's place among the stages of its worker: where a micro-batch's rows come from, and where they go.

`AllLayers` embeds tokens, runs all micro-batches in turns, and samples from what the last layer made. `PipelineStage`
has some of the layers. It runs one micro-batch after another, so that the next stage can begin with the first one. The
first stage embeds; the rows that need logits come back to it, and it samples (`comm/stages`).

Rejected: one class with a pipeline that may be missing. Each of its methods would ask first.
"""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from antiphon.comm.stages import Stages
from antiphon.kernels.api import AttentionBatch
from antiphon.models.attention_half import AttentionHalf
from antiphon.placement.split import IntArray
from antiphon.serve.policy.request import SequenceStep
from antiphon.serve.worker.messages import RunStep, Sampled
from antiphon.serve.worker.row_sampler import RowSampler, needs_logits, rows_with_logits
from antiphon.serve.worker.spans import RECEIVE, SpanRecorder


@dataclass(slots=True)
class MicroBatch:
    """A micro-batch on its way through the layers. Between two layers (x, delta) is its whole state."""

    sequences: list[SequenceStep]
    batch: AttentionBatch
    x_TH: Tensor
    delta_TH: Tensor | None = None  # complete: to be added to x by the next layer
    local_TH: Tensor | None = None  # the shared expert's part, while the experts' part is under way
    in_flight: int | None = None  # layer whose experts still owe their part
    recorded_T: IntArray | None = None  # rows of a record whose experts these rows go to
    prompt_T: Tensor | None = None  # 1 for rows of prompts, if there are any and they are counted


Numbered = tuple[int, list[SequenceStep]]  # a micro-batch's number in the step, and its sequences


@dataclass(eq=False)
class AllLayers:
    """The place of a process that has all layers. `sampler` None: the leader samples, and knows the requests. `wait_s`:
    spent in this step waiting for other stages."""

    half: AttentionHalf
    sampler: RowSampler | None
    wait_s: float = field(default=0.0, init=False)

    def begin_step(self, step: RunStep) -> None:
        """Forget requests that ended, add those that start."""
        self.wait_s = 0.0
        if self.sampler is not None:
            for request_id in step.released:
                self.sampler.remove(request_id)
            for start in step.starts:
                self.sampler.add(start)

    def rounds(self, micro_batches: list[list[SequenceStep]]) -> list[list[Numbered]]:
        """The micro-batches that take turns in the layers, round by round: here all of them at once."""
        return [list(enumerate(micro_batches))]

    def rows(self, token_ids: list[int]) -> Tensor:
        """[T, H]: what the first layer of this process begins with."""
        return self.half.embed(torch.tensor(token_ids, dtype=torch.int64, device=self.half.backend.device))

    def pass_on(self, micro_batch: MicroBatch) -> None:
        """The layers of this process are done with `micro_batch`."""

    def take_back(self, micro_batches: list[MicroBatch]) -> None:
        """Wait for the stages behind this one."""

    def sample(self, micro_batches: list[MicroBatch], bitmasks: dict[str, bytes]) -> list[Sampled]:
        """Logits of the rows that need them, all micro-batches in one product, and the tokens chosen from them."""
        micro_batches = [each for each in micro_batches if any(map(needs_logits, each.sequences))]
        if not micro_batches:
            return []
        logits_RV = self._logits(micro_batches)
        sequences = [each for micro_batch in micro_batches for each in micro_batch.sequences if needs_logits(each)]
        return [] if self.sampler is None else self.sampler.sample(logits_RV, sequences, bitmasks)

    def _logits(self, micro_batches: list[MicroBatch]) -> Tensor:
        parts, deltas = list[Tensor](), list[Tensor]()
        for each in micro_batches:
            assert each.delta_TH is not None, "every layer has a feed-forward"
            index = torch.tensor(rows_with_logits(each.sequences), device=self.half.backend.device)
            parts.append(each.x_TH.index_select(0, index))
            deltas.append(each.delta_TH.index_select(0, index))
        return self.half.head(torch.cat(parts), torch.cat(deltas))


@dataclass(eq=False)
class PipelineStage(AllLayers):
    """The place of a process that has the layers of one stage; `stages` connects it to the others."""

    stages: Stages
    recorder: SpanRecorder

    def rounds(self, micro_batches: list[list[SequenceStep]]) -> list[list[Numbered]]:
        """One micro-batch a round."""
        return [[each] for each in enumerate(micro_batches)]

    def rows(self, token_ids: list[int]) -> Tensor:
        """[T, H]: embedded in the first stage, else what the stage before made. Waits for it."""
        if self.stages.place.is_first:
            return super().rows(token_ids)
        start_ns = time.monotonic_ns()
        x_TH = self._take(len(token_ids))
        self.recorder.add(RECEIVE, start_ns, next(iter(self.half.layers)), rows=len(token_ids))
        self.wait_s += (time.monotonic_ns() - start_ns) * 1e-9
        return x_TH

    def pass_on(self, micro_batch: MicroBatch) -> None:
        """Give the next stage all rows; the last one gives the first stage those that it wants."""
        assert micro_batch.delta_TH is not None, "every layer has a feed-forward"
        x_TH = micro_batch.x_TH + micro_batch.delta_TH
        self.stages.give(x_TH[_returned(micro_batch)] if self.stages.place.is_last else x_TH)

    def take_back(self, micro_batches: list[MicroBatch]) -> None:
        """In the first stage: the last one's rows, [R, H], in place of each micro-batch's. Then all stages have
        computed the step."""
        if not self.stages.place.is_first:
            return
        start_ns = time.monotonic_ns()
        for each in micro_batches:
            each.x_TH, each.delta_TH = self._take(len(_returned(each))), None
        self.recorder.add(RECEIVE, start_ns)
        self.wait_s += (time.monotonic_ns() - start_ns) * 1e-9

    def sample(self, micro_batches: list[MicroBatch], bitmasks: dict[str, bytes]) -> list[Sampled]:
        return super().sample(micro_batches, bitmasks) if self.stages.place.is_first else []

    def _logits(self, micro_batches: list[MicroBatch]) -> Tensor:
        return self.half.head(torch.cat([each.x_TH for each in micro_batches]), None)

    def _take(self, num_rows: int) -> Tensor:
        width, dtype = self.half.spec.hidden_size, self.half.backend.dtype
        return self.stages.take(num_rows, width, dtype).to(self.half.backend.device)


def _returned(micro_batch: MicroBatch) -> list[int]:
    """Rows that the last stage returns: those that need logits, or one. Once a step is answered no stage computes it
    again, so every stage must have computed it by then."""
    return rows_with_logits(micro_batch.sequences) or [0]
