"""`RankGroup` whose collectives take tensors of GPUs too: bytes move by NCCL, sums are made as in host memory.

Every rank gets one share of all ranks' parts (all-to-all), adds them in float32 in the order of ranks and rounds once;
then all get all shares (all-gather). As many bytes travel as in a ring, and the bits are those of `NativeRankGroup`.
Calls return once they are in the order of the device's stream; the host does not wait.

Tickets, epochs, messages and whatever lies in host memory stay with the native library, which also brings the ranks to
NCCL's store. An epoch has a process group of its own. `abort` ends what hangs on the device; where an engine is not
there to call it, NCCL's watchdog ends the process after the group's timeout.

Ranks need a GPU each: NCCL refuses two on one. They tell each other which they have; unless all differ, tensors go by
host memory as without NCCL, and the log says so.

Rejected: NCCL's own sums. Their order depends on the size, the number of ranks and NCCL's choice of an algorithm, so a
row's bits would depend on its neighbours. One process group for the process: a rank has a group on each level.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from antiphon import _m2n
from antiphon.base.logging import get_logger
from antiphon.comm.rank_group import NativeRankGroup, row_elements

_log = get_logger("ranks")
_c10d: Any = dist  # not all of it has types
_IDENTITY_BYTES = 64
MakeProcessGroup = Callable[[Any, int, int, torch.device, timedelta], Any]  # store, rank, size


def why_no_device_sums(device: torch.device) -> str:
    """Why ranks on such devices add in host memory; empty: they may add on their devices."""
    if device.type == "cpu":
        return "their tensors are there"
    if device.type != "cuda" or not _c10d.is_nccl_available():
        return f"this PyTorch ({torch.__version__}) has no NCCL for {device.type}"
    return ""


def nccl_group(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    """A process group over NCCL."""
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    made = _c10d.ProcessGroupNCCL(store, rank, size, options)
    made.eager_connect_single_device(device)
    return made


def identity_of(device: torch.device) -> str:
    """What tells a GPU from all others of all machines."""
    return str(torch.cuda.get_device_properties(device).uuid)


class DeviceRankGroup(NativeRankGroup):
    """The group of a rank that computes on `device`. `host`: where the others reach rank 0's store. `make`, `identity`:
    see `nccl_group`, `identity_of`."""

    def __init__(
        self,
        endpoint: _m2n.Endpoint,
        rank: int,
        size: int,
        *,
        device: torch.device,
        host: str,
        make: MakeProcessGroup = nccl_group,
        identity: Callable[[torch.device], str] = identity_of,
        **options: Any,
    ) -> None:
        super().__init__(endpoint, rank, size, **options)
        self._device, self._host, self._make, self._identity = device, host, make, identity
        self._store: Any = None
        self._group: Any = None
        self._opened: tuple[int, list[bytes]] | None = None  # as `_begun`, once it was decided how tensors travel

    def takes(self, device: torch.device) -> bool:
        return device.type == "cpu" or (self._group is not None and device == self._device)

    # --- epochs

    def reset(self, epoch: int, tickets: Sequence[bytes]) -> None:
        super().reset(epoch, tickets)
        if self._opened == self._begun:
            return  # asked again, because another group of this process could not begin
        self._leave()
        identities = self._identities()
        if len(set(identities)) < self.size:
            names = ", ".join(identities)
            _log.warning("%s: sums are made in host memory: ranks share a GPU (%s)", self._endpoint.name, names)
        else:
            timeout = timedelta(seconds=self._timeout_s)
            self._group = self._make(self._meet(), self.rank, self.size, self._device, timeout)
        self._opened = self._begun

    def abort(self, epoch: int) -> None:
        super().abort(epoch)
        if (group := self._group) is not None:
            with suppress(RuntimeError):  # what cannot be aborted, as gloo, ends at its timeout
                group.abort()

    def close(self) -> None:
        self._leave()
        super().close()

    def _leave(self) -> None:
        self._group, self._store, self._opened = None, None, None

    def _identities(self) -> list[str]:
        own = self._identity(self._device).encode()[:_IDENTITY_BYTES].ljust(_IDENTITY_BYTES)
        rows = super().all_gather(torch.frombuffer(bytearray(own), dtype=torch.uint8)[None], [1] * self.size)
        return [bytes(row.tolist()).decode().strip() for row in rows]

    def _meet(self) -> Any:
        """The store of this epoch, at rank 0."""
        timeout = timedelta(seconds=self._timeout_s)
        if self.rank == 0:
            self._store = _c10d.TCPStore(
                self._host, 0, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=False
            )
            self.broadcast_bytes(msgspec.msgpack.encode((self._host, self._store.port)))
        else:
            host, port = msgspec.msgpack.decode(self.broadcast_bytes(None), type=tuple[str, int])
            self._store = _c10d.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        return self._store

    # --- collectives

    def all_reduce(self, tensor: Tensor) -> None:
        if not self._moves(tensor):
            super().all_reduce(tensor)
            return
        assert tensor.is_contiguous(), "it is summed in place"
        if not tensor.numel():
            return
        flat, share = tensor.view(-1), -(-tensor.numel() // self.size)
        room = flat.new_zeros(self.size * share)
        room[: len(flat)] = flat
        total = self._summed(self._exchanged(room, [share] * self.size, [share] * self.size), share)
        self._gather_even(room, total)
        flat.copy_(room[: len(flat)])

    def all_gather(self, tensor: Tensor, rows_by_rank: Sequence[int]) -> Tensor:
        if not self._moves(tensor):
            return super().all_gather(tensor, rows_by_rank)
        assert tensor.shape[0] == rows_by_rank[self.rank], f"{rows_by_rank[self.rank]} rows announced"
        if (most := max(rows_by_rank)) == 0 or not row_elements(tensor):
            return tensor.new_empty(sum(rows_by_rank), *tensor.shape[1:])
        padded = tensor.new_zeros(most, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        room = tensor.new_empty(self.size, most, *tensor.shape[1:])
        self._gather_even(room, padded)
        return torch.cat([room[rank, :count] for rank, count in enumerate(rows_by_rank)])

    def reduce_scatter(self, tensor: Tensor, rows_by_rank: Sequence[int]) -> Tensor:
        if not self._moves(tensor):
            return super().reduce_scatter(tensor, rows_by_rank)
        assert tensor.shape[0] == sum(rows_by_rank), f"{sum(rows_by_rank)} rows announced"
        own = rows_by_rank[self.rank]
        if not tensor.numel():
            return tensor.new_empty(own, *tensor.shape[1:])
        came = self._exchanged(tensor.contiguous(), rows_by_rank, [own] * self.size)
        return self._summed(came, own)

    def all_to_all(self, tensor: Tensor, rows_to: Sequence[int], rows_from: Sequence[int]) -> Tensor:
        if not self._moves(tensor):
            return super().all_to_all(tensor, rows_to, rows_from)
        return self._exchanged(tensor.contiguous(), rows_to, rows_from)

    def _moves(self, tensor: Tensor) -> bool:
        """Whether the process group moves it; else it is in host memory."""
        assert self.takes(tensor.device), f"{tensor.device} is not this rank's, {self._device}"
        return self._group is not None and tensor.device == self._device

    def _exchanged(self, rows: Tensor, rows_to: Sequence[int], rows_from: Sequence[int]) -> Tensor:
        """An all-to-all of rows, as bytes: every type travels."""
        row_bytes = row_elements(rows) * rows.itemsize
        room = rows.new_empty(sum(rows_from), *rows.shape[1:])
        to, source = ([count * row_bytes for count in counts] for counts in (rows_to, rows_from))
        self._group.alltoall_base(_bytes_of(room), _bytes_of(rows), source, to).wait()
        return room

    def _summed(self, rows: Tensor, count: int) -> Tensor:
        """The sum over ranks of `count` rows of each, in float32 and in their order."""
        parts = rows.view(self.size, count, *rows.shape[1:])
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(rows.dtype)

    def _gather_even(self, room: Tensor, part: Tensor) -> None:
        self._group._allgather_base(_bytes_of(room), _bytes_of(part)).wait()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
