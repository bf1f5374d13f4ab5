"""What all layers know of a micro-batch: rotations, masks, and how positions and heads are shared."""

from dataclasses import dataclass

from torch import Tensor

from antiphon.kernels.ops.attention import attention_mask
from antiphon.specs.model import ModelSpec
from antiphon.train.sequence_parallel import SequenceParallel


@dataclass(frozen=True)
class Sequences:
    """Rotations and `masks` are over all positions; masks by sliding window, see `attention_mask`."""

    parallel: SequenceParallel
    cos_BSR: Tensor
    sin_BSR: Tensor
    masks: dict[int | None, Tensor | None]

    @staticmethod
    def of(
        spec: ModelSpec,
        parallel: SequenceParallel,
        cos_PR: Tensor,
        sin_PR: Tensor,
        positions_BS: Tensor,
        documents_BS: Tensor | None,
    ) -> "Sequences":
        """`positions_BS` count within documents; `documents_BS` None: one document a sequence."""
        windows = {spec.attention.window_of(layer) for layer in range(spec.num_layers)}
        masks = {
            window: attention_mask(documents_BS, positions_BS.shape[1], window, positions_BS.device)
            for window in windows
        }
        return Sequences(parallel, cos_PR[positions_BS], sin_PR[positions_BS], masks)

    @property
    def projected_rotations(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions that this rank projects."""
        own = slice(*self.parallel.gathered)
        return self.cos_BSR[:, own], self.sin_BSR[:, own]

    @property
    def tensors(self) -> list[Tensor]:
        """All of them: not a layer's own."""
        return [self.cos_BSR, self.sin_BSR, *(mask for mask in self.masks.values() if mask is not None)]
