"""Receives in the order of a stream; the steps are those of `lanes.py`.

Which slot a message lands in is the sender's choice, so the stream cannot know beforehand where to copy from: the
core copies the arrived payloads to where the stream expects them and returns the slots at once.
"""

import time
from collections.abc import Sequence

from torch import Tensor

from antiphon import _m2n
from antiphon.base.errors import PeerTimeout, UserError
from antiphon.comm.m2n.streams.lanes import Core, Lane, Transfer, byte_view, host_bytes
from antiphon.comm.m2n.streams.stream import Ready, Stream


class StreamReceiver(Lane):
    """Receives in the order of one stream from one inbox; made by `StreamCore.receiver`."""

    waits_for_arrival = True

    def __init__(
        self, core: Core, inbox: _m2n.Inbox, stream: Stream, num_stages: int, stage_bytes: int, timeout_s: float
    ) -> None:
        super().__init__(core, stream, f"{stream.name} receive", timeout_s)
        self._inbox = inbox
        self._stage_bytes = stage_bytes
        self._stages = [stream.new_stage(stage_bytes) for _ in range(num_stages)]
        self._stage_free: list[Ready | None] = [None] * num_stages

    def receive(self, step: int, sources: Sequence[int], out: Tensor) -> Transfer:
        """Work put on the stream later sees in `out[i]` the message of `step` from `sources[i]`. Returns at once.

        `out` is contiguous, with one row (of its first dim) for each source; what a shorter message leaves of its row
        is unspecified. Raises the error of an earlier receive (see `check`), `UserError` for an `out` that does not
        fit. The deadline counts from when its stage, or `out`, is free and earlier receives of this lane are over.
        A message that comes after its receive has failed keeps its slot until `Inbox.discard_below`, for which there is
        `StreamCore.run`."""
        self.check()
        target = byte_view(out)
        if not sources or out.dim() == 0 or out.shape[0] != len(sources):
            raise UserError(f"{self.name}: out of shape {list(out.shape)} for {len(sources)} sources: one row for each")
        number = self.submitted + 1
        index = number % len(self._stages) if self._stages else -1
        memory, gate = target, None
        if self._stages:
            if target.numel() > self._stage_bytes:
                raise UserError(
                    f"{self.name}: out has {target.numel()} bytes, a stage {self._stage_bytes}: raise stage_bytes"
                )
            memory, gate = self._stages[index][: target.numel()], self._stage_free[index]
        else:
            gate = self._stream.record()  # 1, 2
        transfer = Transfer(
            lane=self,
            number=number,
            step=step,
            gate=gate,
            memory=host_bytes(memory, self.name),
            owner=memory,
            sources=tuple(sources),
        )
        self._core.submit(transfer)
        self._stream.wait_flag(self.flag, number)  # 3
        if self._stages:
            self._stream.copy(target, memory)
            self._stage_free[index] = self._stream.record()
        return transfer

    def _try(self, transfer: Transfer) -> bool:
        if not self._all_here(transfer):
            return False
        rows = transfer.memory.reshape(len(transfer.sources), -1)
        payloads = {message.source: message.payload for message in self._inbox.messages(transfer.step)}
        for row, source in zip(rows, transfer.sources, strict=True):
            payload = payloads[source]
            if payload.size > row.size:
                raise UserError(
                    f"{self.name}: step {transfer.step}: {payload.size} bytes from source {source}, a row of out "
                    f"has {row.size}: give a larger out"
                )
            row[: payload.size] = payload
            transfer.lengths.append(payload.size)
        self._drop(transfer)  # the slots are the senders' again: what we need is in `memory`
        return True

    def _drop(self, transfer: Transfer) -> None:
        for source in transfer.sources:
            self._inbox.release(transfer.step, source)

    def _all_here(self, transfer: Transfer) -> bool:  # 4
        here, coming = self._inbox.partial(transfer.step)
        if set(transfer.sources) <= set(here):
            return True
        late = time.monotonic() >= transfer.deadline
        if not late and set(transfer.sources) <= {*here, *coming}:
            return False
        try:
            self._inbox.wait(transfer.step, transfer.sources, 0.0)  # says who is lost, or not there in time
        except PeerTimeout as error:
            if late:
                raise PeerTimeout(f"{self.name}: step {transfer.step}", error.peers, self._timeout_s) from None
            return False  # somebody has not connected yet
        return True

    def _sleep(self, timeout_s: float) -> None:
        self._inbox.wait(self._queue[0].step, self._queue[0].sources, timeout_s)
