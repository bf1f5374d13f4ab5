"""The ranks of one worker: what the leader tells the others of a step, and how they follow it.

The leader gets steps (attention, replica) or rows (experts) and says so to its ranks; all of them then make the same
calls on their parts of the model, and the collectives in between add the parts up (`models/shares`). A follower answers
nobody: it hears of the next step by waiting for the leader.

Rejected: steps from the engine to every rank. The engine's thread would send each one as often as there are ranks, and
a follower would have to hear of a batch of rows over the library all the same.
"""

import msgspec
import torch
from torch import Tensor

from antiphon.base.errors import PeerTimeout
from antiphon.comm.m2n.api import AttentionExchange, ExpertBatch, ExpertExchange
from antiphon.comm.rank_group import RankGroup
from antiphon.comm.stages import Stages
from antiphon.comm.two_level.levels import Levels
from antiphon.models.expert_half import ExpertHalf
from antiphon.serve.worker.attention import AttentionRunner
from antiphon.serve.worker.expert_moves import ExpertMoves
from antiphon.serve.worker.messages import Reset, RunStep, StepResult
from antiphon.serve.worker.spans import SpanRecorder

_ENCODER = msgspec.msgpack.Encoder()
_DECODE_STEP = msgspec.msgpack.Decoder(RunStep)


class Links:
    """All whom a process waits for: the other side of the exchange, if it has an end of one, and its own ranks."""

    def __init__(self, exchange: AttentionExchange | ExpertExchange | None, ranks: RankGroup | Levels | Stages) -> None:
        """`ranks`: of its worker, or of its whole instance."""
        self.exchange = exchange
        self.ranks = ranks

    def abort(self, epoch: int) -> None:
        """Any thread: the running step is void."""
        self.ranks.abort(epoch)
        if self.exchange is not None:
            self.exchange.abort(epoch)

    def reset(self, order: Reset) -> None:
        """Begin the epoch with all of them. Blocks; `PeerTimeout`, `PeerLost` or `Refused` if one cannot be reached."""
        self.ranks.reset(order.epoch, order.rank_tickets)
        if self.exchange is not None:
            self.exchange.reset(order.epoch, order.tickets)

    def close(self) -> None:
        self.ranks.close()
        if self.exchange is not None:
            self.exchange.close()


class LeadingAttention:
    """Runs the engine's steps with several ranks. A worker of one rank uses `AttentionRunner` alone."""

    def __init__(self, ranks: RankGroup, runner: AttentionRunner) -> None:
        self._ranks = ranks
        self._runner = runner

    def run(self, step: RunStep) -> StepResult:
        """See `AttentionRunner.run`. Followers do not sample, so they hear nothing of what that takes."""
        told = msgspec.structs.replace(step, released=[], starts=[], bitmasks={})
        self._ranks.broadcast_bytes(_ENCODER.encode(told))
        return self._runner.run(step)


class FollowingAttention:
    """The steps of an attention worker or replica on a rank that does not lead it."""

    def __init__(self, ranks: RankGroup, runner: AttentionRunner) -> None:
        self._ranks = ranks
        self._runner = runner

    def serve_one(self, idle_s: float, timeout_s: float) -> bool:
        """Follow one step; False if none came within `idle_s`. Raises as the leader's collectives do."""
        told = _heard(self._ranks, idle_s)
        if told is None:
            return False
        self._runner.run(_DECODE_STEP.decode(told))
        return True


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    """What followers must know of a batch of rows before the rows come."""

    step: int
    layer: int
    micro_batch: int
    num_rows: int
    prefetches: tuple[tuple[int, int, int], ...] = ()


_DECODE_BATCH = msgspec.msgpack.Decoder(_Batch)


class ExpertRanks:
    """The experts of one worker over its ranks: each computes some columns of every expert."""

    def __init__(self, ranks: RankGroup, half: ExpertHalf, moves: ExpertMoves, recorder: SpanRecorder) -> None:
        self._ranks = ranks
        self._moves = moves
        self.half = half
        self._recorder = recorder
        self._top_k = half.spec.router.top_k

    def lead(self, batch: ExpertBatch) -> Tensor:
        """The weighted partial sums of a batch, in host memory and the experts' dtype: the followers get its rows, and
        add their columns."""
        self._moves.check(batch.placements)
        self._moves.prefetched.start(batch.prefetches)
        rows_RH = batch.rows_RH.to(self.half.backend.dtype)
        if self._ranks.size == 1:
            return self._part(batch.layer, rows_RH, batch.ids_RK, batch.weights_RK)
        told = _Batch(batch.step, batch.layer, batch.micro_batch, rows_RH.shape[0], batch.prefetches)
        self._ranks.broadcast_bytes(_ENCODER.encode(told))
        return self._everybody(told, rows_RH, batch.ids_RK, batch.weights_RK)

    def serve_one(self, idle_s: float, timeout_s: float) -> bool:
        """Follow one batch of the leader; False if none came within `idle_s`."""
        heard = _heard(self._ranks, idle_s)
        if heard is None:
            return False
        told = _DECODE_BATCH.decode(heard)
        half, self._recorder.step = self.half, told.step
        self._moves.prefetched.start(told.prefetches)
        rows_RH = torch.empty(0, half.spec.hidden_size, dtype=half.backend.dtype)
        nothing_K = torch.empty(0, self._top_k)
        self._everybody(told, rows_RH, nothing_K.int(), nothing_K)
        return True

    def _everybody(self, told: _Batch, rows_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
        """The leader's rows go to all, the sum of the parts to the leader; the others return no rows."""
        num_rows = [told.num_rows] + [0] * (self._ranks.size - 1)
        rows_RH, ids_RK, weights_RK = (self._ranks.all_gather(x, num_rows) for x in (rows_RH, ids_RK, weights_RK))
        part_RH = self._part(told.layer, rows_RH, ids_RK, weights_RK)
        return self._ranks.reduce_scatter(part_RH, num_rows)

    def _part(self, layer: int, rows_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
        half, device = self.half, self.half.backend.device
        self._moves.prefetched.settle(layer)
        local_RK = half.to_local(layer, ids_RK if device.type == "cpu" else ids_RK.to(device))
        if self._moves.prefetched.num_slots:
            self._moves.prefetched.check(layer, ids_RK, local_RK)
        if device.type == "cpu":
            return half.forward(layer, rows_RH, local_RK, weights_RK)
        return half.forward(layer, rows_RH.to(device), local_RK, weights_RK.to(device)).cpu()


def _heard(ranks: RankGroup, idle_s: float) -> bytes | None:
    """What the leader says next; None if it says nothing for `idle_s`."""
    try:
        return ranks.broadcast_bytes(None, timeout_s=idle_s)
    except PeerTimeout:
        return None
