"""Sends and receives in stream order: what the caller puts on the stream, and what the core's thread then does.

A lane joins one stream with one outbox (`sender.py`) or one inbox (`receiver.py`). Its transfers are
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

Rejected: copying to the device on a stream of the core's own before raising the flag. The copy could end up in the
same hardware queue behind the stream that waits for it. So nothing that raises a flag depends on the device.
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

from antiphon.base.errors import Interrupted, PeerTimeout, UserError
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
