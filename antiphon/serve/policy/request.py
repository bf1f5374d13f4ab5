"""One request as the policy sees it: tokens, progress and blocks. A record, no behaviour beyond its own arithmetic.

Prompt and output live in one list, because that is what has to be computed: after a preemption, or when the worker
that held the keys and values is lost, `num_computed` goes back to 0 and the very same list is computed again. No token
is repeated or lost, since a token enters the list once, when it is sampled.

Rejected: separate prompt and output lists with a "recompute" mode. Every consumer would have to join them again.
"""

from dataclasses import dataclass, field
from enum import Enum

from antiphon.serve.engine_api import FinishReason
from antiphon.specs.sampling import SamplingParams


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """`arrival` orders requests over all attention workers (smaller is older) and must be unique.

    `seed` is `params.seed` or one the engine drew; it stays with the request wherever it is computed.
    `token_ids` is owned by the request: prompt first, then output. `stop_ids`: tokens that end it, see `stop.py`.
    """

    request_id: str
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    arrival: int
    stop_ids: frozenset[int]

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed: int = 0  # leading tokens whose keys and values are in the cache
    block_table: list[int] = field(default_factory=list)
    block_digests: list[bytes] = field(default_factory=list)  # of full blocks, see `blocks.py`; outlives preemption
    num_blocks_sent: int = 0  # leading entries of `block_table` that the worker knows
    num_blocks_published: int = 0  # leading blocks that are offered to other requests
    slot: int = -1  # the worker's row for this request, -1 unless running
    planned_step: int = -1  # the last step that computes something for this request
    num_admissions: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    num_prompt_logprobs: int = 0  # prompt positions already reported, if asked for

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Rows of the prompt are still to be reported; the first token has nothing before it."""
        return self.params.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt - 1

    def forget_computed(self) -> None:
        """Back to "nothing computed": the caller has released the blocks and the slot."""
        self.num_computed = 0
        self.block_table = []
        self.num_blocks_sent = 0
        self.num_blocks_published = 0
        self.slot = -1


def new_request(
    request_id: str,
    prompt_token_ids: list[int],
    params: SamplingParams,
    *,
    arrival: int,
    seed: int,
    eos_token_ids: tuple[int, ...],
) -> Request:
    """A waiting request with its own copy of the prompt."""
    stop_ids = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids |= frozenset(eos_token_ids)
    return Request(
        request_id=request_id,
        token_ids=list(prompt_token_ids),
        num_prompt=len(prompt_token_ids),
        params=params,
        seed=seed,
        arrival=arrival,
        stop_ids=stop_ids,
    )
