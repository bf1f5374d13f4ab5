"""Experts that are copied ahead of a layer, in the middle of a step (`--balance predict` and `paths`; Lina sections
5.2 and 6.2).

Phase one: with the rows of a layer an attention worker asks expert workers for copies that the next layer will want.
The next layer's router, applied to the input of this layer's experts, says how many rows each expert will get there;
or a profile of the paths that rows take through the layers does, which is what Lina reads.
Expert workers load while they compute; rows of the next layer wait for what has not arrived.

Phase two: when that layer's gate has spoken and its most popular experts are others, copies are chosen again. The
request goes with the rows themselves, which wait for it, so the copy must be worth its whole load. It goes with every
micro-batch of the layer: an expert worker may have all rows of the second one before those of the first.

In the hybrid layout an attention worker is a replica, and its ranks, which have the same rows, decide alike.

Each expert worker has room for one copy of each layer for each attention worker, which alone decides about it. It does
so once a step, with its first micro-batch: then none of its rows of the next layer are under way. So copies never
vanish under rows, and no agreement is waited for. The first layer with experts is never expected.

A load competes with batches, so a copy must pay. What its absence costs is added up over steps, fading; when the sum
reaches the cost of a load, it is loaded. The sum wasted before is then at most what the best choice in hindsight costs.
Rejected: to load whatever helps now. With even load the fullest worker is another one in every step.

Letters as in `antiphon.kernels.api`; W expert workers.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np
from torch import Tensor

from antiphon import _native
from antiphon.comm.m2n.api import CopyingExchange
from antiphon.models.expert_half import FREE, ExpertHalf, LoadExpert
from antiphon.placement.split import BoolArray, FloatArray, IntArray, Phases, Prefetch, needs_phase_two
from antiphon.serve.engine_api import PrefetchCounts
from antiphon.serve.worker.exchange import Choices, Forecast, StepExchange
from antiphon.serve.worker.messages import RunStep
from antiphon.serve.worker.spans import PREDICT
from antiphon.specs.placement import ExpertPlacement

_FADING = 1 / 128  # of what a missing copy has cost so far, by step


class Prefetcher:
    """An attention worker's part. `load_rows`: rows that an expert worker computes in the time of one load. `phases`:
    "first" never chooses again, "second" knows nothing ahead; both are for measurements."""

    def __init__(self, num_experts: int, exchange: CopyingExchange, load_rows: int, phases: Phases = "both") -> None:
        self._exchange = exchange
        self._phases = phases
        self._load_rows = load_rows
        self._num_experts = num_experts
        self._missed: dict[int, FloatArray] = {}  # by layer [E, W]: rows that a copy would have spared the fullest
        self._expected_E: IntArray | None = None  # rows of each expert of the next layer with experts
        self.counts = PrefetchCounts()
        self._first, self._parts = 0, 1.0  # of this step
        self._late: dict[int, dict[int, int]] = {}  # of this step, by layer and worker
        self._placement: ExpertPlacement | None = None
        self._present_W: BoolArray = np.ones(0, dtype=bool)  # of `_placement`

    def begin_step(self, num_rows: list[int]) -> None:
        """`num_rows`: of each micro-batch. What is chosen with the first one that has rows serves all of them."""
        self._first = next((index for index, rows in enumerate(num_rows) if rows), 0)
        self._parts = sum(num_rows) / max(1, num_rows[self._first])
        self._expected_E = None
        self._late.clear()

    def ask(self, layer: int, micro_batch: int, ids_TK: Tensor, make_forecast: Callable[[], Forecast | None]) -> None:
        """Rows of `layer` are about to be dispatched, to the experts `ids_TK`: ask for copies that this layer or the
        next one, of which the forecast is, needs."""
        if micro_batch == self._first:
            # no expert is divided that has less than twice the knee
            divides = len(ids_TK) >= 2 * self._exchange.placement.knee
            if self._phases != "first":
                self._correct(layer, ids_TK, divides)
            forecast = make_forecast() if self._phases != "second" and divides else None
            if forecast is not None:
                self._expect(forecast)
        elif copies := self._late.get(layer):
            self._exchange.prefetch(layer, copies)

    def _correct(self, layer: int, ids_TK: Tensor, divides: bool) -> None:
        """Phase two of `layer`; without a phase one always."""
        expected_E, self._expected_E = self._expected_E, None
        if expected_E is None and not (self._phases == "second" and divides):
            return
        counts_E = self._count(ids_TK)
        self.counts.num_forecasts += 1
        if expected_E is not None and not needs_phase_two(expected_E, counts_E, ids_TK.shape[1]):
            return
        self.counts.num_phase_two += 1
        copies = [each for each in self._choose(layer, counts_E) if each.gain * self._parts >= self._load_rows]
        self.counts.num_late += len(copies)
        self._late[layer] = self._ask(layer, copies)

    def _expect(self, forecast: Forecast) -> None:
        """Phase one."""
        layer = forecast.layer
        self._expected_E = counts_E = self._count(forecast.ids_TK, forecast.shares_TK)
        missed = self._missed.get(layer)
        if missed is None:
            shape = (self._num_experts, self._exchange.placement.num_workers)
            missed = self._missed[layer] = np.zeros(shape)
        missed *= 1 - _FADING
        copies = []
        for each in self._choose(layer, counts_E):
            missed[each.expert, each.worker] += each.gain * self._parts
            if missed[each.expert, each.worker] >= self._load_rows:
                missed[:, each.worker] = 0.0
                copies.append(each)
        self.counts.num_copies += len(copies)
        self._ask(layer, copies)

    def _count(self, ids_TK: Tensor, shares_TK: FloatArray | None = None) -> IntArray:
        """Rows of each expert [E]. With shares of choices, N_t K times those of Lina's eq. 1."""
        ids = ids_TK.cpu().numpy().ravel()
        if shares_TK is None:
            return np.bincount(ids, minlength=self._num_experts)
        sums = ids_TK.shape[1] * np.bincount(ids, weights=shares_TK.ravel(), minlength=self._num_experts)
        return np.rint(sums).astype(np.int64)

    def _choose(self, layer: int, counts_E: IntArray) -> list[Prefetch]:
        """A worker may take one that is there and whose copy of before is not divided now."""
        placement = self._exchange.placement
        open_W = self._present_workers(placement).copy()
        for worker, expert in self._exchange.prefetched(layer).items():
            open_W[worker] &= counts_E[expert] < 2 * placement.knee
        return self._exchange.wanted_copies(layer, counts_E, open_W)

    def _present_workers(self, placement: ExpertPlacement) -> BoolArray:
        """[W]: one that is gone holds nothing."""
        if placement is not self._placement:
            self._placement = placement
            self._present_W = np.zeros(placement.num_workers, dtype=bool)
            for of_layer in placement.owners.values():
                self._present_W[list(chain.from_iterable(of_layer))] = True
        return self._present_W

    def _ask(self, layer: int, copies: list[Prefetch]) -> dict[int, int]:
        wanted = {each.worker: each.expert for each in copies}
        if wanted:
            self._exchange.prefetch(layer, wanted)
        return wanted

    def take_counts(self) -> PrefetchCounts:
        """Then counting begins anew."""
        counts, self.counts = self.counts, PrefetchCounts()
        return counts


@dataclass(eq=False)
class PrefetchingExchange(StepExchange):
    """Steps in which expert workers are asked for copies ahead of a layer; `prefetcher` is of the same exchange."""

    prefetcher: Prefetcher = field(kw_only=True)

    def begin_step(self, step: RunStep) -> None:
        self.prefetcher.begin_step([sum(len(each.token_ids) for each in rows) for rows in step.micro_batches])
        super().begin_step(step)

    def dispatch(self, layer: int, micro_batch: int, y_TH: Tensor, choices: Choices) -> None:
        start_ns = time.monotonic_ns()
        self.prefetcher.ask(layer, micro_batch, choices.ids_TK, choices.forecast)
        self.recorder.add(PREDICT, start_ns, layer, micro_batch, y_TH.shape[0])
        super().dispatch(layer, micro_batch, y_TH, choices)

    def take_prefetch_counts(self) -> PrefetchCounts:
        return self.prefetcher.take_counts()


@dataclass
class PrefetchSlots:
    """An expert worker's part: the last `num_slots` slots of each layer, one for each attention worker."""

    half: ExpertHalf
    load: LoadExpert
    num_slots: int
    _epoch: int = -1
    _loading: dict[int, dict[int, tuple[int, Future[None]]]] = field(default_factory=dict)  # by layer and slot

    def __post_init__(self) -> None:
        # packing weights must not take the kernels' threads from the running batch
        self._thread = ThreadPoolExecutor(1, "prefetch", initializer=_native.work_alone) if self.num_slots else None

    def start(self, wanted: Iterable[tuple[int, int, int]]) -> None:
        """Begin to load for (attention worker, layer, expert), unless it is there; what it had before is gone."""
        for source, layer, expert in wanted:
            assert self._thread is not None, f"attention[{source}] asks for a copy, and there is no room for any"
            slot = len(self.half.expert_ids[layer]) - self.num_slots + source
            assert source < self.num_slots, f"a copy for attention[{source}] of {self.num_slots}"
            assert expert < self.half.spec.router.num_experts, f"expert {expert} of layer {layer}"
            there = self._loading.get(layer, {}).get(slot)
            if expert == (self.half.expert_ids[layer][slot] if there is None else there[0]):
                continue
            self.half.hold(layer, slot, FREE)
            loaded = self._thread.submit(partial(self.load, layer, expert, slot))
            self._loading.setdefault(layer, {})[slot] = (expert, loaded)

    def settle(self, layer: int) -> None:
        """Wait until all that was asked for this layer is there. Raises what a load raised."""
        for slot, (expert, loaded) in self._loading.pop(layer, {}).items():
            loaded.result()
            self.half.hold(layer, slot, expert)

    def local_ids(self, layer: int, ids_RK: Tensor) -> Tensor:
        """`ExpertHalf.to_local`, on the device, of ids in host memory. Waits for all that was asked for this layer."""
        self.settle(layer)
        device = self.half.backend.device
        local_RK = self.half.to_local(layer, ids_RK if device.type == "cpu" else ids_RK.to(device, non_blocking=True))
        if self.num_slots:  # rows for what is not here are a bug, and no placement tells
            missing_RK = (local_RK.cpu() < 0) & (ids_RK >= 0)
            assert not missing_RK.any(), f"rows of layer {layer} for experts {sorted(set(ids_RK[missing_RK].tolist()))}"
        return local_RK

    def forget(self, epoch: int) -> None:
        """In a new epoch no attention worker knows of any copy. The engine may announce it twice; rows may have come
        between."""
        if not self.num_slots or epoch == self._epoch:
            return
        self._epoch = epoch
        for layer in list(self._loading):
            self.settle(layer)
        for layer, ids in self.half.expert_ids.items():
            for slot in range(len(ids) - self.num_slots, len(ids)):
                if ids[slot] != FREE:
                    self.half.hold(layer, slot, FREE)

    def close(self) -> None:
        """Wait for the last load."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
