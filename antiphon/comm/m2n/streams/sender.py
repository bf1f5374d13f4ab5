"""Sends in the order of a stream; the steps are those of `lanes.py`.

A message is copied into the library's own slot (of the receiver's memory for `shm`, of registered memory for the
others) before it is posted, so the source is reusable at that moment and not only when the wire has taken it. Rejected:
posting from the source, which saves a copy over a network but leaves the source to the transport even after the peer
is lost, when the stream must not be held any longer.
"""

import time
from collections.abc import Sequence

from torch import Tensor

from antiphon import _m2n
from antiphon.base.errors import NoCredit, UserError
from antiphon.comm.m2n.streams.lanes import Core, Lane, Transfer, byte_view, host_bytes
from antiphon.comm.m2n.streams.stream import Stream


class StreamSender(Lane):
    """Sends in the order of one stream through one outbox; made by `StreamCore.sender`."""

    waits_for_arrival = False

    def __init__(self, core: Core, outbox: _m2n.Outbox, stream: Stream, num_stages: int, timeout_s: float) -> None:
        super().__init__(core, stream, f"{stream.name} to {outbox.peer}", timeout_s)
        self._outbox = outbox
        self._stages = [stream.new_stage(outbox.slot_bytes) for _ in range(num_stages)]

    def send(self, step: int, tensor: Tensor, user: Sequence[int] = (), participants: int = 0) -> Transfer:
        """Send what `tensor` (contiguous) holds when the stream comes here. Returns at once.

        Work put on the stream later may overwrite it. Raises the error of an earlier send (see `check`), `UserError`
        for a tensor that does not fit. The deadline counts from when the stream has come here and finds no credit."""
        self.check()
        source = byte_view(tensor)
        if source.numel() > self._outbox.slot_bytes:
            raise UserError(
                f"{self.name}: a tensor of {source.numel()} bytes, slots hold {self._outbox.slot_bytes}: "
                "make the inbox with larger slots or split the tensor"
            )
        number = self.submitted + 1
        if self._stages:
            stage = self._stages[number % len(self._stages)][: source.numel()]
            if number > len(self._stages):
                self._stream.wait_flag(self.flag, number - len(self._stages))  # 3, for the stage's last send
            self._stream.copy(stage, source)
            source = stage
        transfer = Transfer(
            lane=self,
            number=number,
            step=step,
            gate=self._stream.record(),  # 1, 2
            memory=host_bytes(source, self.name),
            owner=source,
            user=tuple(user),
            participants=participants,
        )
        self._core.submit(transfer)
        if not self._stages:
            self._stream.wait_flag(self.flag, number)  # 3
        return transfer

    def _try(self, transfer: Transfer) -> bool:
        if self._outbox.credits == 0 and not self._outbox.lost:
            if time.monotonic() < transfer.deadline:
                return False
            raise NoCredit(f"{self.name}: a free slot for step {transfer.step}", [self._outbox.peer], self._timeout_s)
        slot = self._outbox.slot()
        slot[: transfer.memory.size] = transfer.memory
        self._outbox.commit(transfer.step, transfer.memory.size, transfer.user, transfer.participants)  # 4, 5
        return True

    @property
    def unsettled(self) -> bool:
        return not self._outbox.lost and self._outbox.credits < self._outbox.slots

    def _sleep(self, timeout_s: float) -> None:
        self._outbox.wait_credits(min(self._outbox.credits + 1, self._outbox.slots), timeout_s)
