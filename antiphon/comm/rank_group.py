"""Ranks that work on one thing together, and the collectives between them, as a worker sees them.

All ranks of a group make the same calls in the same order with sizes that fit each other. A call returns when this
rank's part is done. It waits at most the group's timeout for any peer, and names whom it waited for: `PeerTimeout`,
`PeerLost` as soon as a peer is gone, `StepAborted` once `abort` was called. After any of them the group is of no use
until `reset`. One thread makes the calls; `abort` may come from any.

Sums are made in float32, in the order of ranks, and rounded once. So every rank gets the same bits, at every size, over
every transport. Blocks of rows may be summed one after the other beside other work (`begin_sum`), with the same bits.

Rejected: `torch.distributed` alone (`device_group` moves bytes of GPUs by it). Its groups cannot lose a member and go
on; its order of sums depends on size and on the number of ranks; a rank that dies is named after its timeout.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from antiphon.comm.ledger import Traffic


class RankGroup:
    """One rank's end of a group. Tensors are in host memory or where `takes` says: bfloat16, float16 or float32 where
    they are summed, any type elsewhere. Messages of pairs are in host memory. Rows are entries of the first dimension;
    lists have one entry for each rank, zeros included.

    What calls do here is what they do in a group of one, where nothing travels. A group of several
    (`m2n/rank_group`) does all of them otherwise."""

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


class Alone(RankGroup):
    """A group of one."""
