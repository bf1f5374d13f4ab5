"""In which order a rank of a pipeline runs its stages: plain data, without torch.

The model's layers are cut into `pipeline * virtual_stages` stages. Rank p has stages p, p + pipeline, and so on. A
step's order on each rank:

    1. some forwards, fewer on later ranks: they fill the pipeline
    2. a forward and a backward in turns (1F1B): a micro-batch's activations are freed as soon as they can be
    3. the backwards that are left

With one stage a rank this is 1F1B (PipeDream-Flush; Narayanan et al., 2021, section 2.2.1). With several it is its
interleaved form (section 2.2.2): micro-batches go through a rank's first stage in groups of `pipeline`, then through
its second, so that the pipeline fills with shorter work.

Rejected: `torch.distributed.pipelining`. Its stages pass tensors of one static shape and own the backward, which leaves
no place for the counts of experts that travel with the rows, for spans and for the ledger.
"""

from dataclasses import dataclass

from antiphon.base.errors import UserError


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
        stage = action.stage + (1 if action.backward else -1)
        return StagePass(action.backward, stage, action.micro_batch) if 0 <= stage < self.num_stages else None

    def target(self, action: StagePass) -> StagePass | None:
        """Who needs the result of `action` on another rank."""
        stage = action.stage + (-1 if action.backward else 1)
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
        """Where `action` stands among those of all ranks, when they run one after another."""
        on_the_way = 2 * self.num_stages - 1 - action.stage if action.backward else action.stage
        return action.micro_batch * 2 * self.num_stages + on_the_way

    def _fill(self, place: int) -> int:
        """Forwards before the first backward is wanted."""
        after = self.pipeline - 1 - place
        return after if self.virtual_stages == 1 else 2 * after + (self.virtual_stages - 1) * self.pipeline
