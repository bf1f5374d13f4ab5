"""What one step computes: the message from the scheduler to its attention worker. Immutable, small, safe to send twice.

A worker keeps, per slot, the request's tokens, sampling state and block table. A plan therefore carries the whole of a
request once (`SequenceStart`) and afterwards only what is new: one token, now and then one block. Applying a plan is
idempotent (tables are written at stated positions, tokens at stated positions), so a step that failed because an
expert worker was lost is simply sent again.

`SequenceStep` and `SequenceStart` are named tuples, not dataclasses: a plan of 1,024 sequences is built for every
token, and frozen dataclasses take about five times as long to construct.
"""

from dataclasses import dataclass
from typing import NamedTuple

from antiphon.specs.sampling import SamplingParams

PENDING = -1  # in the place of a token that the step before samples: its worker knows it first


class SequenceStart(NamedTuple):
    """A request that the worker does not know (any more): everything about it but its blocks.

    `token_ids` are all known tokens, `num_prompt` of them from the prompt; `stop_ids` are sorted.
    """

    request_id: str
    slot: int
    token_ids: tuple[int, ...]
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]


class SequenceStep(NamedTuple):
    """New tokens of one sequence. Row r is at position `start + r`.

    `new_blocks` go into the block table from entry `first_new_block` on; 0 there means the table begins anew.
    `samples`: the last row yields the next token, number `start + len(token_ids) - num_prompt` of the output.
    `token_ids` (`PENDING`,): the token that the step in flight before this one samples for the request.
    Rows `logprob_begin` to `logprob_end - 1` report the log-probability of the prompt token that follows them.
    """

    request_id: str
    slot: int
    token_ids: tuple[int, ...]
    start: int
    first_new_block: int
    new_blocks: tuple[int, ...]
    samples: bool
    logprob_begin: int
    logprob_end: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of one attention worker. To be applied in this order: `released`, `starts`, `sequences`.

    `released`: requests whose state the worker may drop (finished, aborted or preempted; a slot may be taken at once).
    Decodes come first in `sequences`, then prefills of the express lane, running prefills, and the newly admitted.
    """

    step_id: int
    released: tuple[str, ...]
    starts: tuple[SequenceStart, ...]
    sequences: tuple[SequenceStep, ...]
    num_tokens: int
