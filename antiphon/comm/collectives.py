"""Collectives that gradients pass, in start and wait, counted by a ledger; long because all have one pattern.

    pending = start(AllToAll(group, "dispatch", send, receive), x_TH)
    ...                       # work that does not need the result
    rows_RH = pending.wait()

The backward of `wait` starts the reverse collective and the backward of the start waits for it. So whatever ran between
start and wait in forward runs between them in backward too. All sizes may differ between ranks.

A collective of rows can be cut into parts, so that work on the first can begin while the others travel (Lina, section
4.2). The rows that go to a rank are a run; part i has the i-th of `count` even slices of every run. Both ends know the
runs, so they cut alike without a message, whatever the router did:

    sent     runs in order, each whole  ->  `taken`: the rows of one part, runs in order
    there    `part_of` the collective moves them, and later `part_of` the one back moves their results
    back     `joined`: rows of all parts, runs whole again

An all-to-all over gloo is made of sends and receives, with all receives posted before the sends. Gloo announces a
receive on the connection that carries the data of the other direction. Its own all-to-all sends first, so the
announcement waits behind that data, and a slow link is used in one direction at a time.

Rejected: `torch.distributed.nn` and functional collectives, which wait at once in backward; parts with a number of rows
each, for which ranks would have to agree on how many parts the fullest of them needs.

Letters: T rows here, R rows received, H width (any shape of rows).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor

from antiphon.comm.mesh import Group
from antiphon.comm.micro_ops import BACKWARD
from antiphon.kernels.ops import differentiable

# PyTorch 2.13 has them under new names and warns of the old ones.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Runs = tuple[int, ...]


class Collective(Protocol):
    """One operation on the first dimension of a tensor."""

    @property
    def group(self) -> Group: ...

    @property
    def name(self) -> str:
        """Purpose and kind, as the ledger knows it."""

    def launch(self, x: Tensor) -> tuple[Tensor, Any]:
        """Begin it; the buffer that fills, and what to wait for. `x` is contiguous."""

    def finish(self, buffer: Tensor) -> Tensor:
        """The result, from the filled buffer."""

    def reverse(self) -> "Collective":
        """What gradients of the result pass to become gradients of the input."""


class MovesRows(Collective, Protocol):
    """A collective that brings rows to ranks, or back."""

    @property
    def sent(self) -> Runs:
        """How many rows it takes from this rank, run by run in order."""

    @property
    def received(self) -> Runs:
        """How many rows come to this rank, or are added there, by rank."""

    def with_sizes(self, sizes: Callable[[Runs], Runs]) -> Self:
        """The same for other numbers of rows."""


def moving(collective: Collective) -> MovesRows:
    """`collective`, which moves rows."""
    assert hasattr(collective, "with_sizes"), f"{collective.name} moves no rows"
    return cast(MovesRows, collective)


@dataclass(frozen=True)
class _Named:
    """What all kinds have; `purpose` is the first half of the name."""

    group: Group
    purpose: str
    kind: ClassVar[str]

    @property
    def name(self) -> str:
        return f"{self.purpose}.{self.kind}"


@dataclass(frozen=True)
class AllToAll(_Named):
    """`sent[i]` rows go to rank i, in order; `received[i]` come from it."""

    sent: Runs
    received: Runs
    kind = "all_to_all"

    def launch(self, x: Tensor) -> tuple[Tensor, Any]:
        assert x.shape[0] == sum(self.sent), f"{sum(self.sent)} rows are to be sent, {x.shape[0]} given"
        buffer = x.new_empty((sum(self.received), *x.shape[1:]))
        away = x.shape[0] - self.sent[self.group.index]
        self.group.ledger.sent(self.name, away * _row_bytes(x))
        return buffer, start_all_to_all(self.group, buffer, x, self.received, self.sent)

    def finish(self, buffer: Tensor) -> Tensor:
        return buffer

    def with_sizes(self, sizes: Callable[[Runs], Runs]) -> "AllToAll":
        return replace(self, sent=sizes(self.sent), received=sizes(self.received))

    def reverse(self) -> MovesRows:
        return AllToAll(self.group, self.purpose, self.received, self.sent)


@dataclass(frozen=True)
class AllGather(_Named):
    """Rows of all ranks, one after the other; `sizes[i]` of rank i. Unequal ones travel padded to the largest."""

    sizes: Runs
    kind = "all_gather"

    @property
    def sent(self) -> Runs:
        return (self.sizes[self.group.index],)

    @property
    def received(self) -> Runs:
        return self.sizes

    def launch(self, x: Tensor) -> tuple[Tensor, Any]:
        group, largest = self.group, max(self.sizes)
        x = _padded(x, largest)
        buffer = x.new_empty((largest * group.size, *x.shape[1:]))
        group.ledger.sent(self.name, (group.size - 1) * x.shape[0] * _row_bytes(x))
        return buffer, start_all_gather(group, buffer, x)

    def finish(self, buffer: Tensor) -> Tensor:
        largest = max(self.sizes)
        if min(self.sizes) == largest:
            return buffer
        return torch.cat([buffer[i * largest : i * largest + size] for i, size in enumerate(self.sizes)])

    def with_sizes(self, sizes: Callable[[Runs], Runs]) -> "AllGather":
        return replace(self, sizes=sizes(self.sizes))

    def reverse(self) -> MovesRows:
        return ReduceScatter(self.group, self.purpose, self.sizes)


@dataclass(frozen=True)
class ReduceScatter(_Named):
    """Sums over all ranks, in order of rank; rank i gets the `sizes[i]` rows of its turn.

    Over gloo an all-to-all brings every rank's rows, and they are added here: gloo's own is an all-reduce that throws
    away all but a part, so it sends twice the bytes. On other back-ends unequal parts travel padded to the largest."""

    sizes: Runs
    kind = "reduce_scatter"

    @property
    def sent(self) -> Runs:
        return self.sizes

    @property
    def received(self) -> Runs:
        return (self._own,) * self.group.size

    @property
    def _own(self) -> int:
        return self.sizes[self.group.index]

    def launch(self, x: Tensor) -> tuple[Tensor, Any]:
        group, largest = self.group, max(self.sizes)
        if is_gloo(group):
            buffer = x.new_empty((group.size * self._own, *x.shape[1:]))
            group.ledger.sent(self.name, (x.shape[0] - self._own) * _row_bytes(x))
            return buffer, start_all_to_all(group, buffer, x, self.received, self.sent)
        if min(self.sizes) != largest:
            x = torch.cat([_padded(part, largest) for part in torch.split(x, list(self.sizes))])
        buffer = x.new_empty((largest, *x.shape[1:]))
        group.ledger.sent(self.name, (group.size - 1) * largest * _row_bytes(x))
        return buffer, reduce_scatter_single(buffer, x, group=group.process_group, async_op=True)

    def finish(self, buffer: Tensor) -> Tensor:
        if not is_gloo(self.group):
            return buffer[: self._own]
        return sum_in_order(buffer.view(self.group.size, self._own, *buffer.shape[1:]))

    def with_sizes(self, sizes: Callable[[Runs], Runs]) -> "ReduceScatter":
        return replace(self, sizes=sizes(self.sizes))

    def reverse(self) -> MovesRows:
        return AllGather(self.group, self.purpose, self.sizes)


@dataclass(frozen=True)
class AllReduce(_Named):
    """The sum over all ranks, on each of them; `in_place`: where the input was."""

    in_place: bool = False
    kind = "all_reduce"

    def launch(self, x: Tensor) -> tuple[Tensor, Any]:
        buffer = x if self.in_place else x.clone()
        self.group.ledger.sent(self.name, 2 * (self.group.size - 1) * x.numel() * x.element_size() // self.group.size)
        return buffer, dist.all_reduce(buffer, group=self.group.process_group, async_op=True)

    def finish(self, buffer: Tensor) -> Tensor:
        return buffer

    def reverse(self) -> Collective:
        return self


class Pending:
    """A collective under way; or, `flight` None, a `token` that is the result already and did not have to travel."""

    def __init__(self, token: Tensor, flight: "Flight | None" = None) -> None:
        self._token = token
        self._flight = flight

    def wait(self) -> Tensor:
        """Its result. Blocks until it is there; errors of the process group (a peer's death, a timeout) are raised."""
        if self._flight is None:
            return self._token
        result: Tensor = _wait(self._token, self._flight)
        return result


def start(collective: Collective, x: Tensor) -> Pending:
    """Begin `collective` on `x`; a group of one has nothing to do. All ranks of a group start the same in order."""
    if collective.group.size == 1:
        return Pending(x)
    flight = Flight(collective)
    return Pending(_start(x, flight), flight)


def run(collective: Collective, x: Tensor) -> Tensor:
    """Start and wait."""
    return start(collective, x).wait()


def gather_sizes(group: Group, rows: int, device: torch.device) -> tuple[int, ...]:
    """How many rows each rank has. Waits for the others."""
    own = torch.tensor([rows], dtype=torch.int64, device=device)
    return tuple(run(AllGather(group, "counts", (1,) * group.size), own).tolist())


def gather_bytes(group: Group, purpose: str, own: bytes) -> list[bytes]:
    """The bytes of each rank, one at least. Waits for the others."""
    sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    sizes = gather_sizes(group, len(own), sent.device)
    return [bytes(each.tolist()) for each in torch.split(run(AllGather(group, purpose, sizes), sent), list(sizes))]


def barrier(group: Group) -> None:
    """Wait until all ranks of `group` are here."""
    run(AllReduce(group, "barrier"), torch.zeros(1))


class Flight:
    """A collective under way: forward first, later backward. No gradient passes it by itself."""

    def __init__(self, collective: Collective) -> None:
        self._forward = collective
        self._current = collective
        self._buffer: Tensor | None = None
        self._work: Any = None

    def launch(self, x: Tensor, *, backward: bool, part: tuple[int, int] = (0, 1)) -> None:
        """`part`: its number among how many that are launched one after the other."""
        current = self._current = self._forward.reverse() if backward else self._forward
        x, launcher = x.detach().contiguous(), current.group.launcher
        with current.group.waiting(current.name):  # it fails here where a peer has ended before
            if launcher is None:
                self._buffer, self._work = current.launch(x)
                return
            name = f"{current.name}{BACKWARD}" if backward else current.name
            size_bytes, (number, count) = x.numel() * x.element_size(), part
            self._work = launcher.all_to_all(
                name, size_bytes, lambda: current.launch(x), number=number, num_pieces=count
            )

    def land(self) -> Tensor:
        assert self._work is not None, "this collective was waited for before"
        begin, group = time.perf_counter(), self._current.group
        with group.waiting(self._current.name):
            self._work.wait()
        group.ledger.waited(self._current.name, time.perf_counter() - begin)
        buffer = self._work.result if self._buffer is None else self._buffer
        assert buffer is not None, "what the launcher waited for has filled a buffer"
        result = self._current.finish(buffer)
        self._buffer = self._work = None
        return result


def _start_forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
    """Gives a view of the input as the token that `_wait` takes: its gradient has the input's shape."""
    ctx.flight = flight
    flight.launch(x, backward=False)
    return x.view_as(x)


def _start_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return ctx.flight.land(), None


_start = differentiable(_start_forward, _start_backward)


def _wait_forward(ctx: Any, token: Tensor, flight: Flight) -> Tensor:
    ctx.flight = flight
    ctx.shape = token.shape
    return flight.land()


def _wait_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    ctx.flight.launch(grad, backward=True)
    return grad.new_zeros(()).expand(ctx.shape), None  # what the token's gradient must look like; it is never read


_wait = differentiable(_wait_forward, _wait_backward)


def sum_in_order(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """The sum of the parts, added in their order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _padded(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:
        return x
    return torch.cat((x, x.new_zeros((rows - x.shape[0], *x.shape[1:]))))


def _row_bytes(x: Tensor) -> int:
    return x[0].numel() * x.element_size() if x.shape[0] else 0


def part_of(collective: Collective, number: int, count: int) -> Collective:
    """Part `number` of `count` of a collective that moves rows."""
    return moving(collective).with_sizes(lambda rows: part_sizes(rows, number, count))


def taken(x: Tensor, runs: Runs, number: int, count: int) -> Tensor:
    """The rows of part `number` of `count`, of `x` whose rows are these runs."""
    parts = [run[slice(*part_bounds(run.shape[0], number, count))] for run in torch.split(x, list(runs))]
    return torch.cat(parts)


def joined(parts: Sequence[Tensor], runs: Runs) -> Tensor:
    """The rows of all parts as these runs."""
    split = [torch.split(part, list(part_sizes(runs, number, len(parts)))) for number, part in enumerate(parts)]
    return torch.cat([piece for of_run in zip(*split, strict=True) for piece in of_run])


def part_sizes(runs: Sequence[int], number: int, count: int) -> Runs:
    """How many rows of each run are in part `number` of `count`."""
    return tuple(stop - start for start, stop in (part_bounds(run, number, count) for run in runs))


def part_bounds(size: int, number: int, count: int) -> tuple[int, int]:
    """Range `number` of `count` even ones, as `micro_ops.partition` cuts them."""
    return size * number // count, size * (number + 1) // count


def start_all_to_all(group: Group, buffer: Tensor, x: Tensor, receive: Sequence[int], send: Sequence[int]) -> Any:
    """Begin to fill `buffer` with `receive[i]` rows from the rank at place i, in order, and to send it `send[i]` of
    `x`; both are contiguous. Ranks start the collectives of a group in one order. The `wait` of the result blocks until
    all have arrived and `x` may be written to; `RuntimeError` if a peer is gone or the group's timeout is over."""
    if is_gloo(group):
        return _Exchange.start(group, torch.split(buffer, list(receive)), torch.split(x, list(send)))
    sizes = list(receive), list(send)
    return dist.all_to_all_single(buffer, x, *sizes, group=group.process_group, async_op=True)


def start_all_gather(group: Group, buffer: Tensor, x: Tensor) -> Any:
    """As `start_all_to_all`; `buffer` gets the equally many rows `x` of all ranks. Over gloo and between more than two
    it is a ring, in which no connection carries data in both directions."""
    if is_gloo(group) and group.size == 2:
        return _Exchange.start(group, buffer.chunk(2), (x, x))
    return all_gather_single(buffer, x, group=group.process_group, async_op=True)


def is_gloo(group: Group) -> bool:
    """Whether the group's collectives are those of gloo."""
    return dist.get_backend(group.process_group) == "gloo"


@dataclass(frozen=True)
class _Exchange:
    """Under way between all ranks of a group. `sent` stays as it is, and alive, until the wait."""

    sent: Sequence[Tensor]
    works: Sequence[Any]

    @staticmethod
    def start(group: Group, received: Sequence[Tensor], sent: Sequence[Tensor]) -> "_Exchange":
        """`received[i]` comes from the rank at place i, `sent[i]` goes there."""
        received[group.index].copy_(sent[group.index])
        peers, own = [place for place in range(group.size) if place != group.index], group.process_group
        works = [dist.irecv(received[each], group=own, group_src=each) for each in peers if received[each].numel()]
        works += [dist.isend(sent[each], group=own, group_dst=each) for each in peers if sent[each].numel()]
        return _Exchange(sent, works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
