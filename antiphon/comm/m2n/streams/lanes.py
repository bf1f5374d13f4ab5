"""Sends and receives in stream order: what the caller puts on the stream, and what the core's thread then does.

A lane joins one stream with one outbox (`StreamSender`) or one inbox (`StreamReceiver`). Its transfers are
numbered and done in order; one flag counts those that are over. The steps of MegaScale-Infer (longer version, figures
6 and 7), with S for the sender and R for the receiver:

1. S, R: an event tells the core that the stream has come to the transfer,
2.       so that the tensor is filled (S) or not used any more (R).
3. S, R: the stream waits for the flag.
4. S: the core writes into a slot and posts it with its immediate. R: it waits for the immediates.
5. S: the write is complete when the library's slot holds it. R: no flush is needed, see below.
6. S, R: the core raises the flag, and the stream goes on.

Without stages (`num_stages` 0) this is what happens, with a tensor in memory of the host. With stages, for tensors of a
device, the stream copies between tensor and pinned memory around the flag. Then the wait moves: a sender's stream goes
on as soon as it has copied and waits only before it fills a stage that is still being sent; a receiver's stage is
filled ahead of the stream, which waits and copies when it gets there.

No flush (GDRCopy, `cuFlushGPUDirectRDMAWrites`): all transports land in memory of the host, and the copy that brings
the bytes to the device is issued behind the flag. A transport that writes into device memory itself (libfabric's
`FI_HMEM`) needs one between 4 and 6.

A sender copies a message into the library's own slot (of the receiver's memory for `shm`, of registered memory for the
others) before it is posted, so the source is reusable at that moment and not only when the network has taken it. Which
slot a message lands in is the sender's choice, so a receiver's stream cannot know beforehand where to copy from: the
core copies the arrived payloads to where the stream expects them and returns the slots at once.

Rejected: posting from the source, which saves a copy over a network but leaves the source to the transport even after
the peer is lost, when the stream must not be held any longer; and copying to the device on a stream of the core's own
before raising the flag. The copy could end up in the same hardware queue behind the stream that waits for it. So
nothing that raises a flag depends on the device.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon import _m2n
from antiphon.base.errors import Interrupted, NoCredit, PeerTimeout, UserError
from antiphon.comm.m2n.streams.stream import Ready, Stream

Bytes = NDArray[np.uint8]


@dataclass(kw_only=True, eq=False)
class Transfer:
    """One send or receive on its way. `memory` is read or written by the core once `gate` is done.

    `lengths`: of a receive that succeeded, the bytes from each source, in the order asked for.
    """

    lane: "Lane"
    number: int
    step: int
    gate: Ready | None
    memory: Bytes
    owner: Tensor  # keeps `memory`
    sources: Sequence[int] = ()
    user: Sequence[int] = ()
    participants: int = 0
    lengths: list[int] = field(default_factory=list)
    error: Exception | None = None
    gate_passed: bool = False
    deadline: float = 0.0  # of what is being waited for now, on the monotonic clock; 0: not looked at yet

    @property
    def over(self) -> bool:
        """Done or failed; `error` tells which."""
        return self.lane.flag.reached(self.number)

    def wait(self, timeout_s: float) -> None:
        """Until the core is through with it; raises its error. (The stream may still have to copy.)"""
        if not self.lane.flag.wait(self.number, timeout_s):
            raise TimeoutError(f"{self.lane.name}: step {self.step} was not over within {timeout_s:.1f} s")
        if self.error is not None:
            self.lane.delivered(self)
            raise self.error


class Core(Protocol):
    """What a lane asks of the core; any thread."""

    def submit(self, transfer: Transfer) -> None:
        """`transfer.lane.put(transfer)`, and see to it. Raises when the core does not run."""

    def remove(self, lane: "Lane") -> None:
        """Give up the lane's transfers and forget it."""


def byte_view(tensor: Tensor) -> Tensor:
    """The same memory as uint8 [num_bytes]."""
    if not tensor.is_contiguous():
        raise UserError(f"tensor of shape {list(tensor.shape)} has strides {tensor.stride()}: make it contiguous()")
    return tensor.detach().reshape(-1).view(torch.uint8)


def host_bytes(memory: Tensor, name: str) -> Bytes:
    """The memory of a uint8 tensor as the core reads and writes it."""
    if memory.device.type != "cpu":
        raise UserError(f"{name}: a tensor on {memory.device} without stages: set num_stages to 2 or more")
    array: NDArray[Any] = memory.numpy()
    return array


class Lane:
    """What senders and receivers share. Callers use the subclasses; the methods marked *core* run on its thread."""

    waits_for_arrival: ClassVar[bool]

    def __init__(self, core: Core, stream: Stream, name: str, timeout_s: float) -> None:
        self.name = name
        self.flag = stream.new_flag()
        self.submitted = 0
        self.closed = False
        self._core = core
        self._stream = stream
        self._timeout_s = timeout_s
        self._queue: deque[Transfer] = deque()
        self._failed: Transfer | None = None

    def check(self) -> None:
        """Raise the error of the first transfer that failed and was not reported yet; every later call does this too.

        The stream was let go all the same: what it computed from such a receive is void."""
        failed = self._failed
        if failed is not None and failed.error is not None:
            self._failed = None
            raise failed.error

    def delivered(self, transfer: Transfer) -> None:
        """The caller has seen this error."""
        if self._failed is transfer:
            self._failed = None

    def wait_idle(self, timeout_s: float) -> None:
        """Until all transfers so far are over, then `check`."""
        if not self.flag.wait(self.submitted, timeout_s):
            raise TimeoutError(f"{self.name}: its transfers were not over within {timeout_s:.1f} s")
        self.check()

    def close(self) -> None:
        """Give up what is not over (`Interrupted`) and leave the core. The outbox or inbox stays the caller's."""
        self._core.remove(self)

    def put(self, transfer: Transfer) -> None:
        """Called under the core's lock, so that queue and numbers agree."""
        if self.closed:
            raise UserError(f"{self.name} was closed: make a new lane")
        self.submitted = transfer.number
        self._queue.append(transfer)

    # --- core

    @property
    def busy(self) -> bool:
        return bool(self._queue)

    @property
    def waits_for_peer(self) -> bool:
        """The stream has come to the next transfer; what is missing is a message or a credit."""
        return bool(self._queue) and self._queue[0].gate_passed

    @property
    def unsettled(self) -> bool:
        """Something that was posted may still need the transport to be driven."""
        return False

    def advance(self, stream_timeout_s: float) -> bool:
        """Do the next transfer if it can be done. Never blocks. True: it is over, one way or the other."""
        if not self._queue:
            return False
        transfer = self._queue[0]
        try:
            if not self._pass_gate(transfer, stream_timeout_s) or not self._try(transfer):
                return False
        except Interrupted:
            return False  # meant for a nap that had ended by itself
        except (RuntimeError, OSError, ValueError) as error:
            transfer.error = error
            self._drop(transfer)
        self._finish(transfer)
        return True

    def give_up(self, error: Exception, up_to: int) -> None:
        """End all transfers up to that number with `error`, so that no stream waits for them."""
        while self._queue and self._queue[0].number <= up_to:
            self._queue[0].error = error
            self._drop(self._queue[0])
            self._finish(self._queue[0])

    def nap(self, longest_s: float) -> None:
        """Sleep until the peer may have done its part, at most until the deadline; raises what such waits raise."""
        if self.waits_for_peer:
            longest_s = min(longest_s, max(0.0, self._queue[0].deadline - time.monotonic()))
        self._sleep(longest_s)

    def _pass_gate(self, transfer: Transfer, stream_timeout_s: float) -> bool:
        if transfer.gate_passed:
            return True
        now = time.monotonic()
        if transfer.gate is None or transfer.gate.done():
            transfer.gate_passed = True
            transfer.deadline = now + self._timeout_s
            return True
        if transfer.deadline == 0.0:
            transfer.deadline = now + stream_timeout_s
        if now >= transfer.deadline:
            raise PeerTimeout(f"{self.name}: step {transfer.step}", [self._stream.name], stream_timeout_s)
        return False

    def _finish(self, transfer: Transfer) -> None:
        self._queue.popleft()
        if transfer.error is not None and self._failed is None:
            self._failed = transfer
        self.flag.raise_to(transfer.number)  # last: who sees it sees the rest

    def _try(self, transfer: Transfer) -> bool:
        raise NotImplementedError

    def _drop(self, transfer: Transfer) -> None:
        """Give back what a failed transfer holds of the library's."""

    def _sleep(self, timeout_s: float) -> None:
        raise NotImplementedError


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
            return False  # a source has not connected yet
        return True

    def _sleep(self, timeout_s: float) -> None:
        self._inbox.wait(self._queue[0].step, self._queue[0].sources, timeout_s)
