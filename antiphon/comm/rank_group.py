"""Ranks that work on one thing together, and the collectives between them, as a worker sees them.

All ranks of a group make the same calls in the same order with sizes that fit each other. A call returns when this
rank's part is done. It waits at most the group's timeout for any peer, and names whom it waited for: `PeerTimeout`,
`PeerLost` as soon as a peer is gone, `StepAborted` once `abort` was called. After any of them the group is of no use
until `reset`. One thread makes the calls; `abort` may come from any.

Sums are made in float32, in the order of ranks, and rounded once. So every rank gets the same bits, at every size, over
every transport. Blocks of rows may be summed one after the other beside other work (`begin_sum`), with the same bits.

A group of several is over the native M2N library (`csrc/m2n/rank_group.h`): any of its transports, one machine or many.
Every rank is a server and a client: it has an inbox with a source for each rank, whose ticket the others get from the
process that starts the group, and an outbox to each of them.

Rejected: `torch.distributed` alone (`device_group` moves bytes of GPUs by it). Its groups cannot lose a member and go
on; its order of sums depends on size and on the number of ranks; a rank that dies is named after its timeout.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from typing import TypeVar

import torch
from torch import Tensor

from antiphon import _m2n
from antiphon.base.errors import UserError
from antiphon.base.split_evenly import split_evenly
from antiphon.comm.ledger import Traffic, read_traffic
from antiphon.comm.m2n.native import aborting, dtype_name, view_of
from antiphon.kernels.api import address


class RankGroup:
    """One rank's end of a group. Tensors are in host memory or where `takes` says: bfloat16, float16 or float32 where
    they are summed, any type elsewhere. Messages of pairs are in host memory. Rows are entries of the first dimension;
    lists have one entry for each rank, zeros included.

    What calls do here is what they do in a group of one, where nothing travels. `NativeRankGroup`, of several, does all
    of them otherwise."""

    rank = 0
    size = 1

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that have left this rank for others."""
        return 0

    @property
    def ticket(self) -> bytes:
        """How the others reach this rank."""
        return b""

    def takes(self, device: torch.device) -> bool:
        """Whether collectives take tensors there."""
        return True

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace `tensor`, which is contiguous and of the same shape on all ranks, by the sum over all ranks."""

    def row_blocks(self, num_rows: int) -> list[tuple[int, int]]:
        """First and last row, exclusive, of the blocks in which `num_rows` rows should be summed, in order."""
        return [(0, num_rows)]

    def begin_sum(self, tensor: Tensor) -> None:
        """As `all_reduce`, but the sum is there after `finish_sums`. Sums begun are made in their order; until they are
        finished only others may begin."""
        self.all_reduce(tensor)

    def finish_sums(self) -> None:
        """Waits until all that began have ended; raises what the first that failed did."""

    def all_gather(self, tensor: Tensor, rows_by_rank: Sequence[int]) -> Tensor:
        """[sum of `rows_by_rank`, ...]: the rows of all ranks in order; `tensor` has this rank's."""
        return tensor

    def reduce_scatter(self, tensor: Tensor, rows_by_rank: Sequence[int]) -> Tensor:
        """[`rows_by_rank[rank]`, ...]: this rank's rows of the sum; `tensor` has all rows, in order of ranks."""
        return tensor

    def all_to_all(self, tensor: Tensor, rows_to: Sequence[int], rows_from: Sequence[int]) -> Tensor:
        """[sum of `rows_from`, ...]: what the others had for this rank, in order; `tensor` has `rows_to[i]` for i."""
        return tensor

    def open_exchange(self) -> int:
        """Begin an exchange of messages of one pair at a time; something else may be done in between. All ranks open
        the same ones in the same order, and in each a rank posts one message to every peer, of one slot at most, and
        takes and releases the peer's."""
        return 0

    def post(self, exchange: int, peer: int, pieces: Sequence[Tensor]) -> None:
        """Send a message, which is the bytes of `pieces` one after another. Waits only for a free slot."""
        raise AssertionError("there is no peer")

    def take(self, exchange: int, peer: int) -> Tensor:
        """The bytes of the peer's message where they were received, valid until `release`. May be called again."""
        raise AssertionError("there is no peer")

    def release(self, exchange: int, peer: int) -> None:
        """Give the message's slot back to the peer."""
        raise AssertionError("there is no peer")

    def broadcast_bytes(self, payload: bytes | None, *, root: int = 0, timeout_s: float | None = None) -> bytes:
        """`payload` of `root`, on every rank; the others give None. `timeout_s`: until something comes, the rest has
        the group's timeout. A rank whose wait ends with `PeerTimeout` before anything came may call again: so an idle
        follower listens."""
        assert payload is not None, "the only rank is the one that has it"
        return payload

    def barrier(self) -> None:
        """Until all ranks are here."""

    def abort(self, epoch: int) -> None:
        """Any thread: the running step is void, `epoch` is about to begin. Every wait ends with `StepAborted`."""

    def reset(self, epoch: int, tickets: Sequence[bytes]) -> None:
        """Begin `epoch`, which is larger than the last, with the ranks that `tickets` lead to, this one's included. For
        an epoch that has begun with these ranks nothing happens.

        Whatever was in flight is forgotten. Connects to those that are new or were lost, and returns when all have
        begun this epoch too. `PeerTimeout` or `PeerLost` names one that has not."""

    def traffic(self) -> Traffic:
        """What this rank has carried since its start."""
        return Traffic(pairs=[], waits=[], round_trips=[])

    def close(self) -> None:
        """Say goodbye to the others; nothing may follow."""


SLOT_BYTES = 256 * 1024  # a chunk: large enough that waking a peer costs less than copying, small enough for a cache
_NUM_BLOCKS, _BLOCK_ROWS = 4, 128  # at most as many blocks of rows, each of at least as many rows
_CONNECT_S = 10.0  # for peers that are known to be there
_Result = TypeVar("_Result")


class NativeRankGroup(RankGroup):
    """`RankGroup` of rank `rank` of `size`. `names`: of the ranks, for errors before they have connected; then an
    endpoint's own name counts. `in_blocks`: many rows are summed in blocks, beside what makes the next one; that takes
    a thread, and pays where links are slow.

    The endpoint is the group's own from now on. `timeout_s` bounds every wait for peers."""

    def __init__(
        self,
        endpoint: _m2n.Endpoint,
        rank: int,
        size: int,
        *,
        names: Sequence[str] | None = None,
        timeout_s: float = 30.0,
        num_slots: int = _m2n.RANK_GROUP_SLOTS,
        slot_bytes: int = SLOT_BYTES,
        in_blocks: bool = False,
    ) -> None:
        if not 0 <= rank < size:
            raise UserError(f"rank {rank} of {size}: ranks are 0 to {size - 1}")
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        names = [f"rank[{other}]" for other in range(size)] if names is None else names
        self._inbox = endpoint.inbox(size, num_slots, slot_bytes, list(names))
        self._native = _m2n.RankGroup(rank, self._inbox)
        self._outboxes: list[_m2n.Outbox | None] = [None] * size
        self._tickets: list[bytes] = [b""] * size
        self._begun: tuple[int, list[bytes]] | None = None
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="sums") if in_blocks else None
        self._sums: list[Future[None]] = []
        self.rank = rank
        self.size = size

    @property
    def bytes_sent(self) -> int:
        return self._native.bytes_sent

    @property
    def ticket(self) -> bytes:
        return self._endpoint.ticket(self._inbox)

    def takes(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def all_reduce(self, tensor: Tensor) -> None:
        if not tensor.is_contiguous():
            raise UserError(f"a tensor of strides {tensor.stride()} to be summed in place: give a contiguous one")
        self._run(self._native.all_reduce, address(tensor), tensor.numel(), dtype_name(tensor.dtype))

    def row_blocks(self, num_rows: int) -> list[tuple[int, int]]:
        num_blocks = 1 if self._beside is None else max(1, min(_NUM_BLOCKS, num_rows // _BLOCK_ROWS))
        return split_evenly(num_rows, num_blocks)

    def begin_sum(self, tensor: Tensor) -> None:
        if self._beside is None:
            raise UserError("this group sums one block at once: make it with in_blocks, or call all_reduce")
        self._sums.append(self._beside.submit(self.all_reduce, tensor))

    def finish_sums(self) -> None:
        sums, self._sums = self._sums, []
        wait_for_all(sums)  # each within the group's timeout
        for each in sums:
            each.result()

    def all_gather(self, tensor: Tensor, rows_by_rank: Sequence[int]) -> Tensor:
        tensor, rows_by_rank = tensor.contiguous(), self._counts(rows_by_rank)
        out = self._room(tensor, rows_by_rank, rows_by_rank[self.rank])
        num_bytes = _times(rows_by_rank, row_elements(tensor) * tensor.itemsize)
        self._run(self._native.all_gather, address(tensor), address(out), num_bytes)
        return out

    def reduce_scatter(self, tensor: Tensor, rows_by_rank: Sequence[int]) -> Tensor:
        tensor, rows_by_rank = tensor.contiguous(), self._counts(rows_by_rank)
        out = self._room(tensor, rows_by_rank[self.rank : self.rank + 1], sum(rows_by_rank))
        counts = _times(rows_by_rank, row_elements(tensor))
        self._run(self._native.reduce_scatter, address(tensor), address(out), counts, dtype_name(tensor.dtype))
        return out

    def all_to_all(self, tensor: Tensor, rows_to: Sequence[int], rows_from: Sequence[int]) -> Tensor:
        tensor, rows_to, rows_from = tensor.contiguous(), self._counts(rows_to), self._counts(rows_from)
        out = self._room(tensor, rows_from, sum(rows_to))
        row_bytes = row_elements(tensor) * tensor.itemsize
        bytes_to, bytes_from = _times(rows_to, row_bytes), _times(rows_from, row_bytes)
        self._run(self._native.all_to_all, address(tensor), address(out), bytes_to, bytes_from)
        return out

    def open_exchange(self) -> int:
        return self._native.open_exchange()

    def post(self, exchange: int, peer: int, pieces: Sequence[Tensor]) -> None:
        pieces = [piece.contiguous() for piece in pieces]
        self._run(self._native.post, exchange, peer, [(address(piece), piece.nbytes) for piece in pieces])

    def take(self, exchange: int, peer: int) -> Tensor:
        address, num_bytes = self._run(self._native.take, exchange, peer)
        return view_of(address, (num_bytes,), torch.uint8)

    def release(self, exchange: int, peer: int) -> None:
        self._native.release(exchange, peer)

    def broadcast_bytes(self, payload: bytes | None, *, root: int = 0, timeout_s: float | None = None) -> bytes:
        if (payload is not None) != (root == self.rank):
            given = "gives no payload" if payload is None else "gives a payload"
            raise UserError(f"rank {self.rank} of {self.size} {given}, root is {root}: the root gives it, others None")
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return aborting(self._native.broadcast, payload, root, timeout_s, self._timeout_s)

    def barrier(self) -> None:
        self._run(self._native.barrier)

    def abort(self, epoch: int) -> None:
        self._native.abort(epoch)
        self._endpoint.interrupt()

    def reset(self, epoch: int, tickets: Sequence[bytes]) -> None:
        if len(tickets) != self.size:
            raise UserError(f"{len(tickets)} tickets for a group of {self.size} ranks: give one for each, in order")
        tickets = list(tickets)
        if self._begun == (epoch, tickets) and not any(box is not None and box.lost for box in self._outboxes):
            return  # asked again, because another group of this process could not begin
        self._begun = None
        for peer, ticket in enumerate(tickets):
            outbox = self._outboxes[peer]
            if peer == self.rank or (outbox is not None and not outbox.lost and ticket == self._tickets[peer]):
                continue
            outbox = self._endpoint.connect(ticket, self.rank, _CONNECT_S)
            self._outboxes[peer], self._tickets[peer] = outbox, ticket
            self._native.set_peer(peer, outbox)
        self._run(self._native.begin, epoch)
        self._begun = epoch, tickets

    def traffic(self) -> Traffic:
        return read_traffic(self._inbox, (outbox for outbox in self._outboxes if outbox is not None))

    def close(self) -> None:
        if self._beside is not None:
            self._beside.shutdown()
        self._endpoint.close()

    def _counts(self, rows: Iterable[int]) -> list[int]:
        """The rows of each rank, as integers that do not overflow."""
        counts = [int(count) for count in rows]
        if len(counts) != self.size or min(counts) < 0:
            raise UserError(f"rows {counts} for a group of {self.size} ranks: give each rank's number, 0 or more")
        return counts

    def _room(self, tensor: Tensor, rows: Sequence[int], rows_given: int) -> Tensor:
        """Space for a result of this many rows; checks what goes in."""
        if tensor.dim() == 0 or tensor.shape[0] != rows_given:
            raise UserError(f"{rows_given} rows are announced, the tensor has the shape {tuple(tensor.shape)}")
        return tensor.new_empty((sum(rows), *tensor.shape[1:]))

    def _run(self, call: Callable[..., _Result], *arguments: object) -> _Result:
        return aborting(call, *arguments, self._timeout_s)


def row_elements(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:])


def _times(rows: Sequence[int], factor: int) -> list[int]:
    return [count * factor for count in rows]
