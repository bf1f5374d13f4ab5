"""The expert half of a model: some routed experts of every MoE layer. It knows no sequences and keeps no state.

Each layer has slots for experts, some of which may be free: an expert can be loaded into one while others compute, and
is used from `hold` on.

Or experts stay in the checkpoint's mapped file, and a bounded pool has those that are in use (Lina section 6.1):

1. The pool has slots of one size, shared by all layers. An expert is read from the file, and packed, into the slot that
   was used longest ago; the file's pages are given back, so resident memory is the pool and one expert.
2. `need` makes sure that a layer's chosen experts are there, and keeps them until the next layer is needed.
   `fetch_ahead` begins to read those that a forecast names for a later layer, while this one computes.
3. The pool holds at least two layers: so all that a layer may choose fits beside all that was read ahead.

An expert worker has its own experts so (`OffloadedHalf`). It knows no router: it reads ahead what the last batch of the
next layer chose. A row's sum over its experts does not depend on their slots, so text is the same as with all experts
in memory. Rejected: the kernels read the mapped file as it is. Weights are packed for them, and the system would decide
what is resident: under pressure it evicts pages of the layer that computes.

Letters as in `antiphon.kernels.api`.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from antiphon import _native
from antiphon.base.logging import get_logger
from antiphon.kernels.api import KernelBackend, PackedExperts
from antiphon.specs.model import ModelSpec

_log = get_logger("kernels")
FREE = -1
LoadExpert = Callable[[int, int, int], None]  # reads an expert into a slot: layer, expert, slot


@dataclass(kw_only=True, eq=False)
class ExpertHalf:
    """`expert_ids[layer]` are the global ids held for that layer, slot by slot; `FREE` where there is none."""

    spec: ModelSpec
    backend: KernelBackend
    experts: Mapping[int, PackedExperts]
    expert_ids: dict[int, tuple[int, ...]]

    def __post_init__(self) -> None:
        self.num_bytes = sum(packed.num_bytes for packed in self.experts.values())
        self.local_index = {layer: self._table(ids) for layer, ids in self.expert_ids.items()}
        self._every = tuple(range(self.spec.router.num_experts))

    def forward(self, layer: int, x_TH: Tensor, local_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Weighted sum over the experts held here, per row; local id -1 means "held elsewhere" and adds nothing."""
        return self.backend.grouped_ffn(x_TH, local_ids_TK, weights_TK, self.experts[layer])

    def warm_up(self, most_rows: int) -> None:
        """Batches of 1 to `most_rows` rows that no expert takes: kernels that are compiled at their first use, in
        variants for different numbers of rows, are compiled then. Beyond 128 rows an expert there is no other."""
        top_k, backend, start = self.spec.router.top_k, self.backend, time.monotonic()
        layers = {(packed.shape, packed.formats): layer for layer, packed in self.experts.items()}
        for (shape, _), layer in layers.items():
            num_rows, last = 1, min(most_rows, -(-128 * shape.num_experts // top_k))
            while True:
                x_TH = torch.zeros(num_rows, shape.hidden, dtype=backend.dtype, device=backend.device)
                nobody_TK = torch.full((num_rows, top_k), -1, dtype=torch.int32, device=backend.device)
                self.forward(layer, x_TH, nobody_TK, torch.zeros(num_rows, top_k, device=backend.device))
                if num_rows >= last:
                    break
                num_rows = min(2 * num_rows, last)
        _log.info("kernels of experts for up to %d rows: ready after %.1f s", most_rows, time.monotonic() - start)

    def to_local(self, layer: int, global_ids_TK: Tensor) -> Tensor:
        """Global expert ids as slots, -1 for experts held elsewhere and for ids that are -1 already."""
        if self.expert_ids[layer] == self._every:
            return global_ids_TK
        table = self.local_index[layer]
        entries = global_ids_TK.flatten().remainder(table.shape[0])  # -1 becomes the last entry
        return table.index_select(0, entries).view(global_ids_TK.shape)

    def hold(self, layer: int, slot: int, expert: int) -> None:
        """`slot` holds this expert from now on; `FREE`: nothing any more."""
        ids = list(self.expert_ids[layer])
        ids[slot] = expert
        self.expert_ids[layer] = tuple(ids)
        self.local_index[layer] = self._table(self.expert_ids[layer])

    def _table(self, ids: tuple[int, ...]) -> Tensor:
        table = torch.full((self.spec.router.num_experts + 1,), -1, dtype=torch.int32)
        for slot, expert in enumerate(ids):
            if expert != FREE:
                table[expert] = slot
        return table.to(self.backend.device)


LAYERS_IN_POOL = 2
_Key = tuple[int, int]  # layer, expert


class OffloadedExperts:
    """All experts of a model for one process, as `ExpertHalf.forward` computes them. `load` reads an expert into a
    slot of `pool`, which has `num_slots`. Not thread-safe."""

    def __init__(self, backend: KernelBackend, pool: PackedExperts, num_experts: int, load: LoadExpert) -> None:
        self._backend = backend
        self._pool = pool
        self._num_experts = num_experts
        self._load = load
        self._slots: OrderedDict[_Key, int] = OrderedDict()  # of experts that are there or coming, by last use
        self._free = list(range(pool.shape.num_experts))
        self._coming: dict[_Key, Future[None]] = {}
        self._pinned: set[_Key] = set()
        self._thread = ThreadPoolExecutor(1, "experts", initializer=_native.work_alone)
        self.num_bytes = pool.num_bytes
        self.num_ahead = 0  # experts read since the last `take_counts`, before their layer
        self.num_late = 0  # and when it was there already

    def need(self, layer: int, ids_TK: Tensor) -> None:
        """Wait until the experts that these rows chose are in the pool, where they stay until the next call. Raises
        what a read raised."""
        keys = [(layer, expert) for expert in _distinct(ids_TK)]
        self._pinned = set(keys)
        for key in keys:
            if key in self._slots:
                self._slots.move_to_end(key)
        missing = [key for key in keys if key not in self._slots]
        self.num_late += len(missing)
        self._begin(missing)
        for key in keys:
            if (coming := self._coming.get(key)) is not None:
                self._finish(key, coming)

    def fetch_ahead(self, layer: int, ids_TK: Tensor) -> None:
        """Begin to read what rows will probably choose in `layer`; does not wait."""
        missing = [key for expert in _distinct(ids_TK) if (key := (layer, expert)) not in self._slots]
        self.num_ahead += len(missing)
        self._begin(missing)

    def forward(self, layer: int, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Weighted sum over each row's experts; reads those that were not asked for before."""
        self.need(layer, ids_TK)
        table = torch.full((self._num_experts + 1,), -1, dtype=torch.int32)
        for key in self._pinned:
            table[key[1]] = self._slots[key]
        local_TK = table.index_select(0, ids_TK.flatten().remainder(len(table))).view(ids_TK.shape)
        return self._backend.grouped_ffn(x_TH, local_TK, weights_TK, self._pool)

    def take_counts(self) -> tuple[int, int]:
        """(read ahead, read late) since the last call."""
        counts, self.num_ahead, self.num_late = (self.num_ahead, self.num_late), 0, 0
        return counts

    def close(self) -> None:
        """Blocks until the expert under way is read."""
        self._thread.shutdown(cancel_futures=True)

    def _finish(self, key: _Key, coming: Future[None]) -> None:
        """Wait for a read. Raises what it raised; the slot is then free, since what it holds is not known. After an
        interrupt the read is still under way."""
        failure = coming.exception()
        del self._coming[key]
        if failure is not None:
            self._free.append(self._slots.pop(key))
            raise failure

    def _begin(self, keys: Iterable[_Key]) -> None:
        for key in keys:
            slot = self._free.pop() if self._free else self._evict()
            self._slots[key] = slot
            self._coming[key] = self._thread.submit(partial(self._load, *key, slot))

    def _evict(self) -> int:
        """The slot that was used longest ago and is neither needed now nor being filled."""
        for key in self._slots:
            coming = self._coming.get(key)
            if key not in self._pinned and (coming is None or coming.done()):
                self._coming.pop(key, None)
                return self._slots.pop(key)
        key = next(key for key in self._slots if key not in self._pinned)  # being filled, for a forecast that was wrong
        self._coming.pop(key).exception()  # waits; a read that failed leaves a slot as good as any
        return self._slots.pop(key)


@dataclass(kw_only=True, eq=False)
class OffloadedHalf(ExpertHalf):
    """The expert half of a worker whose experts stay in the file. `local` ids are global ones: a slot belongs to no
    layer. Experts do not move."""

    offloaded: OffloadedExperts

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_bytes = self.offloaded.num_bytes
        layers = list(self.expert_ids)
        self._next = dict(zip(layers, [*layers[1:], layers[0]], strict=True))
        self._chosen: dict[int, Tensor] = {}  # by layer, of its last batch

    def forward(self, layer: int, x_TH: Tensor, local_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self._chosen[layer] = torch.unique(local_ids_TK)
        self.offloaded.need(layer, self._chosen[layer])
        following = self._next[layer]
        if following != layer and following in self._chosen:
            self.offloaded.fetch_ahead(following, self._chosen[following])
        return self.offloaded.forward(layer, x_TH, local_ids_TK, weights_TK)

    def _table(self, ids: tuple[int, ...]) -> Tensor:
        table = torch.full((self.spec.router.num_experts + 1,), -1, dtype=torch.int32)
        held = [expert for expert in ids if expert != FREE]
        table[held] = torch.tensor(held, dtype=torch.int32)
        return table


def _distinct(ids_TK: Tensor) -> list[int]:
    found: list[int] = torch.unique(ids_TK).tolist()
    return [expert for expert in found if expert >= 0]
