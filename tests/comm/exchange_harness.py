"""Both ends of an exchange in one process, each in its own thread, and a dense computation to compare with."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from antiphon.comm.m2n.api import ExchangeShape, ExpertBatch, StepAborted
from antiphon.comm.m2n.layout import RegionLayout
from antiphon.comm.m2n.shared_memory import create_region
from antiphon.comm.m2n.shm import ControlPage, SharedMemoryAttentionExchange, SharedMemoryExpertExchange
from antiphon.specs.placement import ExpertPlacement

TIMEOUT_S = 30.0


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
    """What expert workers saw: batches in their order, and how often each (worker, layer, micro-batch) came."""

    batches: dict[int, list[ExpertBatch]] = field(default_factory=dict)

    def add(self, worker: int, batch: ExpertBatch) -> None:
        copy = ExpertBatch(**{**batch.__dict__, "ids_RK": batch.ids_RK.clone(), "rows_RH": batch.rows_RH.clone()})
        self.batches.setdefault(worker, []).append(copy)


class Exchange:
    """One region with all its ends. `serve` starts threads that answer as `expert_output` says."""

    def __init__(self, shape: ExchangeShape, placement: ExpertPlacement, start_word: int = 0) -> None:
        self.shape = shape
        self.placement = placement
        self.layout = RegionLayout(shape)
        self.descriptor = create_region(self.layout.total_bytes)
        self.control = ControlPage(self.descriptor, shape)
        if start_word:
            self.set_sequences(start_word)
        self.attention = [self.new_attention(index) for index in range(shape.num_attention)]
        self.experts = [self.new_experts(index) for index in range(shape.num_experts)]
        self.served = Served()
        self.failures: list[BaseException] = []
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def set_sequences(self, word: int) -> None:
        """Pretend that the exchange has been running for long."""
        for attention in range(self.shape.num_attention):
            for expert in range(self.shape.num_experts):
                for micro_batch in range(self.shape.num_micro_batches):
                    for slot in (self.layout.dispatch_slot, self.layout.combine_slot):
                        self.control._region.publish(slot(attention, expert, micro_batch), word)

    def new_attention(self, index: int) -> SharedMemoryAttentionExchange:
        return SharedMemoryAttentionExchange(self.descriptor, self.shape, index, self.placement, spin_s=0.0)

    def new_experts(self, index: int) -> SharedMemoryExpertExchange:
        return SharedMemoryExpertExchange(self.descriptor, self.shape, index, spin_s=0.0)

    def serve(self) -> None:
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
                    output = expert_output(expert, batch.layer, batch.rows_RH[row].float())
                    total[row] += batch.weights_RK[row, position] * output
        return total.to(self.shape.dtype)

    def start(self, work: Callable[[], Any]) -> None:
        """Run `work` in a thread; what it raises is kept in `failures`."""

        def guarded() -> None:
            try:
                work()
            except StepAborted:
                pass
            except BaseException as error:
                self.failures.append(error)

        self._threads.append(threading.Thread(target=guarded))
        self._threads[-1].start()

    def join(self) -> None:
        """Wait for all threads and raise what they raised."""
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a thread of the exchange hangs"
        self._threads.clear()
        if self.failures:
            raise self.failures[0]


@contextmanager
def exchange(
    placement: ExpertPlacement,
    *,
    num_attention: int = 1,
    num_micro_batches: int = 1,
    max_rows: int = 8,
    hidden_size: int = 6,
    top_k: int = 2,
    dtype: torch.dtype = torch.float32,
    start_word: int = 0,
) -> Iterator[Exchange]:
    shape = ExchangeShape(
        num_attention=num_attention,
        num_experts=placement.num_workers,
        num_micro_batches=num_micro_batches,
        max_rows=max_rows,
        hidden_size=hidden_size,
        top_k=top_k,
        dtype=dtype,
    )
    made = Exchange(shape, placement, start_word)
    try:
        yield made
        made.join()
    finally:
        made._stop.set()
        made.control.abort_step()
        made.control.close()
