"""The M2N library: messages from M senders to N receivers, counted, with credits. See docs/m2n.md.

Every wait has a timeout in seconds and raises `antiphon.base.errors.PeerTimeout` (names who is missing) or `PeerLost`.
An `Endpoint` and what it made belong to one thread at a time; waits release the GIL. A thread of the library's own
watches the peers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer as _Buffer

Buffer = _Buffer | NDArray[Any]  # numpy arrays are buffers, but their stubs say so only from Python 3.12 on

class TransportOptions:
    """`congestion`: of tcp's data connections; empty: cubic where the system's is BBR, else the system's."""

    data_priority: int
    data_type_of_service: int
    credit_priority: int
    credit_type_of_service: int
    congestion: str
    library: str
    provider: str
    data_traffic_class: int
    credit_traffic_class: int
    shuffle_seed: int

    def __init__(self) -> None: ...

class Endpoint:
    """One process's (or thread's) end of any number of pairs. `transport`: loopback, shm, tcp or libfabric.

    `waiting`: auto, poll, spin or block; auto compares `local_processes` (all that wait on this machine, this one
    included; 0: unknown) with the cores this process may use (`antiphon.base.allowance`). `host` and `port`: where
    peers of other machines reach us. Nothing listens beyond this machine's loopback unless `host` says so.
    """

    def __init__(
        self,
        name: str,
        transport: str = "shm",
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: bytes = b"",
        waiting: str = "auto",
        local_processes: int = 0,
        spin_s: float = 100e-6,
        heartbeat_s: float = 0.2,
        dead_after_s: float = 0.8,
        options: TransportOptions | None = None,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def transport(self) -> str: ...
    @property
    def waiting(self) -> str: ...
    def inbox(
        self, sources: int, slots: int, slot_bytes: int, names: Sequence[str] = (), device: StreamDevice | None = None
    ) -> Inbox:
        """Room for `slots` messages of `slot_bytes` from each of `sources` senders. Memory is used once written.

        `names`: what errors call the sources before they connect, one for each. `device`: payloads lie in its memory,
        where `why_staged` has no reason against it."""
    def why_staged(self, device: StreamDevice) -> str:
        """Why peers cannot write into this device's memory; empty: they can. It tries."""
    def ticket(self, inbox: Inbox) -> bytes:
        """What senders need to connect to `inbox`: give it to them by whatever way you can talk."""
    def connect(self, ticket: Buffer, source: int, timeout_s: float) -> Outbox:
        """Become source number `source` of the inbox that exported `ticket`. Blocks until welcomed."""
    def interrupt(self) -> None:
        """Any thread: the current wait, or the next one that has to wait, ends with `Interrupted`."""
    def control_counters(self) -> dict[str, int]:
        """accepted, rejected (strangers), gone."""
    def close(self) -> None:
        """Say goodbye and stop; peers see `PeerLost` with reason "closed its endpoint". A second call does nothing."""

class Message:
    """One message that is visible and not yet released."""

    @property
    def source(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def participants(self) -> int: ...
    @property
    def user(self) -> tuple[int, ...]:
        """Eight 32-bit words of the sender's."""
    @property
    def payload(self) -> NDArray[np.uint8]:
        """A view of the receive slot: valid until released (the memory itself stays mapped as long as the view)."""

class Inbox:
    @property
    def sources(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    def connected(self) -> list[int]:
        """Sources that are connected and alive."""
    def wait_connected(self, sources: int | Sequence[int], timeout_s: float) -> None:
        """Until that many (or these) sources are connected."""
    def wait(self, step: int, expect: int | Sequence[int], timeout_s: float) -> None:
        """Until messages of `step` are visible from that many (or from these) sources.

        A number counts messages: with it no source may send two of one step. `PeerLost` as soon as too few sources are
        left; a lost source's message that arrived completely counts."""
    def wait_complete(self, timeout_s: float) -> int | None:
        """The next step of which all `participants` (as its messages say) have arrived; None at the timeout.

        Each step is returned once. `PeerLost` once for each source that went away."""
    def forget_losses(self) -> None:
        """`wait_complete` will not mention the sources lost so far."""
    def partial(self, step: int) -> tuple[list[int], list[int]]:
        """(sources whose message of `step` is here, connected sources whose is not)."""
    def incomplete(self) -> list[tuple[int, float]]:
        """Steps of which something is here but not all that was announced, with the seconds since it began."""
    def messages(self, step: int) -> list[Message]:
        """What was here of `step` at the last wait (or `partial`, `incomplete`), by source."""
    def release(self, step: int, source: int = -1) -> None:
        """Return the credits of all messages of `step`, or of one source's."""
    def drop(self, source: int) -> None:
        """Its connection is of no use any more: it counts as lost until it connects again."""
    def discard_below(self, step: int) -> None:
        """Drop all messages of earlier steps, now and from now on; they are counted as stale, their credits return."""
    def counters(self) -> list[dict[str, int | str]]:
        """Per source: name, incarnation, state, messages, bytes, stale, rejected, lost."""
    def wait_histogram(self) -> list[int]:
        """Waits by duration: bucket i counts those of [2^i, 2^(i+1)) ns."""

class Outbox:
    """One pair's sending end. When the last reference goes, the receiver sees this source as lost."""

    @property
    def peer(self) -> str: ...
    @property
    def lost(self) -> bool:
        """The receiver is gone: only a new `connect` helps."""
    @property
    def credits(self) -> int:
        """Slots free now."""
    @property
    def slots(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    def send(
        self,
        step: int,
        payload: Buffer,
        user: Sequence[int] = (),
        participants: int = 0,
        timeout_s: float = 0.0,
    ) -> None:
        """Copy or hand over `payload`; returns at once. Without a free slot: wait up to `timeout_s`, then `NoCredit`.

        `payload` must not change before `wait_reusable` (at once, for transports that copy); it is kept alive."""
    def slot(self, timeout_s: float = 0.0) -> NDArray[np.uint8]:
        """The next free slot's payload, to be written in place and sent by `commit`."""
    def commit(self, step: int, length: int, user: Sequence[int] = (), participants: int = 0) -> None:
        """Send what was written into `slot()`, which then belongs to the library: a later change might be sent too."""
    def wait_reusable(self, timeout_s: float) -> None:
        """Until the payloads of all earlier `send`s may change."""
    def wait_credits(self, num_credits: int, timeout_s: float) -> None:
        """Until at least that many slots are free; all of them: everything sent has been released."""
    def counters(self) -> dict[str, int | str]:
        """peer, messages, bytes, credit_waits, credits."""
    def credit_histogram(self) -> list[int]:
        """Messages by time from send to credit, as in `Inbox.wait_histogram`."""

def wait_all_credits(outboxes: Sequence[Outbox], timeout_s: float) -> None:
    """Until everything sent through these outboxes, all of one endpoint, has been released. Sleeps until the last
    credit; `wait_credits` of one after another is woken by each."""

def libfabric_info(options: TransportOptions = ...) -> dict[str, Any]:
    """Which libfabric there is, its providers and what they can do; `problem` says what is missing and its mend."""

def transports() -> list[str]:
    """The back-ends this build has."""

INTRODUCTION: int
"""Step number of a message that carries its sender's own ticket."""
MAX_ATTENTION_WORKERS: int

def first_step_of(epoch: int) -> int:
    """The lowest step of an exchange epoch, for `Inbox.discard_below`."""

def dispatch_bytes(hidden: int, top_k: int, rows: int, dtype: str) -> int:
    """Bytes of a dispatch message of `rows` rows."""

class AttentionSide:
    """An attention worker's dispatch and combine. Tensors are given by address; `dtype` as PyTorch names it.

    `ids` int32 and `weights` float32 are [count, top_k], contiguous; rows may be strided.
    """

    def __init__(
        self,
        hidden: int,
        top_k: int,
        max_rows: int,
        dtype: str,
        replies: Inbox,
        num_micro_batches: int,
    ) -> None: ...
    def set_expert(self, worker: int, outbox: Outbox | None) -> None:
        """How to reach an expert worker; None: it is gone, and the placement must not name it."""
    def place(
        self,
        version: int,
        layer: int,
        owners: Sequence[Sequence[int]],
        speeds: Sequence[float],
        knee: int,
        num_workers: int,
    ) -> None:
        """Where the experts of a layer are from the next dispatch on; see `ExpertSplit` for the rest."""
    def dispatch(
        self,
        epoch: int,
        step: int,
        layer: int,
        micro_batch: int,
        participants: int,
        rows: int,
        stride_bytes: int,
        ids: int,
        weights: int,
        count: int,
        timeout_s: float,
    ) -> None:
        """Write each row once to every worker that owns one of its experts. The tensors may change on return."""
    def combine(
        self, epoch: int, step: int, layer: int, micro_batch: int, out: int, timeout_s: float
    ) -> tuple[int, int]:
        """Wait for all partial sums, add them into `out` [num_pending, hidden].

        Nanoseconds: of the call, and the part of them in which the slowest expert worker did not compute."""
    def is_back(self, epoch: int, step: int, layer: int, micro_batch: int) -> bool:
        """`combine` would not wait."""
    def prefetch(self, worker: int, layer: int, expert: int) -> None:
        """The next dispatch asks `worker` for a copy of this expert. At most two requests ride on a message."""
    def wanted_copies(
        self, layer: int, counts: NDArray[np.uint32], open: NDArray[np.bool_]
    ) -> list[tuple[int, int, float]]:
        """As `ExpertSplit.wanted_copies`, by the present split of the layer."""
    def num_pending(self, micro_batch: int) -> int: ...
    def forget(self) -> None: ...
    def take_counts(self) -> bytes:
        """Rows of each expert in all dispatches since the last call: uint32, one placed layer after the other."""
    @property
    def bytes_sent(self) -> int: ...

class ExpertSplit:
    """How many rows each copy of an expert gets: `antiphon.placement.split` in native code, with the same results.

    `owners[e]`: workers that hold expert e; `speeds`: of the workers, only ratios count (empty: equal)."""

    def __init__(
        self, num_workers: int, owners: Sequence[Sequence[int]], speeds: Sequence[float] = (), knee: int = 1
    ) -> None: ...
    def split(self, counts: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Rows of expert 0's owners in their order, then of expert 1's, and so on; from the rows of each expert."""
    def wanted_copies(self, counts: NDArray[np.uint32], open: NDArray[np.bool_]) -> list[tuple[int, int, float]]:
        """(expert, worker, gain) of copies worth having for these rows: see `antiphon.placement.forecast`."""

class ReceivedBatch:
    """Rows of one layer, of one step or of several."""

    def fields(
        self,
    ) -> tuple[
        int, int, int, tuple[int, ...], tuple[int, ...], int, int, tuple[tuple[int, int, int], ...], int, int, int, int
    ]:
        """Step, layer and micro-batch of the first part, sources, rows per source, oldest and newest placement,
        (source, layer, expert) of copies that are asked for, number of rows; addresses of rows, ids and weights, valid
        until `reply`. One call, because what calls it has cold caches."""

class ExpertSide:
    """An expert worker's receive and reply."""

    def __init__(self, hidden: int, top_k: int, max_rows: int, dtype: str, requests: Inbox) -> None: ...
    def set_attention(self, worker: int, outbox: Outbox) -> None: ...
    def next(self, timeout_s: float) -> tuple[int, int, int, tuple[int, ...]] | tuple[int, bytes] | None:
        """The next step of which everything is here, once: its number, layer, micro-batch and sources. Or (source,
        ticket) of a new attention worker; None at the timeout."""
    def collect(self, steps: Sequence[int]) -> ReceivedBatch | None:
        """The rows of these steps of one layer; None if their senders are gone."""
    def reply(self, batch: ReceivedBatch, partials: int, start_ns: int, end_ns: int, timeout_s: float) -> None: ...
    def overdue(self, age_s: float) -> list[str]:
        """Attention workers that a begun batch has been waiting for so long."""
    @property
    def bytes_sent(self) -> int: ...

class StreamDevice:
    """The device whose stream orders calls: words that both see. It has this thread's context where it is a GPU's."""

    @property
    def name(self) -> str: ...
    @property
    def needs_flush(self) -> bool:
        """What a network card wrote into the device's memory may be hidden from it until a flush."""
    @property
    def why_not_written(self) -> str:
        """Why a network card cannot write into the device's memory, as far as the device is concerned; or empty."""

def stream_device(kind: str, library: str = "") -> StreamDevice:
    """`kind`: cpu or cuda. `library`: CUDA's driver in place of libcuda.so.1."""

class StreamCore:
    """The thread that makes calls once the stream has come there. It interrupts waits of `endpoint`."""

    def __init__(self, endpoint: Endpoint, device: StreamDevice, stream_timeout_s: float) -> None: ...
    def wait_idle(self, timeout_s: float) -> bool:
        """Until all calls are over; False: not in time. The ends are the caller's then, until the next call."""
    def check(self) -> None:
        """Raise the error of the first call that failed since `begin`; what came after it was dropped."""
    def is_over(self, number: int) -> bool: ...
    def abort(self, epoch: int) -> None:
        """Any thread: calls of epochs before this one end with `Interrupted`."""
    def begin(self, epoch: int) -> None:
        """Once idle: forget errors; calls from now on belong to this epoch."""
    def stop(self) -> None: ...

class AttentionStream:
    """`AttentionSide.dispatch` and `combine` in the order of `stream` (a CUstream's address; 0 on a CPU). Memory stays
    as it is until the call is over."""

    def __init__(self, side: AttentionSide, core: StreamCore, memory: object) -> None:
        """The core is stopped when this object ends, and `memory`, which calls refer to, is kept until then."""
    def dispatch(
        self,
        stream: int,
        epoch: int,
        step: int,
        layer: int,
        micro_batch: int,
        participants: int,
        rows: int,
        stride_bytes: int,
        ids: int,
        weights: int,
        count: int,
        timeout_s: float,
    ) -> None: ...
    def combine(
        self, stream: int, epoch: int, step: int, layer: int, micro_batch: int, out: int, timeout_s: float
    ) -> None:
        """What is put on the stream from now on finds the sums in `out`, of which the caller knows the size."""
    @property
    def wait_ns(self) -> int:
        """Time spent waiting, of all combines so far."""
    @property
    def exposed_ns(self) -> int: ...

class ExpertStream:
    """`ExpertSide.next`, `collect` and `reply`, the reply in the order of `stream`. `stages`: addresses of rows, ids
    and weights that batches are copied to, `stage_rows` each."""

    def __init__(
        self,
        side: ExpertSide,
        core: StreamCore,
        stages: Sequence[tuple[int, int, int]],
        stage_rows: int,
        memory: object,
    ) -> None:
        """The core and `memory`: as in `AttentionStream`."""
    def next(
        self, side: ExpertSide, timeout_s: float
    ) -> tuple[int, int, int, tuple[int, ...]] | tuple[int, bytes] | None: ...
    def collect(self, steps: Sequence[int]) -> ReceivedBatch | None:
        """Waits while all stages are in use."""
    def reply(
        self, stream: int, batch: ReceivedBatch, partials: int, start_ns: int, end_ns: int, timeout_s: float
    ) -> int:
        """`end_ns` 0: when the stream comes there. Returns the call's number, for `StreamCore.is_over`."""
    def overdue(self, age_s: float) -> list[str]: ...
    def forget(self) -> None:
        """Once idle: all stages are free."""

class RankGroup:
    """Collectives of a group of ranks. Tensors are given by address; `dtype` as PyTorch names it; lists have one entry
    for each rank. A collective that fails leaves the group unusable until `begin`.

    `inbox`: source i is rank i; `RANK_GROUP_SLOTS` slots at least, of the same size on all ranks.
    """

    def __init__(self, rank: int, inbox: Inbox) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def bytes_sent(self) -> int: ...
    def set_peer(self, rank: int, outbox: Outbox) -> None: ...
    def begin(self, epoch: int, timeout_s: float) -> None:
        """Forget what is in flight; wait until all ranks have begun `epoch`."""
    def abort(self, epoch: int) -> None:
        """Any thread: calls of earlier epochs end with `Interrupted`, once `Endpoint.interrupt` has woken them."""
    def barrier(self, timeout_s: float) -> None: ...
    def all_reduce(self, data: int, count: int, dtype: str, timeout_s: float) -> None: ...
    def reduce_scatter(self, source: int, out: int, counts: Sequence[int], dtype: str, timeout_s: float) -> None: ...
    def all_gather(self, source: int, out: int, bytes: Sequence[int], timeout_s: float) -> None: ...
    def all_to_all(
        self, source: int, out: int, bytes_to: Sequence[int], bytes_from: Sequence[int], timeout_s: float
    ) -> None: ...
    def open_exchange(self) -> int:
        """The number of an exchange of messages of one pair at a time, for `post`, `take` and `release`."""
    def post(self, exchange: int, peer: int, pieces: Sequence[tuple[int, int]], timeout_s: float) -> None:
        """Send one message, of (address, bytes) one after another. It fits a slot."""
    def take(self, exchange: int, peer: int, timeout_s: float) -> tuple[int, int]:
        """(address, bytes) of the peer's message, valid until `release`."""
    def release(self, exchange: int, peer: int) -> None: ...
    def broadcast(self, payload: Buffer | None, root: int, timeout_s: float, rest_s: float) -> bytes: ...

RANK_GROUP_SLOTS: int
