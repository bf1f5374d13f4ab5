"""The expert half of a model: some routed experts of every MoE layer. It knows no sequences and keeps no state.

Letters as in `antiphon.kernels.api`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from antiphon.kernels.api import KernelBackend, PackedExperts
from antiphon.specs.model import ModelSpec


class ExpertHalf:
    """`expert_ids[layer]` are the global ids held for that layer; their positions are the local indices."""

    def __init__(
        self,
        spec: ModelSpec,
        backend: KernelBackend,
        *,
        experts: Mapping[int, PackedExperts],
        expert_ids: Mapping[int, tuple[int, ...]],
    ) -> None:
        self.spec = spec
        self.backend = backend
        self.experts = experts
        self.expert_ids = expert_ids
        self.num_bytes = sum(packed.num_bytes for packed in experts.values())
        self.local_index = {layer: self._table(ids) for layer, ids in expert_ids.items()}
        every = tuple(range(spec.router.num_experts))
        self._whole_layers = frozenset(layer for layer, ids in expert_ids.items() if ids == every)

    def forward(self, layer: int, x_TH: Tensor, local_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Weighted sum over the experts held here, per row; local id -1 means "held elsewhere" and adds nothing."""
        return self.backend.grouped_ffn(x_TH, local_ids_TK, weights_TK, self.experts[layer])

    def to_local(self, layer: int, global_ids_TK: Tensor) -> Tensor:
        """Global expert ids as local indices, -1 for experts held elsewhere and for ids that are -1 already."""
        if layer in self._whole_layers:
            return global_ids_TK
        table = self.local_index[layer]
        entries = global_ids_TK.flatten().remainder(table.shape[0])  # -1 becomes the last entry
        return table.index_select(0, entries).view(global_ids_TK.shape)

    def _table(self, ids: tuple[int, ...]) -> Tensor:
        table = torch.full((self.spec.router.num_experts + 1,), -1, dtype=torch.int32)
        table[list(ids)] = torch.arange(len(ids), dtype=torch.int32)
        return table.to(self.backend.device)
