"""What engine and workers say to each other. Plain data; every field is checked when a message is decoded.

Engine to worker: `Configure` once, then `RunStep`s (attention workers only), `Abort` and `Reset` after a failure,
`Shutdown`. Worker to engine: `LoadProgress`, `Ready`, `StepResult` or `StepFailed` per step, `ResetDone`, and from time
to time `ExpertReport` and `ExchangeReport`.
"""

from typing import Literal

import msgspec

from antiphon.comm.m2n.traffic import Traffic
from antiphon.serve.policy.step import SequenceStart, SequenceStep
from antiphon.specs.sampling import TokenLogprob

Role = Literal["replica", "attention", "experts"]


class ExchangeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach others: the transport, where they reach this worker, and the sizes both ends of an exchange agreed
    on. Without expert workers (`num_experts` 0) there are only the ranks of one worker to reach.

    `dtype`: of the rows that travel. `local_processes`: workers on this machine, for the choice how to wait (`waiting`,
    as in `_m2n.Endpoint`)."""

    transport: str
    host: str
    secret: bytes
    waiting: str
    local_processes: int
    num_attention: int
    num_experts: int
    num_micro_batches: int
    max_rows: int
    dtype: str


class Configure(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Everything a worker needs to become ready. `expert_owners` is the placement (see `specs/placement`).

    A worker is a group of `num_ranks` processes; this is number `rank`, and 0 leads: it gets the steps.
    `device_index`: which worker of its machine this is, over all roles; GPUs are taken in turn by it."""

    role: Role
    index: int
    rank: int = 0
    num_ranks: int = 1
    model: str
    device: str
    device_index: int
    dtype: str
    kernels: str
    num_threads: int
    cores: list[int]
    block_size: int
    num_blocks: int
    max_model_len: int
    max_running: int
    expert_owners: list[list[int]]
    exchange: ExchangeConfig | None
    timeout_s: float
    trace: bool


class LoadProgress(msgspec.Struct, tag=True, frozen=True):
    """Bytes of weights loaded so far, of how many."""

    done: int
    total: int


class Ready(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The worker can take steps. `ticket`: how attention workers reach it, if it leads an expert worker; `rank_ticket`:
    how the other ranks of its worker do."""

    kernels: str
    ticket: bytes = b""
    rank_ticket: bytes = b""


class RunStep(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """One step of one attention worker, in the policy's own terms; apply `released`, `starts`, then `micro_batches`.

    `step` counts the steps of the group: it is the same for all who step together. `participants[i]` lists the
    attention workers that have rows in micro-batch i (a worker may have none).
    `bitmasks`: by request id, the tokens a grammar allows next, packed as little-endian 32-bit words.
    """

    step: int
    released: list[str]
    starts: list[SequenceStart]
    micro_batches: list[list[SequenceStep]]
    participants: list[list[int]]
    bitmasks: dict[str, bytes] = {}


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """What the worker says of one request: its next token, if the step sampled one, and log-probabilities asked for."""

    request_id: str
    token_id: int | None
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


class StepResult(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Tokens sampled and where the time went. `requests` holds those for which there is something to say.

    `wait_s`: the worker stood still waiting for experts; `exposed_s`: the part of it in which those did not compute.
    """

    requests: list[Sampled]
    step_s: float
    wait_s: float
    exposed_s: float
    dispatch_bytes: int


class StepFailed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The step did not finish; nothing of it was sampled. `peers` are the workers that were waited for in vain."""

    reason: Literal["aborted", "timeout", "error"]
    message: str
    peers: list[str] = []


class ExpertReport(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """An expert worker's counters since the last report: rows per layer, time busy and waiting."""

    index: int
    rows_per_layer: dict[int, int]
    busy_s: float
    wait_s: float


class ExchangeReport(msgspec.Struct, tag=True, frozen=True):
    """What the worker's exchange has carried since its start."""

    traffic: Traffic


class Abort(msgspec.Struct, tag=True, frozen=True):
    """The running step is void: leave it at once, epoch `epoch` is about to begin."""

    epoch: int


class Reset(msgspec.Struct, tag=True, frozen=True):
    """Start exchange epoch `epoch`. `tickets`: how to reach each expert worker, by index; `rank_tickets`: each rank of
    the worker this goes to."""

    epoch: int
    tickets: list[bytes] = []
    rank_tickets: list[bytes] = []


class ResetDone(msgspec.Struct, tag=True, frozen=True):
    epoch: int


class Spans(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Recorded spans of a worker: parallel lists, times in nanoseconds of the machine's monotonic clock."""

    names: list[str]
    name_index: list[int]
    layers: list[int]
    micro_batches: list[int]
    rows: list[int]
    steps: list[int]
    starts_ns: list[int]
    ends_ns: list[int]


class TakeSpans(msgspec.Struct, tag=True, frozen=True):
    """Ask a worker for its spans so far (and forget them)."""


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Finish and exit 0."""


class Failure(msgspec.Struct, tag=True, frozen=True):
    """The worker cannot start; the message is for people. `exit_code` as in `base/errors`.

    `passing`: the same may succeed another time. A checkpoint that is gone or damaged, or a budget that is too small,
    stays so until somebody changes it."""

    message: str
    exit_code: int
    passing: bool = False


ToWorker = Configure | RunStep | Abort | Reset | TakeSpans | Shutdown
FromWorker = (
    LoadProgress | Ready | StepResult | StepFailed | ExpertReport | ExchangeReport | ResetDone | Spans | Failure
)
