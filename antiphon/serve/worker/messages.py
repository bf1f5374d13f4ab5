"""What engine and workers say to each other. Plain data; every field is checked when a message is decoded.

Engine to worker: `Configure` once, then `RunStep`s (attention workers only), `Abort` and `Reset` after a failure,
`PreparePlacement`, `Place` and `Retire` when experts move, `ExpectKV` and `WithdrawKV` when keys and values
do, `Shutdown`. Worker to engine: `LoadProgress`, `WorkerReady`, `StepResult` or `StepFailed` per step, `ResetDone`,
`Prepared`, `KVNews`, and from time to time `ExpertReport`, `ExchangeReport`.
"""

from typing import Literal

import msgspec

from antiphon.comm.ledger import Traffic
from antiphon.placement.split import Phases
from antiphon.serve.engine_api import PrefetchCounts
from antiphon.serve.policy.handover import ExpectKV, HandOver, KVNews, KVOffer, WithdrawKV
from antiphon.serve.policy.request import SequenceStart, SequenceStep
from antiphon.serve.worker.spans import Spans
from antiphon.specs.model import KVStorage
from antiphon.specs.placement import ExpertPlacement
from antiphon.specs.plan import Collectives
from antiphon.specs.sampling import PackedLogprobs

Role = Literal["replica", "attention", "experts"]
ExchangeLibrary = Literal["m2n", "gloo"]
Pool = Literal["", "prefill", "decode"]  # the phase that a worker's group is for; "": both


class ExchangeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach others: the transport (`rank_transport` between ranks of one worker), where they reach this worker,
    and the sizes both ends of an exchange agreed on. Without expert workers (`num_experts` 0) only ranks are reached.

    `dtype`: of the rows that travel. `library`: what carries them. `merges`: an expert worker computes what is ready of
    a layer together, because attention workers step each for itself. `side_by_side`: each micro-batch of an attention
    worker is a step of its own. `local_processes`: workers on this machine, for
    the choice how to wait (`waiting`, as in `_m2n.Endpoint`)."""

    transport: str
    rank_transport: str
    host: str
    secret: bytes
    waiting: str
    local_processes: int
    num_attention: int
    num_experts: int
    num_micro_batches: int
    max_rows: int
    dtype: str
    library: ExchangeLibrary = "m2n"
    merges: bool = False
    side_by_side: bool = False


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How keys and values reach other workers, which any process with this can send to. `source`: its number among the
    `num_sources` processes that may ever send; `receives`: it has an inbox itself. `layout`: what a cached token is in
    this server, as a digest. `hand_over`: what a step computes leaves after each layer, or at the step's end."""

    transport: str
    host: str
    secret: bytes
    source: int
    num_sources: int
    receives: bool
    layout: str = ""
    hand_over: HandOver = "layers"


class HybridConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas hold experts for each other (layout hybrid), each expert on `expert_tp` ranks. `prefill`, `decode`: the
    form of the exchanges in steps with and without rows of prompts."""

    expert_tp: int
    prefill: Collectives
    decode: Collectives


class Configure(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Everything a worker needs to become ready. `expert_slots`: experts that there is room for in a layer.
    `count_rows`: attention workers say how often the gate chose each expert; `record_routing`: what each row chose.
    `replay_routing`: a file with such choices, which rows make in place of their own. `path_profile`: a file of sample
    paths, of which forecasts are made; empty: the next layer's router makes them. `phases`: as of `Prefetcher`.

    A worker is a group of `num_ranks` processes, evenly divided over `num_stages` stages of a pipeline, one stage after
    the other; this is number `rank`, and 0 leads: it gets the steps.
    `prefetch_rows`: attention workers ask for copies ahead of a layer, and a copy costs as much as this many rows.
    Expert workers have room for one more expert for each attention worker. 0: they do not.
    `graphs`: decode steps run without the host (`worker/decode_steps`), where the worker can. `streams`: rows are
    exchanged in the order of the device's stream (`comm/m2n/streams`).
    `sums_in_blocks`: ranks add up prompts in blocks of rows, each while the next one is multiplied.
    `spins`: threads of the kernels that wait may look again and again.
    `fingerprint`: of the checkpoint that the server began with (`Checkpoint.fingerprint`).
    `device_index`: which worker of its machine this is, over all roles; GPUs are taken in turn by it."""

    role: Role
    index: int
    rank: int = 0
    num_ranks: int = 1
    num_stages: int = 1
    model: str
    fingerprint: dict[str, str] = {}
    device: str
    device_index: int
    dtype: str
    kernels: str
    graphs: bool = False
    streams: bool = False
    num_threads: int
    spins: bool = True
    sums_in_blocks: bool = False
    cores: list[int]
    block_size: int
    num_blocks: int
    kv_dtype: KVStorage = "auto"
    max_model_len: int
    rope_scaling: str = ""
    weights: str = "as-stored"
    max_running: int
    placement: ExpertPlacement
    expert_slots: int
    count_rows: bool
    prefetch_rows: int = 0
    record_routing: bool = False
    replay_routing: str = ""
    path_profile: str = ""
    phases: Phases = "both"
    expert_bytes: int = 0
    exchange: ExchangeConfig | None
    hybrid: HybridConfig | None = None
    kv: KVTransferConfig | None = None
    timeout_s: float
    trace: bool

    @property
    def tp(self) -> int:
        """Ranks of one stage."""
        return self.num_ranks // self.num_stages


class LoadProgress(msgspec.Struct, tag=True, frozen=True):
    """Bytes of weights loaded so far, and in all."""

    done: int
    total: int


class WorkerReady(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The worker can take steps. `ticket`: how attention workers reach it, if it leads an expert worker; `rank_ticket`:
    how the other ranks of its worker do; `kv_ticket`: how others write keys and values to it."""

    kernels: str
    ticket: bytes = b""
    rank_ticket: bytes = b""
    kv_ticket: bytes = b""


class RunStep(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """One step of one attention worker, in the policy's own terms; apply `released`, `starts`, then `micro_batches`.

    `step` counts the steps of the group: it is the same for all workers that step together. The micro-batches are
    numbered from `first_micro_batch` on: a worker that runs steps side by side gives each a number of its own.
    `participants[i]` lists the attention workers that have rows in the one at i (a worker may have none).
    `prefill`: some sequence of the group has more rows than the one that follows its last token; `most_rows`: of the
    largest micro-batch of any of its workers.
    `placement`: where replicas that share experts send rows in this step, by its version; all their ranks have it.
    `bitmasks`: by request id, the tokens a grammar allows next, packed as little-endian 32-bit words.
    `offers`: of requests that start in this step, whose keys and values go to another worker as they are computed.
    """

    step: int
    released: list[str]
    starts: list[SequenceStart]
    micro_batches: list[list[SequenceStep]]
    participants: list[list[int]]
    first_micro_batch: int = 0
    prefill: bool = False
    most_rows: int = 0
    placement: int = 0
    bitmasks: dict[str, bytes] = {}
    offers: list[KVOffer] = []


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """What the worker says of one request: its next token, if the step sampled one, and log-probabilities asked for
    (a prompt's rows may come in several pieces)."""

    request_id: str
    token_id: int | None
    logprob: PackedLogprobs | None = None
    prompt_logprobs: list[PackedLogprobs] | None = None


class StepResult(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Tokens sampled and where the time went. `requests` holds those for which there is something to say.

    `step_s`: since the step began, or since the last result of a worker that runs several side by side.
    `wait_s`: the worker stood still waiting for experts; `exposed_s`: the part of it in which those did not compute.
    `hand_over_s`: it waited at the end until the step's keys and values had left for other workers.
    `expert_rows`: rows of each expert of each MoE layer, as uint32 one layer after the other; empty unless counted.
    `prompt_rows`: the same of rows of prompts alone, where experts are with others; empty without such rows and
    from pipelines, whose leaders see only their own layers.
    `routed`: the experts that the rows chose, `forecasts`: those expected, as in `RoutedRows`; empty unless recorded.
    """

    step: int
    requests: list[Sampled]
    step_s: float
    wait_s: float
    exposed_s: float
    hand_over_s: float = 0.0
    dispatch_bytes: int
    expert_rows: bytes = b""
    prompt_rows: bytes = b""
    routed: bytes = b""
    forecasts: bytes = b""
    prefetch: PrefetchCounts | None = None


class StepFailed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The step did not finish; nothing of it was sampled, nor of those beside it. `peers` are the workers that were
    waited for in vain. `step`: the one that failed; 0: all that ran."""

    reason: Literal["aborted", "timeout", "error"]
    message: str
    peers: list[str] = []
    step: int = 0


class ExpertReport(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What was computed for worker `index` of a placement since the last report: batches, rows, busy time.

    `rows_per_layer`: rows that came. `rows_per_expert[layer]`: rows of each expert held here; a row counts for each of
    its experts."""

    index: int
    num_batches: int
    rows_per_layer: dict[int, int]
    rows_per_expert: dict[int, dict[int, int]]
    busy_s: float


class ExchangeReport(msgspec.Struct, tag=True, frozen=True):
    """What the worker's exchange has carried since its start."""

    traffic: Traffic


class PreparePlacement(msgspec.Struct, tag=True, frozen=True):
    """To a process that holds experts: load, beside serving, what this coming placement wants of it."""

    placement: ExpertPlacement


class Prepared(msgspec.Struct, tag=True, frozen=True):
    """All experts of placement `version` are there; or, with a reason, they cannot be."""

    version: int
    failure: str | None = None


class Place(msgspec.Struct, tag=True, frozen=True):
    """To an attention worker: send rows by this placement from the next step on."""

    placement: ExpertPlacement


class Retire(msgspec.Struct, tag=True, frozen=True):
    """To a process that holds experts: no rows come any more by placements older than `version`."""

    version: int


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


class TakeSpans(msgspec.Struct, tag=True, frozen=True):
    """Ask a worker for its spans so far, which it then forgets, or for those of its `last_steps` steps."""

    last_steps: int = 0


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Finish and exit 0."""


class WorkerFailure(msgspec.Struct, tag=True, frozen=True):
    """The worker cannot start; the message is for people. `exit_code` as in `base/errors`.

    `passing`: the same may succeed another time. A checkpoint that is gone or damaged, or a budget that is too small,
    stays so until somebody changes it."""

    message: str
    exit_code: int
    passing: bool = False


ToWorker = (
    Configure
    | RunStep
    | Abort
    | Reset
    | PreparePlacement
    | Place
    | Retire
    | ExpectKV
    | WithdrawKV
    | TakeSpans
    | Shutdown
)
FromWorker = (
    LoadProgress
    | WorkerReady
    | StepResult
    | StepFailed
    | ExpertReport
    | ExchangeReport
    | ResetDone
    | Prepared
    | KVNews
    | Spans
    | WorkerFailure
)
