"""Both ends of the exchange in the order of a compute stream (`csrc/m2n/stream_core.h`).

On a GPU the thread that computes only puts work on the stream: copies to pinned memory, a word for the core, a wait for
the core's word. The core, one native thread an end, sends and polls when the stream has come there. So neither a
dispatch nor a combine makes that thread wait for the device, and it runs ahead of it by whole layers. On a CPU that
thread is the stream: a dispatch and a reply leave beside its next computation, a combine and a receive wait.

What differs from `native`:

- A call's error comes up at a later call; at the end of a step at the latest, because `bytes_sent` waits for the core.
  `wait_s` and `exposed_s` are those of then: it is read before them.
- Everything that is not in stream order (a new epoch, another placement, counters) first waits until the core rests.
- Rows are staged (on a GPU in pinned memory): for each micro-batch, and for three batches of an expert worker, so that
  it can receive one while the device computes another. So tensors may be reused by later work on the stream.
- Where a network card can write into the GPU's memory, an expert worker's messages arrive there. Rows do not pass
  through host memory; ids and weights are brought there, because the host counts by them. What is tried at start
  decides, and the log says it. Sums of an attention worker are added by the CPU, so its inbox stays in host memory.

The wire is the same, so an end with streams talks to one without.

Letters as in `antiphon.comm.m2n.api`.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from antiphon import _m2n
from antiphon.base.errors import PeerTimeout, UserError
from antiphon.base.logging import get_logger
from antiphon.comm.m2n.api import ExchangeShape, ExpertBatch
from antiphon.comm.m2n.native import (
    NativeAttentionExchange,
    NativeExpertExchange,
    _End,
    aborting,
    check_reply,
    check_rows,
)
from antiphon.specs.placement import ExpertPlacement

_log = get_logger("m2n")
_EXPERT_STAGES = 3  # one is received, one computed, one on its way back


class RowStage(NamedTuple):
    """Memory of one micro-batch or batch: rows, choices and weights on their way out, sums on their way back."""

    rows_TH: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    sums_TH: Tensor


def make_stages(
    shape: ExchangeShape, count: int, max_rows: int, *, pinned: bool, rows_on: torch.device | None = None
) -> list[RowStage]:
    """Memory that a device copies to and from by itself. `rows_on`: the device in whose memory the rows are to lie."""
    hidden, top_k = shape.hidden_size, shape.top_k
    on_host: dict[str, Any] = {"pin_memory": pinned, "device": "cpu"}
    rows: dict[str, Any] = on_host if rows_on is None else {"device": rows_on}
    return [
        RowStage(
            torch.empty(max_rows, hidden, dtype=shape.dtype, **rows),
            torch.empty(max_rows, top_k, dtype=torch.int32, **on_host),
            torch.empty(max_rows, top_k, dtype=torch.float32, **on_host),
            torch.empty(max_rows, hidden, dtype=shape.dtype, **on_host),
        )
        for _ in range(count)
    ]


class _Streaming:
    """The core of one end, and the stream of `device` that it serves. `driver`: CUDA's library in place of the
    system's."""

    def __init__(self, endpoint: _m2n.Endpoint, device: torch.device, timeout_s: float, driver: str = "") -> None:
        self.device = device
        self.timeout_s = timeout_s
        kind = "cuda" if device.type == "cuda" or driver else "cpu"
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # makes the device's context this thread's
        self.native = _m2n.stream_device(kind, driver)
        self.core = _m2n.StreamCore(endpoint, self.native, timeout_s)

    def landing(self, endpoint: _m2n.Endpoint) -> _m2n.StreamDevice | None:
        """The device, if peers can write into its memory; None: their rows are staged in host memory."""
        if self.native.name == "cpu":
            return None
        if reason := endpoint.why_staged(self.native):
            _log.info("%s: rows are staged in pinned memory: %s", endpoint.name, reason)
            return None
        seen = "each arrival is flushed" if self.native.needs_flush else "it sees them in order"
        where = f"the memory of {self.device} over {endpoint.transport}"
        _log.info("%s: rows arrive in %s, %s", endpoint.name, where, seen)
        return self.native

    @property
    def handle(self) -> int:
        """The stream that work is put on now; a CPU's has none."""
        return int(torch.cuda.current_stream(self.device).cuda_stream) if self.device.type == "cuda" else 0

    def rest(self) -> None:
        """Until no call is under way. On a GPU this waits for the device. `PeerTimeout` if it stands still."""
        if not self.core.wait_idle(4 * self.timeout_s):
            raise PeerTimeout("the calls of a stream", [str(self.device)], 4 * self.timeout_s)


class _StreamEnd(_End):
    """What both ends do otherwise than those of `native`: their calls only begin the work."""

    _streaming: _Streaming

    def _rest(self) -> None:
        self._streaming.rest()

    def abort(self, epoch: int) -> None:
        """Any thread: the running step is void, `epoch` is about to begin."""
        super().abort(epoch)
        self._streaming.core.abort(epoch)

    def close(self) -> None:
        """Say goodbye to all peers."""
        self._streaming.core.stop()
        super().close()


class StreamAttentionExchange(_StreamEnd, NativeAttentionExchange):
    """`AttentionExchange` whose dispatches and combines are in the order of the device's stream."""

    def __init__(
        self,
        endpoint: _m2n.Endpoint,
        shape: ExchangeShape,
        index: int,
        placement: ExpertPlacement,
        timeout_s: float,
        device: torch.device,
        driver: str = "",
    ) -> None:
        self._streaming = _Streaming(endpoint, device, timeout_s, driver)
        super().__init__(endpoint, shape, index, placement, timeout_s)
        self._stages = make_stages(shape, shape.num_micro_batches, shape.max_rows, pinned=device.type == "cuda")
        self._calls = _m2n.AttentionStream(self._side, self._streaming.core, self._stages)
        self._num_rows: dict[int, int] = {}  # of each micro-batch under way

    def dispatch(self, layer: int, micro_batch: int, rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        check_rows(self._shape, rows_TH, ids_TK, weights_TK)
        num_rows, handle = len(rows_TH), self._streaming.handle
        if num_rows > self._shape.max_rows:
            raise UserError(
                f"{num_rows} rows in one micro-batch: the exchange was made for {self._shape.max_rows}; lower "
                "--max-batch-tokens"
            )
        stage = self._stages[micro_batch]
        for target, source in zip(stage[:3], (rows_TH, ids_TK, weights_TK), strict=True):
            target[:num_rows].copy_(source, non_blocking=True)
        self._num_rows[micro_batch] = num_rows
        self._call(
            self._calls.dispatch,
            handle,
            self._epoch,
            self._steps[micro_batch],
            layer,
            micro_batch,
            self._participants[micro_batch],
            stage.rows_TH.data_ptr(),
            self._shape.hidden_size * self._shape.dtype.itemsize,
            stage.ids_TK.data_ptr(),
            stage.weights_TK.data_ptr(),
            num_rows,
            self._timeout_s,
        )

    def combine(self, layer: int, micro_batch: int, timeout_s: float) -> Tensor:
        device, staged_TH = self._streaming.device, self._stages[micro_batch].sums_TH[: self._num_rows[micro_batch]]
        handle, key = self._streaming.handle, (self._epoch, self._steps[micro_batch], layer, micro_batch)
        self._call(self._calls.combine, handle, *key, staged_TH.data_ptr(), timeout_s)
        sums_TH = torch.empty_like(staged_TH, device=device).copy_(staged_TH, non_blocking=True)
        if device.type == "cpu":
            self._check()  # the wait is over; on a GPU it has not begun
        self.wait_s, self.exposed_s = self._calls.wait_ns * 1e-9, self._calls.exposed_ns * 1e-9
        return sums_TH

    def _call(self, call: Callable[..., object], *arguments: object) -> None:
        self._check()
        aborting(call, *arguments)

    def _check(self) -> None:
        """Raise what an earlier call met."""
        self._check_epoch()
        aborting(self._streaming.core.check)

    # --- out of the stream's order

    @property
    def bytes_sent(self) -> int:
        self._streaming.rest()
        self._check()
        self.wait_s, self.exposed_s = self._calls.wait_ns * 1e-9, self._calls.exposed_ns * 1e-9
        return super().bytes_sent

    def begin_step(self, step: int, participants: list[list[int]], first: int = 0) -> None:
        """See `NativeAttentionExchange.begin_step`."""
        self._check()
        super().begin_step(step, participants, first)

    def reset(self, epoch: int, tickets: list[bytes]) -> None:
        """See `NativeAttentionExchange.reset`."""
        self._streaming.rest()
        self._streaming.core.begin(epoch)
        self._num_rows.clear()
        super().reset(epoch, tickets)


class StreamExpertExchange(_StreamEnd, NativeExpertExchange):
    """`ExpertExchange` whose replies are in the order of the device's stream."""

    def __init__(
        self,
        endpoint: _m2n.Endpoint,
        shape: ExchangeShape,
        index: int,
        timeout_s: float,
        device: torch.device,
        *,
        merges: bool = False,
        lands: bool = True,
        driver: str = "",
    ) -> None:
        """`lands`: rows may arrive in the device's memory."""
        self._streaming = _Streaming(endpoint, device, timeout_s, driver)
        landing = self._streaming.landing(endpoint) if lands else None
        super().__init__(endpoint, shape, index, merges=merges, landing=landing)
        most_rows = shape.most_rows(merges=merges)
        rows_on = None if landing is None else device
        self._stages = make_stages(shape, _EXPERT_STAGES, most_rows, pinned=device.type == "cuda", rows_on=rows_on)
        self._stage_at = {stage.rows_TH.data_ptr(): stage for stage in self._stages}
        self._calls = _m2n.ExpertStream(
            self._side,
            self._streaming.core,
            [(rows.data_ptr(), ids.data_ptr(), weights.data_ptr()) for rows, ids, weights, _ in self._stages],
            most_rows,
            self._stages,
        )
        self._num_replies = 0

    def _next(self, patience_s: float) -> tuple[int, int, int, tuple[int, ...]] | tuple[int, bytes] | None:
        self._check_epoch()
        return aborting(self._calls.next, self._side, patience_s)

    def _collected(self, numbers: list[int]) -> _m2n.ReceivedBatch | None:
        return aborting(self._calls.collect, numbers)

    def _views_of(self, num_rows: int, rows: int, ids: int, weights: int) -> tuple[Tensor, Tensor, Tensor]:
        stage = self._stage_at[rows]
        return stage.rows_TH[:num_rows], stage.ids_TK[:num_rows], stage.weights_TK[:num_rows]

    def _overdue(self, timeout_s: float) -> list[str]:
        return self._calls.overdue(timeout_s)

    def reply(self, batch: ExpertBatch, partial_RH: Tensor, computed_ns: tuple[int, int]) -> None:
        if self._batch is None:
            raise UserError("no batch waits for a reply: call receive first, and reply once")
        received, steps = self._batch
        check_reply(self._shape, batch, partial_RH)
        self._check_epoch()
        start_ns, end_ns = computed_ns
        if self._streaming.device.type != "cpu":
            end_ns = 0  # when the stream comes there
        sums_RH = self._stages[self._num_replies % _EXPERT_STAGES].sums_TH[: len(partial_RH)]
        sums_RH.copy_(partial_RH, non_blocking=True)
        self._num_replies += 1
        place, timeout_s = (self._streaming.handle, received, sums_RH.data_ptr()), self._streaming.timeout_s
        aborting(self._calls.reply, *place, start_ns, end_ns, timeout_s)
        self._batch = None
        self._ready.answered(steps, (computed_ns[1] - computed_ns[0]) * 1e-9, time.monotonic())

    def reset(self, epoch: int, tickets: list[bytes]) -> None:
        """See `NativeExpertExchange.reset`."""
        self._streaming.rest()
        self._streaming.core.begin(epoch)
        self._calls.forget()
        self._num_replies = 0
        super().reset(epoch, tickets)
