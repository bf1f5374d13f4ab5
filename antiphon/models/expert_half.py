"""The expert half of a model: some routed experts of every MoE layer. It knows no sequences and keeps no state.

Each layer has slots for experts, some of which may be free: an expert can be loaded into one while others compute, and
is used from `hold` on. Letters as in `antiphon.kernels.api`.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

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
