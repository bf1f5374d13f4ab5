"""All ends of an exchange in one process, each in its own thread, and a dense computation to compare with."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from antiphon.base.errors import PeerLost
from antiphon.comm.m2n.api import ExchangeShape, ExpertBatch, StepAborted
from antiphon.comm.m2n.native import NativeAttentionExchange, NativeExpertExchange
from antiphon.comm.m2n.streams import StreamAttentionExchange, StreamExpertExchange
from antiphon.specs.placement import ExpertPlacement
from tests.comm.m2n.backends import BACKENDS, Backend

TIMEOUT_S = 30.0
LAYERS = range(5)
KINDS = ("cpu", "cuda")


@dataclass
class Traffic:
    """Rows of one (layer, micro-batch) of one attention worker."""

    rows_TH: Tensor
    ids_TK: Tensor
    weights_TK: Tensor


def random_traffic(num_rows: int, hidden_size: int, num_experts: int, top_k: int, seed: int) -> Traffic:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_rows, num_experts, generator=generator).argsort(dim=1)[:, :top_k].to(torch.int32)
    rows = torch.randn(num_rows, hidden_size, generator=generator)
    return Traffic(rows, ids, torch.rand(num_rows, top_k, generator=generator))


def expert_output(expert: int, layer: int, rows_RH: Tensor) -> Tensor:
    """What expert `expert` makes of a row: different for every expert and layer, and not linear."""
    return torch.tanh(rows_RH * (1.0 + expert)) + 0.1 * layer + expert


def dense(traffic: Traffic, layer: int) -> Tensor:
    """The whole mixture in one process, expert by expert."""
    total = torch.zeros_like(traffic.rows_TH)
    for position in range(traffic.ids_TK.shape[1]):
        for row in range(total.shape[0]):
            expert = int(traffic.ids_TK[row, position])
            weighted = traffic.weights_TK[row, position] * expert_output(expert, layer, traffic.rows_TH[row])
            total[row] += weighted
    return total


@dataclass
class Served:
    """What expert workers saw: batches in their order."""

    batches: dict[int, list[ExpertBatch]] = field(default_factory=dict)

    def add(self, worker: int, batch: ExpertBatch) -> None:
        copy = msgspec.structs.replace(batch, ids_RK=batch.ids_RK.clone(), rows_RH=batch.rows_RH.clone())
        self.batches.setdefault(worker, []).append(copy)


class Control:
    """The engine's hand on the exchange, as `antiphon.serve.group` is in a server."""

    def __init__(self, made: "Exchange") -> None:
        self._made = made
        self._epoch = 0

    def abort_step(self) -> int:
        """Begin a new epoch and call all ends out of the running step. Returns the epoch to `reset` to."""
        self._epoch += 1
        for end in [*self._made.attention, *self._made.experts]:
            end.abort(self._epoch)
        return self._epoch

    def reset(self, epoch: int) -> None:
        """All ends begin `epoch`. An attention worker's reset waits for expert workers that are in `receive`."""
        made = self._made
        tickets = [end.ticket for end in made.experts]
        resetting = len(made.attention)
        lock = threading.Lock()

        def reset_attention(end: NativeAttentionExchange) -> None:
            nonlocal resetting
            try:
                end.reset(epoch, tickets)
            finally:
                with lock:
                    resetting -= 1

        def reset_experts(end: NativeExpertExchange) -> None:
            end.reset(epoch, tickets)
            while resetting > 0:
                with suppress(PeerLost):  # of somebody who has just been replaced; a server's engine resets again
                    assert end.receive(0.005, TIMEOUT_S) is None, "nobody has sent anything in this epoch"

        for experts in made.experts:
            made.start(partial(reset_experts, experts))
        for attention in made.attention:
            made.start(partial(reset_attention, attention))
        made.wait_for_threads()


class Exchange:
    """All ends of an exchange. `serve` starts threads that answer as `expert_output` says."""

    def __init__(self, shape: ExchangeShape, placement: ExpertPlacement, backend: Backend, *, merges: bool) -> None:
        self.shape = shape
        self.merges = merges
        self.placement = placement
        self.backend = backend
        self.row_bytes = shape.hidden_size * shape.dtype.itemsize
        self.served = Served()
        self.failures: list[BaseException] = []
        self.threads: list[threading.Thread] = []
        self.attention: list[NativeAttentionExchange] = []
        self.experts: list[NativeExpertExchange] = []
        self.retired: list[NativeAttentionExchange | NativeExpertExchange] = []
        self._stop = threading.Event()
        self.control = Control(self)

    def connect(self) -> None:
        """Make the ends and begin the first epoch."""
        self.attention += [self.new_attention(index) for index in range(self.shape.num_attention)]
        self.experts += [self.new_experts(index) for index in range(self.shape.num_experts)]
        self.control.reset(0)

    def new_attention(self, index: int) -> NativeAttentionExchange:
        endpoint = self.backend.endpoint(f"attention[{index}]")
        if driver := self.backend.streams:
            device, driver = torch.device("cuda" if driver == "cuda" else "cpu"), "" if driver in KINDS else driver
            return StreamAttentionExchange(endpoint, self.shape, index, self.placement, TIMEOUT_S, device, driver)
        return NativeAttentionExchange(endpoint, self.shape, index, self.placement, TIMEOUT_S)

    def new_experts(self, index: int) -> NativeExpertExchange:
        endpoint = self.backend.endpoint(f"experts[{index}]")
        if driver := self.backend.streams:
            device, driver = torch.device("cuda" if driver == "cuda" else "cpu"), "" if driver in KINDS else driver
            return StreamExpertExchange(
                endpoint, self.shape, index, TIMEOUT_S, device, merges=self.merges, driver=driver
            )
        return NativeExpertExchange(endpoint, self.shape, index, merges=self.merges)

    def replace_attention(self, index: int, *, farewell: bool) -> None:
        """A new worker in place of this one, which says goodbye or lives on, cut off."""
        self._retire(self.attention[index], farewell)
        self.attention[index] = self.new_attention(index)

    def replace_experts(self, index: int, *, farewell: bool) -> None:
        self._retire(self.experts[index], farewell)
        self.experts[index] = self.new_experts(index)

    def _retire(self, end: NativeAttentionExchange | NativeExpertExchange, farewell: bool) -> None:
        if farewell:
            end.close()
        self.retired.append(end)

    def serve(self) -> None:
        self._stop.clear()
        for index in range(self.shape.num_experts):
            self.start(partial(self._serve, index))

    def _serve(self, index: int) -> None:
        while not self._stop.is_set():
            batch = self.experts[index].receive(0.02, TIMEOUT_S)
            if batch is not None:
                self.served.add(index, batch)
                start_ns = time.monotonic_ns()
                sums = self.partial_sums(batch)
                self.experts[index].reply(batch, sums, (start_ns, time.monotonic_ns()))

    def partial_sums(self, batch: ExpertBatch) -> Tensor:
        total = torch.zeros(batch.rows_RH.shape)
        for position in range(self.shape.top_k):
            for row in range(total.shape[0]):
                if (expert := int(batch.ids_RK[row, position])) >= 0:
                    output = expert_output(expert, batch.layer, batch.rows_RH[row].cpu().float())
                    total[row] += batch.weights_RK[row, position] * output
        return total.to(self.shape.dtype)

    def start(self, work: Callable[[], Any]) -> threading.Thread:
        """Run `work` in a thread; what it raises is kept in `failures`."""

        def guarded() -> None:
            try:
                work()
            except StepAborted:
                pass
            except BaseException as error:
                self.failures.append(error)

        self.threads.append(threading.Thread(target=guarded, daemon=True))
        self.threads[-1].start()
        return self.threads[-1]

    def join(self) -> None:
        """End the serving threads, wait for all and raise what they raised."""
        self._stop.set()
        self.wait_for_threads()

    def wait_for_threads(self) -> None:
        for thread in self.threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a thread of the exchange hangs"
        self.threads.clear()
        if self.failures:
            raise self.failures[0]

    def close(self) -> None:
        """Whatever happened: end the threads, then all ends."""
        self._stop.set()
        self.control.abort_step()
        with suppress(BaseException):  # the test has raised what matters
            self.wait_for_threads()
        for end in [*self.attention, *self.experts, *self.retired]:
            end.close()


@contextmanager
def exchange(
    placement: ExpertPlacement,
    *,
    backend: Backend = BACKENDS[0],
    num_attention: int = 1,
    num_micro_batches: int = 1,
    max_rows: int = 8,
    hidden_size: int = 6,
    top_k: int = 2,
    dtype: torch.dtype = torch.float32,
    merges: bool = False,
) -> Iterator[Exchange]:
    """Ends that are connected."""
    shape = ExchangeShape(
        num_attention=num_attention,
        num_experts=placement.num_workers,
        num_micro_batches=num_micro_batches,
        max_rows=max_rows,
        hidden_size=hidden_size,
        top_k=top_k,
        dtype=dtype,
    )
    made = Exchange(shape, placement, backend, merges=merges)
    try:
        made.connect()
        yield made
        made.join()
    finally:
        made.close()
